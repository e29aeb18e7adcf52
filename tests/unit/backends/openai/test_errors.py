"""Error responses of servers, mapped to Shoal's errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.backends.base.http_answer import Answer
from shoal.backends.openai.errors import (
    engine_error,
    failure_error,
    find_failure,
    lacks_dialect,
    lacks_max_tokens,
    lacks_model,
    lacks_route,
    lacks_system_role,
    refusal_error,
)
from shoal.core.packed_error import PackedError
from shoal.errors import (
    BackendError,
    CapacityError,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
    UpstreamRefused,
)

WHERE = "http://gpu:8000/v1"


def make_answer(status: int, body: Any = None, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"content-type": "application/json", **named}, data)


NO_MAX_TOKENS = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
)


def openai(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


class TestGeneration:
    def test_a_refusal_keeps_status_and_body(self) -> None:
        body = b'{"error": {"message":"maximum context length is 8192",  "code":"context_length_exceeded"}}'
        error = refusal_error(make_answer(400, body), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.body, error.content_type) == (400, body, "application/json")
        assert "maximum context length is 8192" in error.message
        assert error.retry_after is None

    def test_how_long_to_wait_is_kept(self) -> None:
        error = refusal_error(make_answer(429, openai("slow down"), retry_after="7"), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.retry_after) == (429, 7.0)

    @pytest.mark.parametrize("body", [b"<html>", b"", b"{", b"upstream connect error"])
    def test_what_is_no_json_is_not_passed_on(self, body: bytes) -> None:
        error = refusal_error(make_answer(502, body), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, error.body) == (502, b"")

    @pytest.mark.parametrize(
        ("status", "kind"),
        [(400, "upstream"), (429, "upstream"), (500, "upstream_failed"), (501, "upstream"), (503, "upstream_failed")],
    )
    def test_a_server_that_fails_is_told_from_one_that_refuses(self, status: int, kind: str) -> None:
        """Metrics, alerts and records count the first as an error, also when it came from another process."""
        error = refusal_error(make_answer(status, openai("no")), WHERE)
        assert (error.kind, error.for_request("r").kind, PackedError.of(error).to_error().kind) == (kind, kind, kind)

    def test_half_a_body_is_not_passed_on(self) -> None:
        error = refusal_error(Answer(500, {}, b'{"error":1}', is_complete=False), WHERE)
        assert isinstance(error, UpstreamRefused)
        assert error.body == b""

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_wrong_key_is_the_operators_matter(self, status: int) -> None:
        """The error must not look as if the client's key were wrong, nor show any part of the server's key."""
        error = refusal_error(make_answer(status, openai("Incorrect API key provided: sk-secret")), WHERE)
        assert type(error) is UpstreamFailed
        assert "upstream_api_key" in error.message
        assert "sk-" not in error.message

    @pytest.mark.parametrize(("status", "words"), [(302, "redirects"), (204, "status 204"), (101, "status 101")])
    def test_answers_that_make_no_sense(self, status: int, words: str) -> None:
        error = refusal_error(make_answer(status), WHERE)
        assert type(error) is UpstreamFailed
        assert words in error.message


class TestTheKey:
    SAID = b'{"error":{"message":"the model x does not exist for sk-SECRET-1"}}'

    def test_stays_here(self) -> None:
        answer = Answer(404, {}, self.SAID, key=b"sk-SECRET-1")
        error = refusal_error(answer, WHERE)
        assert isinstance(error, UpstreamRefused)
        assert (error.status, json.loads(error.body)["error"]["type"]) == (404, "upstream_error")
        assert "SECRET" not in error.body.decode() + error.message
        assert lacks_model(answer)

    def test_a_name_that_a_server_asks_for_is_none(self) -> None:
        error = refusal_error(Answer(404, {}, self.SAID, key=b"model"), WHERE)
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
        found = failure_error(body)
        assert (found.status, found.body) == (status, body)
        assert "boom" in found.message
        assert find_failure(body) is not None

    @pytest.mark.parametrize(
        "body", [b'{"error":null}', b'{"choices":[]}', b'["error"]', b'{"error"', b'{"a":"error"}']
    )
    def test_none(self, body: bytes) -> None:
        assert find_failure(body) is None


class TestEmbeddings:
    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (make_answer(400, openai("input too long")), InputRejected),
            (make_answer(422, {"error": "inputs cannot be empty"}), InputRejected),
            (make_answer(413, {"error": "payload too large"}), OutOfMemory),
            (make_answer(429, openai("busy")), Overloaded),
            (make_answer(503, openai("busy"), retry_after="2"), Overloaded),
            (make_answer(503, b""), TransportFailed),
            (make_answer(502, b"<html>"), TransportFailed),
            (make_answer(504, b""), TransportFailed),
            (make_answer(404, openai("The model `x` does not exist.", code="model_not_found")), TransportFailed),
            (make_answer(404, {"detail": "Not Found"}), UpstreamFailed),
            (make_answer(500, openai("CUDA out of memory. Tried to allocate")), OutOfMemory),
            (make_answer(500, openai("input (9 tokens) is too large to process. increase the batch")), InputRejected),
            (make_answer(500, openai("boom")), UpstreamFailed),
            (make_answer(424, openai("boom")), UpstreamFailed),
            (make_answer(401, openai("bad key")), UpstreamFailed),
        ],
    )
    def test_the_table(self, answer: Answer, kind: type[ShoalError]) -> None:
        error = engine_error(answer, WHERE)
        assert type(error) is kind
        assert WHERE in error.message

    @pytest.mark.parametrize("status", range(201, 600))
    def test_whatever_the_status_an_engine_may_raise_it(self, status: int) -> None:
        assert isinstance(engine_error(make_answer(status), WHERE), BackendError | CapacityError)

    def test_the_pause_of_a_busy_server(self) -> None:
        assert engine_error(make_answer(429, b"", retry_after_ms="250"), WHERE).retry_after == 0.25


class TestWhatIsMissing:
    @pytest.mark.parametrize(
        ("answer", "model", "route"),
        [
            (make_answer(404, openai("The model `x` does not exist.")), True, False),
            (make_answer(404, openai('model "x" not found, try pulling it first')), True, False),
            (make_answer(400, openai("Unknown model: x")), True, False),
            (make_answer(404, {"detail": "Not Found"}), False, True),
            (make_answer(404, b"404 page not found"), False, True),
            (make_answer(405, {"detail": "Method Not Allowed"}), False, True),
            (make_answer(501, openai("This server does not support embeddings")), False, True),
            (make_answer(400, openai("The model does not support Chat Completions API")), False, True),
            (make_answer(400, openai("messages: at least one is needed")), False, False),
            (
                make_answer(400, openai("'max_tokens' is not supported with this model. Use 'max_completion_tokens'.")),
                False,
                False,
            ),
            (make_answer(500, openai("model not found")), False, False),
        ],
    )
    def test_errors_are_classified(self, answer: Answer, model: bool, route: bool) -> None:
        assert (lacks_model(answer), lacks_route(answer)) == (model, route)

    @pytest.mark.parametrize(
        ("answer", "missing"),
        [
            (make_answer(404, {"detail": "Not Found"}), True),
            (make_answer(404, openai("File Not Found")), True),
            (make_answer(404, b"404 page not found"), True),
            (make_answer(404, b""), True),
            (make_answer(405, {"detail": "Method Not Allowed"}), True),
            (make_answer(404, openai("Invalid URL (POST /v1/messages)")), True),
            (make_answer(404, openai("Unknown request URL: POST /v1/messages. Please check the URL.")), True),
            (make_answer(404, openai("Response with id 'resp_x' not found.")), False),
            (make_answer(404, openai("Item with id 'rs_1' not found.")), False),
            (make_answer(404, openai("LoRA adapter foo was not found")), False),
            (make_answer(404, openai("model: claude-x")), False),
            (make_answer(400, openai("messages: too few")), False),
        ],
    )
    def test_only_a_router_says_that_a_route_is_missing(self, answer: Answer, missing: bool) -> None:
        """A 404 for what a request refers to takes the route from nobody else."""
        assert lacks_dialect(answer) == missing

    @pytest.mark.parametrize(
        ("status", "message", "lacking"),
        [
            (400, NO_MAX_TOKENS, True),
            (400, f"litellm.BadRequestError: OpenAIException - {NO_MAX_TOKENS}", True),
            (500, NO_MAX_TOKENS, False),
            (400, "'max_tokens' or 'max_completion_tokens' is too large: 5000.", False),
        ],
    )
    def test_max_tokens_refused(self, status: int, message: str, lacking: bool) -> None:
        assert lacks_max_tokens(refusal_error(make_answer(status, openai(message)), "up")) == lacking

    def test_system_messages_refused(self) -> None:
        refusal = make_answer(400, openai("messages.1.role: Input should be 'user' or 'assistant'"))
        assert lacks_system_role(refusal, b'{"messages":[{"role":"system"}]}')
        assert not lacks_system_role(refusal, b'{"messages":[]}')
