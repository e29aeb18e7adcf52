"""Models on Triton with other heads than one dense vector: scores, token vectors, sparse vectors, late interaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends.triton.repository_entry import EntrySpec, triton_models
from shoal.backends.triton.schema import Embedder, TensorNames, detect_embedder
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec, TextSpec
from tests.unit.backends.triton.schema_kit import IDS, MASK, SENTENCE, Tensor, found, metadata, read, refusal, sent

LOGITS: Tensor = ("logits", "FP32", [3])
PAIR: list[Tensor] = [("query", "BYTES", [1]), ("passage", "BYTES", [1])]


class TestScores:
    @pytest.mark.parametrize(
        ("outputs", "names", "expected"),
        [
            ([LOGITS], None, {"logits": "logits"}),
            ([("scores", "FP16", [1])], None, {"logits": "scores"}),
            ([("hidden_states", "FP32", [-1, 8]), LOGITS], None, {"logits": "logits"}),
            ([SENTENCE, LOGITS], None, {"sentence_embedding": "sentence_embedding"}),
            ([SENTENCE, LOGITS], TensorNames(scores=True), {"logits": "logits"}),
            ([("output", "FP32", [2])], None, {"sentence_embedding": "output"}),
            ([("output", "FP32", [2])], TensorNames(scores=True), {"logits": "output"}),
            ([("a", "FP32", [2]), ("b", "FP32", [2])], TensorNames(outputs={"logits": "b"}), {"logits": "b"}),
        ],
    )
    def test_of_token_models(self, outputs: list[Tensor], names: TensorNames | None, expected: dict[str, str]) -> None:
        """By the output's name, or by configuration."""
        assert read(found([IDS, MASK], outputs, names)) == expected

    @pytest.mark.parametrize(
        ("size", "dims", "batch", "labels", "axes"),
        [
            (8, [3], "config", 3, 1),
            (8, [-1], "config", None, 1),
            (0, [-1], "free", 1, 0),
            (0, [-1, 3], "free", 3, 1),
            (0, [1, 3], "one", 3, 1),
        ],
    )
    def test_their_shapes(self, size: int, dims: list[int], batch: str, labels: int | None, axes: int) -> None:
        """`dimension` is the number of labels; a single number has one."""
        text = [1] if size or batch == "one" else [-1]
        embedder = found([("text", "BYTES", text)], [("logits", "FP32", dims)], size=size)
        assert (embedder.batch, embedder.dimension, embedder.outputs[0].axes) == (batch, labels, axes)
        assert embedder.level == "sentence"

    @pytest.mark.parametrize("output", [("logits", "FP32", [-1, 30]), ("logits", "INT64", [1])])
    def test_what_are_no_scores(self, output: Tensor) -> None:
        """One number per word and token is the output of a language model."""
        assert "scores are floats" in refusal(
            [IDS, MASK], [output, SENTENCE], TensorNames(outputs={"logits": "logits"})
        )

    def test_two_texts(self) -> None:
        """By the usual names of such models, or by configured ones."""
        embedder = found(PAIR, [("relevance", "FP32", [1])])
        assert (embedder.style, sent(embedder)) == ("pairs", {"text": "query", "pair": "passage"})
        assert read(embedder) == {"logits": "relevance"}
        assert all(port.column for port in embedder.inputs)
        inputs: list[Tensor] = [("a", "BYTES", [1]), ("b", "BYTES", [1])]
        named = found(inputs, [LOGITS], TensorNames(inputs={"text": "b", "pair": "a"}))
        assert sent(named) == {"text": "b", "pair": "a"}
        assert "set input_names.text to the first of the two texts" in refusal(
            inputs, [LOGITS], TensorNames(inputs={"pair": "a"})
        )
        assert "name its tensors in `input_names`" in refusal(inputs, [LOGITS])

    def test_a_second_text_that_is_optional_is_left_out(self) -> None:
        """The model also reads a single text."""
        embedder = found(PAIR, [("embedding", "FP32", [8])], optional=("passage",))
        assert (embedder.style, sent(embedder)) == ("text", {"text": "query"})


class TestOtherHeads:
    def test_token_vectors_beside_a_sentences(self) -> None:
        """As in sentence-transformers' exports: the sentence's vector comes first, and the level is "sentence"."""
        tokens: Tensor = ("token_embeddings", "FP32", [-1, 384])
        embedder = found([IDS, MASK], [tokens, SENTENCE])
        assert list(read(embedder)) == ["sentence_embedding", "token_embeddings"]
        assert (embedder.level, embedder.dimension) == ("sentence", 384)
        other: Tensor = ("token_embeddings", "FP32", [384])
        assert list(read(found([IDS, MASK], [other, SENTENCE]))) == ["sentence_embedding"]

    def test_sparse_vectors_by_name_alone(self) -> None:
        """The shape alone does not distinguish one number per word from a vector."""
        output: Tensor = ("output", "FP32", [30522])
        names = TensorNames(outputs={"sparse_embedding": "output"})
        assert read(found([IDS, MASK], [output], names)) == {"sparse_embedding": "output"}
        both = TensorNames(outputs={"sparse_embedding": "output", "sentence_embedding": "sentence_embedding"})
        assert list(read(found([IDS, MASK], [output, SENTENCE], both))) == ["sentence_embedding", "sparse_embedding"]
        assert "is not the shape of sparse_embedding" in refusal([IDS, MASK], [("output", "FP32", [-1, 8])], names)


def written(text: TextSpec, folder: Path, names: TensorNames | None = None) -> Embedder:
    """Return the schema of an entry that Shoal wrote."""
    for name in ("model.onnx", "tokenizer.json"):
        (folder / name).write_bytes(b"{}")
    spec = EntrySpec(name="org/m", graph=folder / "model.onnx", text=text, token_width=5)
    (model,) = triton_models(spec)
    return detect_embedder(model.config, metadata(), names)


PLAIN = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), dimension=8, max_tokens=16)


class TestOurOwnEntries:
    @pytest.mark.parametrize(
        ("changes", "axes"),
        [
            ({"dimension": 0, "score": ScoreSpec(labels=("a", "b"), activation="softmax")}, {"logits": 1}),
            ({"dimension": 0, "sparse": SparseSpec()}, {"sparse_embedding": 1}),
            ({"dimension": 0, "multi": MultiSpec(dimension=3)}, {"multi_vectors": 2}),
            (
                {
                    "tokens": "token_embeddings",
                    "sparse": SparseSpec(output="token_weights", per="token"),
                    "multi": MultiSpec(dimension=3),
                },
                {
                    "sentence_embedding": 1,
                    "pooled": 1,
                    "token_weights": 1,
                    "multi_vectors": 2,
                    "token_embeddings": 2,
                },
            ),
        ],
    )
    def test_every_output_is_known(self, tmp_path: Path, changes: dict[str, Any], axes: dict[str, int]) -> None:
        """Its name comes from the entry's TextSpec, not from its shape."""
        embedder = written(msgspec.structs.replace(PLAIN, **changes), tmp_path)
        assert {port.canonical: port.axes for port in embedder.outputs} == axes
        assert embedder.level == "sentence"

    def test_the_operators_names_come_first(self, tmp_path: Path) -> None:
        """Whatever the entry has."""
        names = TensorNames(outputs={"pooled": "pooled"})
        assert read(written(PLAIN, tmp_path, names)) == {"sentence_embedding": "pooled"}
