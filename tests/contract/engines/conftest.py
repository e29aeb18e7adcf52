"""Every engine that the contract is checked on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.backends import EngineOptions, opener
from shoal.core.protocols import Engine
from tests.contract.engines.tiny import SLOW_WIDTH, Tiny

KINDS = {
    "openvino": ("openvino", EngineOptions(streams=2, warm_up_s=0.0, precision="f32")),
    "openvino-one-stream": ("openvino", EngineOptions(streams=1, warm_up_s=0.0, precision="f32")),
    "onnxruntime": ("onnxruntime", EngineOptions(streams=2, warm_up_s=0.0)),
    "onnxruntime-one-slot": ("onnxruntime", EngineOptions(streams=1, warm_up_s=0.0)),
}
"""Name to the engine and its options; a new engine is one line here."""


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
    kind, options = KINDS[request.param]
    engine = await opener(kind)(graph, name="tiny", options=options)
    yield Subject(engine, Tiny())
    await engine.aclose()


@pytest.fixture(params=KINDS)
async def short(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """A model with 16 positions whose facts do not say so: longer batches fail in the graph."""
    kind, options = KINDS[request.param]
    model = Tiny(positions=16)
    engine = await opener(kind)(model.save(tmp_path / "model.onnx"), name="short", options=options)
    yield Subject(engine, model)
    await engine.aclose()


@pytest.fixture(params=KINDS)
async def slow(request: pytest.FixtureRequest, slow_graph: Path) -> AsyncIterator[Subject]:
    """A model of which a large batch takes long enough to be given up."""
    kind, options = KINDS[request.param]
    engine = await opener(kind)(slow_graph, name="slow", options=options)
    yield Subject(engine, Tiny(depth=24, width=SLOW_WIDTH))
    await engine.aclose()
