"""Bodies that would block the event loop: each is rejected by its field, before it is built."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.surfaces.ollama_kit import serve_chat as ollama
from tests.surfaces.surface_kit import MODEL
from tests.surfaces.talk_kit import MODEL as CHAT_MODEL
from tests.surfaces.talk_kit import serve_chat

CHAT, RESPONSES, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
EMPTY = {"role": "user", "content": ""}
CALL = {"function": {"name": "f", "arguments": ""}}
ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}
PIXEL = "iVBORw0KGgo="


def tool(at: int = 0, properties: int = 1) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{each}": {"type": "string"} for each in range(properties)}}
    return {"type": "function", "function": {"name": f"f{at}", "parameters": schema}}


def called(arguments: str) -> list[Any]:
    return [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


OPENAI: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": [EMPTY] * 190_000}, "messages"),
    (CHAT, {"messages": [EMPTY] * 8193}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 99_000}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 199_000}]}, "messages"),
    (CHAT, {"messages": called("[" + "[]," * 700_000 + "[]]")}, "messages"),
    (CHAT, {"messages": called('["' + "x" * 2_100_000 + '"]')}, "messages"),
    (CHAT, {"messages": HI, "tools": [tool(each, 30) for each in range(1024)]}, "tools"),
    (CHAT, {"messages": HI, "tools": [tool(each) for each in range(513)]}, "tools"),
    (CHAT, {"messages": HI, "functions": [tool(each)["function"] for each in range(513)]}, "functions"),
    (CHAT, {"messages": HI, "tools": [tool(0, 30_000)]}, "tools"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"a": [{}] * 340_000}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"a": [0] * 500_000}}, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "guided_json": {"a": [{}] * 340_000}}, "guided_json"),
    (CHAT, {"messages": HI, "guided_json": '{"a":[' + "[]," * 100_000 + "0]}"}, "guided_json"),
    (CHAT, {"messages": HI, "structured_outputs": {"json": {"a": [0] * 100_000}}}, "structured_outputs"),
    (
        CHAT,
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": [0] * 100_000}}}},
        "response_format",
    ),
    (CHAT, {"messages": HI, **{f"x{each}": 0 for each in range(100_000)}}, None),
    (CHAT, {"messages": HI, "stop": "x" * 1025}, "stop"),
    (CHAT, {"messages": HI, "stop": ["a", "x" * 1025]}, "stop"),
    (RESPONSES, {"input": [EMPTY] * 190_000}, "input"),
    (RESPONSES, {"input": [EMPTY] * 8193}, "input"),
    (RESPONSES, {"input": [ITEM] * 60_000}, "input"),
    (RESPONSES, {"input": [{**ITEM, "arguments": "[" + "0," * 200_000 + "0]"}]}, "input"),
    (RESPONSES, {"input": "x", "metadata": {str(each): "x" for each in range(50_000)}}, "metadata"),
    (RESPONSES, {"input": "x", "tools": [{**tool()["function"], "type": "function"}] * 513}, "tools"),
    (TEXT, {"prompt": ["a"] * 2048, "best_of": 20}, "best_of"),
    (TEXT, {"prompt": ["a"] * 2048, "n": 2, "best_of": 2}, "n"),
    (TEXT, {"prompt": "a", "guided_json": {"a": [{}] * 340_000}}, "guided_json"),
]


@pytest.mark.parametrize(("path", "fields", "param"), OPENAI)
async def test_openai(path: str, fields: dict[str, Any], param: str | None) -> None:
    """A 400 that names the field, and no work."""
    server = serve_chat()
    body = orjson.dumps({"model": CHAT_MODEL, **fields})
    answer = await server.call("POST", path, body=body)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error["message"]
    assert server.runner.tasks == []


async def test_huge_integers() -> None:
    """JSON allows them but the encoder does not; no route fails on them."""
    long = b"9" * 4000
    body = b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":%b}}' % long
    answer = await serve_chat().call("POST", CHAT, body=body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
    call = b'{"function":{"name":"f","arguments":{"a":%b}}}' % long
    body = b'{"model":"%b","messages":[{"role":"assistant","tool_calls":[%b]}]}' % (MODEL.encode(), call)
    answer = await ollama()[0].call("POST", "/api/chat", body=body)
    assert (answer.status, "64 bits" in answer.json()["error"]) == (400, True)


async def test_escaped_brackets_are_bounded() -> None:
    """Brackets may be escaped as \\u005b, so they appear only after the text is decoded."""
    escaped = b"\\u005b" + b",".join([b"\\u005b\\u005d"] * 70_000) + b"\\u005d"
    turn = b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%b"}}]}]' % escaped
    answer = await serve_chat().call("POST", CHAT, body=b'{"messages":%b}' % turn)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "messages")
    answer = await serve_chat().call(
        "POST", CHAT, body=b'{"messages":%b,"guided_json":"%b"}' % (orjson.dumps(HI), escaped)
    )
    assert (answer.status, answer.json()["error"]["param"]) == (400, "guided_json")


OLLAMA: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [EMPTY] * 190_000}, "'messages' has more than"),
    ("chat", {"messages": [EMPTY] * 8193}, "'messages' is invalid"),
    ("chat", {"messages": HI, "tools": [[]] * 5_000_000}, "smaller tools and schemas"),
    ("chat", {"messages": HI, "tools": [[]] * 200_000}, "'tools' has more than"),
    ("chat", {"messages": HI, "tools": [tool(each) for each in range(513)]}, "'tools' is invalid"),
    ("chat", {"messages": HI, "format": {"a": [[]] * 300_000}}, "'format' has more than"),
    (
        "chat",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"a": [0] * 10**6}}}]}
            ]
        },
        "'messages' has more than",
    ),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a"}}] * 129}]}, "<= 128"),
    ("chat", {"messages": [{**EMPTY, "images": [PIXEL] * 600_000}]}, "'messages' has more than"),
    ("chat", {"messages": [{**EMPTY, "images": [PIXEL] * 257}]}, "'messages[0].images' is invalid"),
    ("chat", {"messages": HI, "options": {"stop": ["a"] * 65}}, "'options.stop' is invalid"),
    ("chat", {"messages": HI, "options": {"stop": "a" * 1025}}, "'options.stop' is invalid"),
    ("generate", {"prompt": "x", "images": [PIXEL] * 600_000}, "'images' has more than"),
    ("generate", {"prompt": "x", "options": {"stop": ["a" * 1025]}}, "'options.stop"),
    ("generate", {"prompt": "x", **{f"x{each}": 0 for each in range(1001)}}, "1000 unknown fields"),
]


@pytest.mark.parametrize(("route", "fields", "words"), OLLAMA)
async def test_ollama(route: str, fields: dict[str, Any], words: str) -> None:
    """Ollama's dialect has the same limits."""
    server, model = ollama()
    answer = await server.call("POST", f"/api/{route}", body=orjson.dumps({"model": MODEL, **fields}))
    assert answer.status == 400
    assert words in answer.json()["error"]
    assert model.generations == []


FITS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [EMPTY] * 8192}),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL] * 128}]}),
    (CHAT, {"messages": called(orjson.dumps({"code": "f(a, b)[{" * 100_000}).decode())}),
    (CHAT, {"messages": HI, "tools": [tool(each, 8) for each in range(512)]}),
    (CHAT, {"messages": HI, "metadata": {"a": [0] * 100_000}}),
    (CHAT, {"messages": HI, "stop": ["x" * 1024] * 4}),
    (CHAT, {"messages": [{"role": "user", "content": "f(a,b)[{" * 1_000_000}]}),
    (RESPONSES, {"input": [*[EMPTY, ITEM, {"type": "function_call_output", "call_id": "a", "output": ""}] * 2700]}),
    (TEXT, {"prompt": ["a"] * 102, "best_of": 20}),
]


@pytest.mark.parametrize(("path", "fields"), FITS)
async def test_long_requests_fit(path: str, fields: dict[str, Any]) -> None:
    """Requests as large as those of coding agents and editors are accepted."""
    answer = await serve_chat().call("POST", path, body=orjson.dumps({"model": CHAT_MODEL, **fields}))
    assert answer.status == 200, answer.body[:300]


async def test_large_images_fit() -> None:
    """On both routes an image is one text, however long."""
    image = "iVBORw0KGgo" + "A" * 4_000_001
    for route, fields in (("chat", {"messages": [{**EMPTY, "images": [image]}]}), ("generate", {"images": [image]})):
        server, model = ollama()
        answer = await server.call("POST", f"/api/{route}", body=orjson.dumps({"model": MODEL, **fields}))
        assert (answer.status, len(model.generations)) == (200, 1)


async def test_embedding_options_are_not_decoded() -> None:
    """Nothing uses them."""
    for route, fields in (("embed", {"input": "x"}), ("embeddings", {"prompt": "x"})):
        server, _ = ollama()
        body = orjson.dumps({"model": MODEL, **fields, "options": {"a": [[]] * 10}})
        assert (await server.call("POST", f"/api/{route}", body=body)).status == 200
