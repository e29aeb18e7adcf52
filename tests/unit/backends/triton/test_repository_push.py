"""Entries as load requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.backends.triton import repository as module
from shoal.backends.triton.repository import build_pushes
from shoal.backends.triton.repository_entry import PROGRAMS, triton_models
from shoal.errors import ConfigError, ModelFileError
from tests.unit.backends.triton.entry_kit import entry


def test_all_files_travel(tmp_path: Path) -> None:
    """By their paths in the folder, as bytes, with the configuration that the repository would have."""
    data = tmp_path / "weights.bin"
    spec = entry(tmp_path, data=(data,), options={"platform": "python"})
    data.write_bytes(b"weights")
    (one,) = build_pushes(spec)
    assert (one.model.name, one.ensemble) == ("org~mini", False)
    assert one.model.config == triton_models(spec)[0].config
    assert one.files["1/model.onnx"] == b"graph"
    assert one.files["1/weights.bin"] == b"weights"
    assert one.files["1/model.py"] == (PROGRAMS / "encoder.py").read_bytes()
    assert set(one.files) == {
        "1/model.onnx",
        "1/model.py",
        "1/weights.bin",
        "warmup/ones-int64-16",
        "warmup/ones-int64-64",
    }


def test_parts_go_before_the_whole(tmp_path: Path) -> None:
    """The ensemble is marked as one."""
    requests = build_pushes(entry(tmp_path, options={"platform": "python", "text_in": True}))
    assert [(one.model.name, one.ensemble) for one in requests] == [
        ("org~mini~~encoder", False),
        ("org~mini~~tokenizer", False),
        ("org~mini", True),
    ]
    assert all(one.files for one in requests)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Before anything is sent."""
    spec = entry(tmp_path)
    spec.graph.unlink()
    with pytest.raises(ModelFileError, match="pull the model again"):
        build_pushes(spec)


def test_what_does_not_fit_into_a_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the alternative."""
    monkeypatch.setattr(module, "MAX_PUSH", 100)
    with pytest.raises(ConfigError, match="a push is limited to 100") as caught:
        build_pushes(entry(tmp_path, graph=b"x" * 200))
    assert caught.value.param == "triton_repository"
