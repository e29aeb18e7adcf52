"""Render a conversation with a model's chat template, into the text that the model was trained to answer.

Templates differ in how they treat content in parts, missing content, and a call's arguments. No template declares this,
so it is detected by rendering small conversations when the template is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from msgspec import structs

from shoal.errors import ConfigError, InvalidValue
from shoal.pipelines.chat import bounds, jinja
from shoal.pipelines.chat.messages import Form, as_dicts, functions_as_dicts, text_of, tools_as_dicts
from shoal.pipelines.chat.tools import ParserKind, detect
from shoal.pipelines.chat.turns import INSTRUCTIONS, fold_instructions
from shoal.types import Message, Part, Tool, ToolCall

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that a request sets through its own fields."""
_XML_TOOLS = "xml_tools"
"""SmolLM3's name for `tools`."""
_PROBE = "shoalprobe"
_FIRST = "shoalfirst"
_ANSWER = "shoalanswer"
_MARK = "shoalendofmessage "
_TOOL = Tool(name="probe", description="probe", parameters={"type": "object", "properties": {}})


class ChatTemplate:
    """A compiled chat template, safe to use from several threads at once.

    `special_tokens` are variables of every rendering (bos_token, eos_token, ...). `mentions_tools`: whether it uses
    tools. `parser`: how the model writes its calls, as far as the template shows. Raises ConfigError for a source that
    is not valid Jinja or uses features that chat templates lack, naming the line, and for one that does not terminate.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special = dict(special_tokens or {})
        made = jinja.create_environment()
        try:
            with bounds.budget():
                tree = made.parse(source)
                self._template = made.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
        except (TemplateError, SyntaxError, RecursionError) as error:  # the last two: nested too deeply
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
        self.parser: ParserKind | None = detect(source)
        self._xml_tools = "tools" not in names and _XML_TOOLS in names
        shows_tools = "tools" in names or self._xml_tools
        self.form = self._probe(not shows_tools)
        self.mentions_tools = shows_tools or self.form.tools_in_system

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation to text.

        `continue_final`: end where the last message ends, so that the answer continues it, without a generation prompt.
        `variables`: additional template variables. Raises InvalidValue with the template's own message if it rejects
        the messages or fails.
        """
        wrong = sorted(RESERVED & (variables or {}).keys())
        if wrong:
            raise InvalidValue(
                f"{wrong[0]} is set by a field of the request, not as a chat template variable",
                param="chat_template_kwargs",
            )
        conversation = self.fold(messages)
        if continue_final:
            conversation[-1:] = [_append_mark(message) for message in conversation[-1:]]
        context = self._variables(tools, add_generation_prompt and not continue_final, variables)
        try:
            text = jinja.render(self._template, {**context, "messages": as_dicts(conversation, self.form, tools)})
        except TemplateError as error:
            words = error.message or type(error).__name__
            raise InvalidValue(
                f"the model's chat template rejects these messages: {words}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final else text

    def fold(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation in the form that `render` shows: without later instructions, if the template does not
        show these."""
        return list(messages) if self.form.later_instructions else fold_instructions(messages)

    def _variables(self, tools: Sequence[Tool], prompt: bool, more: Mapping[str, Any] | None) -> dict[str, Any]:
        variables: dict[str, Any] = {"documents": None, **self._special, **(more or {})}
        if self._xml_tools and tools:
            variables[_XML_TOOLS] = functions_as_dicts(tools)
        return variables | {"tools": tools_as_dicts(tools), "add_generation_prompt": prompt}

    def _probe(self, without_tools: bool) -> Form:
        form = Form(developer="developer" in self.source, function=_compares(self.source, "function"))
        whole = self._try_render([Message(role="user", content=_PROBE)], form)
        parted = replace(form, parts="only")
        parts = self._try_render([Message(role="user", content=[Part(text=_PROBE)])], parted)
        if parts is not None and _PROBE in parts and "'text'" not in parts and '"text"' not in parts:
            form = replace(form, parts="also") if whole is not None and _PROBE in whole else parted
        if without_tools and self.parser == "phi4":
            inner = replace(form, tools_in_system=True, calls_as_text="phi4")
            shown = self._try_render([Message(role="user", content=_PROBE)], inner, [_TOOL])
            form = inner if shown and f'"{_TOOL.name}"' in shown else form
        form = self._probe_calls(form, without_tools)
        return replace(form, later_instructions=all(self._shows_later(role, form) for role in INSTRUCTIONS))

    def _probe_calls(self, form: Form, without_tools: bool) -> Form:
        for json_arguments in (False, True):
            bare = replace(form, json_arguments=json_arguments, empty=None)
            filled = replace(bare, empty="")
            none, blank = self._render_call_probe(bare), self._render_call_probe(filled)
            if none is not None and (blank is None or none.count("None") <= blank.count("None")):
                return bare
            if blank is not None:
                return filled
        if self.parser in ("hermes", "phi4") and not without_tools:
            written = replace(form, calls_as_text=self.parser)
            return written if self._render_call_probe(written) is not None else form
        return form

    def _shows_later(self, role: str, form: Form) -> bool:
        """Whether an instruction within a conversation is shown at its place, and the first one remains: some
        templates show only the last of all."""
        conversation = [
            Message(role="system", content=_FIRST),
            Message(role="user", content="probe"),
            Message(role="assistant", content=_ANSWER),
            Message(role=role, content=_PROBE),
            Message(role="user", content="probe"),
        ]
        text = self._try_render(conversation, form) or ""
        places = [text.find(words) for words in (_FIRST, _ANSWER, _PROBE)]
        return places[0] >= 0 and places == sorted(places)

    def _render_call_probe(self, form: Form) -> str | None:
        """Render a conversation whose second turn only calls a tool; None if its arguments are not shown as JSON."""
        call = ToolCall(id="probe0001", name="probe", arguments=f'{{"{_PROBE}": "told"}}')
        conversation = [
            Message(role="user", content="probe"),
            Message(role="assistant", tool_calls=[call]),
            Message(role="tool", content="probed", tool_call_id=call.id),
        ]
        text = self._try_render(conversation, form, [_TOOL])
        return text if text and _PROBE in text and f"'{_PROBE}'" not in text else None

    def _try_render(self, messages: Sequence[Message], form: Form, tools: Sequence[Tool] = ()) -> str | None:
        try:
            context = {**self._variables(tools, True, None), "messages": as_dicts(messages, form, tools)}
            return jinja.render(self._template, context)
        except bounds.BudgetExceeded as error:
            raise ConfigError(
                f"the chat template does not finish even for a minimal conversation: {error.message}"
            ) from error
        except TemplateError:
            return None  # a valid result: the template does not accept this form


def _compares(source: str, role: str) -> bool:
    return f"== '{role}'" in source or f'== "{role}"' in source


def _append_mark(message: Message) -> Message:
    """Append a marker to the end of the message's text."""
    if not text_of(message):
        raise InvalidValue(
            "the last message has no text to continue; add some, or request a new answer", param="messages"
        )
    content = message.content
    if isinstance(content, list):
        texts = [part for part in content if part.type == "text"]
        return structs.replace(message, content=[*texts[:-1], Part(text=texts[-1].text + _MARK)])
    return structs.replace(message, content=f"{content}{_MARK}")


def _cut_at_mark(text: str) -> str:
    """Cut the text at the marker, as transformers does. If the template strips blanks from messages, strip them here
    too."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise InvalidValue(
            "the chat template does not show the end of the last message, so it cannot be continued; request a new "
            "answer",
            param="messages",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
