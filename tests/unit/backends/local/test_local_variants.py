"""Local models with int8 or fp16 weights, from the setting to the facts."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import compute_space, open_local
from shoal.config.settings import Settings
from shoal.core.protocols import Prepared
from shoal.errors import SourceError
from shoal.models.convert import variants
from shoal.models.store import Store
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Embed
from tests.unit.models.checkpoints import checkpoint
from tests.unit.models.classifiers import classifier


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file:{checkpoint(tmp_path / 'mini')}"


def asking(tmp_path: Path, engine: str, precision: str) -> Settings:
    settings = Settings(home=str(tmp_path / "home"), offline=True, streams=1, threads=1)
    return msgspec.structs.replace(settings, engine=engine, precision=precision)


async def vectors(local: Any) -> Any:
    assert isinstance(local.pipeline, TextPipeline)
    task = Embed(model="", inputs=[])
    engine = local.engines[0]
    prepared = local.pipeline.prepare([(task, text) for text in ("fish to", "together", "a b c")])
    batch = [one for one in prepared if isinstance(one, Prepared)]
    outputs = await engine.infer(local.pipeline.collate(batch, engine.facts), ("pooled",), {}, time.monotonic() + 30)
    return outputs["pooled"][:3]


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("precision", variants.VARIANTS)
async def test_a_variant_serves_with_its_parity_shown(
    tmp_path: Path,
    folder: str,
    engine: str,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The variant's file is served, facts and log show its parity, and a second start measures nothing."""
    caplog.set_level("INFO", "shoal.backends.local.open")
    monkeypatch.setitem(variants.LEAST_MEAN, "int8", 0.5)  # random weights of 16 numbers survive less
    address = parse_address(folder)
    exact = await open_local("mini", [address], asking(tmp_path, engine, "f32"))
    right = await vectors(exact)
    await exact.engines[0].aclose()

    local = await open_local("mini", [address], asking(tmp_path, engine, precision))
    got = await vectors(local)
    await local.engines[0].aclose()
    assert local.facts.precision == precision
    assert np.abs(got - right).max() > 0
    details = local.facts.details
    assert 0.5 < details[f"{precision}_min_cosine"] <= details[f"{precision}_mean_cosine"] <= 1.0001
    assert all(ratio > 0 for ratio in details[f"{precision}_speed"].values())
    (stored,) = await asyncio.to_thread(Store(tmp_path / "home").entries)
    variant: variants.Variant = "int8" if precision == "int8" else "fp16"
    path = variants.variant_path(stored, variant, grouped=(engine, variant) == ("openvino", "int8"))
    assert details[f"{precision}_bytes"] == path.stat().st_size

    monkeypatch.setattr(variants, "compare", lambda *_, **__: pytest.fail("it was measured before"))
    again = await open_local("mini", [address], asking(tmp_path, engine, precision))
    await again.engines[0].aclose()
    assert again.facts.details[f"{precision}_speed"] == details[f"{precision}_speed"]
    lines = [line for line in caplog.messages if line.startswith(f"mini: {precision} weights: ")]
    assert len(lines) == 2 and lines[0] == lines[1]
    assert f"mean cosine to f32 {details[f'{precision}_mean_cosine']:.4f}" in lines[0]
    assert ("must be embedded again" in lines[0]) == (precision == "int8")


async def test_the_accuracy_of_a_classifiers_variant_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log shows the change of the scores, and does not mention an index."""
    monkeypatch.setitem(variants.LEAST_MEAN, "int8", 0.0)
    caplog.set_level("INFO", "shoal.backends.local.open")
    address = parse_address(f"file:{classifier(tmp_path / 'judge')}")
    local = await open_local("judge", [address], asking(tmp_path, "openvino", "int8"))
    await local.engines[0].aclose()
    (message,) = [line for line in caplog.messages if line.startswith("judge: int8 weights: ")]
    assert f"scores move by {local.facts.details['int8_max_difference']:.4f} of their range" in message
    assert "index" not in message


async def test_int8_is_a_space_of_its_own(tmp_path: Path, folder: str) -> None:
    """int8 vectors are not comparable with f32 vectors; fp16 vectors are."""
    local = await open_local("mini", [parse_address(folder)], asking(tmp_path, "openvino", "f32"))
    await local.engines[0].aclose()
    (stored,) = await asyncio.to_thread(Store(tmp_path / "home").entries)
    spaces = [compute_space(stored, precision) for precision in ("", "f32", "fp16", "int8")]
    assert local.facts.space == spaces[0] == spaces[1] == spaces[2]
    assert len(spaces[3]) == 16
    engines = {compute_space(stored, "int8", engine) for engine in ("openvino", "onnxruntime")}
    assert len({*spaces, *engines}) == 4, "each engine has its own arithmetic for int8"
    assert (
        compute_space(stored, "f32", "openvino") == compute_space(stored, "f32", "onnxruntime") == compute_space(stored)
    )


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
async def test_the_space_of_int8_has_its_engine(tmp_path: Path, folder: str, engine: str) -> None:
    """The space of int8 vectors depends on the engine."""
    local = await open_local("mini", [parse_address(folder)], asking(tmp_path, engine, "int8"))
    await local.engines[0].aclose()
    (stored,) = await asyncio.to_thread(Store(tmp_path / "home").entries)
    assert local.facts.space == compute_space(stored, "int8", engine) != compute_space(stored, "int8")


async def test_a_full_disk_is_reported(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the next step, and no partial variant is left on disk."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(variants, "write_variant", full)
    with pytest.raises(SourceError, match=r"int8 weights of .*mini.*: the disk is full; free some space"):
        await open_local("mini", [parse_address(folder)], asking(tmp_path, "openvino", "int8"))
    (stored,) = await asyncio.to_thread(Store(tmp_path / "home").entries)
    assert not [path.name for path in stored.path.iterdir() if path.name.startswith(".") or "int8" in path.name]


async def test_half_of_a_variant_is_made_whole(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(variants.LEAST_MEAN, "int8", 0.5)
    address, settings = parse_address(folder), asking(tmp_path, "openvino", "int8")
    first = await open_local("mini", [address], settings)
    await first.engines[0].aclose()
    (stored,) = await asyncio.to_thread(Store(tmp_path / "home").entries)
    path = variants.variant_path(stored, "int8", grouped=True)
    os.truncate(path, 1000)
    again = await open_local("mini", [address], settings)
    await again.engines[0].aclose()
    assert again.facts.details["int8_bytes"] == path.stat().st_size > 1000
