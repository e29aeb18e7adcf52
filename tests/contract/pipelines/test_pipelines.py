"""Every pipeline that Shoal ships, under the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.backends.fake import FakePipeline, FakeScript
from shoal.core.protocols import EngineFacts, Pipeline
from shoal.pipelines.text import TextPipeline
from shoal.types import TextItem
from tests.contract.pipelines.contract import PipelineContract
from tests.unit.pipelines import tiny_tokenizers


class TestTextPipeline(PipelineContract):
    @pytest.fixture
    def pipeline(self, tmp_path: Path) -> Pipeline:
        folder = tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path)
        return TextPipeline(folder, tiny_tokenizers.spec(dimension=16), truncate=True)

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=(), outputs=("pooled",), length_buckets=(8, 16), size_buckets=(1, 4))

    @pytest.fixture
    def dimension(self) -> int:
        return 16

    @pytest.fixture
    def bad(self) -> TextItem:
        return [5, 10**9]


class TestFakePipeline(PipelineContract):
    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return FakePipeline(FakeScript(dimension=16))

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=("ids",), outputs=("embedding",))

    @pytest.fixture
    def dimension(self) -> int:
        return 16

    @pytest.fixture
    def bad(self) -> TextItem:
        return [5, -1]
