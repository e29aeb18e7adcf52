"""Loading a graph: precision, warm-up, rejected files, and no contact with the network."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.backends.local.engine import LocalEngine
from shoal.backends.local.engines import ENGINES, EngineOptions, PrecisionCheck, load_opener
from shoal.backends.local.open import precision_samples
from shoal.backends.local.precision import MAX_FIGURES
from shoal.core.protocols import CostModel
from shoal.errors import ConfigError, ModelFileError
from shoal.models.convert.convert import ConversionResult, convert
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import ScoreSpec, TextSpec
from shoal.types import Array
from tests.contract.engines.tiny import Tiny, batch
from tests.unit.models.engines import has_bf16
from tests.unit.models.head_checkpoints import pylate

COLD = EngineOptions(streams=1, warm_up_s=0.0)
SAMPLES = [batch(4, 8, seed=1), batch(30, 12, seed=2)]
BF16_COSINE = 0.999
"""Minimum cosine of this graph's bf16 rows to f32 rows, and between batches."""

ALONE = """
import asyncio, os, sys, time
from pathlib import Path
seen = []
FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "os.fork", "os.posix_spawn", "subprocess.Popen")
sys.addaudithook(lambda event, args: seen.append((event, args)) if event in FORBIDDEN else None)

from shoal.backends.local.engines import EngineOptions, load_opener
import numpy as np

def sockets():
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if link.is_symlink() and "socket:" in os.readlink(link)}

async def main():
    before = sockets()
    options = EngineOptions(streams=1, warm_up_s=0.0)
    engine = await load_opener(sys.argv[1])(Path(sys.argv[2]), name="x", options=options)
    ones = np.ones((1, 3), np.int64)
    await engine.infer({"input_ids": ones, "attention_mask": ones}, ["pooled"], {}, time.monotonic() + 30)
    await engine.aclose()
    assert sockets() == before, sockets() - before

asyncio.run(main())
assert not seen, seen
"""


async def rows(graph: Path, options: EngineOptions, inputs: dict[str, Array]) -> Array:
    engine = await load_opener("openvino")(graph, name="x", options=options)
    try:
        answer = await engine.infer(inputs, ["sentence_embedding"], {}, time.monotonic() + 30)
        return answer["sentence_embedding"]
    finally:
        await engine.aclose()


@pytest.mark.parametrize("engine", ENGINES)
def test_loading_and_running_opens_no_connection(engine: str, graph: Path, tmp_path: Path) -> None:
    """Loading, running and closing an engine opens no connection, starts no process and leaves nothing in the home
    directory."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, engine, str(graph)],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_broken_graph_is_named(engine: str, tmp_path: Path) -> None:
    """An invalid graph file raises ModelFileError with its name and the next step."""
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"no graph at all")
    with pytest.raises(ModelFileError, match=r"model\.onnx: .*convert the model again"):
        await load_opener(engine)(broken, name="x", options=COLD)


async def test_onnxruntime_refuses_bf16(graph: Path) -> None:
    """The error of an engine without this precision names an alternative."""
    with pytest.raises(ConfigError, match="use precision f32"):
        await load_opener("onnxruntime")(graph, name="x", options=replace(COLD, precision="bf16"))


async def test_bf16_is_close_or_refused(graph: Path) -> None:
    """With bf16 arithmetic, rows agree with f32 and between batches; without it, requesting bf16 is an error."""
    options = replace(COLD, precision="bf16")
    if not has_bf16():
        with pytest.raises(ConfigError, match="use precision f32 or auto"):
            await rows(graph, options, batch(5))
        return
    inputs = batch(7, 20, 3)
    got, exact = await rows(graph, options, inputs), Tiny().answer(inputs)["sentence_embedding"]
    assert (got * exact).sum(-1).min() >= BF16_COSINE
    alone = await rows(graph, options, {name: array[:1, :7] for name, array in inputs.items()})
    assert (alone[0] * got[0]).sum() >= BF16_COSINE


async def test_auto_compares_its_samples(graph: Path) -> None:
    """Auto selects bf16 only if all figures are good enough; the facts contain them."""
    engine = await load_opener("openvino")(graph, name="x", options=replace(COLD, samples=SAMPLES))
    check = engine.facts.details["precision_checked"]
    await engine.aclose()
    assert (check is not None) == has_bf16()
    assert engine.facts.precision == ("bf16" if check is not None and check.agrees else "f32")
    if check is not None:
        assert 0.99 < check.figures["low_cosine"] <= check.figures["mean_cosine"] < 1.0
        assert engine.facts.details["precision_reason"] == check.reason


@pytest.mark.parametrize("close", [True, False])
async def test_auto_judges_scores_by_their_difference(graph: Path, close: bool) -> None:
    """Cosines do not apply to a model that scores; a stored outcome has the difference instead."""
    spec = TextSpec(
        tokenizer="",
        inputs=("input_ids", "attention_mask"),
        dimension=0,
        max_tokens=64,
        score=ScoreSpec(labels=("a", "b"), activation="softmax", output="sentence_embedding"),
    )
    options = replace(COLD, samples=SAMPLES, spec=spec)
    engine = await load_opener("openvino")(graph, name="x", options=options)
    await engine.aclose()
    found = engine.facts.details["precision_checked"]
    if not has_bf16():
        assert found is None
        return
    assert found.figures.keys() == {"mean_difference", "high_difference", "spearman"}
    assert 0.0 < found.figures["high_difference"] < 1.0
    assert engine.facts.precision == ("bf16" if found.agrees else "f32")
    check = replace(found, figures={"high_difference": MAX_FIGURES["high_difference"] * (1 if close else 1.01)})
    engine = await load_opener("openvino")(graph, name="x", options=replace(options, precision_check=check))
    await engine.aclose()
    assert engine.facts.precision == ("bf16" if close else "f32")
    assert "high difference" in engine.facts.details["precision_reason"]


async def test_bf16_is_not_taken_where_it_is_emulated(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the variable leaves multiply in f32, forty times slower for bf16; OpenVINO lists bf16 all the
    same."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")
    engine = await load_opener("openvino")(graph, name="x", options=replace(COLD, samples=SAMPLES))
    await engine.aclose()
    assert (engine.facts.precision, engine.facts.details["precision_checked"]) == ("f32", None)
    assert engine.facts.details["precision_reason"] == "the processor has no bf16 arithmetic"
    with pytest.raises(ConfigError, match="use precision f32 or auto"):
        await load_opener("openvino")(graph, name="x", options=replace(COLD, precision="bf16"))


async def test_a_closed_engine_leaves_nothing(graph: Path) -> None:
    """Its infer requests are released with the model's memory: repeated loads use no more."""
    engine = await load_opener("openvino")(graph, name="x", options=COLD)
    assert isinstance(engine, LocalEngine)
    requests = [weakref.ref(worker) for worker in engine._lanes.slots._free._queue]  # type: ignore[attr-defined]
    assert requests
    await engine.infer(batch(3, 5), ("pooled",), {}, time.monotonic() + 30)
    await engine.aclose()
    del engine
    gc.collect()
    assert [request() for request in requests] == [None] * len(requests)


async def test_auto_judges_late_interaction_by_token_vectors(tmp_path: Path) -> None:
    """Such a model has no other vectors; those of padding do not count."""

    def prepared() -> tuple[ConversionResult, EngineOptions]:
        converted = convert(pylate(tmp_path / "source"), tmp_path)
        pipeline = TextPipeline(tmp_path, converted.spec, truncate=True)
        return converted, replace(COLD, samples=precision_samples(pipeline), spec=converted.spec)

    converted, options = await asyncio.to_thread(prepared)
    engine = await load_opener("openvino")(tmp_path / converted.graph, name="x", options=options)
    await engine.aclose()
    check = engine.facts.details["precision_checked"]
    if not has_bf16():
        assert check is None
        return
    assert 0.9 < check.figures["low_cosine"] < 1.0, "something was compared, and it is not all equal"


@pytest.mark.parametrize("cosine", [0.5, 1.0])
async def test_a_stored_outcome_is_used_on_the_same_machine_only(graph: Path, cosine: float) -> None:
    """An earlier check decides while its key matches; with another key the samples run again."""
    first = await load_opener("openvino")(graph, name="x", options=replace(COLD, samples=SAMPLES))
    await first.aclose()
    own = first.facts.details["precision_checked"] or PrecisionCheck("")
    for key in (own.key, "another processor"):
        options = replace(COLD, samples=SAMPLES, precision_check=PrecisionCheck(key, figures={"mean_cosine": cosine}))
        engine = await load_opener("openvino")(graph, name="x", options=options)
        await engine.aclose()
        used = engine.facts.details["precision_checked"]
        assert used == (options.precision_check if key == own.key and key else first.facts.details["precision_checked"])


async def test_an_outcome_belongs_to_its_samples(graph: Path) -> None:
    """An outcome stored for other samples is not used."""
    first = await load_opener("openvino")(graph, name="x", options=replace(COLD, samples=SAMPLES))
    await first.aclose()
    if not has_bf16():  # without another precision there is no outcome to store
        assert first.facts.details["precision_checked"] is None
        return
    check = PrecisionCheck(first.facts.details["precision_checked"].key, figures={"mean_cosine": 0.5})
    second = await load_opener("openvino")(
        graph, name="x", options=replace(COLD, samples=SAMPLES[:1], precision_check=check)
    )
    await second.aclose()
    used = second.facts.details["precision_checked"]
    assert used.key != check.key
    assert used.figures["mean_cosine"] > check.figures["mean_cosine"]


async def test_auto_without_samples_is_exact(graph: Path) -> None:
    """Without samples to check, auto selects f32."""
    engine = await load_opener("openvino")(graph, name="x", options=COLD)
    await engine.aclose()
    assert engine.facts.precision == "f32"


@pytest.mark.parametrize("engine", ENGINES)
async def test_warming_measures_the_cost(engine: str, graph: Path) -> None:
    """A warmed-up engine states its own cost, and serves."""
    options = EngineOptions(streams=2, max_length=32, max_batch_size=4, warm_up_s=20.0)
    warm_engine = await load_opener(engine)(graph, name="x", options=options)
    answer = await warm_engine.infer(batch(5), ["pooled"], {}, time.monotonic() + 30)
    await warm_engine.aclose()
    assert warm_engine.facts.cost != CostModel()
    assert warm_engine.facts.cost.seconds(8) > 0
    assert np.isfinite(answer["pooled"]).all()


async def test_no_more_streams_than_openvino_makes(graph: Path) -> None:
    """OpenVINO makes no more streams than threads that it may use; a batch beyond them would wait inside of it."""
    options = EngineOptions(streams=8, threads=2, warm_up_s=0.0)
    engine = await load_opener("openvino")(graph, name="x", options=options)
    await engine.aclose()
    assert engine.facts.slots == engine.facts.details["streams"] <= engine.facts.details["threads"] <= 2
