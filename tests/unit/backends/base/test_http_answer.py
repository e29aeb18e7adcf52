"""Error messages from servers' answers, and calls that failed below HTTP."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import pytest

from shoal.backends.base.http_answer import LONGEST_WORDS, Answer, RequestNotSent, is_json, retry_after, transport_error
from shoal.backends.base.http_connection import BodyCut, ConnectTimedOut, Disconnected
from shoal.errors import TransportFailed

WHERE = "http://gpu:8000/v1"


def make_answer(status: int, body: Any = None, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"content-type": "application/json", **named}, data)


def openai(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


class TestWords:
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (openai("too\n long"), "too long"),
            ({"error": "Unauthorized"}, "Unauthorized"),
            ({"detail": "Not Found"}, "Not Found"),
            ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
            ({"message": "Input validation error", "code": 422}, "Input validation error"),
            ({"error": {"code": 5}}, '{"code":5}'),
            (b"plain text", "plain text"),
            (b"", ""),
            (b"x" * 1000, "x" * 400),
        ],
    )
    def test_of_every_shape(self, body: Any, words: str) -> None:
        assert make_answer(400, body).message == words

    @pytest.mark.parametrize("depth", [900, 3000])
    def test_what_nests_too_deep_has_few(self, depth: int) -> None:
        """Deeply nested JSON cannot be read, and does not fail the reader."""
        answer = make_answer(400, b'{"error":' + b"[" * depth + b"]" * depth + b"}")
        assert len(answer.message) <= LONGEST_WORDS
        assert answer.has_json_body is (depth < 1000)

    def test_a_page_has_none(self) -> None:
        assert make_answer(502, b"<html><h1>Bad Gateway</h1></html>", content_type="text/html").message == ""

    @pytest.mark.parametrize(
        ("kind", "json"),
        [
            ("application/json", True),
            ("Application/JSON; charset=utf-8", True),
            ("application/problem+json", True),
            ("text/event-stream", False),
            ("", False),
        ],
    )
    def test_content_types(self, kind: str, json: bool) -> None:
        assert is_json(kind) is json


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("headers", "seconds"),
        [
            ({"retry-after": "3"}, 3.0),
            ({"retry-after": "0.25"}, 0.25),
            ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
            ({"retry-after": formatdate(1_000_007, usegmt=True)}, 7.0),
            ({"retry-after": formatdate(999_000, usegmt=True)}, 0.0),
            ({"retry-after": "999999999"}, 3600.0),
            ({"retry-after": "-3"}, None),
            ({"retry-after": "nan"}, None),
            ({"retry-after": "soon"}, None),
            ({"retry-after": ""}, None),
            ({}, None),
        ],
    )
    def test_seconds_milliseconds_and_dates(self, headers: dict[str, str], seconds: float | None) -> None:
        assert retry_after(headers, now=1_000_000.0) == seconds


class TestTransport:
    def test_nothing_was_read_where_nobody_was_reached(self) -> None:
        assert isinstance(transport_error(ConnectTimedOut(), WHERE), RequestNotSent)

    @pytest.mark.parametrize("error", [Disconnected(), ConnectionResetError(), BodyCut()])
    def test_a_broken_connection_is_another_matter(self, error: OSError) -> None:
        found = transport_error(error, WHERE)
        assert type(found) is TransportFailed
        assert "send the request again" in found.message
