"""The contract of `Engine`, on the torch engine: the tests of tests/contract/engines over a model's folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.core.protocols import Engine
from shoal.specs import LayerSpec, PartsSpec
from tests.contract.engines.test_engines import *  # noqa: F403 - the contract's tests, with the fixtures below
from tests.parity.torch_models import TinyBert

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@dataclass(frozen=True)
class Subject:
    engine: Engine
    model: TinyBert


@asynccontextmanager
async def opened(model: TinyBert, max_length: int = 512) -> AsyncIterator[Subject]:
    parts = PartsSpec(after=(LayerSpec(kind="normalize"),))
    spec = msgspec.structs.replace(model.spec, modules=("normalize",), ends_normalized=True, parts=parts)
    options = EngineOptions(warm_up_s=0.0, spec=spec, max_length=max_length, precision="f32")
    engine = await load_opener("torch")(model.folder, name="tiny", options=options)
    try:
        yield Subject(engine, model)
    finally:
        await engine.aclose()


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    async with opened(TinyBert(tmp_path)) as engine:
        yield engine


@pytest.fixture
async def local(subject: Subject) -> Subject:
    return subject


@pytest.fixture
async def short(tmp_path: Path) -> AsyncIterator[Subject]:
    async with opened(TinyBert(tmp_path, positions=16)) as engine:
        yield engine


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Subject]:
    async with opened(TinyBert(tmp_path, width=256, layers=4)) as engine:
        yield engine
