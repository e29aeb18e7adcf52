"""Answers of /score, /rerank and /classify as rows, whatever the server sends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base.http_answer import Answer
from shoal.backends.openai.calls import sort_by_index
from shoal.backends.openai.scores import ClassifyCalls, LabelNames, RerankCalls, ScoreCalls
from shoal.errors import UpstreamFailed

PAIRS = [("q", "one"), ("q", "two")]
NONE: list[Any] = [
    b"",
    b"<html>",
    {},
    [],
    {"data": [], "results": []},
    {"data": [{"index": 0, "score": 1.0}]},
    {"data": [{"index": 0, "score": 1.0}, {"index": 0, "score": 1.0}]},
    {"data": [{"index": 0, "score": 1.0}, {"index": 2, "score": 1.0}]},
    {"data": [{"index": -1, "score": 1.0}, {"index": 0, "score": 1.0}]},
    {"data": [{"index": 0, "score": "x"}, {"index": 1, "score": 1.0}]},
    b'{"data":' + b"[" * 5000 + b"]" * 5000 + b"}",
]


def make_answer(body: Any) -> Answer:
    return Answer(200, {}, body if isinstance(body, bytes) else json.dumps(body).encode())


async def scored(body: Any, items: Sequence[Any] = PAIRS) -> tuple[list[list[float]], int]:
    values, tokens = await ScoreCalls("/score").read(make_answer(body), items, "here")
    assert values.dtype == np.float32
    return values.tolist(), tokens


class TestPairs:
    def test_requests_for_scores(self) -> None:
        calls = ScoreCalls("/score")
        assert calls.body("m", PAIRS) == {"model": "m", "text_1": ["q", "q"], "text_2": ["one", "two"]}
        more = calls.body("m", PAIRS, raw_scores=True, truncate=True, truncation_direction="left")
        assert more["use_activation"] is False
        assert (more["truncate_prompt_tokens"], more["truncation_side"]) == (-1, "left")
        assert calls.group(PAIRS[0]) == calls.group(("other", "x"))
        assert calls.group("text") is None

    def test_requests_for_rerankers(self) -> None:
        """A rerank request asks for all documents without their texts, and for raw scores by both known fields."""
        calls = RerankCalls("/rerank")
        request = {"model": "m", "query": "q", "documents": ["one", "two"], "top_n": 2, "return_documents": False}
        assert calls.body("m", PAIRS) == request
        raw = {"raw_scores": True, "use_activation": False}
        assert calls.body("m", PAIRS, raw_scores=True) == request | raw
        assert calls.body("m", PAIRS, truncate=False, max_document_tokens=3) == request | {
            "truncation": False,
            "max_tokens_per_doc": 3,
        }
        assert calls.group(PAIRS[0]) == calls.group(PAIRS[1]) != calls.group(("other", "one"))
        assert calls.group("text") is None

    def test_fields_that_a_reranker_does_not_know(self) -> None:
        calls = RerankCalls("/rerank")
        assert not calls.adapt_to_refusal(make_answer({"detail": "too long"}))
        assert calls.adapt_to_refusal(make_answer({"detail": "Argument 'top_n' is not supported"}))
        assert not calls.adapt_to_refusal(make_answer({"detail": "Argument 'top_n' is not supported"}))
        assert calls.body("m", PAIRS).keys() == {"model", "query", "documents", "return_documents"}

    @pytest.mark.parametrize("body", NONE)
    async def test_answers_that_are_none(self, body: Any) -> None:
        with pytest.raises(UpstreamFailed, match="here"):
            await scored(body)

    async def test_null_and_infinity_fail_their_own_rows(self) -> None:
        rows, _ = await scored({"data": [{"index": 0, "score": None}, {"index": 1, "score": 1e300}]})
        assert np.isnan(rows[0][0])
        assert np.isinf(rows[1][0])

    @pytest.mark.parametrize(
        ("more", "tokens"),
        [
            ({}, 0),
            ({"usage": {"prompt_tokens": 7, "total_tokens": 9}}, 7),
            ({"usage": {"total_tokens": 9}}, 9),
            ({"usage": None, "meta": {"tokens": {"input_tokens": 5}}}, 5),
            ({"meta": {"billed_units": {"search_units": 1}}}, 0),
            ({"usage": {"total_tokens": "many"}}, 0),
        ],
    )
    async def test_the_tokens_that_servers_tell(self, more: dict[str, Any], tokens: int) -> None:
        body = {"results": [{"index": at, "relevance_score": 0.5} for at in range(2)], **more}
        assert (await scored(body))[1] == tokens


class TestClasses:
    async def read(self, calls: ClassifyCalls, data: Any, count: int = 1) -> list[list[float]]:
        found: list[list[float]] = (
            await calls.read(make_answer({"data": data}), ["text"] * count, "here")
        ).values.tolist()
        return found

    async def test_names_of_the_likeliest(self) -> None:
        labels = LabelNames()
        calls = ClassifyCalls("/classify", labels)
        assert not labels.class_names
        rows = [{"index": 1, "label": "b", "probs": [0.25, 0.75]}, {"index": 0, "label": None, "probs": [1.0, 0.0]}]
        assert await self.read(calls, rows, 2) == [[1.0, 0.0], [0.25, 0.75]]
        assert labels.class_names == ("LABEL_0", "b")
        await self.read(calls, [{"label": "a", "probs": [0.5, 0.5]}])
        assert labels.class_names == ("a", "b")
        with pytest.raises(UpstreamFailed, match="3 labels, but the model has 2"):
            await self.read(calls, [{"label": "a", "probs": [0.5, 0.25, 0.25]}])

    async def test_scores_by_name(self) -> None:
        labels = LabelNames()
        calls = ClassifyCalls("/classify", labels)
        row = [{"label": f"LABEL_{number}", "score": number / 16} for number in (10, 9, 2)]
        assert await self.read(calls, [row]) == [[0.125, 0.5625, 0.625]]
        assert labels.class_names == ("LABEL_2", "LABEL_9", "LABEL_10")
        with pytest.raises(UpstreamFailed, match="labels other than LABEL_2"):
            await self.read(calls, [row[:2]])
        with pytest.raises(UpstreamFailed, match="labels other than LABEL_2"):
            await self.read(calls, [[*row[:2], row[0]]])

    async def test_names_that_are_known(self) -> None:
        labels = LabelNames(("b", "a"))
        row = [{"label": "a", "score": 0.25}, {"label": "b", "score": None}]
        (scores,) = await self.read(ClassifyCalls("/classify", labels), [row])
        assert np.isnan(scores[0])
        assert scores[1] == 0.25

    async def test_the_one_label_of_a_reranker(self) -> None:
        labels = LabelNames(("LABEL_0",))
        assert await self.read(ClassifyCalls("/classify", labels), [[{"label": "relevant", "score": 0.5}]]) == [[0.5]]
        assert labels.class_names == ("relevant",)

    @pytest.mark.parametrize("data", [[], [{"probs": []}], [[]], [{"label": "a"}], [1], None])
    async def test_answers_that_are_none(self, data: Any) -> None:
        with pytest.raises(UpstreamFailed):
            await self.read(ClassifyCalls("/classify", LabelNames()), data)

    def test_pairs_are_sent_as_lists(self) -> None:
        calls = ClassifyCalls("/classify", LabelNames())
        assert calls.body("m", [("a", "b")])["input"] == [["a", "b"]]
        assert calls.group(("a", "b")) != calls.group("a") is not None


class TestOrder:
    @given(st.permutations(range(12)))
    def test_any_order_is_put_right(self, order: list[int]) -> None:
        assert sort_by_index([(index, index) for index in order], 12, "here") == [*range(12)]

    @given(st.lists(st.one_of(st.none(), st.integers(-2, 5)), max_size=6), st.integers(0, 5))
    def test_one_row_for_each_input_or_none(self, indices: list[int | None], count: int) -> None:
        found = [(index, place) for place, index in enumerate(indices)]
        places = [place if index is None else index for place, index in enumerate(indices)]
        if sorted(places) == [*range(count)]:
            assert [places[row] for row in sort_by_index(found, count, "here")] == [*range(count)]
        else:
            with pytest.raises(UpstreamFailed, match="rows for"):
                sort_by_index(found, count, "here")

    @given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=5))
    async def test_scores_come_as_they_were_sent(self, values: list[float]) -> None:
        body = {"data": [{"index": at, "score": value} for at, value in enumerate(values)]}
        assert (await scored(body, [("q", "d")] * len(values)))[0] == [[value] for value in values]
