"""The server's refusals and failures, mapped to Shoal's errors. Texts are the server's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.backends.base.http_answer import Answer
from shoal.backends.tei.errors import engine_error, parse_batch_limit
from shoal.errors import (
    BackendError,
    CapacityError,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)

WHERE = "http://gpu:8080"
TOO_LONG = "Input validation error: `inputs` must have less than 512 tokens. Given: 600"
TOO_MANY = "batch size 33 > maximum allowed batch size 32"


def make_answer(status: int, error: str, kind: str = "") -> Answer:
    return Answer(
        status, {"content-type": "application/json"}, json.dumps({"error": error, "error_type": kind}).encode()
    )


def plain(status: int, text: str = "", **headers: str) -> Answer:
    return Answer(status, {"content-type": "text/plain; charset=utf-8", **headers}, text.encode())


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (make_answer(422, TOO_LONG, "Validation"), InputRejected, "less than 512 tokens. Given: 600"),
        (make_answer(413, TOO_LONG, "Validation"), InputRejected, "less than 512 tokens. Given: 600"),
        (make_answer(413, TOO_LONG, "validation"), InputRejected, "less than 512"),
        (make_answer(422, "tokenizer error bad", "Tokenizer"), InputRejected, "tokenizer error bad"),
        (
            make_answer(400, "Input validation error: `inputs` cannot be empty", "Empty"),
            InputRejected,
            "cannot be empty",
        ),
        (make_answer(424, "Backend error: CUDA error", "Backend"), UpstreamFailed, "CUDA error"),
        (make_answer(424, "score is NaN", "Backend"), UpstreamFailed, "score is NaN"),
        (make_answer(424, "Backend error: CUDA out of memory", "Backend"), OutOfMemory, "memory"),
        (make_answer(424, "Backend error: DriverError(CUDA_ERROR_OUT_OF_MEMORY)", "Backend"), OutOfMemory, "memory"),
        (make_answer(424, "Backend error: Backend is unhealthy", "Backend"), TransportFailed, "cannot serve now"),
        (make_answer(429, "Model is overloaded", "Overloaded"), Overloaded, "too busy"),
        (make_answer(503, "unhealthy", "Unhealthy"), TransportFailed, "cannot serve now"),
        (plain(502, "<html>", **{"content-type": "text/html"}), TransportFailed, "cannot serve now"),
        (plain(504), TransportFailed, "cannot serve now"),
        (plain(413, "Failed to buffer the request body: length limit exceeded"), OutOfMemory, "--payload-limit"),
        (plain(422, "Failed to deserialize the JSON body into the target type"), InputRejected, "refused these"),
        (plain(400, "Failed to parse the request body as JSON"), InputRejected, "refused these"),
        (plain(401), UpstreamFailed, "upstream_api_key"),
        (plain(403), UpstreamFailed, "upstream_api_key"),
        (plain(302), UpstreamFailed, "redirects"),
        (plain(204), UpstreamFailed, "status 204"),
        (plain(404), UpstreamFailed, "status 404"),
        (plain(500, "boom"), UpstreamFailed, "boom"),
    ],
)
def test_the_table(answer: Answer, kind: type[ShoalError], words: str) -> None:
    error = engine_error(answer, WHERE)
    assert type(error) is kind
    assert words in error.message


@pytest.mark.parametrize("status", range(201, 600))
def test_whatever_the_status_an_engine_may_raise_it(status: int) -> None:
    assert isinstance(engine_error(plain(status), WHERE), BackendError | CapacityError)


def test_a_pause_is_passed_on_where_a_proxy_names_one() -> None:
    assert engine_error(plain(429, **{"retry-after": "2"}), WHERE).retry_after == 2.0
    assert engine_error(make_answer(429, "Model is overloaded", "Overloaded"), WHERE).retry_after is None


@pytest.mark.parametrize(
    ("answer", "limit"),
    [
        (make_answer(422, TOO_MANY, "Validation"), 32),
        (make_answer(413, TOO_MANY, "Validation"), 32),
        (make_answer(422, "batch size 2 > maximum allowed batch size 0", "Validation"), None),
        (make_answer(422, TOO_LONG, "Validation"), None),
        (make_answer(424, TOO_MANY, "Backend"), None),
        (plain(413, "length limit exceeded"), None),
    ],
)
def test_how_many_inputs_it_takes(answer: Answer, limit: int | None) -> None:
    assert parse_batch_limit(answer) == limit


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"error_type":5}', b"[" * 5000])
def test_bodies_that_nobody_reads(body: bytes) -> None:
    assert isinstance(engine_error(Answer(422, {}, body), WHERE), InputRejected)


def test_a_quoted_key_stays_here() -> None:
    answer = Answer(500, {}, b'{"error":"sk-SECRET-1 is no key"}', key=b"sk-SECRET-1")
    assert "SECRET" not in engine_error(answer, WHERE).message


def test_both_eras_mean_the_same() -> None:
    """Both versions differ only in the status."""
    for text, kind in ((TOO_LONG, "Validation"), ("tokenizer error", "Tokenizer")):
        found: list[Any] = [engine_error(make_answer(status, text, kind), WHERE) for status in (413, 422)]
        assert type(found[0]) is type(found[1])
        assert found[0].message == found[1].message
