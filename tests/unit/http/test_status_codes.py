"""The table of statuses is complete, and the headers of errors are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal import errors
from shoal.errors import (
    CapacityError,
    EngineFailed,
    MethodNotAllowed,
    ModelFailed,
    Overloaded,
    RequestError,
    SetupError,
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.http import status_codes


def every(kind: type[ShoalError] = ShoalError) -> Iterator[type[ShoalError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


SHIPPED = [kind for kind in every() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", SHIPPED)
def test_every_error_has_a_status_in_every_dialect(kind: type[ShoalError]) -> None:
    """Caller errors are 4xx everywhere, a missing requirement of a load is 424, and all others are 5xx."""
    row = status_codes.TABLE[kind.kind]
    statuses = (row.openai.status, row.tei.status, row.embedding)
    assert all(400 <= status < 600 for status in statuses)
    if issubclass(kind, RequestError):
        assert all(status < 500 for status in statuses)
    elif issubclass(kind, SetupError) and kind.kind != "not_at_source":
        assert statuses == (424, 424, 424)
    elif kind.kind not in {"overloaded", "request_timeout", "cancelled", "input_rejected", "not_at_source"}:
        assert row.openai.status >= 500
        assert row.embedding >= 500


def test_every_row_is_used() -> None:
    """A kind without an error would be an untestable row."""
    assert set(status_codes.TABLE) == {kind.kind for kind in SHIPPED}


def test_retryable_statuses() -> None:
    """Clients retry 408, 409, 429 and 500 and above; errors that cannot succeed say so."""
    for kind in SHIPPED:
        if kind.kind in {"method_not_allowed", "missing_extra", "model_file", "upstream"}:
            continue  # these have other constructors; their rows are shared with kinds that are checked
        error = kind("message")
        status = status_codes.find_row(error).openai.status
        says_no = status_codes.headers(error, status).get("x-should-retry") == "false"
        assert says_no == (status >= 500 and not kind.retryable), kind
        if issubclass(kind, CapacityError):
            assert says_no == (kind is ModelFailed)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (2.5, "3")])
def test_retry_after(seconds: float, header: str) -> None:
    """Whole seconds, rounded up and never zero: zero would not be a wait."""
    assert status_codes.headers(Overloaded("full", retry_after=seconds), 429)["retry-after"] == header
    assert "retry-after" not in status_codes.headers(Unavailable("gone"), 503)


def test_headers_of_some_errors() -> None:
    """405 lists the methods, 401 names the scheme, and a permanent failure says so."""
    assert status_codes.headers(MethodNotAllowed("no", allow="GET, HEAD"), 405) == {"allow": "GET, HEAD"}
    assert status_codes.headers(Unauthorized("no"), 401) == {"www-authenticate": "Bearer"}
    assert status_codes.headers(EngineFailed("no"), 500) == {"x-should-retry": "false"}
