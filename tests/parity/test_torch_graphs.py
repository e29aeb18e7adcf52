"""Batches that the torch engine records as CUDA graphs: they give what their kernels give one by one. Where there is no
GPU, a stand-in notes what would be recorded."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.local.torch.graphs import Graphs
from shoal.backends.local.torch.network import Network
from shoal.core.protocols import Tensors
from shoal.models.convert.verify import min_cosine
from shoal.specs import ScoreSpec, TextSpec
from shoal.types import Array
from tests.contract.engines.tiny import batch
from tests.parity import cuda_stand_in
from tests.parity.family_models import MODELS, other
from tests.parity.reference_models import CASES, write
from tests.parity.test_torch import close, infer, opened, reference, spec_of
from tests.parity.torch_models import TinyBert

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

SHAPES = ((8,), (8, 8, 8), (8, 3), (16, 5, 9, 1, 16), (24, 2), (5, 7))
"""Lengths of the texts of a batch: without padding, with it, and with rows to add. The last has a length that is not
recorded."""

OPTIONS: dict[str, Any] = {"precision": "f32"}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda:0"
    cuda_stand_in.install(monkeypatch)
    return "cpu:0"


def graphs_of(engine: Any) -> Graphs:
    found: Graphs = engine._lanes.slots._free._queue[0]._gpu.graphs
    return found


async def run_twice(engine: Any, inputs: Tensors, output: str) -> Array:
    """Return the answer to a batch that was recorded, after another one has used the same memory."""
    first = (await infer(engine, dict(inputs), output))[output]
    await infer(engine, {name: array[::-1].copy() for name, array in inputs.items()}, output)
    again = (await infer(engine, dict(inputs), output))[output]
    np.testing.assert_array_equal(first, again)
    return again


@pytest.mark.parametrize("lengths", SHAPES)
async def test_a_bert(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    model = TinyBert(tmp_path)
    inputs = batch(*lengths)
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        for output in ("pooled", "sentence_embedding"):  # the model has no Normalize
            close(await run_twice(engine, inputs, output), model.answer(inputs)["pooled"])
        graphs = graphs_of(engine)
        assert not graphs.refusal
        assert len(graphs) == (1 if max(lengths) % 8 == 0 else 0), "one recording serves both outputs"


@pytest.mark.parametrize("name", MODELS)
async def test_other_architectures(tmp_path: Path, device: str, name: str) -> None:
    """Recorded or not, their vectors are those of the network."""
    folder = other(name, tmp_path)
    spec = await spec_of(folder)
    plain = await asyncio.to_thread(Network, folder, spec, "f32", device)
    words = reference(folder).tokenizer.vocab_size
    async with opened(folder, spec, **OPTIONS) as engine:
        for lengths in SHAPES:
            inputs = batch(*lengths)
            inputs["input_ids"] %= words
            right = plain.run(inputs, ("sentence_embedding",), threading.Event())["sentence_embedding"].cpu().numpy()
            close(await run_twice(engine, inputs, "sentence_embedding"), right)
        refused = name == "deberta-v2" and device == "cuda:0"  # it copies a constant to the device
        assert bool(graphs_of(engine).refusal) == refused


async def test_a_classifier_with_one_kind_of_token(tmp_path: Path) -> None:
    """Example inputs are in the tables of every model: on a GPU others would break all later work."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=100, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        type_vocab_size=1, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    spec = TextSpec(
        tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask", "token_type_ids"), dimension=0,
        max_tokens=512, score=ScoreSpec(labels=("a", "b", "c"), activation="identity"),
    )  # fmt: skip
    inputs = batch(16, 4, 9)
    inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
    async with opened(tmp_path, spec, **OPTIONS) as engine, opened(tmp_path, spec, cuda_graphs=False) as plain:
        close(await run_twice(engine, inputs, "logits"), (await infer(plain, inputs, "logits"))["logits"])
        assert len(graphs_of(engine)) == 1


async def test_16_bits(tmp_path: Path) -> None:
    model = TinyBert(tmp_path)
    inputs = batch(16, 5, 9)
    async with opened(tmp_path, model.spec, precision="fp16") as engine:
        found = await run_twice(engine, inputs, "pooled")
        assert len(graphs_of(engine)) == 1
    assert min_cosine(found, model.answer(inputs)["pooled"]) > 0.9999


async def test_without_recordings(tmp_path: Path) -> None:
    model = TinyBert(tmp_path)
    inputs = batch(8, 3)
    async with opened(tmp_path, model.spec, cuda_graphs=False, **OPTIONS) as engine:
        assert graphs_of(engine) is None
        close(await run_twice(engine, inputs, "pooled"), model.answer(inputs)["pooled"])


async def test_token_vectors(tmp_path: Path) -> None:
    """Outputs of all tokens are cut to the batch's rows."""
    folder = write(CASES[0], tmp_path)
    spec = await spec_of(folder, tokens="token_embeddings")
    inputs = batch(16, 5, 9, 1, 16)
    inputs["input_ids"] %= reference(folder).tokenizer.vocab_size
    inputs |= {name: inputs["attention_mask"] for name in spec.inputs if name not in inputs}
    async with opened(folder, spec, **OPTIONS) as engine, opened(folder, spec, precision="f32") as plain:
        found = await run_twice(engine, inputs, "token_embeddings")
        right = (await infer(plain, inputs, "token_embeddings"))["token_embeddings"]
        assert len(graphs_of(engine))
    kept = inputs["attention_mask"] > 0
    close(found[kept], right[kept])


async def test_batches_in_flight_do_not_mix(tmp_path: Path) -> None:
    """Two batches at a time, of several shapes, each with its own answer; the answers stay as they are."""
    model = TinyBert(tmp_path)
    batches = [batch(*lengths, seed=seed) for seed in range(6) for lengths in SHAPES]
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        found = await asyncio.gather(*(infer(engine, inputs, "pooled") for inputs in batches))
        found += await asyncio.gather(*(infer(engine, inputs, "pooled") for inputs in batches))
    for inputs, answer in zip(batches * 2, found, strict=True):
        close(answer["pooled"], model.answer(inputs)["pooled"])


async def test_warming_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape is recorded before requests need it."""
    model = TinyBert(tmp_path)
    async with opened(
        tmp_path, model.spec, max_length=16, max_batch_size=4, max_batch_ms=1e6, warm_up_s=60.0, **OPTIONS
    ) as engine:
        graphs = graphs_of(engine)
        assert len(graphs) == 2 * 4, "lengths 8 and 16, sizes 1 to 4"
        monkeypatch.setattr(graphs, "record", None)
        monkeypatch.setattr(graphs._network, "run", None)
        inputs = batch(7, 3, width=8)
        close((await infer(engine, inputs, "pooled"))["pooled"], model.answer(inputs)["pooled"])


async def test_a_model_that_waits_for_the_device_is_not_recorded(tmp_path: Path) -> None:
    """It runs kernel by kernel. What was recorded before stays in use."""
    model = TinyBert(tmp_path)
    inputs = batch(8, 3)
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        graphs = graphs_of(engine)
        await infer(engine, batch(16), "pooled")
        network = graphs._network

        def wait(part: Any, *_: Any) -> None:
            assert float(part.embeddings.word_embeddings.weight.sum()) != 0

        network._model.register_forward_pre_hook(wait)
        close(await run_twice(engine, inputs, "pooled"), model.answer(inputs)["pooled"])
        assert "capturing" in graphs.refusal
        assert [layout.length for layout in graphs._recordings] == [16]


async def test_a_model_that_replaces_its_tables_is_not_recorded(tmp_path: Path) -> None:
    """A recording would go on reading the old one."""
    import torch

    model = TinyBert(tmp_path)
    inputs = batch(8, 3)
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        graphs = graphs_of(engine)

        def replace(part: Any, *_: Any) -> None:
            part.table = torch.ones(1)

        graphs._network._model.register_forward_pre_hook(replace)
        close(await run_twice(engine, inputs, "pooled"), model.answer(inputs)["pooled"])
        assert "keeps" in graphs.refusal
        assert not len(graphs)


async def test_a_recording_that_computes_something_else_is_not_used(tmp_path: Path) -> None:
    """What Python decides from values at the time of the recording is part of it."""
    model = TinyBert(tmp_path)
    inputs = batch(8, 3)
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        graphs = graphs_of(engine)
        network = graphs._network
        calls = []

        def shift(part: Any, inputs: Any, answer: Any) -> None:
            calls.append(time.monotonic())
            if len(calls) == 2:  # the first is the example's run, the second is recorded
                answer.last_hidden_state.add_(1.0)

        network._model.register_forward_hook(shift)
        close(await run_twice(engine, inputs, "pooled"), model.answer(inputs)["pooled"])
        assert "another" in graphs.refusal
        assert not len(graphs)


@pytest.mark.parametrize("place", ["examples", "recording", "end"])
async def test_a_recording_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The batch runs kernel by kernel, that layout is not tried again, and others are still recorded."""
    import torch

    model = TinyBert(tmp_path)
    inputs = batch(8)
    async with opened(tmp_path, model.spec, **OPTIONS) as engine:
        graphs, failures = graphs_of(engine), 0
        compute, capture = graphs._compute, graphs._capture

        def fail(*_: object) -> Any:
            nonlocal failures
            failures += 1
            if place != "end":
                raise torch.OutOfMemoryError("CUDA out of memory")
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("the capture was invalidated")

        monkeypatch.setattr(graphs, "_compute" if place == "examples" else "_capture", fail)
        close(await run_twice(engine, inputs, "pooled"), model.answer(inputs)["pooled"])
        assert (failures, len(graphs), graphs.refusal) == (1, 0, "")
        monkeypatch.setattr(graphs, "_compute", compute)
        monkeypatch.setattr(graphs, "_capture", capture)
        await infer(engine, batch(16), "pooled")
        assert (len(graphs), graphs.refusal) == (1, "")
