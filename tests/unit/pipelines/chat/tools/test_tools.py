"""The parser for a template, and the creation of parsers."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from shoal.pipelines.chat.tools import ParserKind, detect, marks, tool_parser
from shoal.types import Tool

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN = CHATML + '{% if tools %}<tools>...</tools>\n<tool_call>\n{"name": <function-name>}\n</tool_call>{% endif %}'
QWEN_CODER = CHATML + "{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=a>' }}"
GLM = "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>"
MISTRAL = '{{- "[TOOL_CALLS] [" }}{{ call|tojson }}{{ "]" + eos_token }}'
LLAMA_31 = "{{- '<|start_header_id|>' }}{{- '<|python_tag|>' + tool_call.name + '.call(' }}"
LLAMA_4_JSON = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.' }}"""
LLAMA_ESCAPED = '{{- "Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary}." }}'
PYTHONIC = "{{- 'in the format [func_name1(params_name1=params_value1...), func_name2(params)]' }}<|python_tag|>"
LFM = "{{ '<|tool_call_start|>' }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", None),
        (CHATML, None),
        (QWEN, "hermes"),
        (QWEN_CODER, "hermes"),
        (GLM, None),
        ("<tool_call>\n<steptml:invoke name=", None),
        ("<tool_call>\n<invoke name=", None),
        ("within <tool_call></tool_call> XML tags: <tool_calls>[", None),
        ("<|python_tag|><function=example>{{parameters}}</function>", None),
        ("{{ 'List of tools: <|tool_list_start|>[' }}", "pythonic"),
        ("{{ 'List of tools: [' }}", "pythonic"),
        (MISTRAL, "mistral"),
        (LLAMA_31, "llama3"),
        (LLAMA_4_JSON, "llama3"),
        (LLAMA_ESCAPED, "llama3"),
        (PYTHONIC, "pythonic"),
        (LFM, "pythonic"),
        ("{{ messages[0]['content'](x) }} {{ [f(tools)] }}", None),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4"),
        ("{{ '<|tool_call|>' + (tool_call['function'] | tojson) }}", "phi4"),
        ("{{ 'formatted as functools[{...}]' }}", "phi4"),
        ("{{ '<start_function_call>call:' + name }}", "gemma"),
        ("{{ '<|tool_call>call:' + name + '{' }}", "gemma"),
        ("<start_of_turn>user", None),
        ("<tool_calls>[", None),
    ],
)
def test_the_parser_of_a_template(template: str, expected: ParserKind | None) -> None:
    assert detect(template) == expected


CALLS: dict[ParserKind, str] = {
    "hermes": '<tool_call>{"name": "f"}</tool_call>',
    "llama3": '{"name": "f"}',
    "mistral": "[TOOL_CALLS]f{}",
    "pythonic": "[f()]",
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c>f<\uff5ctool\u2581sep\uff5c>{}",
    "phi4": '<|tool_call|>{"name": "f"}',
    "gemma": "<|tool_call>call:f{}",
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("hermes", r"call_[0-9a-f]{24}"),
        ("llama3", r"call_[0-9a-f]{24}"),
        ("mistral", r"[A-Za-z0-9]{9}"),
        ("pythonic", r"call_[0-9a-f]{24}"),
        ("deepseek", r"call_[0-9a-f]{24}"),
        ("phi4", r"call_[0-9a-f]{24}"),
        ("gemma", r"call_[0-9a-f]{24}"),
    ],
)
def test_ids_have_the_form_that_templates_want_back_and_differ(kind: ParserKind, form: str) -> None:
    ids = set()
    for _ in range(20):
        _, deltas = tool_parser(kind, [Tool(name="f")]).push(CALLS[kind])
        assert re.fullmatch(form, deltas[0].id)
        ids.add(deltas[0].id)
    assert len(ids) == 20


def test_with_no_tools_only_marked_calls_are_calls() -> None:
    for kind in get_args(ParserKind):
        content, deltas = tool_parser(kind, []).push(CALLS[kind])
        assert (content, bool(deltas)) == (("", True) if kind not in ("llama3", "pythonic") else (CALLS[kind], False))


@pytest.mark.parametrize("kind", get_args(ParserKind))
def test_marks_identify_the_format(kind: ParserKind) -> None:
    special_texts = marks(kind)
    assert len(special_texts) >= 2
    assert all(mark[0] in "<[" and mark[-1] in ">]" for mark in special_texts)


@pytest.mark.parametrize("name", ["a/b", "my tool", "a:b", "gr\xfc\xdfe-]^", "get_weather"])
@pytest.mark.parametrize("spaced", ["", " "])
def test_offered_names_may_have_any_characters(name: str, spaced: str) -> None:
    tools = [Tool(name=name)]
    calls: dict[ParserKind, str] = {
        "mistral": f"[TOOL_CALLS]{name}{spaced}[ARGS]{{}}",
        "deepseek": f"<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>{spaced}{{}}",
        "gemma": f"<|tool_call>call:{name}{{}}",
    }
    for kind, text in calls.items():
        reader = tool_parser(kind, tools)
        content, deltas = reader.push("")
        for char in text:
            more, found = reader.push(char)
            content, deltas = content + more, [*deltas, *found]
        assert (content, deltas[0].name, deltas[1].arguments[0]) == ("", name, "{")
        other = text.replace(name, f"{name} and {name}")
        content, deltas = tool_parser(kind, tools).push(other)
        assert (content, deltas) == (other, [])
