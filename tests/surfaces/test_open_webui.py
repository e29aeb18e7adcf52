"""Requests of Open WebUI 0.12, with the fields that its sources send and read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.core.lifecycle.lifecycle import Lifecycle
from shoal.core.registry import Model
from shoal.errors import EngineFailed, Overloaded
from shoal.types import Chunk, Message, Usage
from tests.surfaces.life_kit import Scripted
from tests.surfaces.surface_kit import serve
from tests.surfaces.talk_kit import MODEL, FakeRunner, data_of, serve_chat

BASES = ["/v1", ""]
USER_HEADERS = {
    "authorization": "Bearer sk-none",
    "x-openwebui-user-name": "Anna",
    "x-openwebui-user-id": "7f1c",
    "x-openwebui-user-email": "anna@example.org",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "c1",
}
CHAT: dict[str, Any] = {
    "stream": True,
    "model": MODEL,
    "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}],
    "stream_options": {"include_usage": True},
    "temperature": 0.8,
    "max_tokens": 64,
    "params": {},
    "metadata": {"chat_id": "c1"},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("slash", ["", "/"])
async def test_the_list_of_models(base: str, slash: str) -> None:
    """Requested at start, at login and on refresh: served from memory without a redirect, even if the model is down.
    Open WebUI drops entries whose name is null."""
    runner = FakeRunner(able=False, error=EngineFailed("dead"))
    answer = await serve_chat(runner).call("GET", f"{base}/models{slash}", headers=USER_HEADERS)
    assert answer.status == 200
    entries = answer.json()["data"]
    assert [each["id"] for each in entries] == [MODEL, f"{MODEL}:loud"]
    assert all(each["object"] == "model" and each["owned_by"] and each.get("name", "") is not None for each in entries)
    assert entries[1]["parent"] == MODEL
    assert {each["max_model_len"] for each in entries} == {4096}
    assert runner.tasks == []


async def test_the_list_calls_no_backend() -> None:
    """It is complete after one loop iteration, even if a backend hangs."""
    server = serve_chat(FakeRunner(able=False))
    server.gateway.lifecycle = Lifecycle(server.gateway.registry, Scripted(listing_hangs=True))
    asking = asyncio.create_task(server.call("GET", "/v1/models"))
    await asyncio.sleep(0)
    assert asking.done()
    assert (await asking).status == 200
    await server.gateway.lifecycle.aclose()


async def test_one_model() -> None:
    """An adapter is found by the name in the list."""
    server = serve_chat()
    for name in (MODEL, f"{MODEL}:loud"):
        assert (await server.call("GET", f"/v1/models/{name}")).json()["id"] == name
    assert (await server.call("GET", f"/v1/models/{MODEL}:latest")).json()["id"] == MODEL
    assert (await server.call("GET", f"/v1/models/{MODEL}:quiet")).status == 404
    assert (await server.call("GET", "/v1/models/nobody:loud")).status == 404


@pytest.mark.parametrize("base", BASES)
async def test_a_chat_turn(base: str) -> None:
    """Open WebUI detects streams by content type; its popup shows tokens per second from usage and timings."""
    server = serve_chat()
    answer = await server.call("POST", f"{base}/chat/completions", CHAT, headers=USER_HEADERS)
    assert "text/event-stream" in answer.headers["content-type"]
    *events, done = data_of(answer.body)
    assert done == "[DONE]"
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
    assert text == "hello there"
    shown = {**events[-1]["usage"], **events[-1]["timings"]}
    assert {"prompt_tokens", "completion_tokens", "predicted_per_second", "prompt_per_second"} <= set(shown)
    assert server.runner.task.messages == [
        Message(role="system", content="be kind"),
        Message(role="user", content="hello there"),
    ]
    assert set(server.runner.task.extras) == {"params"}


async def test_fairness_by_user() -> None:
    """With the trusted header, fairness counts Open WebUI's users instead of Open WebUI itself."""
    server = serve_chat(client_header="X-OpenWebUI-User-Id")
    await server.call("POST", "/v1/chat/completions", CHAT, headers=USER_HEADERS)
    assert server.runner.contexts[0].client == "7f1c"


async def test_background_tasks() -> None:
    """Titles, tags and follow-ups: not streamed; only the content of choices[0] is read."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "### Task: a title"}],
        "stream": False,
        "max_completion_tokens": 1000,
        "metadata": {"task": "title_generation", "task_body": {"deep": [1]}, "chat_id": None},
    }
    answer = await serve_chat().call(
        "POST", "/v1/chat/completions", body, headers={**USER_HEADERS, "x-shoal-class": "bulk"}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "### Task: a title"


async def test_continue() -> None:
    """The button sends the answer so far for the model to continue."""
    server = serve_chat()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "well"}]
    body = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await server.call("POST", "/v1/chat/completions", body)).status == 200
    assert (server.runner.task.continue_final, server.runner.task.add_generation_prompt) == (True, False)


async def test_reasoning() -> None:
    """It reads `reasoning_content` of a delta."""
    chunks = [Chunk(reasoning="hm"), Chunk(text="yes"), Chunk(finish_reason="stop"), Chunk(usage=Usage())]
    answer = await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", "/v1/chat/completions", CHAT)
    deltas = [each["choices"][0]["delta"] for each in data_of(answer.body)[:-2]]
    assert [each["reasoning_content"] for each in deltas if "reasoning_content" in each] == ["hm"]


async def test_errors_are_shown() -> None:
    """In a stream an error must not have choices; before the stream it has a status and Retry-After."""
    answer = await serve_chat(FakeRunner(error=EngineFailed("broken"), fail_after=1)).call(
        "POST", "/v1/chat/completions", CHAT
    )
    (error,) = [each for each in data_of(answer.body) if "error" in each]
    assert set(error) == {"error"}
    full = FakeRunner(error=Overloaded("later", retry_after=2.0))
    answer = await serve_chat(full).call("POST", "/v1/chat/completions", CHAT)
    assert (answer.status, answer.headers["retry-after"], answer.headers["content-type"]) == (
        429,
        "2",
        "application/json",
    )


async def test_a_loading_model() -> None:
    """The list shows it as loading, and a request is a 503."""
    server = serve_chat()
    server.gateway.registry.add(Model(name="slow"))
    entry = (await server.call("GET", "/v1/models")).json()["data"][-1]
    assert (entry["id"], entry["status"]["value"]) == ("slow", "loading")
    answer = await server.call("POST", "/v1/chat/completions", {**CHAT, "model": "slow"})
    assert (answer.status, answer.json()["error"]["code"]) == (503, "model_loading")


@pytest.mark.parametrize("base", BASES)
async def test_documents(base: str) -> None:
    """Retrieval sends lists of texts without a format, and reads the vectors in order."""
    body = {"model": "mini", "input": ["search_query: a", "b"]}
    answer = await serve().call("POST", f"{base}/embeddings", body, headers=USER_HEADERS)
    assert [len(each["embedding"]) for each in answer.json()["data"]] == [4, 4]


async def test_the_provider_llama_cpp() -> None:
    """It reads each entry's status and modalities."""
    (entry, adapter) = (await serve_chat().call("GET", "/models")).json()["data"]
    assert entry["status"] == adapter["status"] == {"value": "loaded"}
    assert entry["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
