"""Answers of servers that fail, to what Shoal raises."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import aiohttp
import pytest

from shoal.backends.openai.errors import (
    LONGEST_WORDS,
    Answer,
    Unreached,
    engine_error,
    failed,
    failure,
    is_json,
    lacks_model,
    lacks_route,
    refusal,
    retry_after,
    transport_error,
)
from shoal.errors import (
    BackendError,
    CapacityError,
    EngineFailed,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamRefused,
)

WHERE = "http://gpu:8000/v1"


def told(status: int, body: Any = None, **headers: str) -> Answer:
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
        assert told(400, body).words == words

    @pytest.mark.parametrize("depth", [900, 3000])
    def test_what_nests_too_deep_has_few(self, depth: int) -> None:
        """It is no JSON that anybody could read, and no failure of the one who looks at it."""
        answer = told(400, b'{"error":' + b"[" * depth + b"]" * depth + b"}")
        assert len(answer.words) <= LONGEST_WORDS
        assert answer.json is (depth < 1000)

    def test_a_page_has_none(self) -> None:
        assert told(502, b"<html><h1>Bad Gateway</h1></html>", content_type="text/html").words == ""

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


class TestGeneration:
    def test_a_refusal_keeps_status_and_body(self) -> None:
        body = b'{"error": {"message":"maximum context length is 8192",  "code":"context_length_exceeded"}}'
        error = refusal(told(400, body), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.body, error.content_type) == (400, body, "application/json")
        assert "maximum context length is 8192" in error.message
        assert error.retry_after is None

    def test_how_long_to_wait_is_kept(self) -> None:
        error = refusal(told(429, openai("slow down"), retry_after="7"), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.retry_after) == (429, 7.0)

    @pytest.mark.parametrize("body", [b"<html>", b"", b"{", b"upstream connect error"])
    def test_what_is_no_json_is_not_passed_on(self, body: bytes) -> None:
        error = refusal(told(502, body), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.body) == (502, b"")

    def test_half_a_body_is_not_passed_on(self) -> None:
        error = refusal(Answer(500, {}, b'{"error":1}', whole=False), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert error.body == b""

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_wrong_key_is_the_operators_matter(self, status: int) -> None:
        """The client must not think that its own is meant, nor see any of it."""
        error = refusal(told(status, openai("Incorrect API key provided: sk-secret")), WHERE)
        assert type(error) is EngineFailed
        assert "upstream_api_key" in error.message
        assert "sk-" not in error.message

    @pytest.mark.parametrize(("status", "words"), [(302, "redirects"), (204, "status 204"), (101, "status 101")])
    def test_answers_that_make_no_sense(self, status: int, words: str) -> None:
        error = refusal(told(status), WHERE)
        assert type(error) is EngineFailed
        assert words in error.message


class TestTheKey:
    SAID = b'{"error":{"message":"the model x does not exist for sk-SECRET-1"}}'

    def test_stays_here(self) -> None:
        answer = Answer(404, {}, self.SAID, key=b"sk-SECRET-1")
        error = refusal(answer, WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, json.loads(error.body)["error"]["type"]) == (404, "upstream_error")
        assert "SECRET" not in error.body.decode() + error.message
        assert lacks_model(answer)

    def test_a_name_that_a_server_asks_for_is_none(self) -> None:
        error = refusal(Answer(404, {}, self.SAID, key=b"model"), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert error.body == self.SAID


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "status"),
        [
            ("boom", 500),
            ({"message": "boom"}, 500),
            ({"message": "boom", "code": 429}, 429),
            ({"message": "boom", "code": 200}, 500),
            ({"message": "boom", "code": 401}, 500),
            ({"message": "boom", "code": "rate_limit"}, 500),
        ],
    )
    def test_statuses(self, error: Any, status: int) -> None:
        body = json.dumps({"error": error}).encode()
        found = failure(body)
        assert (found.status, found.body) == (status, body)
        assert "boom" in found.message
        assert failed(body) is not None

    @pytest.mark.parametrize(
        "body", [b'{"error":null}', b'{"choices":[]}', b'["error"]', b'{"error"', b'{"a":"error"}']
    )
    def test_none(self, body: bytes) -> None:
        assert failed(body) is None


class TestEmbeddings:
    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (told(400, openai("input too long")), InputRejected),
            (told(422, {"error": "inputs cannot be empty"}), InputRejected),
            (told(413, {"error": "payload too large"}), OutOfMemory),
            (told(429, openai("busy")), Overloaded),
            (told(503, openai("busy"), retry_after="2"), Overloaded),
            (told(503, b""), TransportFailed),
            (told(502, b"<html>"), TransportFailed),
            (told(504, b""), TransportFailed),
            (told(404, openai("The model `x` does not exist.", code="model_not_found")), TransportFailed),
            (told(404, {"detail": "Not Found"}), EngineFailed),
            (told(500, openai("CUDA out of memory. Tried to allocate")), OutOfMemory),
            (told(500, openai("boom")), EngineFailed),
            (told(424, openai("boom")), EngineFailed),
            (told(401, openai("bad key")), EngineFailed),
        ],
    )
    def test_the_table(self, answer: Answer, kind: type[ShoalError]) -> None:
        error = engine_error(answer, WHERE)
        assert type(error) is kind
        assert WHERE in error.message

    @pytest.mark.parametrize("status", range(201, 600))
    def test_whatever_the_status_an_engine_may_raise_it(self, status: int) -> None:
        assert isinstance(engine_error(told(status), WHERE), BackendError | CapacityError)

    def test_the_pause_of_a_busy_server(self) -> None:
        assert engine_error(told(429, b"", retry_after_ms="250"), WHERE).retry_after == 0.25


class TestWhatIsMissing:
    @pytest.mark.parametrize(
        ("answer", "model", "route"),
        [
            (told(404, openai("The model `x` does not exist.")), True, False),
            (told(404, openai('model "x" not found, try pulling it first')), True, False),
            (told(400, openai("Unknown model: x")), True, False),
            (told(404, {"detail": "Not Found"}), False, True),
            (told(404, b"404 page not found"), False, True),
            (told(405, {"detail": "Method Not Allowed"}), False, True),
            (told(501, openai("This server does not support embeddings")), False, True),
            (told(400, openai("The model does not support Chat Completions API")), False, True),
            (told(400, openai("messages: at least one is needed")), False, False),
            (
                told(400, openai("'max_tokens' is not supported with this model. Use 'max_completion_tokens'.")),
                False,
                False,
            ),
            (told(500, openai("model not found")), False, False),
        ],
    )
    def test_told_apart(self, answer: Answer, model: bool, route: bool) -> None:
        assert (lacks_model(answer), lacks_route(answer)) == (model, route)


class TestTransport:
    def test_nothing_was_read_where_nobody_was_reached(self) -> None:
        reached = aiohttp.ConnectionTimeoutError("Connection timeout to host")
        assert isinstance(transport_error(reached, WHERE), Unreached)

    @pytest.mark.parametrize(
        "error", [aiohttp.ServerDisconnectedError(), ConnectionResetError(), aiohttp.ClientPayloadError()]
    )
    def test_a_broken_connection_is_another_matter(self, error: Exception) -> None:
        found = transport_error(error, WHERE)
        assert type(found) is TransportFailed
        assert "send the request again" in found.message
