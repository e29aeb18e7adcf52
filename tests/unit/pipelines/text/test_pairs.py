"""Pairs and texts for cross-encoders and classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, NotFinite, ShoalError, TooLong
from shoal.pipelines.text.pairs import PairPipeline
from shoal.specs import Activation, ScoreSpec, TextSpec
from shoal.types import Array, Classify, Item, Rerank
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.text.test_pairing import bare, bert, xlnet
from tests.unit.pipelines.tiny_tokenizers import spec

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
FACTS = EngineFacts(name="e", inputs=INPUTS, outputs=("logits",), length_buckets=(8, 16), size_buckets=(1, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(bert(), tmp_path_factory.mktemp("pairs"))


def scoring(labels: int = 1, activation: Activation = "sigmoid", **fields: Any) -> TextSpec:
    names = tuple(f"LABEL_{n}" for n in range(labels))
    options: dict[str, Any] = {
        "dimension": 0,
        "inputs": INPUTS,
        "score": ScoreSpec(labels=names, activation=activation),
    }
    return spec(**(options | fields))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> PairPipeline:
    return PairPipeline(folder, scoring(), truncate=True)


def rerank(**fields: Any) -> Rerank:
    return Rerank(model="m", queries=[], documents=[], **fields)


def classify(**fields: Any) -> Classify:
    return Classify(model="m", inputs=[], **fields)


def one(pipeline: PairPipeline, item: Item, task: Rerank | Classify | None = None) -> Prepared:
    prepared = pipeline.prepare([(task or rerank(), item)])[0]
    assert isinstance(prepared, Prepared), prepared
    return prepared


def fault(pipeline: PairPipeline, item: Item, task: Rerank | Classify | None = None) -> ShoalError:
    error = pipeline.prepare([(task or rerank(), item)])[0]
    assert isinstance(error, ShoalError)
    return error


def ids(prepared: Prepared) -> list[int]:
    tensor: list[int] = prepared.tensors["input_ids"].tolist()
    return tensor


def test_pairs_and_texts_share_a_call(pipeline: PairPipeline) -> None:
    """Each item keeps its own segments, padded with zeros; reranking and classification share a batch."""
    raw = bert()
    batch = [
        one(pipeline, ("the fox", "a dog")),
        one(pipeline, "the fox", classify()),
        one(pipeline, ("a", "b"), classify(raw_scores=True)),
    ]
    assert {(item.group, item.outputs) for item in batch} == {((), ("logits",))}
    tensors = pipeline.collate(batch, FACTS)
    assert set(tensors) == set(INPUTS)
    expected = [raw.encode("the fox", "a dog"), raw.encode("the fox"), raw.encode("a", "b")]
    for row, encoding in enumerate(expected):
        size = len(encoding.ids)
        assert tensors["input_ids"][row, :size].tolist() == encoding.ids
        assert tensors["token_type_ids"][row].tolist() == encoding.type_ids + [0] * (8 - size)
        assert tensors["attention_mask"][row].tolist() == [1] * size + [0] * (8 - size)
    assert all(tensor.shape == (4, 8) and tensor.dtype == np.int64 for tensor in tensors.values())
    assert tensors["attention_mask"][3].tolist() == [1] + [0] * 7


def test_segments_past_the_second(tmp_path: Path) -> None:
    """The post-processor determines the number of segments."""
    pipeline = PairPipeline(tiny_tokenizers.save(xlnet(), tmp_path), scoring(), truncate=True)
    expected = xlnet().encode("the fox", "in").type_ids
    assert pipeline.collate([one(pipeline, ("the fox", "in"))], FACTS)["token_type_ids"][
        0, : len(expected)
    ].tolist() == (expected)


def test_a_graph_without_segments_is_given_none(folder: Path) -> None:
    """For example RoBERTa."""
    pipeline = PairPipeline(folder, scoring(inputs=("input_ids", "attention_mask")), truncate=True)
    prepared = one(pipeline, ("the fox", "a dog"))
    assert set(prepared.tensors) == {"input_ids"}
    assert set(pipeline.collate([prepared], FACTS)) == {"input_ids", "attention_mask"}


class TestTruncation:
    PAIR = ("the fox " * 5, "a dog " * 8)

    def test_the_setting_applies_unless_the_task_overrides_it(self, folder: Path, pipeline: PairPipeline) -> None:
        """None follows the setting; the error counts both texts with their special tokens."""
        prepared = one(pipeline, self.PAIR)
        assert (prepared.cost, prepared.tokens, prepared.truncated) == (16, 16, True)
        strict = PairPipeline(folder, scoring(), truncate=False)
        for error in (fault(strict, self.PAIR), fault(pipeline, self.PAIR, classify(truncate=False))):
            assert isinstance(error, TooLong)
            assert "has 29 tokens" in error.message
            assert "at most 16" in error.message
        assert one(strict, self.PAIR, rerank(truncate=True)).truncated
        assert not one(strict, ("the", "fox")).truncated

    def test_either_end(self, pipeline: PairPipeline) -> None:
        """The task chooses the end for single texts and pairs."""
        raw = bert()
        for item in (self.PAIR, self.PAIR[0]):
            raw.enable_truncation(16, direction="left")
            expected = raw.encode(*item).ids if isinstance(item, tuple) else raw.encode(item).ids
            task = classify(truncation_direction="left")
            assert ids(one(pipeline, item, task)) == expected

    def test_a_document_is_cut_by_itself_first(self, folder: Path, pipeline: PairPipeline) -> None:
        """A requested document limit never refuses; a pair that is still too long is refused."""
        strict = PairPipeline(folder, scoring(), truncate=False)
        prepared = one(strict, ("the fox", "a dog " * 20), rerank(max_document_tokens=3))
        assert ids(prepared) == bert().encode("the fox", "a dog a").ids
        assert prepared.truncated
        assert isinstance(fault(strict, ("the fox", "a dog " * 20), rerank(max_document_tokens=12)), TooLong)
        assert not one(pipeline, ("the fox", "a dog"), rerank(max_document_tokens=2)).truncated

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_document_of_nothing_is_refused(self, pipeline: PairPipeline, limit: int) -> None:
        """check raises the error, and prepare returns it for the items."""
        task = rerank(max_document_tokens=limit)
        with pytest.raises(InvalidValue, match="must be at least 1 token") as caught:
            pipeline.check(task)
        assert caught.value.param == "max_tokens_per_doc"
        assert isinstance(fault(pipeline, ("a", "b"), task), InvalidValue)

    def test_far_too_long_texts_are_reported(self, pipeline: PairPipeline) -> None:
        """The texts are not read to their end."""
        error = fault(pipeline, ("fox " * 10_000, "dog"), rerank(truncate=False))
        assert "at least" in error.message


class TestPrompts:
    def test_the_default_prompt_stands_before_the_first_text(self, folder: Path) -> None:
        """As in sentence-transformers' cross-encoders; other prompts cannot be requested."""
        prompts = {"query": "query: ", "other": "x"}
        pipeline = PairPipeline(folder, scoring(prompts=prompts, default_prompt_name="query"), truncate=True)
        assert ids(one(pipeline, ("a", "b"))) == bert().encode("query: a", "b").ids
        assert ids(one(pipeline, "a")) == bert().encode("query: a").ids
        plain = PairPipeline(folder, scoring(prompts=prompts), truncate=True)
        assert ids(one(plain, ("a", "b"))) == bert().encode("a", "b").ids


class TestEstimate:
    @pytest.mark.parametrize(
        ("item", "tokens"),
        [("", 3), (("", ""), 3), (("abc" * 2, "東" * 2), 7), (("abc" * 20, "x"), 16), (("x" * 100, "y" * 200), 103)],
    )
    def test_both_texts_count(self, pipeline: PairPipeline, item: Item, tokens: int) -> None:
        """The count is bytes / 3 plus special tokens, at most max_tokens; texts read in pieces count in full."""
        assert pipeline.estimate(item) == tokens


class TestKeys:
    def test_equal_work_has_equal_keys(self, pipeline: PairPipeline) -> None:
        """The kind of task does not matter."""
        assert one(pipeline, ("The fox", "a")).key == one(pipeline, ("the  fox", "a"), classify()).key

    def test_options_that_change_the_row_change_the_key(self, pipeline: PairPipeline) -> None:
        """Other texts, raw scores, and another boundary between the two texts."""
        pairs = [("fox", "dog"), ("dog", "fox"), ("fox dog", "")]
        keys = {one(pipeline, pair).key for pair in pairs}
        keys |= {one(pipeline, "fox").key, one(pipeline, pairs[0], rerank(raw_scores=True)).key}
        assert len(keys) == 5

    def test_texts_without_anything_between_them(self, tmp_path: Path) -> None:
        """Equal ids in other segments have another key."""
        pipeline = PairPipeline(tiny_tokenizers.save(bare(), tmp_path), scoring(), truncate=True)
        first, second = one(pipeline, ("the fox", "in")), one(pipeline, ("the", "fox in"))
        assert first.key != second.key


class TestScores:
    LOGITS: Array = np.array([[0.5], [-3.0], [np.nan], [7.0]], dtype=np.float32)

    def test_each_item_has_its_own_options(self, pipeline: PairPipeline) -> None:
        """Activation is per item, a row with NaN is NotFinite, and padding rows are ignored."""
        tasks = [rerank(), rerank(raw_scores=True), rerank()]
        batch = [one(pipeline, ("a", "b"), task) for task in tasks]
        first, second, third = pipeline.finish({"logits": self.LOGITS}, batch)
        assert isinstance(first, np.ndarray)
        np.testing.assert_allclose(first, [1 / (1 + np.exp(-0.5))], rtol=1e-6)
        np.testing.assert_array_equal(second, [-3.0])
        assert isinstance(third, NotFinite)

    def test_several_labels(self, folder: Path) -> None:
        """Softmax over them, from half precision too."""
        pipeline = PairPipeline(folder, scoring(3, "softmax"), truncate=True)
        logits = np.array([[1, 2, 3]], dtype=np.float16)
        (row,) = pipeline.finish({"logits": logits}, [one(pipeline, "a", classify())])
        assert isinstance(row, np.ndarray)
        assert row.shape == (3,)
        assert row.sum() == pytest.approx(1.0)

    def test_an_axis_that_one_label_lacks(self, pipeline: PairPipeline) -> None:
        """[rows] is [rows, 1]."""
        (row,) = pipeline.finish({"logits": self.LOGITS[:1, 0]}, [one(pipeline, "a", rerank(raw_scores=True))])
        np.testing.assert_array_equal(row, [0.5])


class TestRefusals:
    def test_items_that_are_no_texts(self, pipeline: PairPipeline, tmp_path: Path) -> None:
        """Token ids, lone surrogates and texts without a token fail alone."""
        assert isinstance(fault(pipeline, [5, 6], classify()), InvalidValue)
        answers = pipeline.prepare([(rerank(), pair) for pair in (("a", "b"), ("a", "\ud800"), ("a", "c"))])
        assert [isinstance(answer, InvalidValue) for answer in answers] == [False, True, False]
        nothing = PairPipeline(tiny_tokenizers.save(bare(), tmp_path), scoring(), truncate=True)
        assert isinstance(fault(nothing, ("", "")), EmptyInput)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"inputs": ("input_ids", "pooling_mask")}, "pooling_mask"), ({"score": None, "dimension": 8}, "no scores")],
    )
    def test_models_that_it_is_not_for(self, folder: Path, changes: dict[str, Any], message: str) -> None:
        """They are refused when they are loaded."""
        with pytest.raises(ModelFileError, match=message):
            PairPipeline(folder, scoring(**changes), truncate=True)


def summarize(entry: Prepared | ShoalError) -> Any:
    if isinstance(entry, ShoalError):
        return entry.kind, entry.message
    tensors = {name: tensor.tolist() for name, tensor in entry.tensors.items()}
    return entry.key, entry.cost, entry.tokens, entry.truncated, tensors


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_the_tokens_of_another_process_are_its_own(folder: Path, truncate: bool, direction: Any) -> None:
    """A copy tokenizes pairs and texts; scores, counts and errors are those of the texts themselves."""
    texts = ["fish", "", "a b c " * 20, "Gr\u00f6\u00dfe \U0001f41f", "fish"]
    pipeline, copy = (PairPipeline(folder, scoring(), truncate=True) for _ in range(2))
    assert copy.tokenizer_id == pipeline.tokenizer_id
    options: dict[str, Any] = {"model": "m", "truncate": truncate, "truncation_direction": direction}
    for task in (
        Rerank(queries=["a b"], documents=texts, max_document_tokens=3, **options),
        Rerank(queries=texts, documents=texts, **options),
        Classify(inputs=[*texts, ("fish", "a " * 40)], **options),
    ):
        made = []
        for items in (task.items, pipeline.unpack_tokens(copy.tokenize(task), task.items)):
            prepared = pipeline.prepare([(task, item) for item in items])
            made.append([summarize(each) for each in prepared])
        assert made[0] == made[1]
