"""A server in this process, connections to it, and checks without pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends import parse_address
from shoal.backends.base import backoff
from shoal.backends.local.open import prepare_local
from shoal.backends.triton import control as control_module
from shoal.backends.triton import engine as engine_module
from shoal.backends.triton.open import connections
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost
from shoal.backends.triton.open.models import AnyTritonRunner, TritonTarget, open_triton
from shoal.config.settings import ModelTable, Settings
from shoal.core.generation.runner import GenerationOptions, GenerationRunner
from shoal.core.protocols import ChatPipeline, Engine, ModelFacts, Observer, Pipeline, TextGenerator
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from shoal.models.store import Store, StoredModel
from shoal.types import Modality
from tests.fakes.triton import FakeTriton
from tests.unit.backends.triton.open.kit import Open, grpc_in_use, reads, stored_model
from tests.unit.models import checkpoints


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for servers without pauses."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    monkeypatch.setattr(connections, "Control", partial(control_module.Control, pauses=(0.001,)))


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with grpc_in_use(), FakeTriton() as server:
        yield server


@pytest.fixture
async def tritons(triton: FakeTriton) -> AsyncIterator[TritonConnections]:
    made = TritonConnections(Settings())
    yield made
    await made.aclose()


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    return stored_model(Store(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    made.mkdir()
    return made


@pytest.fixture
def settings(triton: FakeTriton, tmp_path: Path) -> Settings:
    """Settings under which files are pushed."""
    return Settings(home=str(tmp_path / "home"), triton_url=triton.target, connect_timeout_s=30.0, load_timeout_s=30.0)


@pytest.fixture
def writing(settings: Settings, folder: Path) -> Settings:
    """Settings under which files are written to a repository."""
    return msgspec.structs.replace(settings, triton_repository=str(folder))


@pytest.fixture
def pushing(settings: Settings, tritons: TritonConnections) -> TritonHost:
    return TritonHost(settings, tritons)


@pytest.fixture
def host(writing: Settings, tritons: TritonConnections, triton: FakeTriton, folder: Path) -> TritonHost:
    reads(triton, folder)
    return TritonHost(writing, tritons)


@pytest.fixture
async def offline(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path / "home"), offline=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint without its weights: the source of a tokenizer."""
    made = checkpoints.checkpoint(tmp_path / "tiny")
    prompts = {"prompts": {"query": "to "}, "default_prompt_name": None}
    checkpoints.write_json(made / "config_sentence_transformers.json", prompts)
    (made / "model.safetensors").unlink()
    return made


@pytest.fixture
async def opened(tritons: TritonConnections, triton: FakeTriton, offline: Settings) -> AsyncIterator[Open]:
    """Opens models on these servers (default: `triton`) and closes them after the test."""
    runners: list[AnyTritonRunner] = []
    threads = Threads("prepare", 1)

    async def open_(
        model: str, *servers: FakeTriton, table: ModelTable | None = None, notes: list[str] | None = None, **fields: Any
    ) -> Any:
        chosen = fields.pop("settings", offline)
        endpoints = [
            await tritons.endpoint(parse_address(f"triton://{each.target}#{model}"), table or ModelTable(), chosen)
            for each in servers or (triton,)
        ]
        target = TritonTarget(
            name="m",
            source=",".join(endpoint.address for endpoint in endpoints),
            endpoints=endpoints,
            prepare=lambda address: prepare_local(address, chosen),
            settings=chosen,
            table=table or ModelTable(),
            **fields,
        )

        def lanes(
            parts: Mapping[Modality, tuple[Pipeline, Sequence[Engine]]], facts: ModelFacts
        ) -> dict[Modality, Lane]:
            options = LaneOptions(model="m", limits=Limits(), max_items=100, space=facts.space)
            return {
                modality: Lane(pipeline, engines, options, threads=threads, observer=Observer())
                for modality, (pipeline, engines) in parts.items()
            }

        def talk(pipeline: ChatPipeline, generators: Sequence[TextGenerator], facts: ModelFacts) -> GenerationRunner:
            return GenerationRunner(pipeline, generators, facts, GenerationOptions(model="m"))

        messages: list[str] = [] if notes is None else notes
        runner = await open_triton(target, lanes, talk, messages.append)
        runners.append(runner)
        return runner

    yield open_
    for runner in runners:
        await runner.aclose()
    threads.close()


@pytest.fixture
async def second(triton: FakeTriton) -> AsyncIterator[FakeTriton]:
    async with FakeTriton() as server:
        yield server
