"""Choosing the engine of a local model."""

from __future__ import annotations

import importlib.util

import pytest

from shoal.backends.local import engines
from shoal.errors import ConfigError, MissingExtra


def only(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: object() if name in installed else None)


def test_auto_prefers_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both installed, `auto` selects openvino."""
    only(monkeypatch, "openvino", "onnxruntime")
    assert engines.choose_engine() == "openvino"


def test_auto_falls_back_to_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without openvino, `auto` selects onnxruntime."""
    only(monkeypatch, "onnxruntime")
    assert engines.choose_engine("auto") == "onnxruntime"


def test_auto_without_engines_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """With neither installed, the error has the pip command for the local extra."""
    only(monkeypatch)
    with pytest.raises(MissingExtra, match=r"in your clone: pip install -e '\.\[local\]'"):
        engines.choose_engine()


@pytest.mark.parametrize(("engine", "extra"), [("openvino", "local"), ("onnxruntime", "ort")])
def test_an_engine_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, engine: str, extra: str
) -> None:
    """An engine requested by name is never replaced by another one."""
    only(monkeypatch, "openvino" if engine == "onnxruntime" else "onnxruntime")
    with pytest.raises(MissingExtra) as caught:
        engines.choose_engine(engine)
    assert caught.value.extra == extra


def test_an_unknown_engine_is_refused() -> None:
    """An unknown name is a ConfigError that lists the known ones."""
    with pytest.raises(ConfigError, match="auto, openvino or onnxruntime"):
        engines.choose_engine("tensorrt")


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_every_engine_of_the_table_opens(engine: str) -> None:
    """Each entry refers to a coroutine function, and each engine has an extra."""
    assert importlib.util.find_spec(engines.ENGINES[engine].partition(":")[0]) is not None
    assert callable(engines.load_opener(engine))
    assert engine in engines.EXTRAS
