"""Every pipeline that Shoal ships, under the contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from shoal.backends.fake.model import FakePipeline, FakeScript, compute_scores
from shoal.core.protocols import EngineFacts, Pipeline, Prepared
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.string_pairs import StringPairPipeline, StringPairSpec
from shoal.pipelines.text.strings import StringPipeline, StringSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import Activation, MultiSpec, ScoreSpec, SparseSpec
from shoal.types import Array, Item, SparseVector, VectorKind
from tests.contract.pipelines.contract import TEXTS, PipelineContract, ScoreContract, VectorContract
from tests.unit.pipelines import tiny_tokenizers

ALL: tuple[VectorKind, ...] = ("dense", "sparse", "multi", "tokens")


class Tokenised(PipelineContract):
    """Engines that take token ids, padded to buckets."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path)

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=(), outputs=("pooled",), length_buckets=(8, 16), size_buckets=(1, 4))

    @pytest.fixture
    def width(self) -> int:
        return 16

    @pytest.fixture
    def bad(self) -> Item:
        return [5, 10**9]


class TestTextPipeline(Tokenised, VectorContract):
    @pytest.fixture
    def pipeline(self, folder: Path) -> Pipeline:
        return TextPipeline(folder, tiny_tokenizers.spec(dimension=16), truncate=True)


class TestTextPipelineOverTokenVectors(TestTextPipeline):
    """The engine returns a vector per token, and the pipeline pools."""

    kinds = ("dense", "tokens")

    @pytest.fixture
    def pipeline(self, folder: Path) -> Pipeline:
        spec = tiny_tokenizers.spec(dimension=16, pooled="token_embeddings", pooling="max", tokens="token_embeddings")
        return TextPipeline(folder, spec, truncate=True)

    def outputs(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        """Every token has the vector of its text; padding has arbitrary values."""
        tokens = np.repeat(rows[:, None, :], 18, axis=1)
        for row, item in enumerate(batch):
            tokens[row, item.cost :] = np.nan
        return {"token_embeddings": tokens}


class TestTextPipelineOfEveryKind(TestTextPipeline):
    """As bge-m3, plus token vectors."""

    kinds = ALL

    @pytest.fixture
    def pipeline(self, folder: Path) -> Pipeline:
        heads = {"sparse": SparseSpec(output="weights", per="token"), "multi": MultiSpec(dimension=4)}
        return TextPipeline(folder, tiny_tokenizers.spec(dimension=16, tokens="tokens", **heads), truncate=True)

    def sets(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        spans = np.repeat(np.abs(rows)[:, None, :], 16, axis=1)
        outputs = {"pooled": rows, "weights": spans[..., 0], "multi_vectors": spans[..., :4], "tokens": spans}
        return {name: outputs[name] for name in batch[0].outputs}


class TestTextPipelineOfStaticVectors(TestTextPipeline):
    """No special tokens: the empty text gives zeros, regardless of the engine's row."""

    @pytest.fixture
    def pipeline(self, folder: Path) -> Pipeline:
        spec = tiny_tokenizers.spec(dimension=16, frame_tokens=False, dropped=(1,))
        return TextPipeline(folder, spec, truncate=True)


class TestPairPipeline(Tokenised, ScoreContract):
    labels = 1
    activation: Activation = "sigmoid"

    @pytest.fixture
    def pipeline(self, folder: Path) -> Pipeline:
        score = ScoreSpec(labels=tuple(map(str, range(self.labels))), activation=self.activation)
        spec = tiny_tokenizers.spec(dimension=0, score=score, inputs=("input_ids", "token_type_ids"))
        return PairPipeline(folder, spec, truncate=True)

    @pytest.fixture
    def width(self) -> int:
        return self.labels


class TestPairPipelineOfSeveralLabels(TestPairPipeline):
    labels = 3
    activation = "softmax"


class Strings(PipelineContract):
    """Texts as strings: nothing is padded, and token ids are rejected."""

    padded = False

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=("text",), outputs=("embedding",), size_buckets=(8,), pads_batches=False)

    @pytest.fixture
    def width(self) -> int:
        return 16

    @pytest.fixture
    def bad(self) -> Item:
        return [5, 6]

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> TextTokenizer:
        return TextTokenizer(tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path), "tokenizer.json")


class TestStringPipeline(Strings, VectorContract):
    items: ClassVar[Sequence[Item]] = [text for text in TEXTS if isinstance(text, str)]

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16), truncate=True)


class TestStringPipelineThatCounts(TestStringPipeline):
    @pytest.fixture
    def pipeline(self, tokenizer: TextTokenizer) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16, max_tokens=16), truncate=True, tokenizer=tokenizer)


class TestStringPipelineForNim(TestStringPipeline):
    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16, nim=True, token_count="token_count"), truncate=True)

    def outputs(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        return {"embedding": rows, "token_count": np.arange(1, len(rows) + 1, dtype=np.int32)}


class TestStringPipelineOfEveryKind(TestStringPipeline):
    """A server with a path for each kind, which takes token ids too."""

    items: ClassVar[Sequence[Item]] = TEXTS
    kinds = ALL

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return StringPipeline(StringSpec(dimension=16, kinds=ALL, ids=True), truncate=True)

    @pytest.fixture
    def bad(self) -> Item:
        return [5, -1]

    def sets(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        sparse, matrices = np.empty(len(rows), dtype=object), np.empty(len(rows), dtype=object)
        for place, row in enumerate(np.abs(rows)):
            sparse[place] = SparseVector(np.arange(16, dtype=np.int32), row)
            matrices[place] = np.stack([row] * (place + 1))
        outputs = {"embedding": rows, "sparse_embedding": sparse}
        return {name: outputs.get(name, matrices) for name in batch[0].outputs}


class TestStringPairPipeline(Strings, ScoreContract):
    @pytest.fixture
    def pipeline(self) -> Pipeline:
        spec = StringPairSpec(labels=("LABEL_0",), activation="sigmoid", raw=True)
        return StringPairPipeline(spec, truncate=True)

    @pytest.fixture
    def width(self) -> int:
        return 1


class TestStringPairPipelineThatCounts(TestStringPairPipeline):
    @pytest.fixture
    def pipeline(self, tokenizer: TextTokenizer) -> Pipeline:
        spec = StringPairSpec(labels=("a", "b"), activation="softmax", raw=True, max_tokens=16)
        return StringPairPipeline(spec, truncate=True, tokenizer=tokenizer)

    @pytest.fixture
    def width(self) -> int:
        return 2


class Fake(PipelineContract):
    @pytest.fixture
    def facts(self) -> EngineFacts:
        return EngineFacts(name="e", inputs=("ids",), outputs=("embedding",))

    @pytest.fixture
    def bad(self) -> Item:
        return [5, -1]


class TestFakePipeline(Fake, VectorContract):
    kinds = ALL

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return FakePipeline(FakeScript(dimension=16))

    @pytest.fixture
    def width(self) -> int:
        return 16

    def test_kinds_it_lacks_are_refused(self, pipeline: Pipeline) -> None:
        """It supports every kind."""
        assert set(self.kinds) == set(ALL)


class TestFakePipelineThatScores(Fake, ScoreContract):
    """Its scores are computed from the words, not from the engine's outputs."""

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return FakePipeline(FakeScript(labels=2))

    @pytest.fixture
    def width(self) -> int:
        return 2

    def expected(self, batch: list[Prepared], rows: Array) -> Array:
        return np.stack([compute_scores(item.tensors["ids"].tolist(), 2, raw=True) for item in batch])
