"""The ChatPipeline of models whose prompts Shoal builds: renders conversations with the model's template, passes plain
prompts on, and converts both to token ids if there is a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from msgspec import structs

from shoal.core.protocols import Prompt
from shoal.errors import InvalidValue, TooLong, Unsupported
from shoal.pipelines.chat.decoder import AnswerDecoder, DecodingOptions, Gives
from shoal.pipelines.chat.reasoning import CLOSE, OPEN
from shoal.pipelines.chat.required_tools import call_schema, check_depth, select_tools
from shoal.pipelines.chat.segments import AnswerFormat
from shoal.pipelines.chat.template import ChatTemplate
from shoal.pipelines.chat.tool_tags import (
    CallSpelling,
    calls_or_answer,
    can_tag,
    find_spelling,
    marked_calls,
    required_calls,
)
from shoal.pipelines.chat.tools import ParserKind, marks, tool_parser
from shoal.pipelines.chat.tools.result_collector import call_id, short_call_id
from shoal.pipelines.chat.turns import drop_turns, split_turns
from shoal.pipelines.chat.vocabulary import Vocabulary, check_letters
from shoal.types import Generate, Guide, Message, Sampling, TextItem, Tool

RESERVE = 1024
"""Tokens to reserve for the answer when old turns are dropped and the request does not limit the answer. The reserve
never exceeds a quarter of the context, whoever set the limit: a limit means "up to", and the conversation is worth
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The operator's settings. `tool_parser` "auto": detect from the template; None: leave calls in the text.
    `reasoning` "think": separate the contents of <think>. `context_tokens`: limit of prompt and answer together, None
    if unknown. `truncation` "oldest": drop the oldest turns of a long conversation. `answer_tokens`: answer length if
    the request does not say; 0: whatever fits. `cuts`: the backend has no answer limit, so Shoal drops the excess.
    `ignore`: fields that cannot be honored but do not fail a request."""

    tool_parser: ParserKind | Literal["auto"] | None = "auto"
    reasoning: Literal["none", "think"] = "none"
    context_tokens: int | None = None
    truncation: Literal["none", "oldest"] = "none"
    answer_tokens: int = 0
    cuts: bool = False
    ignore: frozenset[str] = frozenset()


class TextChatPipeline:
    """Pipeline of a chat model. `vocabulary` None: prompts are sent as text and not counted. `template` None: no
    conversations.

    `tools_template` replaces it when tools are offered. A Prompt's text omits the special tokens that the model's own
    tokenizer adds, so that no backend doubles the first one.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        template: ChatTemplate | None,
        options: ChatOptions | None = None,
        *,
        tools_template: ChatTemplate | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.template = template
        self.tools_template = tools_template or template
        self.options = options or ChatOptions()
        kind = self.options.tool_parser
        if kind == "auto":
            kind = self.tools_template.parser if self.tools_template else None
        self.tool_parser: ParserKind | None = kind

    @property
    def details(self) -> dict[str, Any]:
        """Describe the model: whether it supports reasoning and tools, with which parser, and its template."""
        made: dict[str, Any] = {"thinking": self.options.reasoning == "think", "tools": False}
        if self.template is not None and self.tools_template is not None:
            made["tools"] = self.tool_parser is not None and self._takes_tools
            made["chat_template"] = self.template.source
        if made["tools"]:
            made["tool_call_parser"] = self.tool_parser
        return made

    @property
    def _takes_tools(self) -> bool:
        """Whether the template shows tools to the model, or the operator says that the model knows them."""
        explicit = self.options.tool_parser not in ("auto", None)
        return explicit or (self.tools_template is not None and self.tools_template.mentions_tools)

    def check(self, task: Generate) -> None:
        for item in task.prompts:
            if not isinstance(item, str):
                self._vocabulary_for(item)
        if task.messages:
            self._check_messages(task)

    def prompts(self, task: Generate, *, whole: bool = False) -> list[Prompt]:
        if whole:
            made = [self._render(task, task.messages)] if task.messages else map(self._build_prompt, task.prompts)
            return [self._count_all(prompt) for prompt in made]
        if task.messages:
            return [self._render_conversation(task)]
        return [self._check_fit(self._build_prompt(item), task.sampling.max_tokens, "prompt") for item in task.prompts]

    def decoder(self, task: Generate, prompt: Prompt, index: int, gives: Gives) -> AnswerDecoder:
        """Raises Unsupported for ids without a tokenizer to decode them."""
        if gives == "ids" and self.vocabulary is None:
            raise Unsupported("this model returns token ids, but there is no tokenizer to decode them")
        sampling = task.sampling
        eos = self.vocabulary.eos_ids if self.vocabulary and not sampling.ignore_eos else frozenset[int]()
        goes_on = not task.messages or task.continue_final
        return AnswerDecoder(
            index,
            DecodingOptions(
                output_mode=gives,
                vocabulary=self.vocabulary,
                stops=[stop for stop in sampling.stop if stop],
                include_stop=bool(sampling.include_stop),
                stop_ids=eos | frozenset(sampling.stop_token_ids),
                skip_special_tokens=sampling.skip_special_tokens is not False,
                visible_ids=self._visible_special_ids(task),
                context=(prompt.ids or ()) if goes_on else (),
                answer_format=self._answer_format(task, prompt),
                hidden_reasoning=not task.include_reasoning,
                max_tokens=sampling.max_tokens if self.options.cuts else None,
            ),
        )

    def tools_guide(self, task: Generate, *, tags: bool = False) -> Guide | None:
        """Return a guide that forces calls as plain JSON objects, which the decoder reads whatever the model's own
        format; with "auto", one that keeps calls in that format valid, beside the task's own guide if it has one.
        Raises Unsupported if that guide would make calls impossible."""
        if task.tool_choice == "none" or not task.tools or not self._takes_tools:
            return None
        if task.tool_choice == "auto" and task.sampling.guide:
            return self._calls_or_answer_guide(task, task.sampling.guide, tags=tags)
        if self.tool_parser is None:
            return None
        if task.tool_choice == "auto":
            return self._marked_calls_guide(task) if tags else None
        tools = select_tools(task)
        key = "parameters" if self.tool_parser == "llama3" else "arguments"
        if tags and can_tag(tools) and task.tool_choice == "required" and task.parallel_tool_calls:
            return Guide(kind="structural_tag", value=required_calls(tools, key), field="tools")
        return Guide(kind="json_schema", value=call_schema(tools, key), field="tools")

    def _marked_calls_guide(self, task: Generate) -> Guide | None:
        """Return an optional guide, None for formats without a single spelling."""
        spelling = self._find_spelling(task)
        if spelling is None:
            return None
        value = marked_calls(spelling, task.tools, parallel=task.parallel_tool_calls)
        return Guide(kind="structural_tag", value=value, field="tools", optional=True)

    def _calls_or_answer_guide(self, task: Generate, requested: Guide, *, tags: bool) -> Guide | None:
        """Return a guide for calls or the requested JSON; None for other kinds, which are of all that the model writes,
        calls included."""
        if requested.kind not in ("json_object", "json_schema"):
            return None
        spelling = self._find_spelling(task) if tags else None
        if spelling is None:
            raise Unsupported(
                f"this model cannot choose between a tool call and an answer that matches {requested.field!r}: omit"
                f" 'tools' (or send tool_choice 'none'), or omit {requested.field!r}",
                param=requested.field,
            )
        schema = json.loads(requested.value or '{"type": "object"}')
        value = calls_or_answer(spelling, task.tools, schema, parallel=task.parallel_tool_calls)
        return structs.replace(requested, kind="calls_or_answer", value=value)

    def _find_spelling(self, task: Generate) -> CallSpelling | None:
        """Return the spelling of the model's calls; None if there is no single one, or it cannot be in tags."""
        spelling = find_spelling(self.tool_parser, self.tools_template.source if self.tools_template else "")
        return spelling if spelling and spelling.can_tag(task.tools) else None

    def to_backend_sampling(self, task: Generate, sampling: Sampling) -> Sampling:
        """Adapt the sampling for the backend. A backend also stops at a stop text inside a call or reasoning, so it
        gets no stop texts where Shoal parses these. It must also leave the special tokens that mark them in the
        text."""
        changes: dict[str, Any] = {}
        if sampling.stop and task.messages and (self._parses_calls(task) or self.options.reasoning == "think"):
            changes["stop"] = []
        if self.reads_special(task):
            changes["skip_special_tokens"] = False
        return structs.replace(sampling, **changes) if changes else sampling

    def reads_special(self, task: Generate) -> bool:
        """Whether a backend that returns text must leave special tokens in it, since they mark calls and reasoning."""
        if self.vocabulary is None:
            return self._parses_calls(task) and self.tool_parser != "hermes"
        return bool(self._visible_special_ids(task))

    def _vocabulary_for(self, ids: Sequence[int]) -> Vocabulary:
        """Return the vocabulary of a prompt's ids. Raises Unsupported without one, and InvalidValue for unknown ids."""
        if self.vocabulary is None:
            raise Unsupported("there is no tokenizer for this model here: send the prompt as a text", param="prompt")
        self.vocabulary.check(ids)
        return self.vocabulary

    def _check_messages(self, task: Generate) -> None:
        if self.template is None or self.tools_template is None:
            raise Unsupported(
                "this model has no chat template: use /v1/completions (the operator can give it one with"
                " chat_template)",
                param="messages",
            )
        check_depth(task.tools)
        for message in task.messages:
            parts = message.content if isinstance(message.content, list) else ()
            if any(part.type == "image" for part in parts):
                raise Unsupported("this model does not accept images: send text only", param="messages")
            for part in parts:
                if part.type == "other":
                    raise Unsupported(
                        f"this model does not accept parts of type {part.kind!r}: send text only", param="messages"
                    )
        if task.tool_choice in ("none", "auto"):
            return  # a template without tools gets an answer without them; `_render_conversation` reports it
        if not select_tools(task):
            requested = f"the tool {task.tool_name!r}" if task.tool_choice == "function" else "a tool"
            raise InvalidValue(f"tool_choice requires {requested}, which is not in 'tools'", param="tool_choice")
        if "tool_choice" in self.options.ignore:
            return
        if not self._takes_tools:
            raise Unsupported(
                "this model's chat template does not support tools, so it cannot be forced to call one: use "
                "tool_choice 'auto' for an answer without them (the operator can set tool_call_parser or another "
                "chat_template)",
                param="tool_choice",
            )
        if self.tool_parser is None:
            raise Unsupported(
                "the format of this model's tool calls is unknown: use tool_choice 'auto' and parse its text (the "
                "operator can set tool_call_parser)",
                param="tool_choice",
            )

    def _render_conversation(self, task: Generate) -> Prompt:
        """Render the conversation, dropping old turns if allowed. Raises TooLong if it still does not fit."""
        context_tokens, max_tokens = self.options.context_tokens, task.sampling.max_tokens
        may_drop = task.drop_oldest or self.options.truncation == "oldest"
        whole = self._render(task, task.messages)
        if context_tokens is not None and whole.tokens is not None and may_drop:
            # Before turns are dropped: a later instruction goes with its turn, and must not become the first message.
            task = structs.replace(task, messages=self._find_template(self._shown_tools(task)).fold(task.messages))
            groups = split_turns(task.messages)
            wished = max_tokens if max_tokens is not None else self.options.answer_tokens or RESERVE
            wished = min(wished, max(1, context_tokens // 4))
            if len(groups) > 1 and whole.tokens + wished > context_tokens:
                whole = self._drop_old_turns(task, groups, context_tokens - wished)
        if task.tools and task.tool_choice != "none" and not self._takes_tools:
            whole = replace(whole, ignored=("tools",))
        return self._check_fit(whole, max_tokens, "messages")

    def _drop_old_turns(self, task: Generate, groups: Sequence[Sequence[int]], max_tokens: int) -> Prompt:
        """Drop as few of the oldest turns as possible: all but the last, if need be."""
        low, high = 1, len(groups) - 1
        found: Prompt | None = None
        while low < high:
            middle = (low + high) // 2
            tried = self._render_without(task, groups[:middle])
            if tried.tokens is None or tried.tokens <= max_tokens:
                high, found = middle, tried
            else:
                low = middle + 1
        # The last prompt that fit drops exactly `high` turns.
        return found or self._render_without(task, groups[:high])

    def _render_without(self, task: Generate, left_out: Sequence[Sequence[int]]) -> Prompt:
        kept = drop_turns(task.messages, left_out)
        return replace(self._render(task, kept), cut=len(task.messages) - len(kept))

    def _render(self, task: Generate, messages: Sequence[Message]) -> Prompt:
        tools = self._shown_tools(task)
        text = self._find_template(tools).render(
            messages,
            tools=tools,
            add_generation_prompt=task.add_generation_prompt,
            continue_final=task.continue_final,
            variables=task.template_kwargs,
        )
        opened = self.options.reasoning == "think" and text.rstrip().endswith(OPEN)
        return replace(self._tokenize(text, "messages"), ends_in_reasoning=opened)

    def _shown_tools(self, task: Generate) -> list[Tool]:
        return select_tools(task) if self._takes_tools and task.tool_choice != "none" else []

    def _find_template(self, tools: Sequence[Tool]) -> ChatTemplate:
        template = self.tools_template if tools else self.template
        if template is None:
            raise Unsupported("this model has no chat template: use /v1/completions", param="messages")
        return template

    def _build_prompt(self, item: TextItem) -> Prompt:
        if isinstance(item, str):
            return self._tokenize(item, "prompt")
        vocabulary = self._vocabulary_for(item)
        bare = item[1:] if vocabulary.adds_bos and item[:1] == [vocabulary.bos_id] else item
        text = vocabulary.decode(bare, skip_special_tokens=False)
        return Prompt(text=text, ids=tuple(item), tokens=len(item))

    def _tokenize(self, text: str, param: Literal["messages", "prompt"]) -> Prompt:
        """Tokenize a prompt. A text that is too long is not read to its end and gets no ids; `_check_fit` rejects
        it."""
        if self.vocabulary is None:
            check_letters(text, param)
            return Prompt(text=text)
        special = param == "prompt"
        ids, tokens = self.vocabulary.fit(text, special=special, limit=self.options.context_tokens, param=param)
        bos = self.vocabulary.bos_id
        if not special and self.vocabulary.adds_bos and bos is not None:
            text = text.removeprefix(self.vocabulary.raw.id_to_token(bos) or "")
        return Prompt(text=text, ids=None if ids is None else tuple(ids), tokens=tokens)

    def _count_all(self, prompt: Prompt) -> Prompt:
        limit = self.options.context_tokens
        if self.vocabulary is None or limit is None or prompt.ids is not None:
            return prompt
        return replace(prompt, tokens=self.vocabulary.estimate(prompt.text, limit))

    def _check_fit(self, prompt: Prompt, max_tokens: int | None, param: str) -> Prompt:
        """Return the prompt if it leaves room for at least one token, unless none is requested. Answers end at the
        context limit."""
        limit, tokens = self.options.context_tokens, prompt.tokens
        if limit is None or tokens is None or tokens + (max_tokens != 0) <= limit:
            return prompt
        least = "at least " if prompt.ids is None else ""
        raise TooLong(
            f"This model's maximum context length is {limit} tokens. However, there are {least}{tokens} tokens in the"
            f" {param}, which leaves no room for an answer. Shorten the {param}.",
            param=param,
        )

    def _parses_calls(self, task: Generate) -> bool:
        return bool(
            task.messages and task.tools and task.tool_choice != "none" and self.tool_parser and self._takes_tools
        )

    def _visible_special_ids(self, task: Generate) -> frozenset[int]:
        """Return the ids of special tokens that mark calls and reasoning."""
        if self.vocabulary is None or not task.messages:
            return frozenset()
        names: tuple[str, ...] = (OPEN, CLOSE) if self.options.reasoning == "think" else ()
        if self.tool_parser is not None and self._parses_calls(task):
            names += marks(self.tool_parser)
        ids = {self.vocabulary.raw.token_to_id(name) for name in names}
        return self.vocabulary.special_ids & ids

    def _answer_format(self, task: Generate, prompt: Prompt) -> AnswerFormat:
        if not task.messages:
            return AnswerFormat()
        kind, tools = self.tool_parser, select_tools(task)
        guide = task.sampling.guide
        guided = "{[" if guide is not None and guide.kind in ("json_object", "json_schema") else ""
        parser = plain = None
        if kind is not None and self._parses_calls(task):
            parser = partial(tool_parser, kind, tools, parallel=task.parallel_tool_calls)
            if task.tool_choice != "auto":
                new_id = short_call_id if kind == "mistral" else call_id
                plain = partial(tool_parser, "llama3", tools, parallel=task.parallel_tool_calls, new_id=new_id)
                guided = "{"
            elif guide is not None and guide.kind == "calls_or_answer":
                guided = "{[<"  # JSON, or calls in their marks
        return AnswerFormat(
            reasoning=self.options.reasoning == "think",
            starts_in_reasoning=prompt.ends_in_reasoning,
            parser=parser,
            guided=guided,
            plain=plain,
        )
