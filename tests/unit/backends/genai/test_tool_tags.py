"""Tags that keep tool calls valid, as the library reads them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from msgspec import structs

from shoal.backends.genai.sampling import structure_arguments
from shoal.backends.genai.structural_tags import write_tags
from shoal.errors import InvalidValue
from shoal.pipelines.chat.tool_tags import calls_or_answer, can_tag, marked_calls, required_calls
from shoal.pipelines.chat.tools import ToolParser, tool_parser
from shoal.types import Guide, Tool

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from tests.unit.backends.genai.grammar_matcher import GrammarMatcher

WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}
NODE = {"type": "object", "properties": {"n": WHOLE}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    Tool(name="add", parameters={**NODE, "properties": {"n": {"$ref": "#/$defs/whole"}}, "$defs": {"whole": WHOLE}}),
    Tool(name="add_more", parameters=NODE),
    Tool(name="now"),
]
FIRST, SECOND = ("add", '{"n": 1}'), ("add_more", '{"n": 22}')


@pytest.fixture(scope="module")
def matcher() -> GrammarMatcher:
    return GrammarMatcher()


def plain(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def marked(name: str, arguments: str) -> str:
    return f"<tool_call>\n{plain(name, arguments)}\n</tool_call>"


def calls_in(parser: ToolParser, text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of the calls in a text that has nothing else."""
    content, deltas = parser.push(text)
    rest, more = parser.flush()
    assert content + rest == ""
    calls: list[tuple[str, str]] = []
    for delta in [*deltas, *more]:
        if delta.name:
            calls.append((delta.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


@pytest.mark.parametrize(
    "calls", [[FIRST], [SECOND], [FIRST, SECOND, FIRST], [("now", "{}")], [("now", '{"zone": "utc"}')]]
)
def test_required_calls(matcher: GrammarMatcher, calls: list[tuple[str, str]]) -> None:
    """One or more, and the parser of plain calls reads them all."""
    text = "; ".join(plain(*call) for call in calls)
    assert matcher.accepts(text, structural_tags_config=write_tags(required_calls(TOOLS, "arguments")))
    assert calls_in(tool_parser("llama3", TOOLS), text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "well",
        plain("sub", '{"n": 1}'),
        plain("add", '{"n": 100}'),
        plain("add", "{}"),
        plain("now", "[]"),
        plain(*FIRST) + "; ",
        plain(*FIRST) + plain(*SECOND),
        plain(*FIRST) + " done",
        f"well {plain(*FIRST)}",
    ],
)
def test_what_a_required_call_is_not(matcher: GrammarMatcher, text: str) -> None:
    assert not matcher.accepts(text, structural_tags_config=write_tags(required_calls(TOOLS, "arguments")))


def test_noise_becomes_valid_calls(matcher: GrammarMatcher) -> None:
    """Whatever the model prefers."""
    tags = write_tags(required_calls(TOOLS[:2], "arguments"))
    texts = [matcher.sample(seed, 400, structural_tags_config=tags) for seed in range(30)]
    assert None not in texts
    calls = [calls_in(tool_parser("llama3", TOOLS), str(text)) for text in texts]
    assert {name for each in calls for name, _ in each} == {"add", "add_more"}
    assert all(0 <= json.loads(arguments)["n"] <= 99 for each in calls for _, arguments in each)


@pytest.mark.parametrize("parallel", [True, False])
def test_marked_calls(matcher: GrammarMatcher, parallel: bool) -> None:
    """Text stays free; a call once begun is valid; without `parallel` nothing follows it."""
    tags: dict[str, Any] = {"structural_tags_config": write_tags(marked_calls(TOOLS, parallel=parallel))}
    for text in ("", "a <tool> or { }", f"well {marked(*FIRST)}", marked("now", "{}")):
        assert matcher.accepts(text, **tags), text
    for text in (marked("sub", '{"n": 1}'), marked("add", '{"n": "x"}'), "well <tool_call>", marked(*FIRST)[:-5]):
        assert not matcher.accepts(text, **tags), text
    for text in (f"{marked(*FIRST)}\n{marked(*SECOND)}", f"{marked(*FIRST)} done"):
        assert matcher.accepts(text, **tags) == parallel, text
    both = f"{marked(*FIRST)}\n{marked(*SECOND)}"
    assert calls_in(tool_parser("hermes", TOOLS, parallel=True), both) == [FIRST, SECOND]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_or_an_answer(matcher: GrammarMatcher, parallel: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tags: dict[str, Any] = {"structural_tags_config": write_tags(calls_or_answer(TOOLS, schema, parallel=parallel))}
    for text in ('{"city": "K\xf6ln"}', marked(*FIRST), marked("now", "{}")):
        assert matcher.accepts(text, **tags), text
    for text in ("", "well", '{"n": 1}', plain(*FIRST), marked("sub", "{}"), marked(*FIRST) + '{"city": "x"}'):
        assert not matcher.accepts(text, **tags), text
    both = f"{marked(*FIRST)}\n{marked(*SECOND)}"
    assert matcher.accepts(both, **tags) == parallel
    assert calls_in(tool_parser("hermes", TOOLS, parallel=True), both) == [FIRST, SECOND]


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_or_an_answer_of_tools_without_a_grammar(matcher: GrammarMatcher, parallel: bool) -> None:
    """Only their arguments are free; an answer's schema without a grammar is refused."""
    tools = [*TOOLS, Tool(name="free", parameters={"type": "object", "not": {}})]
    guide = Guide(kind="calls_or_answer", value=calls_or_answer(tools, NODE, parallel=parallel))
    tags: dict[str, Any] = structure_arguments(guide)
    for text in ('{"n": 1}', marked(*FIRST), marked("free", '{"x": [1]}')):
        assert matcher.accepts(text, **tags), text
    for text in ('{"x": 1}', marked("add", '{"x": 1}'), marked("free", "1")):
        assert not matcher.accepts(text, **tags), text
    with pytest.raises(InvalidValue, match="`not` is not supported"):
        structure_arguments(structs.replace(guide, kind="structural_tag"))
    with pytest.raises(InvalidValue, match="`not` is not supported"):
        structure_arguments(structs.replace(guide, value=calls_or_answer(tools, {"not": {}}, parallel=parallel)))


def test_names_beyond_ascii() -> None:
    assert can_tag(TOOLS)
    assert not can_tag([*TOOLS, Tool(name="gr\xf6\xdfe")])
