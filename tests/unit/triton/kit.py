"""Embedding models for the fake Triton server, and what they answer."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.backends.triton import codec
from shoal.backends.triton import protocol_pb2 as pb
from shoal.types import Array
from tests.fakes.triton import FakeModel, FakeTriton, embedder, reply

DIMENSION = 8
VOCAB = 128
LACKING = "failed to load 'x', unable to find backend library for backend 'onnxruntime'"


def vector_of(text: str, dimension: int = DIMENSION, *, unit: bool = False, seed: int = 0) -> Array:
    """What a model that reads texts gives for one."""
    draw = np.random.default_rng([seed, zlib.crc32(text.encode())])
    vector = draw.standard_normal(dimension).astype(np.float32) * 3
    return np.asarray(vector / np.linalg.norm(vector) if unit else vector)


def table(dimension: int = DIMENSION, seed: int = 0) -> Array:
    """The vectors of tokens."""
    return np.random.default_rng(seed).standard_normal((VOCAB, dimension)).astype(np.float32)


def mean_of(ids: Sequence[int], dimension: int = DIMENSION, seed: int = 0) -> Array:
    """What a model that reads tokens gives for them."""
    return np.asarray(table(dimension, seed)[list(ids)].mean(0))


def text_model(
    name: str = "emb", dimension: int = DIMENSION, *, unit: bool = False, seed: int = 0, **fields: Any
) -> FakeModel:
    """From `text` to `vectors`."""

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        texts = [each.decode() for each in codec.read_inputs(request)["text"].ravel()]
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
    """From `input_ids` and `attention_mask` to `sentence_embedding`, or to `token_embeddings` when not `pooled`.
    Attended tokens alone count."""
    output = "sentence_embedding" if pooled else "token_embeddings"
    length = fields.pop("length", -1)

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        inputs = codec.read_inputs(request)
        hidden = table(dimension, seed)[inputs["input_ids"]]
        mask = inputs["attention_mask"][..., None].astype(np.float32)
        rows = (hidden * mask).sum(1) / mask.sum(1) if pooled else hidden
        if unit:
            rows = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
        return reply(request, final=None, **{output: rows.astype(np.float32)})

    config = token_config(name, output, [dimension] if pooled else [-1, dimension], length=length)
    return FakeModel(name, config=config, answer=answer, **fields)


def asked(triton: FakeTriton, rpc: str) -> list[Any]:
    """The requests of one RPC so far."""
    return [request for name, request in triton.requests if name == rpc]


def forgotten(triton: FakeTriton) -> None:
    """As after the start of a server in explicit mode: nothing is loaded, and nothing says why."""
    for model in triton.models.values():
        model.state = model.reason = ""


async def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the loop turn until what nobody announces has come true."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - a state that has no event of its own
            await asyncio.sleep(0.001)
