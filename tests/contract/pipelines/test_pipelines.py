"""Every pipeline that Shoal ships, under the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.backends.fake import FakePipeline, FakeScript
from shoal.core.protocols import EngineFacts, Pipeline, Prepared
from shoal.pipelines.strings import StringPipeline, StringSpec
from shoal.pipelines.text import TextPipeline
from shoal.pipelines.tokenizer import TextTokenizer
from shoal.types import Array, TextItem
from tests.contract.pipelines.contract import TEXTS, PipelineContract
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


class TestTextPipelineOverTokenVectors(TestTextPipeline):
    """The engine answers a vector a token, and pooling is done behind it."""

    @pytest.fixture
    def pipeline(self, tmp_path: Path) -> Pipeline:
        folder = tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path)
        spec = tiny_tokenizers.spec(dimension=16, pooled="token_embeddings", pooling="max")
        return TextPipeline(folder, spec, truncate=True)

    def outputs(self, batch: list[Prepared], vectors: Array) -> dict[str, Array]:
        """Every token has the vector of its text; what lies in the padding is nobody's business."""
        tokens = np.repeat(vectors[:, None, :], 18, axis=1)
        for row, item in enumerate(batch):
            tokens[row, item.cost :] = np.nan
        return {"token_embeddings": tokens}


class StringPipelineContract(PipelineContract):
    """Texts as they are: nothing is padded, and token ids are refused."""

    texts = [text for text in TEXTS if isinstance(text, str)]
    padded = False

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=("text",), outputs=("embedding",), size_buckets=(8,), padded=False)

    @pytest.fixture
    def dimension(self) -> int:
        return 16

    @pytest.fixture
    def bad(self) -> TextItem:
        return [5, 6]


class TestStringPipeline(StringPipelineContract):
    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16), truncate=True)


class TestStringPipelineThatCounts(StringPipelineContract):
    @pytest.fixture
    def pipeline(self, tmp_path: Path) -> Pipeline:
        folder = tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path)
        tokenizer = TextTokenizer(folder, "tokenizer.json")
        return StringPipeline(StringSpec(dimension=16, max_tokens=16), truncate=True, tokenizer=tokenizer)


class TestStringPipelineForNim(StringPipelineContract):
    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16, nim=True, token_count="token_count"), truncate=True)

    def outputs(self, batch: list[Prepared], vectors: Array) -> dict[str, Array]:
        return {"embedding": vectors, "token_count": np.arange(1, len(vectors) + 1, dtype=np.int32)}


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
