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
    ShoalError,
    Unauthorized,
    Unavailable,
)
from shoal.surfaces import _status


def every(kind: type[ShoalError] = ShoalError) -> Iterator[type[ShoalError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


SHIPPED = [kind for kind in every() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", SHIPPED)
def test_every_error_has_a_status_in_every_dialect(kind: type[ShoalError]) -> None:
    """Faults of the caller are 4xx everywhere, all others say that they are not."""
    row = _status.TABLE[kind.kind]
    statuses = (row.openai.status, row.tei.status, row.embedding)
    assert all(400 <= status < 600 for status in statuses)
    if issubclass(kind, RequestError):
        assert all(status < 500 for status in statuses)
    elif kind.kind not in {"overloaded", "request_timeout", "cancelled", "input_rejected", "not_at_source"}:
        assert row.openai.status >= 500
        assert row.embedding >= 500


def test_no_row_is_dead() -> None:
    """A kind that no error has would be a row that nobody can test."""
    assert set(_status.TABLE) == {kind.kind for kind in SHIPPED}


def test_what_clients_repeat() -> None:
    """Clients repeat 408, 409, 429 and all of 500 and above: exactly what cannot succeed says so."""
    for kind in SHIPPED:
        if kind.kind in {"method_not_allowed", "missing_extra", "model_file", "upstream"}:
            continue  # other constructors; their rows are shared with kinds that are checked
        error = kind("message")
        status = _status.row(error).openai.status
        says_no = _status.headers(error, status).get("x-should-retry") == "false"
        assert says_no == (status >= 500 and not kind.retryable), kind
        if issubclass(kind, CapacityError):
            assert says_no == (kind is ModelFailed)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (2.5, "3")])
def test_retry_after(seconds: float, header: str) -> None:
    """Whole seconds, rounded up, and never nought: that would be no wait at all."""
    assert _status.headers(Overloaded("full", retry_after=seconds), 429)["retry-after"] == header
    assert "retry-after" not in _status.headers(Unavailable("gone"), 503)


def test_headers_of_some_errors() -> None:
    """405 lists the methods, 401 names the scheme, a failure that stays says so."""
    assert _status.headers(MethodNotAllowed("no", allow="GET, HEAD"), 405) == {"allow": "GET, HEAD"}
    assert _status.headers(Unauthorized("no"), 401) == {"www-authenticate": "Bearer"}
    assert _status.headers(EngineFailed("no"), 500) == {"x-should-retry": "false"}
