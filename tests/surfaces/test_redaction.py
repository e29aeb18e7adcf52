"""No error on any surface, nor a list, shows clients the address of a backend server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import orjson
import pytest

from shoal import errors
from shoal.errors import BackendError, CapacityError, RequestError, SetupError, ShoalError
from shoal.http.errors import render_stream_error
from shoal.http.redaction import redact, redact_error
from shoal.surfaces import SURFACES, Options
from tests.surfaces.talk_kit import FakeRunner, serve_chat

PLACES = [
    "triton://10.0.0.5:8001#model",
    "tritons://triton.internal:8001",
    "tei+http://tei.internal:8080",
    "openai+https://llm.internal/v1#org/name",
    "http://llm.internal:8000/v1",
    "10.0.0.5:8001",
    "10.0.0.5",
    "name=llm.internal",
    "llm.internal:8000",
    "localhost:9000",
    "[fd00::5]:8001",
    "ipv4:10.0.0.5:8001",
    "ipv6:%5Bfd00::5%5D:8001",
    "Cannot connect to host llm.internal:8000 ssl:default [Connect call failed ('10.0.0.5', 8000)]",
    "DNS resolution failed for llm.internal:8001: C-ares status: qtype=A name=llm.internal is_balancer=0",
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.5:8001: connection refused",
]
SECRETS = ("10.0.0.5", "internal", "fd00::", "localhost:9", ":8001", ":8000", ", 8000")


def kinds() -> Iterator[type[ShoalError]]:
    for each in vars(errors).values():
        # The message of an OpenAI-compatible server is passed on.
        if isinstance(each, type) and issubclass(each, BackendError | CapacityError | SetupError):
            yield from () if each is errors.UpstreamRefused else (each,)


def make_error(kind: type[ShoalError], message: str) -> ShoalError:
    error = kind.__new__(kind)
    ShoalError.__init__(error, message)
    for name in ("file", "key"):
        if not hasattr(error, name):
            setattr(error, name, "")
    return error


def leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize("place", PLACES)
def test_every_form_of_an_address(place: str) -> None:
    """As Shoal, aiohttp and gRPC write them, inside a sentence and at its ends."""
    for text in (f"the server at {place} cannot serve now: try again", place, f"({place})", f"{place}, {place}."):
        assert not leaks(redact(text)), redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "the model 'llama3.2:1b' is not served: there are all-MiniLM-L6-v2 and org/name:Q4_K_M",
        "the input has 600 tokens, but the model accepts at most 512; shorten it, or set truncate",
        "hf:org/name@main asks for torch 2.4.1: pip install 'shoal[torch]'",
    ],
)
def test_other_text_is_kept(text: str) -> None:
    """Model names, numbers and versions."""
    assert redact(text) == text


@pytest.mark.parametrize("surface", SURFACES, ids=lambda each: each.__name__)
def test_every_error_on_every_surface(surface: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The text around the address stays, and the log has all of it."""
    render = surface(Options()).render_error
    with caplog.at_level(logging.WARNING, "shoal.http"):
        for kind, place in product(kinds(), PLACES):
            message = f"the server at {place} cannot serve now"
            status, headers, body = render(redact_error(make_error(kind, message), "req_1"))
            assert status >= 400
            assert not leaks(body.decode() + str(headers)), body
            assert message in caplog.text


@pytest.mark.parametrize("server", ["http://10.0.0.5:8000/v1", "https://llm.internal/v1", "http://[fd00::5]:8000"])
@pytest.mark.parametrize("surface", SURFACES, ids=lambda each: each.__name__)
def test_a_server_that_names_itself(surface: Any, server: str) -> None:
    """Its own address is hidden in its message, before an answer and in a stream; others stay."""
    place = server.removeprefix("https://").removeprefix("http://").removesuffix("/v1")
    words = f"see {server}/docs or {place}, not http://pictures.example:80/a.png"
    body = orjson.dumps({"error": {"message": words, "type": "server_error"}})
    error = errors.UpstreamRefused(f"the server at {server} refused ({words})", status=500, body=body, server=server)
    renderer = surface(Options())
    status, headers, content = renderer.render_error(redact_error(error, "req_1"))
    assert status >= 400
    assert not leaks(content.decode() + str(headers)), content
    if b"[address hidden]" in content:
        assert b"http://pictures.example:80/a.png" in content
    assert not leaks(render_stream_error(redact_error(error, "req_1")).decode())
    assert error.body == body


def test_a_clients_address_is_kept() -> None:
    """An address that the client sent, like an image's URL, is not hidden from it."""
    error = RequestError("the image at http://pictures.internal:8000/a.png cannot be read")
    assert redact_error(error, "req_1") is error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat", "/api/generate"]
)
async def test_errors_of_generations(path: str, stream: bool) -> None:
    """Before an answer and in mid-stream, in every dialect that streams."""
    body: dict[str, Any] = {"prompt": "a"}
    if path.endswith(("chat", "chat/completions")):
        body = {"messages": [{"role": "user", "content": "a"}]}
    elif path.endswith("responses"):
        body = {"input": "a"}
    for after in (0, 2):
        for place in PLACES:
            error = errors.TransportFailed(f"the connection to {place} broke")
            server = serve_chat(FakeRunner(error=error, fail_after=after))
            answer = await server.call("POST", path, {**body, "stream": stream, "model": server.model.name})
            assert b"[address hidden]" in answer.body, answer.body
            assert not leaks(answer.body.decode() + str(answer.headers))
