"""Responses that later requests refer to: the store, its routes, and whom it belongs to."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from shoal.surfaces.openai.responses.store import ResponseStore, StoredItem, Turn
from shoal.types import Chunk, Message, ToolCall, ToolDelta, Usage
from tests.surfaces.surface_kit import Answer
from tests.surfaces.talk_kit import MODEL, ChatServer, FakeRunner, data_of, serve_chat

PATH = "/v1/responses"
CALL = [
    Chunk(reasoning="hm"),
    Chunk(tools=[ToolDelta(index=0, id="call_1", name="add", arguments="{}")]),
    Chunk(finish_reason="tool_calls"),
    Chunk(usage=Usage()),
]
ADD = {"type": "function", "name": "add"}
CALLED = Message(role="assistant", tool_calls=[ToolCall(id="call_1", name="add", arguments="{}")], reasoning="hm")
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


def caller() -> ChatServer:
    return serve_chat(FakeRunner(reply=lambda task: CALL))


async def ask(server: ChatServer, given: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "input": given, "tools": [ADD], **fields}
    answer = await server.call("POST", PATH, body)
    assert answer.status == 200, answer.body
    return data_of(answer.body)[-1]["response"] if fields.get("stream") else answer.json()


def texts_of(items: list[Any]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


@pytest.mark.parametrize("stream", [False, True])
async def test_going_on_from_a_response(stream: bool) -> None:
    """Its conversation comes before the new items; instructions are those of the request."""
    server = caller()
    first = await ask(server, "add them", instructions="old", stream=stream)
    assert first["store"] is True
    again = await ask(server, [RESULT], previous_response_id=first["id"], instructions="new", stream=stream)
    assert again["previous_response_id"] == first["id"]
    assert server.runner.task.messages == [
        Message(role="system", content="new"),
        Message(role="user", content="add them"),
        CALLED,
        Message(role="tool", content="3", tool_call_id="call_1"),
    ]
    await ask(server, "thanks", previous_response_id=again["id"])
    assert [message.role for message in server.runner.task.messages] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]


async def test_references_to_items() -> None:
    """As the AI SDK sends them: each stands for a stored item."""
    server = caller()
    first = await ask(server, [{"role": "user", "content": "add them"}])
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    again = await ask(server, [{"role": "user", "content": "add them"}, *references, RESULT])
    assert server.runner.task.messages == [
        Message(role="user", content="add them"),
        CALLED,
        Message(role="tool", content="3", tool_call_id="call_1"),
    ]
    # The items that it stands for are stored with the response that refers to them.
    assert (await server.call("DELETE", f"{PATH}/{first['id']}")).status == 200
    await ask(server, "more", previous_response_id=again["id"])
    assert server.runner.task.messages[1] == CALLED


async def test_the_routes() -> None:
    """Show, list the items before the answer, delete."""
    server = serve_chat()
    first = await ask(server, [{"role": "user", "content": [{"type": "input_text", "text": "one"}]}])
    again = await ask(server, "two", previous_response_id=first["id"])
    id = again["id"]
    assert (await server.call("GET", f"/v1/responses/{id}")).json() == again
    items = (await server.call("GET", f"/v1/responses/{id}/input_items")).json()
    assert texts_of(items["data"]) == ["two", "one", "one"]
    assert [item["role"] for item in items["data"]] == ["user", "assistant", "user"]
    assert all(item["id"].startswith("msg_") for item in items["data"])
    assert (items["object"], items["has_more"], items["last_id"]) == ("list", False, items["data"][-1]["id"])
    query = b"order=asc&limit=1"
    page = (await server.call("GET", f"/v1/responses/{id}/input_items", query_string=query)).json()
    assert (texts_of(page["data"]), page["has_more"]) == (["one"], True)
    old = first["id"]
    gone = (await server.call("DELETE", f"/v1/responses/{old}")).json()
    assert gone == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (("GET", old), ("GET", f"{old}/input_items"), ("DELETE", old)):
        missing: Answer = await server.call(method, f"/v1/responses/{path}")
        assert (missing.status, missing.json()["error"]["param"]) == (404, "response_id")
    # The response that goes on from it still has its conversation.
    assert len((await server.call("GET", f"/v1/responses/{id}/input_items")).json()["data"]) == 3


async def test_streams_of_stored_responses() -> None:
    """They come whole."""
    server = serve_chat()
    id = (await ask(server, "one"))["id"]
    answer = await server.call("GET", f"/v1/responses/{id}", query_string=b"stream=true")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize(("fields", "options"), [({"store": False}, {}), ({}, {"response_store_mb": 0})])
async def test_what_is_not_stored(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """At the client's wish, or the operator's."""
    server = serve_chat(**options)
    body = await ask(server, "one", **fields)
    assert body["store"] is False
    assert (await server.call("GET", f"{PATH}/{body['id']}")).status == 404
    answer = await server.call("POST", PATH, {"input": "two", "previous_response_id": body["id"]})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "previous_response_id")


async def test_other_clients() -> None:
    """With keys, a client finds only its own responses and items."""
    server = serve_chat(api_key=("one", "two"))
    mine, theirs = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    body = (await server.call("POST", PATH, {"input": "secret"}, headers=mine)).json()
    item = body["output"][0]["id"]
    assert (await server.call("GET", f"{PATH}/{body['id']}", headers=mine)).status == 200
    for method in ("GET", "DELETE"):
        assert (await server.call(method, f"{PATH}/{body['id']}", headers=theirs)).status == 404
    for asked in (
        {"input": "x", "previous_response_id": body["id"]},
        {"input": [{"type": "item_reference", "id": item}]},
    ):
        assert (await server.call("POST", PATH, asked, headers=theirs)).status == 400
        assert (await server.call("POST", PATH, asked, headers=mine)).status == 200


def turn(owner: str, number: int, previous: Turn | None = None, size: int = 10_000) -> Turn:
    output = [{"id": f"out{number}", "text": "x" * size}]
    inputs = [StoredItem(f"in{number}", b'{"id":"in%d"}' % number)]
    return Turn(owner, f"resp{number}", previous, inputs, orjson.dumps({"output": output}))


def test_the_bound() -> None:
    """The oldest go first, of the owner with the most; what others go on from counts as long as they do."""
    store = ResponseStore(60_000, 10.0, clock=lambda: 0.0)
    chain = None
    for number in range(3):
        chain = turn("a", number, chain)
        store.add(chain)
    store.add(turn("b", 10))
    whole = store.size
    store.add(turn("b", 11))
    assert store.size <= 60_000
    assert store.size < whole + 13_000
    assert store.get("b", "resp10") is not None
    assert store.find_item("b", "out11") is not None
    found = [store.get("a", f"resp{number}") is not None for number in range(3)]
    assert found == [False, False, False]  # the first two were held by the third, which went last
    assert store.find_item("a", "out2") is None


def test_the_lifetime() -> None:
    """It begins anew with each use."""
    now = 0.0
    store = ResponseStore(1_000_000, 10.0, clock=lambda: now)
    for number in range(2):
        store.add(turn("a", number))
    now = 6.0
    assert store.get("a", "resp0") is not None
    now = 12.0
    assert (store.get("a", "resp0") is None, store.get("a", "resp1") is None) == (False, True)
    now = 30.0
    assert store.get("a", "resp0") is None
    assert store.size == 0


def test_what_is_too_large() -> None:
    """It does not displace everything else."""
    store = ResponseStore(60_000, 10.0, clock=lambda: 0.0)
    store.add(turn("a", 0))
    store.add(turn("a", 1, size=40_000))
    assert store.get("a", "resp0") is not None
    assert store.get("a", "resp1") is None


def test_deleting_a_chain() -> None:
    """Its bytes are free once nothing goes on from it."""
    store = ResponseStore(1_000_000, 10.0, clock=lambda: 0.0)
    first = turn("a", 0)
    second = turn("a", 1, first)
    for each in (first, second):
        store.add(each)
    assert store.delete("a", "resp0")
    assert not store.delete("a", "resp0")
    assert store.size == first.size + second.size
    assert store.delete("a", "resp1")
    assert store.size == 0


def test_going_on_from_what_was_deleted_meanwhile() -> None:
    """Its bytes count again, once."""
    store = ResponseStore(1_000_000, 10.0, clock=lambda: 0.0)
    first = turn("a", 0)
    store.add(first)
    assert store.delete("a", "resp0")
    second = turn("a", 1, first)
    store.add(second)
    assert store.size == first.size + second.size
    assert store.delete("a", "resp1")
    assert store.size == 0


async def test_a_few_bytes_refer_to_few() -> None:
    """Items that are named often are read as often: within a bound."""
    server = caller()
    await ask(server, [{"role": "user", "content": "x" * 500_000, "id": "long"}])
    references = [{"type": "item_reference", "id": "long"}] * 100
    answer = await server.call("POST", PATH, {"model": MODEL, "input": references})
    assert answer.status == 400
    assert "stored items" in answer.json()["error"]["message"]


async def test_ids_of_clients() -> None:
    """Null stands for none, and an id that is given again names the first item."""
    server = caller()
    first = await ask(server, [{"id": None, "type": None, "role": "user", "content": "one"}])
    listed = (await server.call("GET", f"{PATH}/{first['id']}/input_items")).json()
    assert listed["data"][0]["id"] == listed["first_id"]
    assert listed["data"][0]["type"] == "message"
    for text in ("two", "three"):
        await ask(server, [{"id": "mine", "role": "user", "content": text}])
    await ask(server, [{"type": "item_reference", "id": "mine"}])
    assert server.runner.task.messages == [Message(role="user", content="two")]


async def test_a_function_and_a_custom_tool_of_one_name() -> None:
    server = caller()
    await ask(server, "x", tools=[ADD, {"type": "custom", "name": "add"}])
    names = [tool.name for tool in server.runner.task.tools]
    assert len(set(names)) == 2
    assert names[0] == "add"
