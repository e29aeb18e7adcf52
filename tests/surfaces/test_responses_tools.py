"""Tools of the Responses API beyond functions, and what else is translated for models that know only conversations."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.protocols import ModelFacts
from shoal.surfaces.openai.responses.custom_input import InputReader, read_input, to_arguments
from shoal.surfaces.openai.responses.tool_names import MAX_NAME, ToolName, ToolNames
from shoal.types import Chunk, Generate, Message, Part, ToolCall, ToolDelta, Usage
from tests.surfaces.surface_kit import Answer
from tests.surfaces.talk_kit import MODEL, FakeRunner, data_of, serve_chat

PATH = "/v1/responses"
ADD = {"type": "function", "name": "add", "description": "Adds", "parameters": {"type": "object"}}
SUMS = {"type": "namespace", "name": "mcp__sums", "description": "Sums", "tools": [ADD]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": GRAMMAR}
ADD_ONLY = {"type": "function", "name": "add"}
PATCH_ONLY = {"type": "custom", "name": "apply_patch"}
ALL = ["add", "mcp__sums__add", "apply_patch"]
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds", "parameters": {"type": "object"}}


class Speaker(FakeRunner):
    """A runner whose model may be on a server that speaks the Responses API."""

    @property
    def facts(self) -> ModelFacts:
        return replace(super().facts, passes=("openai.responses",))


def calling(name: str, *arguments: str) -> FakeRunner:
    """A model that calls a tool, with its arguments in these pieces."""
    first = Chunk(tools=[ToolDelta(index=0, id="call_1", name=name)])
    pieces = [Chunk(tools=[ToolDelta(index=0, arguments=piece)]) for piece in arguments]
    chunks = [first, *pieces, Chunk(finish_reason="tool_calls"), Chunk(usage=Usage())]
    return FakeRunner(reply=lambda task: chunks)


def text_part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


async def ask(runner: FakeRunner, given_input: Any = "x", **fields: Any) -> tuple[Answer, Generate]:
    answer = await serve_chat(runner).call("POST", PATH, {"model": MODEL, "input": given_input, **fields})
    assert answer.status == 200, answer.body
    return answer, runner.task


@pytest.mark.parametrize("stream", [False, True])
async def test_namespaces(stream: bool) -> None:
    """Their functions have flat names for the model, and their own for the client, both ways."""
    sent = {"type": "function_call", "call_id": "call_0", "namespace": "mcp__sums", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_0", "output": "3"}
    answer, task = await ask(
        calling("mcp__sums__add", "{}"),
        [{"role": "user", "content": "go"}, sent, result],
        tools=[ADD, SUMS],
        stream=stream,
    )
    assert [tool.name for tool in task.tools] == ["add", "mcp__sums__add"]
    assert task.messages[1].tool_calls == [ToolCall(id="call_0", name="mcp__sums__add", arguments="{}")]
    body = data_of(answer.body)[-1]["response"] if stream else answer.json()
    (item,) = body["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__sums", "add")
    assert body["tools"] == [ADD, SUMS]


async def test_custom_tools() -> None:
    """A function of one text for the model; the grammar is described."""
    text = 'a "b"\n\\ é'
    sent = {"type": "custom_tool_call", "call_id": "call_0", "name": "apply_patch", "input": text}
    result = {"type": "custom_tool_call_output", "call_id": "call_0", "output": "done"}
    answer, task = await ask(
        calling("apply_patch", json.dumps({"input": text})), [{"role": "user", "content": "go"}, sent, result],
        tools=[PATCH],
    )  # fmt: skip
    (tool,) = task.tools
    assert tool.parameters["properties"] == {"input": {"type": "string"}}
    assert tool.parameters["required"] == ["input"]
    assert all(words in tool.description for words in ("Edits files", "`input`", "lark", "start: /a+/"))
    assert json.loads(task.messages[1].tool_calls[0].arguments) == {"input": text}
    assert task.messages[2] == Message(role="tool", content="done", tool_call_id="call_0")
    (item,) = answer.json()["output"]
    assert item.pop("id").startswith("ctc_")
    assert item == {
        **{"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch"},
        **{"input": text, "status": "completed"},
    }


async def test_regular_expressions() -> None:
    """They are in the schema, which engines follow."""
    form = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    _, task = await ask(FakeRunner(), tools=[{**PATCH, "format": form}])
    assert task.tools[0].parameters["properties"]["input"]["pattern"] == "^(?:a+)$"


async def test_custom_input_as_a_stream() -> None:
    """Its text comes as it is written; the arguments around it are not seen."""
    answer, _ = await ask(
        calling("apply_patch", '{"in', 'put": "a\\', "nb", "\\u00", 'e9"}'), tools=[PATCH], stream=True
    )
    events = [each for each in data_of(answer.body) if "item_id" in each]
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "\nb", "é"]
    assert events[-1]["type"] == "response.custom_tool_call_input.done"
    assert events[-1]["input"] == "a\nbé"


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(1, 12)), st.booleans())
def test_inputs_in_any_pieces(text: str, cuts: list[int], ascii_only: bool) -> None:
    """What is read piece by piece is the whole, and nothing twice."""
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader, read, at = InputReader(), "", 0
    for size in [*cuts, len(arguments)]:
        read += reader.push(arguments[at : at + size])
        at += size
    assert read == text
    assert reader.finish() == ""
    assert read_input(to_arguments(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"patch": "p"}', "p"),
        ('{"input": 7}', '{"input": 7}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": "line\nbreak"}', "line\nbreak"),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"input": "cut o', "cut o"),
        ("[]", "[]"),
        ("", ""),
    ],
)
async def test_odd_arguments(arguments: str, text: str) -> None:
    """Models do not always write what the schema says."""
    answer, _ = await ask(calling("apply_patch", arguments), tools=[PATCH])
    assert answer.json()["output"][0]["input"] == text


async def test_a_search_that_the_client_runs() -> None:
    """A function for the model; what it has found can be called from then on."""
    call = {"type": "tool_search_call", "call_id": "call_0", "execution": "client", "arguments": {"query": "add"}}
    found = {"type": "tool_search_output", "call_id": "call_0", "execution": "client", "tools": [SUMS]}
    answer, task = await ask(
        calling("tool_search", '{"query":', '"sub"}'), [{"role": "user", "content": "go"}, call, found], tools=[SEARCH]
    )
    assert [tool.name for tool in task.tools] == ["tool_search", "mcp__sums__add"]
    assert task.messages[1].tool_calls[0].arguments == '{"query":"add"}'
    assert "mcp__sums__add" in str(task.messages[2].content)
    (item,) = answer.json()["output"]
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "sub"})


async def test_tools_that_servers_run() -> None:
    """They are left out, as are the records of their calls, and the answer says so."""
    kinds = ["web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "tool_search"]
    record = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    answer, task = await ask(
        FakeRunner(), [record, {"role": "user", "content": "hi"}], tools=[*({"type": kind} for kind in kinds), ADD]
    )
    assert [tool.name for tool in task.tools] == ["add"]
    expected = [*(f"tools.{kind}" for kind in kinds), "input.web_search_call"]
    assert answer.headers["x-shoal-ignored"].split(", ") == expected


async def test_a_server_that_speaks_this_api() -> None:
    """It gets everything as it came, also what cannot be translated, and nothing is said to be ignored."""
    raw = [Chunk(raw=("openai.responses", b'{"id":"resp_up"}'), usage=Usage())]
    sent = {
        **{"input": [{"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}]},
        **{"tools": [{"type": "web_search"}, PATCH], "tool_choice": {"type": "web_search"}},
        **{"conversation": "conv_1", "previous_response_id": "resp_theirs", "client_metadata": {"a": "b"}},
    }
    server = serve_chat(Speaker(reply=lambda task: raw))
    data = orjson.dumps(sent)
    answer = await server.call("POST", PATH, body=data)
    assert (answer.status, answer.body) == (200, b'{"id":"resp_up"}')
    assert "x-shoal-ignored" not in answer.headers
    task = server.runner.task
    assert task.raw is not None
    assert task.raw[0] == "openai.responses"
    assert {name: orjson.loads(bytes(value)) for name, value in task.raw[1].items()} == sent
    assert task.untranslated is not None
    assert "client_metadata" not in task.extras


async def test_what_is_stored_here_stays_here() -> None:
    """A request that refers to it is translated, whoever answers."""
    server = serve_chat(Speaker())
    body = (await server.call("POST", PATH, {"input": "one"})).json()
    await server.call("POST", PATH, {"input": "two", "previous_response_id": body["id"]})
    assert server.runner.task.raw is not None
    assert server.runner.task.raw[0] == ""
    assert [message.content for message in server.runner.task.messages] == ["one", "one", "two"]


@pytest.mark.parametrize(
    ("choice", "names", "selection"),
    [
        ({"type": "allowed_tools", "mode": "required", "tools": [ADD_ONLY]}, ["add"], "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [PATCH_ONLY]}, ["apply_patch"], "auto"),
        (PATCH_ONLY, ALL, "function"),
        ({**ADD_ONLY, "namespace": "mcp__sums"}, ALL, "function"),
    ],
)
async def test_tool_choices(choice: dict[str, Any], names: list[str], selection: str) -> None:
    """`allowed_tools` leaves the others out; the response repeats the choice."""
    answer, task = await ask(FakeRunner(), tools=[ADD, SUMS, PATCH], tool_choice=choice)
    assert [tool.name for tool in task.tools] == names
    assert task.tool_choice == selection
    assert answer.json()["tool_choice"] == choice


async def test_reasoning_as_a_summary() -> None:
    """It has parts and events of its own."""
    chunks = [Chunk(reasoning="let me "), Chunk(reasoning="see"), Chunk(text="3"), Chunk(finish_reason="stop")]
    answer, _ = await ask(FakeRunner(reply=lambda task: chunks), reasoning={"summary": "auto"}, stream=True)
    events = data_of(answer.body)
    summary = [each for each in events if "summary_index" in each]
    assert [each["type"].removeprefix("response.reasoning_summary_") for each in summary] == [
        *("part.added", "text.delta", "text.delta", "text.done", "part.done")
    ]
    assert [each["delta"] for each in summary[1:3]] == ["let me ", "see"]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "let me see"}]
    assert item["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    # A client that sends back the summary alone, as most do, gives the model its reasoning.
    sent = [{"role": "user", "content": "a"}, {**item, "content": None}, {"role": "assistant", "content": "3"}]
    _, task = await ask(FakeRunner(), sent)
    assert task.messages[1] == Message(role="assistant", content="3", reasoning="let me see")


async def test_reasoning_that_clients_keep() -> None:
    """Clients that store nothing send it back as the content that they cannot read; another server's says nothing."""
    chunks = [Chunk(reasoning="hm é"), Chunk(text="3"), Chunk(finish_reason="stop")]
    runner = FakeRunner(reply=lambda task: chunks)
    answer, _ = await ask(runner, include=["reasoning.encrypted_content"], store=False)
    sealed = answer.json()["output"][0]["encrypted_content"]
    reply = {"role": "assistant", "content": "3"}
    for content, reasoning in ((sealed, "hm é"), ("gAAAA", None), ("shoal.!", None)):
        item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": content}
        _, task = await ask(FakeRunner(), [{"role": "user", "content": "a"}, item, reply])
        assert task.messages[1].reasoning == reasoning


async def test_files_and_images() -> None:
    """A file that is a text is read; images in a tool's output come after all outputs."""
    data = base64.b64encode("héllo".encode()).decode()
    file = {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{data}"}
    image = {"type": "input_image", "image_url": "https://a.example/b.png"}
    calls = [{"type": "function_call", "call_id": each, "name": "view", "arguments": "{}"} for each in "ab"]
    outputs = [
        {"type": "function_call_output", "call_id": "a", "output": [text_part("one"), image]},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": each} for each in "xy"],
        },
    ]
    _, task = await ask(FakeRunner(), [{"role": "user", "content": [file]}, *calls, *outputs])
    assert task.messages[0].content == "a.txt:\n\nhéllo"
    assert task.messages[2:] == [
        Message(role="tool", content="one", tool_call_id="a"),
        Message(role="tool", content="x\ny", tool_call_id="b"),
        Message(role="user", content=[Part(type="image", url="https://a.example/b.png")]),
    ]


@pytest.mark.parametrize("file", [{"file_id": "file_1"}, {"file_data": base64.b64encode(b"%PDF\0").decode()}])
async def test_files_that_are_no_text(file: dict[str, str]) -> None:
    """They are refused by name."""
    given_input = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    answer = await serve_chat().call("POST", PATH, {"input": given_input})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input")
    assert "'input_file'" in answer.json()["error"]["message"]


async def test_fields_for_servers_of_chat_completions() -> None:
    """Those that both APIs have keep their names; the response repeats them."""
    fields = {
        **{"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "service_tier": "flex"},
        **{"prompt_cache_key": "k", "max_tool_calls": 3, "truncation": "auto"},
    }
    server = serve_chat()
    sent = {"input": "x", **fields, "text": {"verbosity": "low"}, "store": False, "client_metadata": {}}
    body = (await server.call("POST", PATH, sent)).json()
    assert {name: body[name] for name in fields} == fields
    task = server.runner.task
    assert {name: orjson.loads(bytes(value)) for name, value in task.extras.items()} == {
        **{
            name: fields[name] for name in ("metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key")
        },
        "verbosity": "low",
    }
    assert task.drop_oldest


def test_flat_names() -> None:
    """Distinct, short enough for every server, and the same each time."""
    names = ToolNames()
    plain = ToolName("function", "mcp__sums__add")
    spaced = ToolName("function", "add", "mcp__sums")
    long = ToolName("function", "x" * 60, "a.b")
    flat = [names.flatten(each) for each in (plain, spaced, long)]
    assert flat[0] == "mcp__sums__add"
    assert len(set(flat)) == 3
    assert max(map(len, flat)) <= MAX_NAME
    assert "." not in flat[2]
    assert [names.restore(each) for each in flat] == [plain, spaced, long]
    assert [names.flatten(each) for each in (plain, spaced, long)] == flat
    assert names.restore("invented") == ToolName("function", "invented")
    assert ToolNames().flatten(ToolName("function", "add", "mcp__sums__")) == "mcp__sums__add"
