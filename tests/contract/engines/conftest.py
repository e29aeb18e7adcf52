"""Every engine that the contract tests cover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint, TritonEngine
from shoal.backends.triton.schema import Embedder, TensorNames
from shoal.core.protocols import Engine
from shoal.kserve import protocol_pb2 as pb
from tests.contract.engines.tiny import OUTPUTS, SLOW_WIDTH, Tiny
from tests.fakes import triton_codec
from tests.fakes.triton import Code, FakeModel, FakeTriton, Refused, reply
from tests.unit.backends.triton.open.kit import grpc_in_use

Open = Callable[[Path, Tiny], AbstractAsyncContextManager[Engine]]


def here(kind: str, **options: Any) -> Open:
    """An engine in this process."""

    @asynccontextmanager
    async def opened(graph: Path, model: Tiny) -> AsyncIterator[Engine]:
        engine = await load_opener(kind)(graph, name="tiny", options=EngineOptions(warm_up_s=0.0, **options))
        try:
            yield engine
        finally:
            await engine.aclose()

    return opened


@asynccontextmanager
async def triton(graph: Path, model: Tiny) -> AsyncIterator[Engine]:
    """A model on a server, which computes the same as the graph."""

    async def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        inputs = triton_codec.read_inputs(request)
        if inputs["input_ids"].shape[1] > len(model.positions):
            raise Refused("the positions end before", Code.INVALID_ARGUMENT)
        arrays = await asyncio.to_thread(model.answer, inputs)
        outputs = {each.name: arrays[each.name].astype("float32") for each in request.outputs}
        return reply(request, final=None, **outputs)

    config = pb.ModelConfig(name="tiny", max_batch_size=64)
    config.parameters["shoal_precision"].string_value = "f32"
    for name in ("input_ids", "attention_mask"):
        config.input.add(name=name, data_type=pb.TYPE_INT64, dims=[-1])
    for name in OUTPUTS:
        config.output.add(name=name, data_type=pb.TYPE_FP32, dims=[model.table.shape[1]])
    async with grpc_in_use(), FakeTriton() as server:
        server.add(FakeModel("tiny", config=config, answer=answer))
        client = Client(server.target)
        names = TensorNames(outputs={name: name for name in OUTPUTS})
        target = Endpoint(
            client=client, control=Control(client), address="triton://fake#tiny", model="tiny", names=names
        )

        async def admit(engine: TritonEngine) -> None:
            raise AssertionError("nobody watches it, so it joins once")

        embedder = await target.find()
        assert isinstance(embedder, Embedder)
        engine = TritonEngine(target, "tiny-0", embedder=embedder, admit=admit, serving=True)
        try:
            yield engine
        finally:
            await engine.aclose()
            await client.aclose()


HERE: dict[str, Open] = {
    "openvino": here("openvino", streams=2, precision="f32"),
    "openvino-one-stream": here("openvino", streams=1, precision="f32"),
    "onnxruntime": here("onnxruntime", streams=2),
    "onnxruntime-one-slot": here("onnxruntime", streams=1),
}
KINDS: dict[str, Open] = HERE | {"triton": triton}
"""Engine name to its opener; add a new engine here."""


@dataclass(frozen=True)
class Subject:
    """An engine under test and the model that it should compute."""

    engine: Engine
    model: Tiny


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().save(tmp_path_factory.mktemp("tiny") / "model.onnx")


@pytest.fixture(scope="session")
def slow_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny(depth=24, width=SLOW_WIDTH).save(tmp_path_factory.mktemp("slow") / "model.onnx")


@pytest.fixture(params=KINDS)
async def subject(request: pytest.FixtureRequest, graph: Path) -> AsyncIterator[Subject]:
    model = Tiny()
    async with KINDS[request.param](graph, model) as engine:
        yield Subject(engine, model)


@pytest.fixture(params=HERE)
async def local(request: pytest.FixtureRequest, graph: Path) -> AsyncIterator[Subject]:
    """The engines of this process only."""
    model = Tiny()
    async with HERE[request.param](graph, model) as engine:
        yield Subject(engine, model)


@pytest.fixture(params=KINDS)
async def short(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """A model with 16 positions that its facts do not state: longer batches fail in the graph."""
    model = Tiny(positions=16)
    async with KINDS[request.param](model.save(tmp_path / "model.onnx"), model) as engine:
        yield Subject(engine, model)


@pytest.fixture(params=KINDS)
async def slow(request: pytest.FixtureRequest, slow_graph: Path) -> AsyncIterator[Subject]:
    """A model whose large batches take long enough to be cancelled."""
    model = Tiny(depth=24, width=SLOW_WIDTH)
    async with KINDS[request.param](slow_graph, model) as engine:
        yield Subject(engine, model)
