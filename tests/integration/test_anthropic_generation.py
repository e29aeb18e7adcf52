"""Anthropic's Messages over a model in Shoal's own engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.llm_kit import running
from tests.integration.server_kit import Server
from tests.surfaces.talk_kit import data_of

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
ASKED: dict[str, Any] = {
    **{"model": "tiny", "max_tokens": 8, "temperature": 0, "system": "be brief"},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("tiny"), f"tiny=file:{TINY}") as started:
        yield started


def test_an_answer_and_its_stream(server: Server) -> None:
    """The same text and usage, and the input tokens that are counted without generating."""
    status, headers, body = server.request("POST", "/v1/messages", ASKED)
    message = json.loads(body)
    assert (status, message["stop_reason"], message["usage"]["output_tokens"]) == (200, "max_tokens", 8)
    assert headers["request-id"]
    _, _, body = server.request("POST", "/v1/messages/count_tokens", ASKED)
    assert json.loads(body) == {"input_tokens": message["usage"]["input_tokens"]}
    _, _, body = server.request("POST", "/v1/messages", {**ASKED, "stream": True})
    events = data_of(body)
    texts = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    assert message["content"] == [{"type": "text", "text": "".join(texts)}]
    assert events[-2]["usage"] == message["usage"]


def test_a_stop_sequence_is_named(server: Server) -> None:
    """Shoal finds it in the text."""
    _, _, body = server.request("POST", "/v1/messages", ASKED)
    stop = json.loads(body)["content"][0]["text"][2:4]
    _, _, body = server.request("POST", "/v1/messages", {**ASKED, "stop_sequences": [stop]})
    message = json.loads(body)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_a_prompt_that_is_too_long(server: Server) -> None:
    """It is refused in the words at which agents compact their conversation, and still counted."""
    long = {**ASKED, "messages": [{"role": "user", "content": "Hello " * 5000}]}
    status, _, body = server.request("POST", "/v1/messages", long)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: ")
    status, _, body = server.request("POST", "/v1/messages/count_tokens", long)
    assert status == 200
    assert json.loads(body)["input_tokens"] > 5000
