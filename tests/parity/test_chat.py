"""Conversations as transformers renders them, and texts as it decodes them, from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.base.chat_pipeline import load_chat_pipeline
from shoal.config.settings import Settings
from shoal.errors import InvalidValue
from shoal.pipelines.chat.detokenize import Detokenizer
from shoal.types import Generate, Message, Tool, ToolCall
from tests.fixtures import tiny_llama
from tests.fixtures.chat_templates import FAMILIES

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEMPLATES = FAMILIES | {"chatml": tiny_llama.CHATML}
TOOLS = [
    Tool(
        name="get_weather",
        description='The wéather <now> & "here"',
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    ),
    Tool(name="now", description="The time", parameters={"type": "object", "properties": {}}),
]
HI = Message(role="user", content="  Hi <b> & 'you', 東京\n")
SYSTEM = Message(role="system", content="Be brief.")
ANSWER = Message(role="assistant", content=" It is noon. ")
CALLED = [
    Message(role="user", content="Weather?"),
    Message(
        role="assistant",
        tool_calls=[ToolCall(id="call00001", name="get_weather", arguments='{"city": "Köln", "days": [1, 2.5, null]}')],
    ),
    Message(role="tool", content='{"degrees": 21}', tool_call_id="call00001", name="get_weather"),
]
CONVERSATIONS = {
    "short": [HI],
    "system": [SYSTEM, HI],
    "long": [SYSTEM, HI, ANSWER, HI],
    "called": CALLED,
    "answered": [SYSTEM, *CALLED, ANSWER, HI],
    "twice": [HI, HI],
}


def plain(message: Message) -> dict[str, Any]:
    """A message in the form that transformers documents."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields


def plain_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_are_rendered_as_by_transformers(
    tmp_path: Path, kind: tiny_llama.Kind, name: str, tools: list[Tool], conversation: str
) -> None:
    """The same ids, or both reject the conversation."""
    tiny_llama.write_tokenizer(tmp_path, kind=kind, template=TEMPLATES[name])
    messages = CONVERSATIONS[conversation]
    pipeline = load_chat_pipeline(tmp_path, Settings(tool_call_parser="hermes"))
    task = Generate(model="m", messages=messages, tools=tools)
    try:
        expected = reference(tmp_path).apply_chat_template(
            [plain(message) for message in messages],
            tools=[plain_tool(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception:  # the template's own exception, of a class that differs between versions
        with pytest.raises(InvalidValue):
            pipeline.prompts(task)
        return
    assert list(pipeline.prompts(task)[0].ids or ()) == list(expected)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["It is", "It is ", " It\n\n", "<|im_end|>"])
def test_the_last_message_is_continued_as_by_transformers(tmp_path: Path, name: str, content: str) -> None:
    tiny_llama.write_tokenizer(tmp_path, template=TEMPLATES[name])
    messages = [Message(role="user", content="Hi"), Message(role="assistant", content=content)]
    expected = reference(tmp_path).apply_chat_template(
        [plain(message) for message in messages], continue_final_message=True, tokenize=True, return_dict=False
    )
    task = Generate(model="m", messages=messages, continue_final=True)
    assert list(load_chat_pipeline(tmp_path, Settings()).prompts(task)[0].ids or ()) == list(expected)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", [*tiny_llama.SENTENCES, "🤗 👩‍🚀\u0301 x  y", "東京" * 20, "\n\n tab\there"])
@pytest.mark.parametrize("skip", [True, False])
def test_streams_join_to_the_text_of_transformers(tmp_path: Path, kind: tiny_llama.Kind, text: str, skip: bool) -> None:
    tiny_llama.write_tokenizer(tmp_path, kind=kind)
    vocabulary = load_chat_pipeline(tmp_path, Settings()).vocabulary
    assert vocabulary is not None
    tokenizer = reference(tmp_path)
    ids = [tiny_llama.IM_START, *tokenizer(text, add_special_tokens=False)["input_ids"], tiny_llama.IM_END]
    expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip)
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == expected


def test_plain_prompts_are_framed_as_by_transformers(tmp_path: Path) -> None:
    tiny_llama.write_tokenizer(tmp_path)
    prompts = ["the weather", "", "<|im_start|>user"]
    expected = reference(tmp_path)(prompts)["input_ids"]
    result = load_chat_pipeline(tmp_path, Settings()).prompts(Generate(model="m", prompts=[*prompts]))
    assert [list(prompt.ids or ()) for prompt in result] == expected
