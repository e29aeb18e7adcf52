"""Embedding models for the fake Triton server, and their expected answers."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from shoal.backends import parse_address
from shoal.backends.triton.open.models import TritonRunner
from shoal.kserve import protocol_pb2 as pb
from shoal.models.manifest import Manifest, measure
from shoal.models.store import Store, StoredModel
from shoal.specs import TextSpec
from shoal.types import Array, Context, Embed, Embedded
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, embedder, reply
from tests.unit.models import checkpoints

DIMENSION = 8
VOCAB = 128
LACKING = "failed to load 'x', unable to find backend library for backend 'onnxruntime'"


def vector_of(text: str, dimension: int = DIMENSION, *, unit: bool = False, seed: int = 0) -> Array:
    """Return the vector that a model that reads texts returns for one text."""
    draw = np.random.default_rng([seed, zlib.crc32(text.encode())])
    vector = draw.standard_normal(dimension).astype(np.float32) * 3
    return np.asarray(vector / np.linalg.norm(vector) if unit else vector)


def table(dimension: int = DIMENSION, seed: int = 0) -> Array:
    """Return the vectors of all tokens."""
    return np.random.default_rng(seed).standard_normal((VOCAB, dimension)).astype(np.float32)


def mean_of(ids: Sequence[int], dimension: int = DIMENSION, seed: int = 0) -> Array:
    """Return the vector that a model that reads tokens returns for them."""
    return np.asarray(table(dimension, seed)[list(ids)].mean(0))


def text_model(
    name: str = "emb", dimension: int = DIMENSION, *, unit: bool = False, seed: int = 0, **fields: Any
) -> FakeModel:
    """Build a model from `text` to `vectors`."""

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        texts = [each.decode() for each in triton_codec.read_inputs(request)["text"].ravel()]
        return reply(request, vectors=np.stack([vector_of(text, dimension, unit=unit, seed=seed) for text in texts]))

    fields.setdefault("answer", answer)
    return FakeModel(name, config=embedder(name, dimension=dimension), **fields)


def token_config(name: str, output: str, dims: Sequence[int], *, length: int = -1, size: int = 8) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, backend="onnxruntime", max_batch_size=size)
    for one in ("input_ids", "attention_mask"):
        config.input.add(name=one, data_type=pb.TYPE_INT64, dims=[length])
    config.output.add(name=output, data_type=pb.TYPE_FP32, dims=dims)
    return config


def token_model(
    name: str = "tok",
    dimension: int = DIMENSION,
    *,
    pooled: bool = True,
    unit: bool = False,
    seed: int = 0,
    **fields: Any,
) -> FakeModel:
    """Build a model from `input_ids` and `attention_mask` to `sentence_embedding`, or to `token_embeddings` if not
    `pooled`. Only attended tokens count."""
    output = "sentence_embedding" if pooled else "token_embeddings"
    length = fields.pop("length", -1)

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        inputs = triton_codec.read_inputs(request)
        hidden = table(dimension, seed)[inputs["input_ids"]]
        mask = inputs["attention_mask"][..., None].astype(np.float32)
        rows = (hidden * mask).sum(1) / mask.sum(1) if pooled else hidden
        if unit:
            rows = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
        return reply(request, final=None, **{output: rows.astype(np.float32)})

    config = token_config(name, output, [dimension] if pooled else [-1, dimension], length=length)
    return FakeModel(name, config=config, answer=answer, **fields)


def stored_model(
    store: Store, address: str = "hf:org/mini", *, dimension: int = checkpoints.HIDDEN, created: int = 1
) -> StoredModel:
    """Return a model of the store with an invalid graph and a valid tokenizer."""
    parsed = parse_address(address)
    with store.working(parsed) as partial:
        (partial / "model.onnx").write_bytes(b"graph")
        checkpoints.tokenizer("bert").save(str(partial / "tokenizer.json"))
        spec = TextSpec(
            tokenizer="tokenizer.json",
            inputs=("input_ids", "attention_mask"),
            dimension=dimension,
            max_tokens=16,
            prompts={"query": "to "},
        )
        manifest = Manifest(
            id=parsed.id,
            address=address,
            source=f"{address}@main",
            revision="main",
            converter=1,
            graph="model.onnx",
            graph_source="built",
            weights={"model.safetensors": "ab"},
            conversion="built",
            parameters=1,
            text=spec,
            created=created,
            files=measure(partial),
        )
        return store.commit(partial, parsed, manifest)


def reads(triton: FakeTriton, folder: Path, dimension: int = checkpoints.HIDDEN, load_error: str = "") -> None:
    """Let a server load the folders of a repository, each as a model that reads tokens."""
    load = triton._load

    def look_and_load(request: Any) -> Any:
        name = request.model_name
        if not (folder / name / "config.pbtxt").is_file():
            triton.models.pop(name, None)
        elif name not in triton.models:
            triton.add(token_model(name, dimension, loaded=False, load_error=load_error))
        return load(request)

    triton._load = look_and_load  # type: ignore[method-assign]


def requests_of(triton: FakeTriton, rpc: str) -> list[Any]:
    """Return the requests of one RPC so far."""
    return [request for name, request in triton.requests if name == rpc]


def forgotten(triton: FakeTriton) -> None:
    """Put a server into the state after a start in explicit mode: nothing is loaded, and no reason is listed."""
    for model in triton.models.values():
        model.state = model.reason = ""


@asynccontextmanager
async def grpc_in_use() -> AsyncIterator[None]:
    """Keep gRPC's threads alive across all tests: stopping them blocks the test that drops the last gRPC object, and
    restarting them in the next test's loop may lose wake-ups."""
    grpc.aio.init_grpc_aio()
    yield


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Run the loop until a condition without an event becomes true."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - a state that has no event of its own
            await asyncio.sleep(0.001)


Open = Callable[..., Coroutine[Any, Any, Any]]


def soon(seconds: float = 30.0) -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds, client="c")


async def ask(runner: TritonRunner, *texts: str, **fields: Any) -> Embedded:
    fields.setdefault("normalize", False)
    return await runner.run(Embed(model="m", inputs=list(texts), **fields), soon())


async def vectors(runner: TritonRunner, *texts: str, **fields: Any) -> Any:
    return (await ask(runner, *texts, **fields)).vectors
