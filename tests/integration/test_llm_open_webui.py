"""The calls of Open WebUI 0.12, with its HTTP client (aiohttp), over sockets: one server with a model that repeats its
input and one whose backend is dead.

The tests read the same parts of the answers as its `routers/openai.py`, `utils/middleware.py` and `retrieval/utils.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.llm_kit import FAKE, MODEL, free_port, running, until, user_messages
from tests.integration.server_kit import Server

DEAD = "dead"
BASES = ["/v1", ""]
HEADERS = {
    "Authorization": "Bearer sk-none",
    "X-OpenWebUI-User-Name": "Anna%20B",
    "X-OpenWebUI-User-Id": "7f1c",
    "X-OpenWebUI-User-Email": "anna@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "c1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is never ready, because one of its models never is."""
    folder = tmp_path_factory.mktemp("webui")
    (folder / "shoal.toml").write_text('[models.second]\nbackends = ["fake:"]\n')
    dead = f"{DEAD}=openai+http://127.0.0.1:{free_port()}/v1#gone"
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with running(folder, FAKE, dead, flags=flags, wait=False) as started:
        ask = {"model": MODEL, "messages": user_messages("a")}
        until(lambda: started.request("POST", "/v1/chat/completions", ask)[0] == 200)
        yield started


@pytest.fixture
async def webui(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with Open WebUI's settings: trusted environment, a total timeout; its callers follow no redirects."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(server.base_url, headers=HEADERS, timeout=timeout) as session:
        yield session


def turn(text: str, **fields: Any) -> dict[str, Any]:
    """A user's turn in a chat, with the fields that the interface adds: `stream_options` for streams only."""
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "system", "content": "be kind"}, *user_messages(text)],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "max_tokens": 64,
        "params": {},
        "metadata": {"chat_id": "c1", "message_id": "m1", "session_id": "s1", "features": {"web_search": False}},
        "chat_id": "c1",
        **fields,
    }
    if not body["stream"]:
        del body["stream_options"]
    return body


async def events(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    """Read a stream as the interface does: by content type, line by line; return the JSON of each data line."""
    async with session.post(path, data=json.dumps(body), headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200
        assert "text/event-stream" in answer.headers["Content-Type"]
        return [
            json.loads(line.removeprefix(b"data: ")) async for line in answer.content if line.startswith(b"data: {")
        ]


@pytest.mark.parametrize("base", BASES)
async def test_the_list_of_models(webui: aiohttp.ClientSession, base: str) -> None:
    """At login and on every refresh: both models are listed, the dead one with its state."""
    async with webui.get(f"{base}/models") as answer:
        listed = (await answer.json())["data"]
    entries = {entry["id"]: entry for entry in listed}
    assert {MODEL, DEAD} <= set(entries)
    assert (entries[MODEL]["status"]["value"], entries[DEAD]["status"]["value"]) == ("loaded", "loading")
    assert all(entry.get("name", "") is not None for entry in listed)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("path", ["/models", "/chat/completions", "/embeddings", "/responses", "/completions"])
async def test_no_redirects(webui: aiohttp.ClientSession, base: str, path: str) -> None:
    """The client follows no redirects, so a trailing slash must make no difference."""
    bodies: dict[str, Any] = {
        "/chat/completions": turn("a", stream=False),
        "/embeddings": {"model": MODEL, "input": ["a"]},
        "/responses": {"model": MODEL, "input": "a"},
        "/completions": {"model": MODEL, "prompt": "a"},
    }
    method = "POST" if path in bodies else "GET"
    for slash in ("", "/"):
        async with webui.request(
            method, f"{base}{path}{slash}", json=bodies.get(path), allow_redirects=False
        ) as answer:
            assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")


@pytest.mark.parametrize("base", BASES)
async def test_a_turn(webui: aiohttp.ClientSession, base: str) -> None:
    """Text in choices[0], the usage, and llama.cpp's timings for the popup with tokens per second."""
    chunks = await events(webui, f"{base}/chat/completions", turn("hello there, friend"))
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
    assert text == "hello there, friend"
    shown = {**chunks[-1]["usage"], **chunks[-1]["timings"]}
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["predicted_n"]) == (3, 3, 3)
    assert shown["predicted_per_second"] > 0


async def test_a_turn_with_tools_and_thoughts(webui: aiohttp.ClientSession) -> None:
    """Native calls need their index in every fragment; the reasoning comes in `reasoning_content`."""
    call = '<think> hm </think> <tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    chunks = await events(webui, "/v1/chat/completions", turn(call, tools=[tool]))
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "hm"
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert {part["index"] for part in parts} == {0}
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["add"]
    assert json.loads("".join(part["function"].get("arguments", "") for part in parts)) == {"a": 1}


async def test_all_calls_of_one_turn(webui: aiohttp.ClientSession) -> None:
    """The chat and its background tasks (title, tags, follow-ups) run concurrently, the tasks without streaming."""

    async def task(kind: str) -> str:
        body = turn(f"### Task: {kind}", stream=False, max_completion_tokens=1000)
        del body["max_tokens"]
        body["metadata"] = {"task": kind, "task_body": {"deep": [1]}, "chat_id": None}
        async with webui.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            reply = await answer.json()
        return str(reply["choices"][0]["message"]["content"])

    kinds = ["title_generation", "tags_generation", "follow_up_generation", "query_generation"]
    stream, *texts = await asyncio.gather(events(webui, "/v1/chat/completions", turn("hello")), *map(task, kinds))
    assert stream[-1]["usage"]["completion_tokens"] == 1
    assert texts == [f"### Task: {kind}" for kind in kinds]


async def test_continue_and_parts(webui: aiohttp.ClientSession) -> None:
    """The turn of "Continue" ends with the model's own partial answer; texts may come in parts; a model without vision
    rejects an image with a message that can be shown."""
    begun = turn("a", stream=False, continue_final_message=True, add_generation_prompt=False)
    begun["messages"].append({"role": "assistant", "content": "so far"})
    parts: list[dict[str, Any]] = [{"type": "text", "text": "look here"}]
    async with webui.post("/v1/chat/completions", json=begun) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == "so far"
    async with webui.post("/v1/chat/completions", json=turn("", stream=False, messages=messages_of(parts))) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == "look here"
    parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    async with webui.post("/v1/chat/completions", json=turn("", messages=messages_of(parts))) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (400, "application/json")
        assert "image" in (await answer.json())["error"]["message"]


def messages_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}]


async def test_embeddings_of_a_document(webui: aiohttp.ClientSession) -> None:
    """An upload: hundreds of concurrent single-text lists; no format is requested, and numbers come back."""

    async def embed(text: str) -> list[float]:
        body = {"input": [text], "model": MODEL}
        async with webui.post("/v1/embeddings", json=body) as answer:
            answer.raise_for_status()
            (row,) = [each["embedding"] for each in (await answer.json())["data"]]
        return [float(number) for number in row]

    texts = [f"chunk {number} of a document" for number in range(200)]
    rows = await asyncio.gather(*map(embed, texts))
    assert {len(row) for row in rows} == {32}
    assert rows[7] == await embed(texts[7])
    assert rows[7] != rows[8]


async def test_responses(webui: aiohttp.ClientSession) -> None:
    """For connections of type `responses`: events by their `type`, the complete response in the last one."""
    body = {"model": MODEL, "input": [{"role": "user", "content": [{"type": "input_text", "text": "a b"}]}]}
    stream = await events(webui, "/v1/responses", {**body, "stream": True})
    assert "".join(each["delta"] for each in stream if each["type"] == "response.output_text.delta") == "a b"
    assert stream[-1]["type"] == "response.completed"
    assert stream[-1]["response"]["output"][0]["content"][0]["text"] == "a b"
    assert stream[-1]["response"]["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"model": DEAD}, 503),
        ({"messages": []}, 400),
        ({"messages": user_messages("poison-item")}, 500),
    ],
)
async def test_errors_before_the_answer(
    webui: aiohttp.ClientSession, fields: dict[str, Any], status: int, stream: bool
) -> None:
    """Errors have a status and a JSON body, with the time after which to retry."""
    async with webui.post("/v1/chat/completions", json=turn("a", stream=stream, **fields)) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json")
        assert (await answer.json())["error"]["message"]
        assert ("retry-after" in answer.headers) == (status == 503)


async def test_errors_in_the_answer(webui: aiohttp.ClientSession) -> None:
    """The interface only shows errors without choices: an error beside choices would be lost."""
    chunks = await events(webui, "/v1/chat/completions", turn("one poison-item"))
    assert [set(each) for each in chunks if "error" in each] == [{"error"}]


async def test_models_are_managed(server: Server, webui: aiohttp.ClientSession) -> None:
    """A connection of type `llama.cpp`: the root lists, loads and unloads models and streams progress events."""
    progress: list[Any] = []
    loaded = asyncio.Event()
    async with webui.get("/models/sse", timeout=aiohttp.ClientTimeout(total=None)) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")

        async def watch() -> None:
            async for line in stream.content:
                if line.startswith(b"data: "):
                    progress.append(json.loads(line.removeprefix(b"data: ")))
                    status = progress[-1]["data"]["status"] if progress[-1]["event"] == "model_status" else ""
                    if status == "loaded":
                        loaded.set()
                    elif status == "unloaded":
                        return

        watching = asyncio.create_task(watch())
        async with webui.post("/models/load", json={"model": "second"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"success": True})
        async with asyncio.timeout(10):
            await loaded.wait()
        chunks = await events(webui, "/v1/chat/completions", turn("hello", model="second"))
        assert chunks[0]["model"] == "second"
        assert await states(webui) >= {"second": "loaded", MODEL: "loaded", DEAD: "loading"}.items()
        async with webui.post("/models/unload", json={"model": "second"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"success": True})
        async with asyncio.timeout(10):
            await watching
    assert {each["model"] for each in progress} == {"second"}
    assert "second" not in dict(await states(webui))
    async with webui.post("/models/load", json={"model": "../etc"}) as answer:
        assert answer.status == 400


async def states(session: aiohttp.ClientSession) -> Any:
    """(name, state) of each listed model."""
    async with session.get("/models") as answer:
        assert answer.status == 200
        return {entry["id"]: entry["status"]["value"] for entry in (await answer.json())["data"]}.items()
