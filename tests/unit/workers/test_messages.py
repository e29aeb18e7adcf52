"""The messages between a front and the model process."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal.backends.base.http_answer
import shoal.backends.tei.link
import shoal.backends.triton.errors  # noqa: F401 - their error classes are checked below
from shoal import errors
from shoal.core import packed_error
from shoal.core.packed_error import PackedError
from shoal.core.protocols import BatchReport, GenerationReport, ModelFacts, ReplicaStatus
from shoal.core.recording import BatchRecord, Found, RequestRecord, TaskRecord
from shoal.errors import InternalError, ShoalError
from shoal.types import (
    BatchFacts,
    Chunk,
    Classify,
    Context,
    Embed,
    Embedded,
    Generate,
    Image,
    Message,
    Part,
    Rerank,
    Sampling,
    Scored,
    SparseVector,
    TokenizedTexts,
    TokenLogprob,
    ToolDelta,
    Usage,
)
from shoal.workers import messages

CONTEXT = Context(id="r1", deadline=12.5, client="c", traffic="bulk", surface="openai")
FACTS = ModelFacts(source="fake:", backend="fake", tasks=("embed",), dimension=3, prompts={"query": "q: "})
STATE = messages.ModelState(
    name="a",
    aliases=("b",),
    default_for=("embed",),
    created=7,
    state="ready",
    note="",
    is_sleeping=False,
    required=True,
    usable=True,
    facts=FACTS,
    error=PackedError("ModelFailed", "gone"),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(0, 2**63 - 1)

FROM_FRONT = [
    messages.Hello(7),
    messages.Run(1, Embed(model="m", inputs=["a", [1, 2], Image(b"\xff\x00")], outputs=("dense", "sparse")), CONTEXT),
    messages.Run(2, Rerank(model="m", queries=["q"], documents=["a", "b"], raw_scores=True), CONTEXT),
    messages.Run(3, Classify(model="m", inputs=["a", ("b", "c"), Image(b"\x00")]), CONTEXT),
    messages.Run(4, Embed(model="m", inputs=["a"], tokenized=TokenizedTexts("t", b"\xff\x00", 0.5)), CONTEXT),
    messages.Accepted("m", "embed", 2, "bulk", "tei"),
    messages.Finished("m", "embed", "ok", 0.5, "tei", [3, 4], 1, BatchFacts(size=2)),
    messages.Finished("m", "generate", "cancelled", 0.5, "openai"),
    messages.Batched(BatchReport("m", "m-0", 2, 7, 8, "idle", 0.1)),
    messages.Generated(GenerationReport("m", 3, 4, None, 0.5)),
    messages.More(4, 16),
    messages.Cancel(4),
    messages.Wake(5, "m", CONTEXT),
    messages.AwaitServers(6, math.inf),
    messages.Refused("too_large", "tei"),
    messages.Lag(0.25),
    messages.Replicas([("m", ReplicaStatus("r", "ejected", 2))]),
    messages.Known(3),
    messages.Recorded(
        5,
        Found(
            RequestRecord("r1", "openai", "POST", "/v1/embeddings", 200, 1.5, 2.5, 0.5, "c", "a", ""),
            [
                TaskRecord(
                    *("r1", "a", "embed", 2, 2.5, "00-1-2-01 k=v", 2.5, 0.4, "ok"),
                    facts=BatchFacts(size=2),
                    attempts=[BatchRecord(7, 2, 1, "idle", "a-0", 0.1, 2.6, 16, "transport", "retry")],
                )
            ],
        ),
    ),
    messages.Request(8, "POST", "/a b/é", b"x=%20", [(b"a", b"\xff"), (b"a", b"2")], ("::1", 5)),
    messages.Event(8, b"\x00\xff", True),
    messages.Event(8, b"", False, True),
]
TO_FRONT = [
    messages.Tick(),
    messages.LookUp(5, "r1"),
    messages.Leaving(),
    messages.Models(2, [STATE], {"triton:a": "it is starting"}, {"b"}, {"old": "old", "older": "old"}),
    messages.Piece(
        1,
        Chunk(
            text="a",
            index=1,
            finish_reason="stop",
            reasoning="r",
            tools=[ToolDelta(index=0, id="t", name="f", arguments="{}")],
            logprobs=[TokenLogprob(token="a", logprob=-0.5, data=b"\xff", top=[TokenLogprob(token="b", logprob=-1.0)])],
            usage=Usage(prompt_tokens=3),
            raw=("openai.chat", b"\xff"),
            cut=2,
            ignored=("seed",),
        ),
    ),
    messages.Done(1),
    messages.Done(1, True),
    messages.Failure(1, PackedError("TooLong", "too long", {"param": "input", "retry_after": None})),
    messages.Receive(1),
    messages.Start(1, 404, [(b"content-type", b"text/html")]),
    messages.Body(1, b"\x00\xff", True),
]


def there_and_back(message: Any, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    return decoder.decode(messages.encode(message))


@pytest.mark.parametrize("message", FROM_FRONT, ids=lambda message: type(message).__name__)
def test_a_message_of_a_front_survives(message: Any) -> None:
    """The model process reads what a front has written."""
    back = there_and_back(message, messages.decoder_from_front())
    assert type(back) is type(message)
    assert back == message


@pytest.mark.parametrize("message", TO_FRONT, ids=lambda message: type(message).__name__)
def test_a_message_to_a_front_survives(message: Any) -> None:
    """A front reads what the model process has written."""
    back = there_and_back(message, messages.decoder_to_front())
    assert type(back) is type(message)
    assert back == message


def test_each_message_is_checked_above() -> None:
    """The two lists hold a message of each type; streams and results have tests of their own."""
    checked = {type(message) for message in (*FROM_FRONT, *TO_FRONT)}
    kinds = {*messages.FromFront.__args__, *messages.ToFront.__args__}
    assert kinds - checked == {messages.Stream, messages.EmbedAnswer, messages.ScoreAnswer}


@given(NUMBERS, st.lists(TEXTS, min_size=1, max_size=5), TEXTS, st.floats(allow_nan=False), st.none() | TEXTS)
def test_any_texts_survive(number: int, inputs: list[str], client: str, deadline: float, prompt: str | None) -> None:
    """Inputs, names and deadlines of a task arrive as they are."""
    task = Embed(model=client, inputs=inputs, prompt_name=prompt)
    message = messages.Run(number, task, Context(id=client, deadline=deadline, client=client))
    assert there_and_back(message, messages.decoder_from_front()) == message


@given(st.binary(max_size=300), TEXTS, st.binary(max_size=20), st.lists(st.tuples(st.binary(), st.binary())))
def test_any_request_survives(body: bytes, path: str, query: bytes, headers: messages.Headers) -> None:
    """The bytes of a request that is handed over arrive as they are."""
    decoder = messages.decoder_from_front()
    for message in (messages.Request(1, "PUT", path, query, headers, ("h", 0)), messages.Event(1, body, False)):
        assert there_and_back(message, decoder) == message


def test_a_stream_keeps_the_fields_of_its_body() -> None:
    """A Generate keeps its JSON fields, which are not MessagePack."""
    task = Generate(
        model="m",
        messages=[Message(role="user", content=[Part(text="é"), Part(type="image", url="data:")])],
        sampling=Sampling(stop=["a"], logit_bias={5: -1.0}, seed=3),
        raw=("openai.chat", {"seed": msgspec.Raw(b"3"), "x": msgspec.Raw(b'{"a": [1.50]}')}),
        extras={"x": msgspec.Raw(b'{"a": [1.50]}')},
        template_kwargs={"deep": {"a": [None, True]}},
    )
    message = there_and_back(messages.Stream.of(9, task, CONTEXT), messages.decoder_from_front())
    back = message.unpack_task()
    assert (message.id, message.ctx) == (9, CONTEXT)
    assert back.raw is not None
    assert {name: bytes(value) for name, value in back.raw[1].items()} == {"seed": b"3", "x": b'{"a": [1.50]}'}
    assert {name: bytes(value) for name, value in back.extras.items()} == {"x": b'{"a": [1.50]}'}
    replace = msgspec.structs.replace
    assert replace(back, raw=None, extras={}) == replace(task, raw=None, extras={})


@given(st.integers(0, 4), st.integers(0, 5), st.data())
def test_vectors_survive_to_the_bit(inputs: int, dimension: int, data: st.DataObject) -> None:
    """Vectors, also empty ones, NaN and negative zero, arrive with their dtype, their shape and each bit."""
    size = inputs * dimension * 4
    bits = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.float32).reshape(inputs, dimension)
    sparse = SparseVector(indices=np.arange(dimension, dtype=np.int32), values=np.zeros(dimension, np.float32))
    embedded = Embedded(
        vectors=bits,
        tokens=[3] * inputs,
        truncated=1,
        facts=BatchFacts(size=2, flush="age", queue_ms=0.1),
        space="s",
        sparse=[sparse],
        token_vectors=[bits],
        multi_vectors=[bits[:0]],
    )
    back = there_and_back(messages.EmbedAnswer(1, embedded), messages.decoder_to_front()).result
    pairs = [(back.vectors, bits), (back.token_vectors[0], bits), (back.multi_vectors[0], bits[:0])]
    pairs += [(back.sparse[0].indices, sparse.indices), (back.sparse[0].values, sparse.values)]
    for got, sent in pairs:
        assert (got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())
    assert (back.tokens, back.truncated, back.facts, back.space) == ([3] * inputs, 1, embedded.facts, "s")
    scored = there_and_back(messages.ScoreAnswer(1, Scored(scores=bits, tokens=[1])), messages.decoder_to_front())
    assert scored.result.scores.tobytes() == bits.tobytes()


def all_errors(kind: type[ShoalError] = ShoalError) -> list[type[ShoalError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in all_errors(below))]


SPECIAL = {
    errors.MethodNotAllowed: errors.MethodNotAllowed("no", allow="GET, HEAD"),
    errors.UpstreamRefused: errors.UpstreamRefused(
        "no", status=418, body=b"\xff{}", content_type="text/x", param="p", retry_after=1.5, server="http://s"
    ),
    errors.ModelFileError: errors.ModelFileError("bad", file="config.json", key="a.b"),
    errors.MissingExtra: errors.MissingExtra("torch", "torch"),
}


def example(kind: type[ShoalError]) -> ShoalError:
    if kind in SPECIAL:
        return SPECIAL[kind]
    return kind("no, é: do that", param="input", retry_after=2.0)


def carry(error: ShoalError) -> ShoalError:
    failure = there_and_back(messages.Failure(3, PackedError.of(error)), messages.decoder_to_front())
    assert failure.id == 3
    back: ShoalError = failure.error.to_error()
    return back


@pytest.mark.parametrize(
    "kind", [kind for kind in all_errors() if kind.__module__ == errors.__name__], ids=lambda kind: kind.__name__
)
def test_an_error_survives(kind: type[ShoalError]) -> None:
    """An error arrives as its class with all of its attributes, and can be copied and reworded as the original."""
    error = example(kind)
    for back in (carry(error), copy(carry(error))):
        assert type(back) is kind
        assert vars(back) == vars(error)
        assert (str(back), back.message, back.kind, back.retryable) == (
            error.message,
            error.message,
            error.kind,
            error.retryable,
        )
    assert carry(error.at_input(2)).message == error.at_input(2).message


@pytest.mark.parametrize(
    "kind",
    [kind for kind in all_errors() if kind.__module__.startswith("shoal.backends")],
    ids=lambda kind: kind.__name__,
)
def test_an_error_of_a_backend_keeps_its_kind(kind: type[ShoalError], monkeypatch: pytest.MonkeyPatch) -> None:
    """A front knows no backend, but must answer with the status of the class that errors.py has for it."""
    known = {one.__name__: one for one in all_errors() if one.__module__ == errors.__name__}
    monkeypatch.setattr(packed_error, "_ERRORS", known)
    error = kind.__new__(kind, "no")
    vars(error).update(vars(ShoalError("no", retry_after=1.0)))
    back = carry(error)
    assert (back.kind, back.retryable, back.message) == (error.kind, error.retryable, "no")


def test_an_unknown_error_is_internal() -> None:
    """An error whose class a front does not know becomes an InternalError with its message."""
    back = PackedError("Nonsense", "why", {"param": None, "retry_after": None}).to_error()
    assert type(back) is InternalError
    assert back.message == "why"
