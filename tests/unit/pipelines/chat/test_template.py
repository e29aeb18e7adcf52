"""Conversations rendered by templates of model families, and limits of templates."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from msgspec import structs

from shoal.errors import ConfigError, InvalidValue
from shoal.pipelines.chat import jinja
from shoal.pipelines.chat.messages import Form
from shoal.pipelines.chat.template import ChatTemplate
from shoal.types import Message, Part, Tool, ToolCall
from tests.fixtures.chat_templates import DEEPSEEK, FAMILIES, GEMMA, LLAMA3, MISTRAL, PARTS, QWEN
from tests.fixtures.tiny_llama import CHATML

PHI4 = """{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- if message['role'] == 'system' and 'tools' in message %}
        {{- '<|tool|>' + message['tools'] + '<|/tool|>' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = Tool(
    name="get_weather",
    description="The wéather <now> & here",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
)
HI = Message(role="user", content="Hi <b> & 'you'")
CALLED = [
    Message(role="user", content="Weather in Köln?"),
    Message(role="assistant", tool_calls=[ToolCall(id="call00001", name="get_weather", arguments='{"city": "Köln"}')]),
    Message(role="tool", content="21 degrees", tool_call_id="call00001"),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=TOKENS)


def rendered(source: str, *messages: Message, **options: Any) -> str:
    return template(source).render(list(messages), **options)


def test_a_plain_conversation() -> None:
    system = Message(role="system", content="Be brief.")
    assert rendered(QWEN, system, HI) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(MISTRAL, system, HI, tools=[]) == "<s>[INST] Be brief.\n\nHi <b> & 'you'[/INST]"
    assert rendered(GEMMA, HI) == "<s><start_of_turn>user\nHi <b> & 'you'<end_of_turn>\n<start_of_turn>model\n"


STRICT = """{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{- raise_exception('System first.') }}{% endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""
LAST = """{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{- '<system>' + ns.system }}
{%- for message in messages if message.role != 'system' %}{{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""
SILENT = """{%- for message in messages %}
    {%- if message.role != 'system' or loop.first %}{{- '<' + message.role + '>' + message.content }}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize(
    "source", [STRICT, SILENT, LAST, LAST.replace("= message.content", "= ns.system + message.content")]
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_instructions_where_they_are_not_shown(source: str, role: str) -> None:
    """Nor where they replace the first one, or join it: they become part of the user's turn."""
    first, later = Message(role="system", content="a"), Message(role=role, content="b")
    answer = Message(role="assistant", content="c")
    text = rendered(source, first, later, HI, answer, later, HI)
    assert text == f"<system>a\n\nb<user>{HI.content}<assistant>c<user><system>\nb\n</system>\n\n{HI.content}"


def test_later_instructions_where_they_are_shown() -> None:
    later = Message(role="developer", content="b")
    assert "<|im_start|>system\nb<|im_end|>" in rendered(QWEN, HI, later, HI)
    assert rendered(MISTRAL, HI, later).endswith("\n\n<system>\nb\n</system>[/INST]")


def test_tools_are_json_as_they_came() -> None:
    """No escapes for HTML or ASCII, and the order of keys is kept."""
    text = rendered(QWEN, HI, tools=[WEATHER])
    line = next(line for line in text.splitlines() if line.startswith('{"type"'))
    assert '"description": "The wéather <now> & here", "parameters"' in line
    assert json.loads(line)["function"]["parameters"] == WEATHER.parameters
    indented = rendered(LLAMA3, HI, tools=[WEATHER])
    assert '{\n    "type": "function",\n    "function": {\n        "name": "get_weather"' in indented


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (
            QWEN,
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        ),
        (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Köln"}}<|eot_id|>'),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}, "id": "call00001"}]</s>'
            '[TOOL_RESULTS] {"content": 21 degrees, "call_id": "call00001"}[/TOOL_RESULTS]',
        ),
        (DEEPSEEK, '<call>get_weather\n{"city": "Köln"}</call><result>21 degrees</result>'),
        (CHATML, '{"name": "get_weather", "arguments": {"city": "Köln"}}'),
    ],
)
def test_calls_and_their_results(source: str, call: str) -> None:
    """Some templates take arguments as an object, others as text; and missing content as None or as an empty text."""
    text = rendered(source, *CALLED, tools=[WEATHER])
    assert call in text
    assert "21 degrees" in text
    assert "None" not in text
    blank = structs.replace(CALLED[1], content="")
    assert rendered(source, CALLED[0], blank, CALLED[2], tools=[WEATHER]) == text


def test_a_call_beside_an_empty_text() -> None:
    """Some templates, such as DeepSeek's, show calls only where the content is null."""
    source = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
        "{{ c.function.arguments }}</call>{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    blanks: list[Any] = [None, "", []]
    for blank in blanks:
        text = rendered(source, CALLED[0], structs.replace(CALLED[1], content=blank), CALLED[2])
        assert text == '<user>Weather in Köln?<call>get_weather{"city": "Köln"}</call><tool>21 degrees'


def test_tools_within_the_system_message() -> None:
    """Phi-4-mini's template shows tools and calls only as texts of messages."""
    for text in (rendered(PHI4, HI, tools=[WEATHER]), rendered(PHI4, *CALLED, tools=[WEATHER])):
        assert text.startswith('<|system|><|tool|>[{"name": "get_weather", "description": "The wéather <now> & here"')
    assert '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Köln"}}]<|/tool_call|><|end|>' in text
    assert rendered(PHI4, Message(role="system", content="Be brief."), HI, tools=[WEATHER]).startswith(
        "<|system|>Be brief.<|tool|>["
    )
    assert rendered(PHI4, HI) == f"<|user|>{HI.content}<|end|><|assistant|>"
    assert template(PHI4).mentions_tools
    assert template(PHI4).parser == "phi4"


def test_calls_that_are_shown_as_content_only() -> None:
    """SmolLM3's template takes tools as `xml_tools`; neither it nor Granite's shows the calls of earlier messages."""
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    smollm = (
        "{% if xml_tools %}{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}<tool_call>{% endif %}" + turns
    )
    granite = "{% if tools %}{{ tools | tojson }}<|tool_call|>{% endif %}" + turns
    called = structs.replace(CALLED[1], tool_calls=CALLED[1].tool_calls * 2, content="Well.")
    call = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
    text = rendered(smollm, CALLED[0], called, CALLED[2], tools=[WEATHER])
    assert text.startswith("{'name': 'get_weather', 'description': 'The wéather <now> & here', 'parameters'")
    each = f"<tool_call>\n{call}\n</tool_call>"
    assert f"<assistant>Well.\n{each}\n{each}<tool>21 degrees" in text
    assert template(smollm).mentions_tools
    assert rendered(smollm, HI, variables={"xml_tools": ["mine"]}).startswith("mine<tool_call>")
    assert f"<assistant>Well.<|tool_call|>[{call}, {call}]<tool>" in rendered(
        granite, called, CALLED[2], tools=[WEATHER]
    )


def test_template_features_are_detected() -> None:
    assert template(QWEN).form == Form(parts="never", empty=None, later_instructions=True)
    assert template(DEEPSEEK).form == Form(parts="never", empty=None, json_arguments=True)
    assert template(PARTS).form == Form(parts="only", later_instructions=True)
    added = "{% for m in messages %}{{ m.content + m.tool_calls | default([]) | tojson }}{% endfor %}"
    assert template(added).form == Form(empty="", later_instructions=True)
    shown = "{% for m in messages %}{{ m.content | trim }}{{ m.tool_calls | default([]) | tojson }}{% endfor %}"
    assert template(shown).form == Form(empty="", later_instructions=True)


def test_arguments_that_are_no_json_go_back_as_they_were() -> None:
    broken = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f", arguments='{"city": ')])
    assert '"arguments": {"city": }' in rendered(QWEN, HI, broken)
    empty = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f", arguments="")])
    assert '"arguments": {}}' in rendered(QWEN, HI, empty)


def test_results_have_the_name_of_the_called_tool() -> None:
    source = "{% for m in messages %}{{ m.name }}={{ m.content }};{% endfor %}"
    assert rendered(source, *CALLED).endswith("get_weather=21 degrees;")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARTS, "<|user|>onetwo<|end|><|assistant|>"),
        (GEMMA, "<s><start_of_turn>user\none\ntwo<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_contents_in_parts(source: str, expected: str) -> None:
    """As parts if the template reads parts, else as one text."""
    assert rendered(source, Message(role="user", content=[Part(text="one"), Part(text="two")])) == expected


def test_a_template_that_reads_parts_gets_a_text_in_parts() -> None:
    assert rendered(PARTS, HI) == "<|user|>Hi <b> & 'you'<|end|><|assistant|>"
    silent = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f")])
    assert rendered(PARTS, HI, silent, add_generation_prompt=False).endswith("<|assistant|><|end|>")


def test_a_template_that_reads_both_gets_several_parts_as_they_are() -> None:
    both = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert template(both).form.parts == "also"
    assert rendered(both, Message(role="user", content=[Part(text="a"), Part(text="b")])) == "(a)(b)"
    assert rendered(both, Message(role="user", content=[Part(text="a")])) == "a"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = Message(role="developer", content="Be brief.")
    assert "<|im_start|>system\nBe brief." in rendered(QWEN, message, HI)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
    assert rendered(knows, message) == "DBe brief."


def test_the_old_role_of_function_results_is_tool() -> None:
    result = Message(role="function", name="f", content="42")
    assert rendered("{% for m in messages %}{{ m.role }}{% endfor %}", result) == "tool"
    assert rendered("{% for m in messages if m.role == 'function' %}!{% endfor %}", result) == "!"


def test_reasoning_that_came_back() -> None:
    thought = Message(role="assistant", content="4", reasoning="2+2")
    assert "<think>\n2+2\n</think>\n\n4" in rendered(QWEN, HI, thought)


def test_further_variables_reach_the_template() -> None:
    off = rendered(QWEN, HI, variables={"enable_thinking": False})
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "Today: 1 May 2031" in rendered(LLAMA3, HI, variables={"date_string": "1 May 2031"})
    assert rendered("{{ documents[0] }}", HI, variables={"documents": ["d"]}) == "d"
    assert rendered("{{ documents is none }}", HI) == "True"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_of_the_request_itself_are_not_replaced(name: str) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        rendered(QWEN, HI, variables={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_without_an_invitation_to_answer() -> None:
    assert rendered(QWEN, HI, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("content", ["It is", "It is ", "\nIt is", "a</s>b"])
def test_the_last_message_is_continued(content: str) -> None:
    messages = [HI, Message(role="assistant", content=content)]
    whole = rendered(GEMMA, *messages, add_generation_prompt=False)
    text = rendered(GEMMA, *messages, continue_final=True)
    assert whole.startswith(text)
    assert text.endswith("<start_of_turn>model\n" + content.strip())


def test_blanks_at_the_end_stay_where_the_template_keeps_them() -> None:
    messages = [HI, Message(role="assistant", content=[Part(text="It"), Part(text="is ")])]
    assert rendered(QWEN, *messages, continue_final=True).endswith("<|im_start|>assistant\nIt\nis ")


@pytest.mark.parametrize("content", [None, "", []])
def test_nothing_cannot_be_continued(content: Any) -> None:
    with pytest.raises(InvalidValue, match="no text to continue; add some"):
        rendered(QWEN, HI, Message(role="assistant", content=content), continue_final=True)


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(InvalidValue, match="does not show the end of the last message"):
        rendered("{{ messages[0].content }}", HI, Message(role="assistant", content="x"), continue_final=True)


@pytest.mark.parametrize(
    ("source", "mentions", "parser"),
    [
        (QWEN, True, "hermes"),
        (LLAMA3, True, "llama3"),
        (MISTRAL, True, "mistral"),
        (GEMMA, False, None),
        ("{{ 'tools' }}", False, None),
    ],
)
def test_whether_it_knows_tools_and_how_calls_are_written(source: str, mentions: bool, parser: str | None) -> None:
    assert (template(source).mentions_tools, template(source).parser) == (mentions, parser)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (GEMMA, "System role not supported"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 + messages[0].content }}", "TypeError: unsupported operand"),
        ("{{ undefined_thing() }}", "'undefined_thing' is undefined"),
        ("{{ messages[0].nothing | tojson }}", "TypeError: Object of type Undefined is not JSON serializable"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_refusals_are_in_the_templates_own_words(source: str, words: str) -> None:
    with pytest.raises(
        InvalidValue, match=f"the model's chat template rejects these messages: .*{re.escape(words)}"
    ) as e:
        rendered(source, Message(role="system", content="Be brief."), HI)
    assert e.value.param == "messages"


def test_loops_are_as_they_always_are() -> None:
    """Counting iterations changes nothing that a template can observe."""
    source = (
        "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{{ '.' if loop.last }}"
        "{% else %}never{% endfor %}{% for x in nothing %}{% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k ~ v ~ '!' }}{% endfor %}"
        "{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{% macro each(xs) %}{% for x in xs %}<{{ x }}>{% endfor %}{% endmacro %}{{ each('ab') }}"
    )
    assert rendered(source, HI) == "1/32/313/32.nonea1!02<a><b>"


def test_the_date_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    class FixedDate(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> FixedDate:
            return cls(2031, 5, 1)

    monkeypatch.setattr(jinja, "datetime", FixedDate)
    assert rendered("{{ strftime_now('%d %b %Y') }}", HI) == "01 May 2031"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("\n{{ x | unheard }}", "line 2: No filter named 'unheard'"),
        ("{% endfor %}", "line 1"),
        ("{% generation %}", "line 1"),
        ("{% if x %}" * 400 + "{% endif %}" * 400, "not valid Jinja"),
    ],
)
def test_a_broken_template_is_found_when_it_is_loaded(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ChatTemplate(source)


@pytest.mark.parametrize("source", [*FAMILIES.values(), CHATML, PARTS, DEEPSEEK])
def test_renderings_do_not_touch_each_other(source: str) -> None:
    chat_template = template(source)
    first = chat_template.render([HI])
    chat_template.render(CALLED[:1], tools=[WEATHER])
    assert chat_template.render([HI]) == first
