"""Typed tasks as bodies of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shoal.backends.openai.request import build_request
from shoal.errors import InvalidValue, Unsupported
from shoal.types import Generate, Guide, Message, Part, Sampling, Tool, ToolCall

HI = [Message(role="user", content="hi")]
WEATHER = Tool(name="weather", description="tells it", parameters={"type": "object"})


def body(**fields: Any) -> dict[str, Any]:
    """Return the body without the fields that every body has."""
    fields.setdefault("messages", HI)
    path, data = build_request(Generate(model="m", **fields), "up", defaults={})
    assert path == "/chat/completions"
    found: dict[str, Any] = json.loads(data)
    assert found.pop("model") == "up"
    if fields["messages"] == HI:
        assert found.pop("messages") == [{"role": "user", "content": "hi"}]
    return found


class TestChat:
    def test_unset_fields_are_omitted(self) -> None:
        assert body() == {}

    def test_a_stream_asks_for_its_usage(self) -> None:
        assert body(stream=True) == {"stream": True, "stream_options": {"include_usage": True}}

    def test_parts_that_only_a_passed_on_body_can_hold(self) -> None:
        parts = [Part(text="what?"), Part(type="other", kind="input_audio")]
        with pytest.raises(Unsupported, match="cannot convert parts of type 'input_audio'"):
            body(messages=[Message(role="user", content=parts)])

    def test_messages(self) -> None:
        parts = [Part(text="what?"), Part(type="image", url="data:x")]
        call = ToolCall(id="c1", name="weather", arguments='{"a":1}')
        messages = [
            Message(role="system", content="be brief"),
            Message(role="user", content=parts, name="ann"),
            Message(role="assistant", tool_calls=[call], reasoning="hm"),
            Message(role="tool", content="sun", tool_call_id="c1"),
        ]
        function = {"name": "weather", "arguments": '{"a":1}'}
        assert body(messages=messages)["messages"] == [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
                "reasoning_content": "hm",
            },
            {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        ]

    def test_instructions(self) -> None:
        """One system message at each place, since many chat templates accept no more."""
        messages = [
            Message(role="system", content="be brief"),
            Message(role="developer", content=[Part(text="be kind"), Part(text="be true")]),
            *HI,
            Message(role="developer", content="now"),
            Message(role="developer", content=[Part(type="image", url="data:x")]),
        ]
        image = {"type": "image_url", "image_url": {"url": "data:x"}}
        assert body(messages=messages)["messages"] == [
            {"role": "system", "content": "be brief\n\nbe kind\n\nbe true"},
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "now"},
            {"role": "system", "content": [image]},
        ]

    @pytest.mark.parametrize(("folds", "later"), [(True, "user"), (False, "system")])
    def test_later_instructions(self, folds: bool, later: str) -> None:
        """They become part of the user's turn if the task says so, else they are sent as they came."""
        messages = [*HI, Message(role="assistant", content="hey"), Message(role="system", content="now")]
        sent = body(messages=messages, folds_instructions=folds)["messages"]
        assert sent[-1] == {"role": later, "content": "<system>\nnow\n</system>" if folds else "now"}

    def test_reasoning_effort(self) -> None:
        """A field of its own; other variables of the template are in vLLM's field."""
        assert body(template_kwargs={"reasoning_effort": "low"}) == {"reasoning_effort": "low"}
        assert body(template_kwargs={"reasoning_effort": "low", "x": 1}) == {
            "reasoning_effort": "low",
            "chat_template_kwargs": {"x": 1},
        }

    def test_the_name_of_the_length(self) -> None:
        """Only chats have the new one."""
        sampling = Sampling(max_tokens=3)
        chat = Generate(model="m", messages=HI, sampling=sampling)
        prompt = Generate(model="m", prompts=["a"], sampling=sampling)
        for task, name in ((chat, "max_completion_tokens"), (prompt, "max_tokens")):
            _, data = build_request(task, "up", defaults={}, length_field="max_completion_tokens")
            assert {key: value for key, value in json.loads(data).items() if "max" in key} == {name: 3}

    def test_a_named_schema(self) -> None:
        guide = Guide(kind="json_schema", value="{}", name="mine", strict=True)
        form = {"type": "json_schema", "json_schema": {"name": "mine", "schema": {}, "strict": True}}
        assert body(sampling=Sampling(guide=guide)) == {"response_format": form}

    def test_tools(self) -> None:
        function = {"name": "weather", "description": "tells it", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        assert body(tools=[WEATHER]) == {"tools": tools}
        assert body(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False) == {
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        choice = {"type": "function", "function": {"name": "weather"}}
        assert body(tools=[WEATHER], tool_choice="function", tool_name="weather")["tool_choice"] == choice
        assert body(tools=[Tool(name="x", strict=True)])["tools"][0]["function"] == {"name": "x", "strict": True}
        assert body(tool_choice="none") == {}

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"n": 2}, {"n": 2}),
            ({"continue_final": True}, {"continue_final_message": True, "add_generation_prompt": False}),
            ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
            ({"template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
            ({"include_reasoning": False}, {"include_reasoning": False}),
            ({"extras": {"vllm_xargs": msgspec.Raw(b'{"a":1}')}}, {"vllm_xargs": {"a": 1}}),
        ],
    )
    def test_other_fields(self, fields: dict[str, Any], expected: dict[str, Any]) -> None:
        assert body(**fields) == expected

    def test_the_task_wins_over_extras_and_defaults(self) -> None:
        extras = {"temperature": msgspec.Raw(b"2"), "user": msgspec.Raw(b'"u"')}
        task = Generate(model="m", messages=HI, sampling=Sampling(temperature=0.5), extras=extras)
        _, data = build_request(
            task, "up", strip=("messages", "seed"), defaults={"temperature": 1, "seed": 3, "top_k": 9}
        )
        assert json.loads(data) == {"model": "up", "temperature": 0.5, "user": "u", "top_k": 9}


class TestSampling:
    @pytest.mark.parametrize(
        "name",
        [
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "length_penalty",
        ],
    )
    def test_numbers_keep_their_names(self, name: str) -> None:
        fields: dict[str, Any] = {name: 0}
        assert body(sampling=Sampling(**fields)) == fields

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"stop": ["a"], "stop_token_ids": [3]}, {"stop": ["a"], "stop_token_ids": [3]}),
            ({"bad_words": ["x"], "ignore_eos": True}, {"bad_words": ["x"], "ignore_eos": True}),
            ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
            ({"include_stop": True}, {"include_stop_str_in_output": True}),
            ({"logit_bias": {7: -1.5}}, {"logit_bias": {"7": -1.5}}),
            ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
            ({"logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
        ],
    )
    def test_other_fields_have_their_wire_names(self, fields: dict[str, Any], expected: dict[str, Any]) -> None:
        assert body(sampling=Sampling(**fields)) == expected

    def test_every_field_is_known(self) -> None:
        """A field that is added to Sampling later must be handled here."""
        values: dict[str, Any] = {
            "stop": ["a"],
            "stop_token_ids": [1],
            "bad_words": ["b"],
            "logit_bias": {1: 1.0},
            "guide": Guide(kind="json_object"),
        }
        for name in Sampling.__struct_fields__:
            assert body(sampling=Sampling(**{name: values.get(name, 1)})), name

    @pytest.mark.parametrize(
        ("guide", "expected"),
        [
            (Guide(kind="json_object"), {"response_format": {"type": "json_object"}}),
            (
                Guide(kind="json_schema", value='{"type": "object"}'),
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": {"type": "object"}},
                    }
                },
            ),
            (Guide(kind="regex", value="a+"), {"structured_outputs": {"regex": "a+"}}),
            (Guide(kind="grammar", value="root ::= x"), {"structured_outputs": {"grammar": "root ::= x"}}),
            (Guide(kind="choice", value='["a","b"]'), {"structured_outputs": {"choice": ["a", "b"]}}),
            (
                Guide(kind="structural_tag", value='{"structures":[]}'),
                {"response_format": {"type": "structural_tag", "structures": []}},
            ),
        ],
    )
    def test_guides(self, guide: Guide, expected: dict[str, Any]) -> None:
        assert body(sampling=Sampling(guide=guide)) == expected

    def test_a_guide_that_is_no_json(self) -> None:
        with pytest.raises(InvalidValue, match="choice: not JSON"):
            body(sampling=Sampling(guide=Guide(kind="choice", value="[")))


class TestCompletions:
    @pytest.mark.parametrize(
        ("prompts", "expected"),
        [(["a"], "a"), ([[1, 2]], [1, 2]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]])],
    )
    def test_prompts(self, prompts: list[Any], expected: Any) -> None:
        task = Generate(model="m", prompts=prompts, sampling=Sampling(logprobs=2), echo=True, best_of=3)
        path, data = build_request(task, "up", defaults={})
        assert path == "/completions"
        assert json.loads(data) == {"model": "up", "prompt": expected, "logprobs": 2, "echo": True, "best_of": 3}

    def test_texts_and_ids_do_not_mix(self) -> None:
        with pytest.raises(InvalidValue, match="all texts or all token ids"):
            build_request(Generate(model="m", prompts=["a", [1]]), "up", defaults={})
