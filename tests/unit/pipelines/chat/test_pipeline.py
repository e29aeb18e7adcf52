"""Tasks to prompts and decoders, with a real tokenizer and templates of several families."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
import pytest

from shoal.core.protocols import ChatPipeline, Piece, Prompt
from shoal.errors import InvalidValue, TooLong, Unsupported
from shoal.pipelines.chat.pipeline import ChatOptions, TextChatPipeline
from shoal.pipelines.chat.template import ChatTemplate
from shoal.pipelines.chat.vocabulary import Vocabulary
from shoal.types import Generate, Guide, Message, Part, Sampling, Tool, ToolCall
from tests.fixtures import tiny_llama
from tests.fixtures.chat_templates import DEEPSEEK, GEMMA, LLAMA3, MISTRAL, QWEN
from tests.unit.pipelines.chat.chat_kit import vocabulary

HI = Message(role="user", content="Hi")
SYSTEM = Message(role="system", content="Be brief.")
WEATHER = Tool(name="get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
NOW = Tool(name="now")
CALL = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'


def pipeline(
    source: str | None = tiny_llama.CHATML, kind: str | None = "byte_level", **options: Any
) -> TextChatPipeline:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}) if source else None
    return TextChatPipeline(vocabulary(kind) if kind else None, template, ChatOptions(**options))


def chat(*messages: Message, **fields: Any) -> Generate:
    return Generate(model="m", messages=list(messages) or [HI], **fields)


def only(chat: TextChatPipeline, task: Generate) -> Prompt:
    chat.check(task)
    (prompt,) = chat.prompts(task)
    return prompt


def long_talk(turns: int) -> list[Message]:
    messages = [SYSTEM]
    for number in range(turns):
        messages += [
            Message(role="user", content=f"question {number}"),
            Message(role="assistant", tool_calls=[ToolCall(id=f"c{number}", name="now", arguments="{}")]),
            Message(role="tool", content="noon", tool_call_id=f"c{number}"),
            Message(role="assistant", content=f"answer {number}"),
        ]
    return [*messages, Message(role="user", content="and now?")]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters in each tokenizer call."""
    lengths: list[int] = []
    encode = Vocabulary.encode

    def spy(self: Vocabulary, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        lengths.append(len(text))
        return encode(self, text, special=special, param=param)

    monkeypatch.setattr(Vocabulary, "encode", spy)
    return lengths


def test_it_is_the_seam() -> None:
    seam: ChatPipeline = pipeline()
    assert seam.tools_guide(chat()) is None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_conversation_begins_with_one_first_token(kind: str) -> None:
    """The template writes it; the prompt text leaves it to the tokenizer of the backend."""
    prompt = only(pipeline(kind=kind), chat(SYSTEM, HI))
    assert prompt.ids is not None
    assert prompt.ids[0] == tiny_llama.BOS
    assert prompt.ids.count(tiny_llama.BOS) == 1
    assert prompt.text.startswith("<|im_start|>system\nBe brief.")
    assert prompt.tokens == len(prompt.ids)
    assert vocabulary(kind).encode(prompt.text, special=True)[0] == tiny_llama.BOS


def test_prompts_of_every_kind() -> None:
    chat_pipeline = pipeline()
    ids = vocabulary().encode("the weather", special=True)
    task = Generate(model="m", prompts=["the weather", ids, ids[1:], ""])
    chat_pipeline.check(task)
    texts, whole, bare, empty = chat_pipeline.prompts(task)
    assert texts == whole == Prompt(text="the weather", ids=tuple(ids), tokens=len(ids))
    assert bare == Prompt(text="the weather", ids=tuple(ids[1:]), tokens=len(ids) - 1)
    assert empty == Prompt(text="", ids=(tiny_llama.BOS,), tokens=1)


def test_without_a_tokenizer_there_are_texts_only() -> None:
    chat_pipeline = pipeline(kind=None)
    assert chat_pipeline.prompts(Generate(model="m", prompts=["the"])) == [Prompt(text="the")]
    assert only(chat_pipeline, chat()).text.startswith("<s><|im_start|>user\nHi")
    for ask in (chat_pipeline.check, chat_pipeline.prompts):
        with pytest.raises(Unsupported, match="send the prompt as a text") as caught:
            ask(Generate(model="m", prompts=[[1, 2]]))
        assert caught.value.param == "prompt"
    with pytest.raises(Unsupported, match="no tokenizer to decode them"):
        chat_pipeline.decoder(chat(), Prompt(text=""), 0, "ids")


@pytest.mark.parametrize("ids", [[448], [-1], [0, 1, 1_000_000]])
def test_ids_that_are_no_tokens(ids: list[int]) -> None:
    task = Generate(model="m", prompts=["fine", ids])
    for ask in (pipeline().check, pipeline().prompts):
        with pytest.raises(InvalidValue, match="between 0 and 447") as caught:
            ask(task)
        assert caught.value.param == "prompt"


def test_unsupported_options_are_refused_at_once() -> None:
    with pytest.raises(Unsupported, match=r"no chat template: use /v1/completions"):
        pipeline(None).check(chat())
    with pytest.raises(Unsupported, match="no chat template"):
        pipeline(None).prompts(chat())
    audio = Message(role="user", content=[Part(text="what?"), Part(type="other", kind="input_audio")])
    with pytest.raises(Unsupported, match="does not accept parts of type 'input_audio'") as caught:
        pipeline().check(chat(audio))
    assert caught.value.param == "messages"
    image = Message(role="user", content=[Part(text="what?"), Part(type="image", url="data:,")])
    with pytest.raises(Unsupported, match="does not accept images") as caught:
        pipeline().check(chat(image))
    assert caught.value.param == "messages"


class TestTools:
    def test_a_template_without_tools(self) -> None:
        """Clients offer tools without knowing the model: the answer has no calls and a warning."""
        task = chat(tools=[WEATHER])
        chat_pipeline = pipeline(GEMMA)
        chat_pipeline.check(task)
        (prompt,) = chat_pipeline.prompts(task)
        assert prompt.ignored == ("tools",)
        assert prompt.ids == chat_pipeline.prompts(chat())[0].ids
        assert pipeline(GEMMA, tool_parser="hermes").prompts(task)[0].ignored == ()
        assert chat_pipeline.prompts(chat(tools=[WEATHER], tool_choice="none"))[0].ignored == ()

    @pytest.mark.parametrize("choice", ["required", "function"])
    def test_a_call_that_is_demanded_of_a_template_without_tools(self, choice: Any) -> None:
        """The request is refused unless the operator ignores such demands."""
        task = chat(tools=[WEATHER], tool_choice=choice, tool_name=WEATHER.name)
        with pytest.raises(Unsupported, match="does not support tools") as caught:
            pipeline(GEMMA).check(task)
        assert caught.value.param == "tool_choice"
        lax = pipeline(GEMMA, ignore=frozenset({"tool_choice"}))
        lax.check(task)
        assert lax.tools_guide(task) is None
        assert lax.prompts(task)[0].ignored == ("tools",)

    @pytest.mark.parametrize(
        ("fields", "kind", "words"),
        [
            ({"tool_choice": "required"}, InvalidValue, "requires a tool, which is not in 'tools'"),
            (
                {"tools": [WEATHER], "tool_choice": "function", "tool_name": "other"},
                InvalidValue,
                "requires the tool 'other', which is not in 'tools'",
            ),
        ],
    )
    def test_tool_choices_without_matching_tools(
        self, fields: dict[str, Any], kind: type[Exception], words: str
    ) -> None:
        with pytest.raises(kind, match=words) as caught:
            pipeline(QWEN).check(chat(**fields))
        assert getattr(caught.value, "param", None) == "tool_choice"

    def test_calls_in_a_form_that_is_not_known(self) -> None:
        source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
        pipeline(source).check(chat(tools=[WEATHER]))
        for chat_pipeline in (pipeline(source), pipeline(QWEN, tool_parser=None)):
            with pytest.raises(Unsupported, match="the format of this model's tool calls is unknown"):
                chat_pipeline.check(chat(tools=[WEATHER], tool_choice="required"))

    def test_which_of_them_the_template_shows(self) -> None:
        chat_pipeline = pipeline(QWEN)
        both = only(chat_pipeline, chat(tools=[WEATHER, NOW])).text
        assert "get_weather" in both
        assert '"now"' in both
        assert "get_weather" not in only(chat_pipeline, chat(tools=[WEATHER, NOW], tool_choice="none")).text
        named = only(chat_pipeline, chat(tools=[WEATHER, NOW], tool_choice="function", tool_name="now")).text
        assert "get_weather" not in named
        assert '"now"' in named

    def test_a_template_of_their_own(self) -> None:
        chat_pipeline = TextChatPipeline(vocabulary(), ChatTemplate(GEMMA), tools_template=ChatTemplate(QWEN))
        assert chat_pipeline.tool_parser == "hermes"
        assert "<start_of_turn>" in only(chat_pipeline, chat()).text
        assert "<tools>" in only(chat_pipeline, chat(tools=[WEATHER])).text

    @pytest.mark.parametrize(("source", "key"), [(QWEN, "arguments"), (LLAMA3, "parameters"), (MISTRAL, "arguments")])
    def test_guides_for_a_backend_that_supports_them(self, source: str, key: str) -> None:
        guide = pipeline(source).tools_guide(chat(tools=[WEATHER], tool_choice="required"))
        assert guide is not None
        assert guide.kind == "json_schema"
        assert json.loads(guide.value)["required"] == ["name", key]
        assert pipeline(source).tools_guide(chat(tools=[WEATHER])) is None

    @pytest.mark.parametrize(("source", "key"), [(QWEN, "arguments"), (LLAMA3, "parameters"), (MISTRAL, "arguments")])
    def test_guides_for_a_backend_with_structural_tags(self, source: str, key: str) -> None:
        """Several calls where the client allows them; one where it names the tool."""
        for fields, kind in (
            ({"tool_choice": "required"}, "structural_tag"),
            ({"tool_choice": "required", "parallel_tool_calls": False}, "json_schema"),
            ({"tool_choice": "function", "tool_name": WEATHER.name}, "json_schema"),
        ):
            guide = pipeline(source).tools_guide(chat(tools=[WEATHER], **fields), tags=True)
            assert guide is not None
            assert (guide.kind, guide.field, guide.optional) == (kind, "tools", False)
            assert f'"{key}' in guide.value.replace("\\", "")

    def test_optional_guides(self) -> None:
        """Calls are kept valid, except those of formats without a single spelling."""
        guide = pipeline(QWEN).tools_guide(chat(tools=[WEATHER]), tags=True)
        assert guide is not None
        assert (guide.kind, guide.field, guide.optional) == ("structural_tag", "tools", True)
        assert pipeline(QWEN).tools_guide(chat(tools=[WEATHER], tool_choice="none"), tags=True) is None
        for source, trigger in (
            (LLAMA3, '{"name": "get_weather"'),
            (MISTRAL, "[TOOL_CALLS]"),
            (QWEN + "{# <function= #}", "<tool_call>"),
        ):
            guide = pipeline(source).tools_guide(chat(tools=[WEATHER]), tags=True)
            assert guide is not None
            assert json.loads(guide.value)["format"]["triggers"] == [trigger]
        assert pipeline(QWEN, tool_parser="pythonic").tools_guide(chat(tools=[WEATHER]), tags=True) is None

    @pytest.mark.parametrize("kind", ["json_object", "json_schema"])
    def test_calls_beside_a_requested_form(self, kind: Literal["json_object", "json_schema"]) -> None:
        """The model may call or answer in JSON; the answer is read as such even if its prompt ends in reasoning."""
        requested = Guide(kind=kind, value='{"type": "array"}' if kind == "json_schema" else "", field="format")
        task = chat(tools=[WEATHER], sampling=Sampling(guide=requested))
        made = pipeline(QWEN, reasoning="think")
        guide = made.tools_guide(task, tags=True)
        assert guide is not None
        assert (guide.kind, guide.field, guide.optional) == ("calls_or_answer", "format", False)
        answer, call = json.loads(guide.value)["format"]["elements"]
        assert answer["json_schema"] == {"type": "array" if kind == "json_schema" else "object"}
        assert call["begin"] == "<tool_call>"
        task = msgspec.structs.replace(task, sampling=Sampling(guide=guide))
        for text, calls, content in ((CALL, 1, ""), ("[1]", 0, "[1]")):
            decoder = made.decoder(task, Prompt(text="", ends_in_reasoning=True), 0, "delta")
            chunks = [*decoder.push(Piece(text=text)), *decoder.flush("stop")]
            assert sum(bool(chunk.tools) for chunk in chunks) == calls
            assert "".join(chunk.text for chunk in chunks) == content

    @pytest.mark.parametrize("kind", ["regex", "structural_tag"])
    def test_reasoning_beside_a_pattern_of_all_that_is_written(self, kind: Literal["regex", "structural_tag"]) -> None:
        """It is read as without tools."""
        task = chat(tools=[WEATHER], sampling=Sampling(guide=Guide(kind=kind, value="(?s).*")))
        made = pipeline(QWEN, reasoning="think")
        assert made.tools_guide(task, tags=True) is None
        decoder = made.decoder(task, Prompt(text=""), 0, "delta")
        chunks = [*decoder.push(Piece(text="<think>hm</think>so")), *decoder.flush("stop")]
        assert ("".join(chunk.reasoning for chunk in chunks), "".join(chunk.text for chunk in chunks)) == ("hm", "so")

    def test_forms_that_make_calls_impossible(self) -> None:
        """They are refused, unless they are of all that is written, or the model has no calls anyway."""
        form = Sampling(guide=Guide(kind="json_object"))
        choice = Sampling(guide=Guide(kind="choice", value='["a"]', field="guided_choice"))
        for source, sampling, tools, tags in (
            (LLAMA3, form, [WEATHER], False),
            (QWEN, form, [WEATHER], False),
            (QWEN, form, [Tool(name="gr\xf6\xdfe")], True),
        ):
            with pytest.raises(Unsupported, match="cannot choose between a tool call and an answer") as caught:
                pipeline(source).tools_guide(chat(tools=tools, sampling=sampling), tags=tags)
            assert caught.value.param == (sampling.guide.field if sampling.guide else "")
        task = chat(tools=[WEATHER], sampling=form)
        with pytest.raises(Unsupported, match="cannot choose"):
            pipeline(QWEN, tool_parser=None).tools_guide(task, tags=True)
        assert pipeline(QWEN).tools_guide(chat(tools=[WEATHER], sampling=choice), tags=True) is None
        assert pipeline(GEMMA).tools_guide(task, tags=True) is None
        assert pipeline(QWEN).tools_guide(msgspec.structs.replace(task, tool_choice="none"), tags=True) is None

    def test_names_that_cannot_be_in_tags(self) -> None:
        tools = [Tool(name="gr\xf6\xdfe")]
        guide = pipeline(QWEN).tools_guide(chat(tools=tools, tool_choice="required"), tags=True)
        assert guide is not None
        assert guide.kind == "json_schema"
        assert pipeline(QWEN).tools_guide(chat(tools=tools), tags=True) is None

    def test_calls_are_parsed_only_where_tools_were_offered(self) -> None:
        chat_pipeline = pipeline(QWEN)
        for task, calls in (
            (chat(tools=[WEATHER]), 1),
            (chat(), 0),
            (chat(tools=[WEATHER], tool_choice="none"), 0),
            (Generate(model="m", prompts=["x"], tools=[WEATHER]), 0),
        ):
            decoder = chat_pipeline.decoder(task, Prompt(text=""), 0, "delta")
            chunks = [*decoder.push(Piece(text=CALL)), *decoder.flush("stop")]
            assert sum(bool(chunk.tools) for chunk in chunks) == calls
            assert chunks[-1].finish_reason == ("tool_calls" if calls else "stop")

    @pytest.mark.parametrize("source", [QWEN, LLAMA3, MISTRAL])
    def test_a_guided_call_is_read_whatever_the_form(self, source: str) -> None:
        made, task = pipeline(source), chat(tools=[WEATHER], tool_choice="required")
        decoder = made.decoder(task, Prompt(text=""), 3, "delta")
        chunks = decoder.push(Piece(text='{"name": "get_weather", "arguments": {"city": "x"}}'))
        deltas = [delta for chunk in chunks for delta in chunk.tools]
        assert "".join(delta.name for delta in deltas) == "get_weather"
        assert "".join(delta.arguments for delta in deltas) == '{"city": "x"}'
        assert {chunk.index for chunk in chunks} == {3}
        assert len(deltas[0].id) == 9 if source == MISTRAL else deltas[0].id


class TestLength:
    def test_the_error_has_both_counts_and_the_next_step(self) -> None:
        task = chat(*long_talk(3), HI)
        tokens = only(pipeline(), task).tokens or 0
        with pytest.raises(TooLong) as caught:
            pipeline(context_tokens=tokens).prompts(task)
        assert caught.value.message == (
            f"This model's maximum context length is {tokens} tokens. However, there are {tokens} tokens in the"
            " messages, which leaves no room for an answer. Shorten the messages."
        )
        assert caught.value.param == "messages"
        assert only(pipeline(context_tokens=tokens + 1), task).tokens == tokens

    @pytest.mark.parametrize(("max_tokens", "fits"), [(None, 99), (0, 100), (1, 99), (50, 99), (2_147_483_647, 99)])
    def test_one_token_must_fit_unless_none_is_requested(self, max_tokens: int | None, fits: int) -> None:
        """Whatever the maximum length: the answer gets the remaining space."""
        made, sampling = pipeline(context_tokens=100), Sampling(max_tokens=max_tokens)
        (prompt,) = made.prompts(Generate(model="m", prompts=[[5] * fits], sampling=sampling))
        assert prompt.tokens == fits
        with pytest.raises(TooLong) as caught:
            made.prompts(Generate(model="m", prompts=[[5] * (fits + 1)], sampling=sampling))
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("text", ["the weather " * 100_000, "w" * 1_000_000, " " * 1_000_000])
    def test_far_too_long_texts_are_not_read_to_the_end(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        read = reads(monkeypatch)
        for task in (Generate(model="m", prompts=[text]), chat(Message(role="user", content=text))):
            with pytest.raises(TooLong, match=r"there are at least \d+ tokens in the (prompt|messages)"):
                pipeline(context_tokens=100).prompts(task)
        assert sum(read) < 10_000

    @pytest.mark.parametrize("truncation", ["none", "oldest"])
    def test_counts_beyond_the_context(self, truncation: str) -> None:
        """Nothing is refused or cut."""
        whole = only(pipeline(), task := chat(*long_talk(20))).tokens
        (prompt,) = pipeline(context_tokens=100, truncation=truncation).prompts(task, whole=True)
        assert prompt.tokens == pytest.approx(whole, rel=0.02)
        assert prompt.cut == 0
        assert (prompt.tokens or 0) > 100

    @pytest.mark.parametrize("text", ["the weather " * 100_000, "w" * 1_000_000])
    def test_counts_far_beyond_the_context(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        """They are estimated from the beginning."""
        whole = vocabulary().count(text)
        read = reads(monkeypatch)
        for task in (Generate(model="m", prompts=[text]), chat(Message(role="user", content=text))):
            (prompt,) = pipeline(context_tokens=100).prompts(task, whole=True)
            assert prompt.tokens == pytest.approx(whole, rel=0.1)
        assert sum(read) < 20_000

    @pytest.mark.parametrize("word", ["the weather ", "w"])
    def test_a_long_conversation_is_not_read_again_and_again(self, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
        """While the oldest turns are dropped, each try reads only as much as can fit."""
        messages = [Message(role="user", content=word * (40_000 // len(word))) for _ in range(200)]
        chat_pipeline = pipeline(context_tokens=2048, truncation="oldest")
        read = reads(monkeypatch)
        prompt = only(chat_pipeline, chat(*messages, HI))
        assert prompt.cut == 200
        assert sum(read) < 300_000

    def test_nothing_is_dropped_by_default(self) -> None:
        with pytest.raises(TooLong):
            pipeline(context_tokens=150).prompts(chat(*long_talk(20)))

    @pytest.mark.parametrize("context", [150, 200, 400, 700])
    def test_the_oldest_turns_are_left_out(self, context: int) -> None:
        """As few whole turns as possible; never the instructions or the last turn."""
        chat_pipeline = pipeline(context_tokens=context, truncation="oldest")
        sampling, messages = Sampling(max_tokens=16), long_talk(20)
        prompt = only(chat_pipeline, chat(*messages, sampling=sampling))
        assert prompt.tokens is not None
        assert prompt.tokens + 16 <= context
        assert prompt.cut > 0
        assert prompt.cut % 4 == 0
        assert "Be brief." in prompt.text
        assert "and now?" in prompt.text
        first = prompt.cut // 4
        remaining = [number for number in range(20) if f"question {number}<" in prompt.text]
        assert remaining == list(range(first, 20))
        assert prompt.text.count("noon") == prompt.text.count("<tool_call>") == len(remaining)
        more = only(pipeline(), chat(SYSTEM, *messages[1 + prompt.cut - 4 :], sampling=sampling))
        assert (more.tokens or 0) + 16 > context

    def test_later_instructions_are_left_out_with_their_turns(self) -> None:
        """Where the template shows none there; else one would become the first message, which this template refuses."""
        reminder = Message(role="system", content="Remember.")
        talk = [HI]
        for number in range(20):
            talk += [Message(role="assistant", content=f"answer {number}"), reminder, HI]
        prompt = only(pipeline(GEMMA, context_tokens=200, truncation="oldest"), chat(*talk))
        assert prompt.cut
        assert 0 < prompt.text.count("Remember.") == prompt.text.count("answer") + 1 < 20

    def test_a_request_may_allow_it(self) -> None:
        """Where the operator has not."""
        task = msgspec.structs.replace(chat(*long_talk(20)), drop_oldest=True)
        assert only(pipeline(context_tokens=400), task).cut
        with pytest.raises(TooLong):
            only(pipeline(context_tokens=400), chat(*long_talk(20)))

    def test_old_turns_are_dropped_for_an_answer_without_a_limit(self) -> None:
        prompt = only(pipeline(context_tokens=400, truncation="oldest"), chat(*long_talk(20)))
        assert (prompt.tokens or 0) <= 300
        larger = only(pipeline(context_tokens=400, truncation="oldest", answer_tokens=1), chat(*long_talk(20)))
        assert 300 < (larger.tokens or 0) <= 399

    @pytest.mark.parametrize("answer_tokens", [101, 100_000])
    def test_at_most_a_quarter_of_the_context_is_reserved(self, answer_tokens: int) -> None:
        """Many clients request far more tokens than they need, which would drop the whole conversation."""
        chat_pipeline = pipeline(context_tokens=400, truncation="oldest", answer_tokens=answer_tokens)
        quarter = only(pipeline(context_tokens=400, truncation="oldest"), chat(*long_talk(20)))
        assert only(chat_pipeline, chat(*long_talk(20))) == quarter
        assert only(chat_pipeline, chat(*long_talk(20), sampling=Sampling(max_tokens=answer_tokens))) == quarter
        assert (only(chat_pipeline, chat(*long_talk(20), sampling=Sampling(max_tokens=0))).tokens or 0) > 300

    def test_fitting_conversations_stay_whole(self) -> None:
        assert only(pipeline(context_tokens=4000, truncation="oldest"), chat(*long_talk(5))).cut == 0

    def test_the_last_turn_may_be_too_long_by_itself(self) -> None:
        last = Message(role="user", content="the weather " * 200)
        with pytest.raises(TooLong):
            pipeline(context_tokens=150, truncation="oldest").prompts(chat(*long_talk(3), last))
        with pytest.raises(TooLong):
            pipeline(context_tokens=150, truncation="oldest").prompts(chat(last))


class TestReasoning:
    def test_a_prompt_may_open_the_thoughts(self) -> None:
        chat_pipeline = pipeline(DEEPSEEK, reasoning="think")
        prompt = only(chat_pipeline, chat())
        assert prompt.ends_in_reasoning
        decoder = chat_pipeline.decoder(chat(), prompt, 0, "delta")
        (thought, answer) = decoder.push(Piece(text="hm</think>\n\nyes"))
        assert (thought.reasoning, answer.text) == ("hm", "yes")

    def test_only_if_configured_as_a_reasoning_model(self) -> None:
        chat_pipeline = pipeline(DEEPSEEK)
        prompt = only(chat_pipeline, chat())
        assert not prompt.ends_in_reasoning
        assert (
            chat_pipeline.decoder(chat(), prompt, 0, "delta").push(Piece(text="<think>x</think>"))[0].text
            == "<think>x</think>"
        )

    def test_thoughts_that_the_client_does_not_want(self) -> None:
        made, task = pipeline(QWEN, reasoning="think"), chat(include_reasoning=False)
        chunks = made.decoder(task, only(made, task), 0, "delta").push(Piece(text="<think>hm</think>yes"))
        assert [(chunk.reasoning, chunk.text) for chunk in chunks] == [("", "yes")]

    def test_completions_have_none(self) -> None:
        made, task = pipeline(QWEN, reasoning="think"), Generate(model="m", prompts=["x"])
        (chunk,) = made.decoder(task, made.prompts(task)[0], 0, "delta").push(Piece(text="<think>x"))
        assert chunk.text == "<think>x"

    def test_an_answer_in_guided_json(self) -> None:
        chat_pipeline = pipeline(DEEPSEEK, reasoning="think")
        task = chat(sampling=Sampling(guide=Guide(kind="json_object")))
        (chunk,) = chat_pipeline.decoder(task, only(chat_pipeline, task), 0, "delta").push(Piece(text='{"a": 1}'))
        assert chunk.text == '{"a": 1}'


class TestDecoder:
    def test_the_sampling_decides_how_it_ends(self) -> None:
        chat_pipeline = pipeline()
        ids = vocabulary().encode("one two", special=False)
        for sampling, text, reason in (
            (Sampling(), "one two", "stop"),
            (Sampling(ignore_eos=True), "one twoone two", "length"),
            (Sampling(stop=[" "]), "one", "stop"),
            (Sampling(stop=[" ", ""], include_stop=True), "one ", "stop"),
            (Sampling(stop_token_ids=[ids[0]]), "", "stop"),
            (Sampling(ignore_eos=True, skip_special_tokens=False), "one two<|im_end|>one two", "length"),
        ):
            task = chat(sampling=sampling)
            decoder = chat_pipeline.decoder(task, Prompt(text=""), 0, "ids")
            chunks = [*decoder.push(Piece(ids=[*ids, tiny_llama.IM_END, *ids])), *decoder.flush("length")]
            assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (text, reason)

    def test_only_continuations_keep_their_first_space(self) -> None:
        chat_pipeline = pipeline(kind="byte_fallback")
        word = vocabulary("byte_fallback").encode("weather", special=False)
        begun = Message(role="assistant", content="the")
        for task, text in (
            (Generate(model="m", prompts=["the"]), " weather"),
            (chat(), "weather"),
            (chat(HI, begun, continue_final=True), " weather"),
        ):
            decoder = chat_pipeline.decoder(task, chat_pipeline.prompts(task)[0], 0, "ids")
            assert decoder.push(Piece(ids=word))[0].text == text

    def test_whether_a_backend_must_leave_special_tokens_in_its_text(self) -> None:
        tools = chat(tools=[WEATHER])
        assert not pipeline(QWEN).reads_special(tools)
        assert pipeline(MISTRAL, kind=None).reads_special(tools)
        assert not pipeline(MISTRAL, kind=None).reads_special(chat())


def test_a_conversation_is_continued() -> None:
    task = chat(HI, Message(role="assistant", content="The weather is"), continue_final=True)
    assert only(pipeline(), task).text.endswith("<|im_start|>assistant\nThe weather is")


def test_further_variables_and_no_invitation() -> None:
    task = chat(template_kwargs={"enable_thinking": False})
    assert only(pipeline(QWEN), task).text.endswith("<think>\n\n</think>\n\n")
    assert only(pipeline(QWEN), chat(add_generation_prompt=False)).text.endswith("<|im_end|>\n")


def test_backends_get_stop_texts_only_if_they_apply_to_all_of_the_text() -> None:
    """Not if calls or reasoning are parsed, which they would end; special tokens that mark calls are still sent."""
    sampling = Sampling(stop=["END"])
    plain, tools = chat(sampling=sampling), chat(sampling=sampling, tools=[NOW])
    source = "{{ messages[0].content }}{{ tools }}"
    for parser, reasoning, task, stop, special in (
        (None, "none", plain, ["END"], None),
        ("mistral", "none", plain, ["END"], None),
        ("mistral", "none", tools, [], False),
        ("hermes", "none", tools, [], None),
        (None, "think", plain, [], None),
        (None, "think", Generate(model="m", prompts=["x"], sampling=sampling), ["END"], None),
    ):
        sent = pipeline(source, None, tool_parser=parser, reasoning=reasoning).to_backend_sampling(task, sampling)
        assert (sent.stop, sent.skip_special_tokens) == (stop, special)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", None])
def test_half_a_character_is_refused_in_words_wherever_it_stands(kind: str | None) -> None:
    """The error names the field that was sent."""
    call = ToolCall(id="c", name="now", arguments='{"a": "\\ud83e"}')
    for task, param in (
        (chat(HI, Message(role="assistant", tool_calls=[call])), "messages"),
        (chat(Message(role="user", content="\ud83e")), "messages"),
        (Generate(model="m", prompts=["\ud83e"]), "prompt"),
    ):
        with pytest.raises(InvalidValue, match=r"half of a character, \\ud83e") as caught:
            pipeline(kind=kind, context_tokens=2048).prompts(task)
        assert caught.value.param == param


def test_deeply_nested_values_are_refused_or_left_unchanged() -> None:
    """A tool's schema is refused by name; arguments of an earlier call go to the template as text."""
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(InvalidValue, match="tool 1 are nested more than 64") as caught:
        pipeline(QWEN).check(chat(tools=[NOW, Tool(name="deep", parameters=deep)]))
    assert caught.value.param == "tools"
    call = ToolCall(id="c", name="f", arguments='{"a":' * 2000 + "1" + "}" * 2000)
    answer = only(
        pipeline("{{ messages[1].tool_calls[0].function.arguments }}"),
        chat(HI, Message(role="assistant", tool_calls=[call])),
    )
    assert answer.text == call.arguments


def test_references_move_with_the_schema_also_below_names_that_look_like_keywords() -> None:
    """A property may be called "default"; the value of the keyword is not a schema."""
    parameters = {
        "type": "object",
        "properties": {"default": {"$ref": "#/$defs/x"}, "y": {"default": {"$ref": "#/kept"}}},
        "$defs": {"x": {"type": "string"}},
    }
    task = chat(tools=[Tool(name="f", parameters=parameters)], tool_choice="required")
    guide = pipeline(QWEN, tool_parser="hermes").tools_guide(task)
    assert guide is not None
    moved = json.loads(guide.value)["properties"]["arguments"]["properties"]
    assert moved["default"] == {"$ref": "#/properties/arguments/$defs/x"}
    assert moved["y"] == {"default": {"$ref": "#/kept"}}


@pytest.mark.parametrize(
    ("source", "options", "tools", "parser"),
    [
        (QWEN, {"tool_parser": "auto"}, True, "hermes"),
        (QWEN, {"tool_parser": None}, False, None),
        ("{{ messages }}", {"tool_parser": "auto"}, False, None),
        ("{{ messages }}", {"tool_parser": "hermes"}, True, "hermes"),
        (None, {"tool_parser": "hermes"}, False, None),
    ],
)
def test_details_list_capabilities(
    source: str | None, options: dict[str, Any], tools: bool, parser: str | None
) -> None:
    """For clients that only offer tools to models that support them."""
    details = pipeline(source, **options, reasoning="think").details
    assert (details["tools"], details.get("tool_call_parser"), details["thinking"]) == (tools, parser, True)
    assert details.get("chat_template") == source
