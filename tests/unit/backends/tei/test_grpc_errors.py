"""Statuses of the gRPC build, mapped to Shoal's errors. Texts are the server's own."""

from __future__ import annotations

import grpc
import pytest

from shoal.backends.tei.grpc_errors import status_error
from shoal.backends.tei.link import KeyRefused
from shoal.errors import (
    BackendError,
    CapacityError,
    DeadlineExceeded,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)

Code = grpc.StatusCode
WHERE = "grpc://gpu:8080"
TOO_LONG = "Input validation error: `inputs` must have less than 512 tokens. Given: 600"


@pytest.mark.parametrize(
    ("code", "details", "kind", "words"),
    [
        (Code.INVALID_ARGUMENT, TOO_LONG, InputRejected, "less than 512 tokens. Given: 600"),
        (Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty", InputRejected, "cannot be empty"),
        (Code.OUT_OF_RANGE, "Error, decoded message length too large: found 9 bytes", InputRejected, "too large"),
        (Code.FAILED_PRECONDITION, "tokenizer error bad", InputRejected, "tokenizer error bad"),
        (Code.FAILED_PRECONDITION, "Tokenizer error bad", InputRejected, "Tokenizer error bad"),
        (Code.FAILED_PRECONDITION, "Backend error: CUDA error", UpstreamFailed, "CUDA error"),
        (Code.FAILED_PRECONDITION, "Backend error: no tokenizer error", UpstreamFailed, "see its log"),
        (Code.FAILED_PRECONDITION, "score is NaN", UpstreamFailed, "score is NaN"),
        (Code.FAILED_PRECONDITION, "Backend error: CUDA out of memory", OutOfMemory, "memory"),
        (Code.FAILED_PRECONDITION, "Backend error: Backend is unhealthy", TransportFailed, "cannot serve now"),
        (Code.UNAVAILABLE, "unhealthy", TransportFailed, "cannot serve now"),
        (Code.UNAVAILABLE, "failed to connect to all addresses", TransportFailed, "that it is the gRPC build"),
        (Code.RESOURCE_EXHAUSTED, "Model is overloaded", Overloaded, "too busy"),
        (Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)", UpstreamFailed, "is too large"),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded, "deadline"),
        (Code.CANCELLED, "RST_STREAM", TransportFailed, "broke"),
        (Code.UNAUTHENTICATED, "No valid auth token", KeyRefused, "upstream_api_key"),
        (Code.PERMISSION_DENIED, "", KeyRefused, "upstream_api_key"),
        (Code.UNIMPLEMENTED, "", UpstreamFailed, "does not have this call"),
        (Code.INTERNAL, "boom", UpstreamFailed, "INTERNAL (boom)"),
        (Code.UNKNOWN, "", UpstreamFailed, "UNKNOWN:"),
    ],
)
def test_the_table(code: grpc.StatusCode, details: str, kind: type[ShoalError], words: str) -> None:
    error = status_error(code, details, WHERE)
    assert type(error) is kind
    assert words in error.message


@pytest.mark.parametrize("code", Code)
def test_whatever_the_status_an_engine_may_raise_it(code: grpc.StatusCode) -> None:
    assert isinstance(status_error(code, "words", WHERE), BackendError | CapacityError)


def test_words_are_one_short_line() -> None:
    error = status_error(Code.INTERNAL, "many\nwords " * 1000, WHERE)
    assert "\n" not in error.message
    assert len(error.message) < 600


def test_a_quoted_key_stays_here() -> None:
    for code in Code:
        assert "SECRET" not in status_error(code, "sk-SECRET-1 is no key", WHERE, key="sk-SECRET-1").message
