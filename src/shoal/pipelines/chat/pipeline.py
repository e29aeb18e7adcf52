"""The ChatPipeline of models whose prompts are made here: conversations rendered by the model's template, prompts as
they are, both as token ids where there is a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec

from shoal.core.protocols import Prompt
from shoal.errors import InvalidValue, TooLong, Unsupported
from shoal.pipelines.chat.decoder import AnswerDecoder, DecodingOptions, Gives
from shoal.pipelines.chat.demand import call_schema, check_depth, select_tools
from shoal.pipelines.chat.reasoning import CLOSE, OPEN
from shoal.pipelines.chat.segments import AnswerFormat
from shoal.pipelines.chat.template import ChatTemplate
from shoal.pipelines.chat.tools import ParserKind, marks, tool_parser
from shoal.pipelines.chat.tools.outlet import call_id, short_call_id
from shoal.pipelines.chat.turns import drop_turns, split_turns
from shoal.pipelines.chat.vocabulary import Vocabulary, check_letters
from shoal.types import Generate, Guide, Message, Sampling, TextItem

RESERVE = 1024
"""Where turns are left out and nobody said how long the answer may be: room is made for so many tokens. It is a quarter
of the context at most, whoever said what: they mean as long as it goes, and the conversation is worth more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the operator sets. `tool_parser` "auto": as the template tells; None: calls stay in the text. `reasoning`
    "think": tell apart what stands in <think>. `context_tokens`: prompt and answer together, None where not known.
    `truncation` "oldest": leave out a long conversation's oldest turns. `answer_tokens`: an answer's length where the
    request does not say; 0: whatever there is room for. `cuts`: the backend cannot be told how long an answer may be,
    so that what is too much of it is left out here. `ignore`: fields that cannot be honored and do not fail a request.
    """

    tool_parser: ParserKind | Literal["auto"] | None = "auto"
    reasoning: Literal["none", "think"] = "none"
    context_tokens: int | None = None
    truncation: Literal["none", "oldest"] = "none"
    answer_tokens: int = 0
    cuts: bool = False
    ignore: frozenset[str] = frozenset()


class TextChatPipeline:
    """`vocabulary` None: prompts go as texts, and nothing is counted. `template` None: no conversations.

    `tools_template` is used in its place when tools are offered. A Prompt's text is what the model's own tokenizer is
    to read with the special tokens that it adds by itself, so that no backend doubles the first one.
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
        """What is worth knowing of it: whether and how it does tools and thoughts, and its template."""
        made: dict[str, Any] = {"thinking": self.options.reasoning == "think", "tools": False}
        if self.template is not None and self.tools_template is not None:
            made["tools"] = self.tool_parser is not None and self._takes_tools
            made["chat_template"] = self.template.source
        if made["tools"]:
            made["tool_call_parser"] = self.tool_parser
        return made

    @property
    def _takes_tools(self) -> bool:
        """Whether the template shows tools to the model, or the operator says that it knows them."""
        explicit = self.options.tool_parser not in ("auto", None)
        return explicit or (self.tools_template is not None and self.tools_template.mentions_tools)

    def check(self, task: Generate) -> None:
        for item in task.prompts:
            if not isinstance(item, str):
                self._check_ids(item)
        if task.messages:
            self._check_messages(task)

    def prompts(self, task: Generate) -> list[Prompt]:
        if task.messages:
            return [self._render_conversation(task)]
        return [self._check_fit(self._build_prompt(item), task.sampling.max_tokens, "prompt") for item in task.prompts]

    def decoder(self, task: Generate, prompt: Prompt, index: int, gives: Gives) -> AnswerDecoder:
        """Raises Unsupported for ids without a tokenizer to read them."""
        if gives == "ids" and self.vocabulary is None:
            raise Unsupported("this model's answers are token ids, and there is no tokenizer to read them")
        sampling = task.sampling
        eos = self.vocabulary.eos_ids if self.vocabulary and not sampling.ignore_eos else frozenset[int]()
        goes_on = not task.messages or task.continue_final
        return AnswerDecoder(
            index,
            DecodingOptions(
                gives=gives,
                vocabulary=self.vocabulary,
                stops=[stop for stop in sampling.stop if stop],
                include_stop=bool(sampling.include_stop),
                stop_ids=eos | frozenset(sampling.stop_token_ids),
                skip_special_tokens=sampling.skip_special_tokens is not False,
                shown=self._visible_special_ids(task),
                context=(prompt.ids or ()) if goes_on else (),
                reading=self._answer_format(task, prompt),
                hidden_reasoning=not task.include_reasoning,
                most=sampling.max_tokens if self.options.cuts else None,
            ),
        )

    def tools_guide(self, task: Generate) -> Guide | None:
        """A call as a plain JSON object, which the decoder reads whatever else the model's format is."""
        if self.tool_parser is None or task.tool_choice not in ("required", "function") or not task.tools:
            return None
        if not self._takes_tools:
            return None
        key = "parameters" if self.tool_parser == "llama3" else "arguments"
        return Guide(kind="json_schema", value=call_schema(select_tools(task), key))

    def to_backend_sampling(self, task: Generate, sampling: Sampling) -> Sampling:
        """A backend ends at a stop text also inside of a call or a thought, so it is told of none where these are
        parsed; and it must leave in the text the special tokens that they are told by."""
        changes: dict[str, Any] = {}
        if sampling.stop and task.messages and (self._parses_calls(task) or self.options.reasoning == "think"):
            changes["stop"] = []
        if self.reads_special(task):
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(sampling, **changes) if changes else sampling

    def reads_special(self, task: Generate) -> bool:
        """Whether a backend that gives text must leave special tokens in it, since calls and thoughts are told by
        them."""
        if self.vocabulary is None:
            return self._parses_calls(task) and self.tool_parser in ("mistral", "llama3", "pythonic")
        return bool(self._visible_special_ids(task))

    def _check_ids(self, ids: Sequence[int]) -> None:
        if self.vocabulary is None:
            raise Unsupported("there is no tokenizer for this model here: send the prompt as a text", param="prompt")
        self.vocabulary.check(ids)

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
                raise Unsupported("this model reads no images: send text only", param="messages")
            for part in parts:
                if part.type == "other":
                    raise Unsupported(
                        f"this model reads no parts of type {part.kind!r}: send text only", param="messages"
                    )
        if task.tool_choice == "none":
            return
        if task.tool_choice == "auto":
            return  # where the template knows no tools, the answer is one without: `_render_conversation` says so
        if not select_tools(task):
            wanted = f"the tool {task.tool_name!r}" if task.tool_choice == "function" else "a tool"
            raise InvalidValue(f"tool_choice asks for {wanted}, and 'tools' has none such", param="tool_choice")
        if "tool_choice" in self.options.ignore:
            return
        if not self._takes_tools:
            raise Unsupported(
                "this model's chat template knows no tools, so that it cannot be made to call one: use tool_choice"
                " 'auto' to be answered without them (the operator can set tool_call_parser or another chat_template)",
                param="tool_choice",
            )
        if self.tool_parser is None:
            raise Unsupported(
                "how this model writes calls is not known: use tool_choice 'auto' and read its text (the operator can"
                " set tool_call_parser)",
                param="tool_choice",
            )

    def _render_conversation(self, task: Generate) -> Prompt:
        """Raises TooLong where it does not fit, after leaving out what may be."""
        most, asked = self.options.context_tokens, task.sampling.max_tokens
        whole = self._render(task, task.messages)
        if most is not None and whole.tokens is not None and self.options.truncation == "oldest":
            groups = split_turns(task.messages)
            wished = asked if asked is not None else self.options.answer_tokens or RESERVE
            wished = min(wished, max(1, most // 4))
            if len(groups) > 1 and whole.tokens + wished > most:
                whole = self._drop_old_turns(task, groups, most - wished)
        if task.tools and task.tool_choice != "none" and not self._takes_tools:
            whole = replace(whole, ignored=("tools",))
        return self._check_fit(whole, asked, "messages")

    def _drop_old_turns(self, task: Generate, groups: Sequence[Sequence[int]], room: int) -> Prompt:
        """The conversation with as few as possible of its oldest turns left out: all but the last, if need be."""
        low, high = 1, len(groups) - 1
        found: Prompt | None = None
        while low < high:
            middle = (low + high) // 2
            tried = self._render_without(task, groups[:middle])
            if tried.tokens is None or tried.tokens <= room:
                high, found = middle, tried
            else:
                low = middle + 1
        # What fitted last leaves out just `high` turns.
        return found or self._render_without(task, groups[:high])

    def _render_without(self, task: Generate, left_out: Sequence[Sequence[int]]) -> Prompt:
        kept = drop_turns(task.messages, left_out)
        return replace(self._render(task, kept), cut=len(task.messages) - len(kept))

    def _render(self, task: Generate, messages: Sequence[Message]) -> Prompt:
        tools = select_tools(task) if self._takes_tools and task.tool_choice != "none" else ()
        template = self.tools_template if tools else self.template
        if template is None:
            raise Unsupported("this model has no chat template: use /v1/completions", param="messages")
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=task.add_generation_prompt,
            continue_final=task.continue_final,
            variables=task.template_kwargs,
        )
        opened = self.options.reasoning == "think" and text.rstrip().endswith(OPEN)
        return replace(self._tokenize(text, "messages"), opened=opened)

    def _build_prompt(self, item: TextItem) -> Prompt:
        if isinstance(item, str):
            return self._tokenize(item, "prompt")
        if self.vocabulary is None:
            raise Unsupported("there is no tokenizer for this model here: send the prompt as a text", param="prompt")
        self.vocabulary.check(item)
        bare = item[1:] if self.vocabulary.adds_bos and item[:1] == [self.vocabulary.bos_id] else item
        text = self.vocabulary.decode(bare, skip_special_tokens=False)
        return Prompt(text=text, ids=tuple(item), tokens=len(item))

    def _tokenize(self, text: str, param: Literal["messages", "prompt"]) -> Prompt:
        """A text that is too long has no ids: it is not read to its end, and `_check_fit` refuses it."""
        if self.vocabulary is None:
            check_letters(text, param)
            return Prompt(text=text)
        special = param == "prompt"
        ids, tokens = self.vocabulary.fit(text, special=special, limit=self.options.context_tokens, param=param)
        bos = self.vocabulary.bos_id
        if not special and self.vocabulary.adds_bos and bos is not None:
            text = text.removeprefix(self.vocabulary.raw.id_to_token(bos) or "")
        return Prompt(text=text, ids=None if ids is None else tuple(ids), tokens=tokens)

    def _check_fit(self, prompt: Prompt, asked: int | None, param: str) -> Prompt:
        """The prompt, where it leaves room for one token, if any is asked for: an answer is as long as it goes."""
        most, tokens = self.options.context_tokens, prompt.tokens
        if most is None or tokens is None or tokens + (asked != 0) <= most:
            return prompt
        least = "at least " if prompt.ids is None else ""
        raise TooLong(
            f"This model's maximum context length is {most} tokens. However, there are {least}{tokens} tokens in the"
            f" {param}, which leaves no room for an answer. Shorten the {param}.",
            param=param,
        )

    def _parses_calls(self, task: Generate) -> bool:
        return bool(
            task.messages and task.tools and task.tool_choice != "none" and self.tool_parser and self._takes_tools
        )

    def _visible_special_ids(self, task: Generate) -> frozenset[int]:
        """Special tokens that tell calls and thoughts."""
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
        return AnswerFormat(
            reasoning=self.options.reasoning == "think",
            opened=prompt.opened,
            parser=parser,
            guided=guided,
            plain=plain,
        )
