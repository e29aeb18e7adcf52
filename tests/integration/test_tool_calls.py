"""Tool calls of Shoal's own engine, whose model writes noise: only a constraint makes them valid, in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from tests.integration.llm_kit import running, user_messages
from tests.integration.server_kit import Server
from tests.surfaces.talk_kit import data_of

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}
FIELDS: dict[str, dict[str, Any]] = {"add": {"a": WHOLE, "b": WHOLE}, "paint": {"color": {"enum": ["red", "green"]}}}
SCHEMAS: dict[str, Any] = {
    name: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for name, fields in FIELDS.items()
}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": user_messages("Add 1 and 2"),
    "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    **{"max_tokens": 200, "temperature": 1.5},
}
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "paint"}}]

pytestmark = pytest.mark.timeout(120)
choices = pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
parallel = pytest.mark.parametrize("parallel", [True, False])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("tiny"), f"tiny=file:{TINY}") as started:
        yield started


def post(server: Server, path: str, body: dict[str, Any]) -> bytes:
    status, _, answer = server.request("POST", path, body)
    assert status == 200, answer
    return answer


def check(calls: list[tuple[str, str]], *, named: bool = False) -> None:
    """Each call is of an offered tool, with the arguments of its schema."""
    assert calls
    for name, arguments in calls:
        assert name in (["paint"] if named else SCHEMAS)
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


@choices
@parallel
def test_chat(server: Server, choice: Any, parallel: bool) -> None:
    """Streamed and whole, with several seeds."""
    for seed in range(5):
        body = {**CHAT, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
        (made,) = json.loads(post(server, "/v1/chat/completions", body))["choices"]
        functions = [call["function"] for call in made["message"]["tool_calls"]]
        assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
        check([(each["name"], each["arguments"]) for each in functions], named=choice != "required")
        assert parallel or len(functions) == 1
        *events, done = data_of(post(server, "/v1/chat/completions", {**body, "stream": True}))
        deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
        assert len(deltas) >= 2 * len(functions)
        assert (
            "".join(each["function"].get("arguments", "") for each in deltas if each["index"] == 0)
            == (functions[0]["arguments"])
        )
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert done == "[DONE]"


@choices
def test_responses(server: Server, choice: Any) -> None:
    flat = choice if choice == "required" else {"type": "function", "name": "paint"}
    tools = [{"type": "function", **each, "strict": True} for each in FUNCTIONS]
    body = {"model": "tiny", "input": "Add", "tools": tools, "tool_choice": flat, "max_output_tokens": 200}
    response = json.loads(post(server, "/v1/responses", body))
    assert response["status"] == "completed"
    assert {item["type"] for item in response["output"]} == {"function_call"}
    check([(item["name"], item["arguments"]) for item in response["output"]], named=choice != "required")
    events = data_of(post(server, "/v1/responses", {**body, "stream": True}))
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == "".join(event["arguments"] for event in done)
    assert len(pieces) >= len(done) >= 1


def test_calls_beside_a_form(server: Server) -> None:
    """With `auto`, the model calls a tool or answers in the form; a pattern is of all that it writes."""
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMAS["add"]}}
    kinds: set[str] = set()
    for seed in range(10):
        body = {**CHAT, "response_format": form, "seed": seed}
        (made,) = json.loads(post(server, "/v1/chat/completions", body))["choices"]
        kinds.add(made["finish_reason"])
        if made["finish_reason"] == "tool_calls":
            check([(each["function"]["name"], each["function"]["arguments"]) for each in made["message"]["tool_calls"]])
        else:
            Draft202012Validator(SCHEMAS["add"]).validate(json.loads(made["message"]["content"]))
    assert kinds == {"tool_calls", "stop"}
    (made,) = json.loads(post(server, "/v1/chat/completions", {**CHAT, "guided_regex": "a{1,4}"}))["choices"]
    assert set(made["message"]["content"]) == {"a"}


FORMATS = {
    "tagged": "<tool_call><function=",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS][ARGS]",
    "deepseek": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "phi4": "<|tool|>",
    "gemma": "<start_function_call>",
}
"""What shows each format in a chat template."""


@pytest.mark.parametrize("kind", FORMATS)
def test_calls_in_the_format_of_the_template(tmp_path: Path, kind: str) -> None:
    """With `auto` beside a form, in which even noise ends: each answer is calls or in the form."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}x{% endif %}{# " + FORMATS[kind] + " #}"
    )
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMAS["add"]}}
    with running(tmp_path, f"tiny=file:{TINY}", flags=("--chat-template", str(template))) as started:
        kinds: set[str] = set()
        for seed in range(40):
            if seed >= 8 and "tool_calls" in kinds:
                break
            body = {**CHAT, "response_format": form, "seed": seed, "parallel_tool_calls": False}
            (made,) = json.loads(post(started, "/v1/chat/completions", body))["choices"]
            kinds.add(made["finish_reason"])
            if made["finish_reason"] == "tool_calls":
                (call,) = made["message"]["tool_calls"]
                check([(call["function"]["name"], call["function"]["arguments"])])
            else:
                Draft202012Validator(SCHEMAS["add"]).validate(json.loads(made["message"]["content"]))
    assert {"tool_calls"} <= kinds <= {"tool_calls", "stop"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "paint"}], ids=["any", "tool"])
def test_anthropic(server: Server, choice: dict[str, Any]) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    body = {"model": "tiny", "messages": user_messages("Add"), "max_tokens": 200, "tools": tools, "tool_choice": choice}
    message = json.loads(post(server, "/v1/messages", body))
    assert message["stop_reason"] == "tool_use"
    assert {block["type"] for block in message["content"]} == {"tool_use"}
    check([(block["name"], json.dumps(block["input"])) for block in message["content"]], named="name" in choice)
    events = data_of(post(server, "/v1/messages", {**body, "stream": True}))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "parameters", [{"type": "object", "properties": {"n": {"not": {}}}}, SCHEMAS["add"]], ids=["unsupported", "valid"]
)
def test_auto_answers_whatever_the_schema(server: Server, parameters: dict[str, Any]) -> None:
    """With `auto`, and in Ollama's API, which knows nothing else: a schema without a grammar does not fail the answer.
    A required call is refused by name."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {**CHAT, "tools": [tool], "max_tokens": 8, "ignore_eos": True}
    (made,) = json.loads(post(server, "/v1/chat/completions", body))["choices"]
    assert (made["finish_reason"], bool(made["message"]["content"])) == ("length", True)
    chat = {"model": "tiny", "messages": CHAT["messages"], "tools": [tool], "options": {"num_predict": 8}}
    last = json.loads(post(server, "/api/chat", chat).splitlines()[-1])
    assert last["done"] and last["done_reason"] in ("stop", "length")
    if parameters is not SCHEMAS["add"]:
        status, _, answer = server.request("POST", "/v1/chat/completions", {**body, "tool_choice": "required"})
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "tools")
        assert "`not` is not supported" in error["message"]
