"""Pairs for models that bring their own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.core.protocols import CountedRow, EngineFacts, Prepared
from shoal.errors import InvalidValue, NotFinite, ShoalError, TooLong, Unsupported
from shoal.pipelines.text.string_pairs import StringPairPipeline, StringPairSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.types import Array, Classify, Item, Rerank
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.text.test_pairing import bert

FACTS = EngineFacts(name="e", inputs=("text", "pair"), outputs=("scores",), size_buckets=(16,))
TEI = frozenset({"truncate", "truncation_direction"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(tiny_tokenizers.save(bert(), tmp_path_factory.mktemp("string_pairs")), "tokenizer.json")


def made(*, truncate: bool = True, tokenizer: TextTokenizer | None = None, **fields: Any) -> StringPairPipeline:
    options: dict[str, Any] = {"labels": ("LABEL_0",), "activation": "sigmoid", "raw": True}
    return StringPairPipeline(StringPairSpec(**(options | fields)), truncate=truncate, tokenizer=tokenizer)


def rerank(**fields: Any) -> Rerank:
    return Rerank(model="m", queries=[], documents=[], **fields)


def classify(**fields: Any) -> Classify:
    return Classify(model="m", inputs=[], **fields)


def entry(pipeline: StringPairPipeline, item: Item, task: Rerank | Classify | None = None) -> Prepared | ShoalError:
    return pipeline.prepare([(task or rerank(), item)])[0]


def one(pipeline: StringPairPipeline, item: Item, task: Rerank | Classify | None = None) -> Prepared:
    prepared = entry(pipeline, item, task)
    assert isinstance(prepared, Prepared), prepared
    return prepared


def test_pairs_and_texts_share_a_call() -> None:
    """Texts are sent unpadded; a single text has None as its second part."""
    pipeline = made()
    batch = [one(pipeline, ("q", "d")), one(pipeline, "東京", classify()), one(pipeline, ("", ""), classify())]
    assert {item.group for item in batch} == {()}
    tensors = pipeline.collate(batch, FACTS)
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "text": ["q", "東京", ""],
        "pair": ["d", None, ""],
    }
    assert all(array.dtype == object for array in tensors.values())


def test_a_server_that_takes_one_query() -> None:
    """Pairs with the same first text share a call; grouping does not change the answers."""
    pipeline = made(one_query=True, raw=False, passes=TEI)
    same, too, other = (one(pipeline, pair) for pair in (("q", "a"), ("q", "b"), ("r", "a")))
    assert same.group == too.group != other.group
    alone = [one(pipeline, text, classify()) for text in ("q", "a")]
    assert alone[0].group == alone[1].group != same.group
    assert same.key == one(made(raw=False, passes=TEI), ("q", "a")).key


def test_tokens_that_the_server_counts(tokenizer: TextTokenizer) -> None:
    """Server counts replace the estimate; a failed row has no count, and a local tokenizer needs none."""
    pipeline = made(raw=False, token_count="token_count")
    batch = [one(pipeline, ("q", "d")), one(pipeline, ("q", "e"))]
    assert batch[0].outputs == ("scores", "token_count")
    rows: dict[str, Array] = {"scores": np.array([[0.5], [np.nan], [0]]), "token_count": np.array([[7], [8], [9]])}
    good, bad = pipeline.finish(rows, batch)
    assert isinstance(good, CountedRow)
    assert (good.tokens, np.asarray(good.row).tolist()) == (7, [0.5])
    assert isinstance(bad, NotFinite)
    assert one(made(token_count="token_count", tokenizer=tokenizer), ("q", "d")).outputs == ("scores",)


class TestScores:
    ROWS: Array = np.array([[0.5], [-2.0], [np.nan]], dtype=np.float32)

    def finished(self, pipeline: StringPairPipeline, *tasks: Rerank) -> list[Array | ShoalError]:
        rows = pipeline.finish({"scores": self.ROWS}, [one(pipeline, ("a", "b"), task) for task in tasks])
        return [row for row in rows if not isinstance(row, CountedRow)]

    def test_logits_are_activated_here(self) -> None:
        """Raw and activated scores share a call."""
        scored, raw, bad = self.finished(made(), rerank(), rerank(raw_scores=True), rerank())
        np.testing.assert_allclose(scored if isinstance(scored, np.ndarray) else [], [1 / (1 + np.exp(-0.5))], 1e-6)
        np.testing.assert_array_equal(raw if isinstance(raw, np.ndarray) else [], [-2.0])
        assert isinstance(bad, NotFinite)

    def test_final_scores_stay(self) -> None:
        """No raw scores exist for them."""
        pipeline = made(raw=False)
        np.testing.assert_array_equal(self.finished(pipeline, rerank())[0], self.ROWS[0])
        with pytest.raises(Unsupported) as caught:
            pipeline.check(rerank(raw_scores=True))
        assert caught.value.param == "raw_scores"
        assert isinstance(entry(pipeline, ("a", "b"), rerank(raw_scores=True)), Unsupported)

    def test_a_server_may_get_raw_scores(self) -> None:
        """The server returns the requested scores; raw scores take separate calls."""
        for behind in (True, False):
            pipeline = made(raw=behind, passes=frozenset({"raw_scores"}))
            for raw in (True, False):
                task = rerank(raw_scores=raw)
                pipeline.check(task)
                assert one(pipeline, ("a", "b"), task).params == {"raw_scores": raw}
                np.testing.assert_array_equal(self.finished(pipeline, task)[0], self.ROWS[0])


class TestOptions:
    def test_truncation_travels(self) -> None:
        """Truncation is sent if the server supports it, by request or by setting."""
        assert one(made(passes=TEI), "a").params == {"truncate": True}
        assert one(made(passes=TEI, truncate=False), "a").params == {"truncate": False}
        left = one(made(passes=TEI), "a", classify(truncation_direction="left"))
        assert left.params == {"truncate": True, "truncation_direction": "left"}
        assert left.group != one(made(passes=TEI), "a").group

    def test_options_of_the_tokenizer_are_unsupported(self, tokenizer: TextTokenizer) -> None:
        """The same rule applies to embeddings."""
        for fields in ({"truncate": False}, {"truncation_direction": "left"}):
            with pytest.raises(Unsupported) as caught:
                made().check(classify(**fields))
            assert caught.value.param == next(iter(fields))
            made(tokenizer=tokenizer, max_tokens=16).check(classify(**fields))
            made(passes=TEI).check(classify(**fields))

    def test_a_limit_of_documents(self) -> None:
        """Only the server can truncate a text that is sent whole."""
        with pytest.raises(Unsupported) as caught:
            made().check(rerank(max_document_tokens=5))
        assert caught.value.param == "max_tokens_per_doc"
        passing = made(passes=frozenset({"max_document_tokens"}))
        assert one(passing, ("a", "b"), rerank(max_document_tokens=5)).params == {"max_document_tokens": 5}
        with pytest.raises(InvalidValue):
            passing.check(rerank(max_document_tokens=0))

    def test_keys_tell_texts_and_options_apart(self) -> None:
        """Two halves of a pair have another key than one joined text."""
        pipeline = made()
        keys = {one(pipeline, item).key for item in ("ab", ("a", "b"), ("b", "a"), ("ab", ""))}
        assert len(keys | {one(pipeline, "ab", classify(raw_scores=True)).key}) == 5
        assert one(pipeline, "ab").key in keys


class TestUsage:
    def test_tokens_are_estimated_without_a_count(self) -> None:
        """The estimate is one token for 4 bytes of both texts; admission assumes 3 bytes."""
        assert one(made(), ("a" * 20, "東" * 20)).tokens == 20
        assert made().estimate(("a" * 30, "東" * 10)) == 20
        assert made().estimate("") == one(made(), "").tokens == 1

    @pytest.mark.parametrize("max_tokens", [0, 64])
    def test_counted_with_a_tokenizer(self, tokenizer: TextTokenizer, max_tokens: int) -> None:
        """The count includes special tokens, and all tokens if the model's limit is unknown."""
        pipeline = made(tokenizer=tokenizer, max_tokens=max_tokens)
        prepared = one(pipeline, ("the fox", "a dog " * 20))
        assert prepared.tokens == prepared.cost == 45
        assert not prepared.truncated
        assert one(pipeline, "the fox", classify()).tokens == 4

    def test_too_long_inputs(self, tokenizer: TextTokenizer) -> None:
        """The server truncates it, or Shoal refuses it with the count."""
        pipeline = made(tokenizer=tokenizer, max_tokens=16)
        pair = ("the fox", "a dog " * 8)
        prepared = one(pipeline, pair)
        assert (prepared.tokens, prepared.truncated) == (16, True)
        assert prepared.tensors["pair"][0] == pair[1]
        error = entry(pipeline, pair, rerank(truncate=False))
        assert isinstance(error, TooLong)
        assert "21 tokens" in error.message
        assert isinstance(entry(pipeline, pair, rerank(truncation_direction="left")), Unsupported)
        assert pipeline.estimate(pair) == 16

    def test_a_text_that_the_tokenizer_cannot_read_is_estimated(self, tmp_path: Path) -> None:
        """A failed count does not refuse the text."""
        raw = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        pipeline = made(tokenizer=TextTokenizer(tiny_tokenizers.save(raw, tmp_path), "tokenizer.json"))
        assert [one(pipeline, pair).tokens for pair in (("a a", "b"), ("a" * 8, "b" * 8))] == [3, 4]


def test_items_that_cannot_travel_fail_alone() -> None:
    """A lone surrogate on either side, and token ids."""
    items: list[Item] = [("a", "b"), ("\ud800", "b"), ("a", "\ud800"), [5, 6], "c"]
    answers = made().prepare([(classify(), item) for item in items])
    assert [isinstance(answer, InvalidValue) for answer in answers] == [False, True, True, True, False]
