"""Messages of the gRPC streams, compared with the public protocol: Shoal has its own types for the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.backends.base.response_limit import MAX_SPARSE_TERMS
from shoal.backends.tei import grpc_messages as messages
from shoal.backends.tei import tei_pb2 as pb
from shoal.backends.tei.info import Info
from shoal.backends.tei.link import ExpectedShape
from shoal.errors import InputRejected, UpstreamFailed
from tests.fakes.tei_wire import wire

WHERE = "grpc://gpu:8080"
SHAPE = ExpectedShape(Info(kind="embedding", model_id="m", max_input_length=8, labels=("a", "b")), 4)
FLOATS = st.floats(width=32)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
KINDS = {"embedding": "EmbedRequest", "tokens": "EmbedAllRequest", "sparse": "EmbedSparseRequest"}


def read(stream: messages.Stream, made: Any) -> Any:
    return stream.answer.FromString(made.SerializeToString())


@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(TEXT, min_size=1, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "truncate": st.none() | st.booleans(),
            "truncation_direction": st.sampled_from([None, "left", "right"]),
            "prompt_name": st.none() | TEXT,
            "normalize": st.none() | st.booleans(),
            "dimensions": st.none() | st.integers(1, 4096),
        },
    ),
)
def test_texts_with_their_options(name: str, texts: list[str], params: dict[str, Any]) -> None:
    """A server reads each option as intended; omitted ones have the HTTP build's defaults."""
    made = messages.build_requests(name, texts, params)
    found = [getattr(wire, KINDS[name]).FromString(messages.encode(each)) for each in made]
    assert [each.inputs for each in found] == texts
    for each in found:
        assert each.truncate is bool(params.get("truncate"))
        assert each.truncation_direction == (1 if params.get("truncation_direction") == "left" else 0)
        assert (each.prompt_name if each.HasField("prompt_name") else None) == params.get("prompt_name")
        if name == "embedding":
            assert each.HasField("normalize"), "servers of before 1.9 take its absence for no"
            assert each.normalize is (params.get("normalize") is not False)
            assert (each.dimensions if each.HasField("dimensions") else None) == params.get("dimensions")


@given(st.lists(TEXT | st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_texts_and_pairs(items: list[Any]) -> None:
    made = messages.build_requests("scores", items, {"truncate": True, "normalize": True})
    found = [wire.PredictPairRequest.FromString(messages.encode(each)) for each in made]
    assert [tuple(each.inputs) for each in found] == [(item,) if isinstance(item, str) else item for item in items]
    assert all(each.raw_scores and each.truncate for each in found)


@pytest.mark.parametrize("params", [{"dimensions": 2**32}, {"dimensions": -1}, {"prompt_name": "\ud800"}])
def test_what_no_message_can_carry(params: dict[str, Any]) -> None:
    with pytest.raises(InputRejected, match="cannot be sent"):
        messages.build_requests("embedding", ["a"], params)


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FLOATS))
async def test_vectors_are_exact(rows: Any) -> None:
    """Vectors are bit-identical, whatever they contain."""
    found = [read(messages.EMBED, wire.EmbedResponse(embeddings=row)) for row in rows]
    array = await messages.to_array("embedding", found, SHAPE, WHERE)
    assert array.flags.writeable
    assert np.array_equal(array, rows, equal_nan=True)


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FLOATS))
async def test_token_vectors_are_exact(rows: Any) -> None:
    vectors = [wire.TokenEmbedding(embeddings=row) for row in rows]
    found = [read(messages.EMBED_ALL, wire.EmbedAllResponse(token_embeddings=some)) for some in (vectors, vectors[:1])]
    array = await messages.to_array("tokens", found, SHAPE, WHERE)
    assert np.array_equal(array[0], rows, equal_nan=True)
    assert np.array_equal(array[1], rows[:1], equal_nan=True)


@given(st.dictionaries(st.integers(0, 2**31 - 1), FLOATS, max_size=9))
async def test_sparse_vectors_are_exact(weights: dict[int, float]) -> None:
    """Indices are sorted, whatever order they arrive in."""
    terms = [wire.SparseValue(index=index, value=value) for index, value in weights.items()]
    (row,) = await messages.to_array(
        "sparse", [read(messages.EMBED_SPARSE, wire.EmbedSparseResponse(sparse_embeddings=terms))], SHAPE, WHERE
    )
    assert row.indices.tolist() == sorted(weights)
    expected = np.array([weights[index] for index in sorted(weights)], dtype=np.float32)
    assert np.array_equal(row.values, expected, equal_nan=True)


async def test_scores_come_by_their_labels() -> None:
    predictions = [wire.Prediction(score=2, label="b"), wire.Prediction(score=1, label="a")]
    found = [read(messages.PREDICT, wire.PredictResponse(predictions=predictions))] * 2
    assert (await messages.to_array("scores", found, SHAPE, WHERE)).tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("embedding", [wire.EmbedResponse()]),
        ("embedding", [wire.EmbedResponse(embeddings=[1]), wire.EmbedResponse(embeddings=[1, 2])]),
        ("tokens", [wire.EmbedAllResponse()]),
        ("tokens", [wire.EmbedAllResponse(token_embeddings=[wire.TokenEmbedding()])]),
        ("sparse", [wire.EmbedSparseResponse(sparse_embeddings=[wire.SparseValue(index=2**31)])]),
        ("sparse", [wire.EmbedSparseResponse(sparse_embeddings=[wire.SparseValue(), wire.SparseValue()])]),
        ("scores", [wire.PredictResponse(predictions=[wire.Prediction(label="a")])]),
    ],
)
async def test_answers_that_are_none(name: str, answers: list[Any]) -> None:
    found = [read(messages.STREAMS[name], answer) for answer in answers]
    with pytest.raises(UpstreamFailed):
        await messages.to_array(name, found, SHAPE, WHERE)


async def test_vectors_that_are_half_a_number() -> None:
    with pytest.raises(UpstreamFailed, match="that are empty or of different lengths"):
        await messages.to_array("embedding", [pb.EmbedResponse(embeddings=b"12345")], SHAPE, WHERE)


@given(st.binary(max_size=60))
async def test_whatever_the_bytes_it_is_an_array_or_an_error(data: bytes) -> None:
    for name, stream in messages.STREAMS.items():
        try:
            answer: Any = stream.answer.FromString(data)
        except DecodeError:
            continue
        try:
            await messages.to_array(name, [answer], SHAPE, WHERE)
        except UpstreamFailed:
            continue


def test_counts_are_read_or_estimated() -> None:
    replies = [pb.EmbedResponse(metadata=pb.Metadata(compute_tokens=7)), pb.EmbedResponse(), pb.EmbedResponse()]
    assert messages.count_tokens(replies, ["a", "a" * 20, [1, 2, 3]]) == [7, 6, 4]


def largest(name: str) -> Any:
    metadata = wire.Metadata(
        compute_chars=2**32 - 1,
        compute_tokens=2**32 - 1,
        total_time_ns=2**64 - 1,
        tokenization_time_ns=2**64 - 1,
        queue_time_ns=2**64 - 1,
        inference_time_ns=2**64 - 1,
    )
    if name == "embedding":
        return wire.EmbedResponse(embeddings=[1.0] * 4, metadata=metadata)
    if name == "tokens":
        vectors = [wire.TokenEmbedding(embeddings=[1.0] * 4)] * 8
        return wire.EmbedAllResponse(token_embeddings=vectors, metadata=metadata)
    if name == "sparse":
        terms = [wire.SparseValue(index=2**31 - 1 - at, value=1.0) for at in range(MAX_SPARSE_TERMS)]
        return wire.EmbedSparseResponse(sparse_embeddings=terms, metadata=metadata)
    return wire.PredictResponse(predictions=[wire.Prediction(score=1, label=each) for each in "ab"], metadata=metadata)


@pytest.mark.parametrize("name", messages.STREAMS)
def test_every_valid_answer_fits(name: str) -> None:
    size = len(largest(name).SerializeToString())
    assert size <= messages.max_message_bytes(name, SHAPE) <= size + 2**20


def test_a_lone_label_may_have_any_name() -> None:
    info = Info(kind="reranker", model_id="m", labels=("LABEL_0",))
    answer = wire.PredictResponse(predictions=[wire.Prediction(score=1, label="x" * 1000)])
    assert len(answer.SerializeToString()) <= messages.max_message_bytes("scores", ExpectedShape(info, None))
