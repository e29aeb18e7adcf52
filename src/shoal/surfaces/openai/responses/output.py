"""The output items of a response as they grow, and the typed events of what changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.surfaces.openai.chat import to_logprobs
from shoal.surfaces.openai.events import AnswerHeader
from shoal.surfaces.openai.responses import wire_output as wire
from shoal.surfaces.openai.responses.custom_input import InputReader
from shoal.surfaces.openai.responses.reasoning import ReasoningForm, seal
from shoal.surfaces.openai.responses.tool_names import ToolName, ToolNames
from shoal.types import Chunk, TokenLogprob, ToolDelta

Event: TypeAlias = tuple[str, dict[str, Any]]
Ending: TypeAlias = Literal["completed", "incomplete"]

_PLAIN = ReasoningForm()
_NO_TOOL = ToolName("function", "")
_ANY = msgspec.json.Decoder()


@dataclass(slots=True)
class _Item:
    """An output item. `number` is its place in the output. Subclasses yield the events of its content."""

    number: int
    id: str = ""
    status: wire.ItemStatus = "in_progress"
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.number}

    def to_wire(self) -> wire.OutputItem:
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        yield from ()

    def finish(self) -> Iterator[Event]:
        yield from ()


@dataclass(slots=True)
class _Message(_Item):
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.number, "content_index": 0}

    def to_part(self) -> wire.OutputText:
        return wire.OutputText(text=self.text, logprobs=_to_logprobs(self.logprobs))

    def to_wire(self) -> wire.MessageItem:
        parts = [self.to_part()] if self.status != "in_progress" else []
        return wire.MessageItem(id=self.id, content=parts, status=self.status)

    def begin(self) -> Iterator[Event]:
        yield "content_part.added", {**self.place, "part": self.to_part()}

    def grow(self, chunk: Chunk) -> Iterator[Event]:
        self.parts.append(chunk.text)
        self.logprobs += chunk.logprobs
        yield "output_text.delta", {**self.place, "delta": chunk.text, "logprobs": _to_logprobs(chunk.logprobs)}

    def finish(self) -> Iterator[Event]:
        yield "output_text.done", {**self.place, "text": self.text, "logprobs": _to_logprobs(self.logprobs)}
        yield "content_part.done", {**self.place, "part": self.to_part()}


@dataclass(slots=True)
class _Reasoning(_Item):
    """Reasoning; also as its own summary, which is all that many clients show."""

    form: ReasoningForm = _PLAIN

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.number, "content_index": 0}

    @property
    def summary_place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.number, "summary_index": 0}

    def to_wire(self) -> wire.ReasoningItem:
        whole = self.status != "in_progress"
        return wire.ReasoningItem(
            id=self.id,
            summary=[wire.SummaryText(text=self.text)] if whole and self.form.summarizes else [],
            content=[wire.ReasoningText(text=self.text)] if whole else [],
            encrypted_content=seal(self.text) if whole and self.form.seals else msgspec.UNSET,
            status=self.status,
        )

    def begin(self) -> Iterator[Event]:
        yield "content_part.added", {**self.place, "part": wire.ReasoningText(text="")}
        if self.form.summarizes:
            yield "reasoning_summary_part.added", {**self.summary_place, "part": wire.SummaryText(text="")}

    def grow(self, chunk: Chunk) -> Iterator[Event]:
        self.parts.append(chunk.reasoning)
        yield "reasoning_text.delta", {**self.place, "delta": chunk.reasoning}
        if self.form.summarizes:
            yield "reasoning_summary_text.delta", {**self.summary_place, "delta": chunk.reasoning}

    def finish(self) -> Iterator[Event]:
        if self.form.summarizes:
            yield "reasoning_summary_text.done", {**self.summary_place, "text": self.text}
            yield "reasoning_summary_part.done", {**self.summary_place, "part": wire.SummaryText(text=self.text)}
        yield "reasoning_text.done", {**self.place, "text": self.text}
        yield "content_part.done", {**self.place, "part": wire.ReasoningText(text=self.text)}


@dataclass(slots=True)
class _Call(_Item):
    """A tool call; `index` is its place among the calls of the answer."""

    index: int = 0
    call_id: str = ""
    tool: ToolName = _NO_TOOL

    @property
    def namespace(self) -> str | msgspec.UnsetType:
        return self.tool.namespace or msgspec.UNSET

    def to_wire(self) -> wire.OutputItem:
        return wire.CallItem(
            id=self.id,
            call_id=self.call_id,
            namespace=self.namespace,
            name=self.tool.name,
            arguments=self.text,
            status=self.status,
        )

    def add(self, arguments: str) -> Iterator[Event]:
        if arguments:
            self.parts.append(arguments)
            yield "function_call_arguments.delta", {**self.place, "delta": arguments}

    def finish(self) -> Iterator[Event]:
        yield "function_call_arguments.done", {**self.place, "name": self.tool.name, "arguments": self.text}


@dataclass(slots=True)
class _CustomCall(_Call):
    reader: InputReader = field(default_factory=InputReader)

    def to_wire(self) -> wire.CustomCallItem:
        return wire.CustomCallItem(
            id=self.id,
            call_id=self.call_id,
            namespace=self.namespace,
            name=self.tool.name,
            input=self.text,
            status=self.status,
        )

    def add(self, arguments: str) -> Iterator[Event]:
        yield from self._grow(self.reader.push(arguments))

    def finish(self) -> Iterator[Event]:
        yield from self._grow(self.reader.finish())
        yield "custom_tool_call_input.done", {**self.place, "input": self.text}

    def _grow(self, text: str) -> Iterator[Event]:
        if text:
            self.parts.append(text)
            yield "custom_tool_call_input.delta", {**self.place, "delta": text}


@dataclass(slots=True)
class _SearchCall(_Call):
    """A search of the client for tools. Its arguments have no events of their own."""

    def to_wire(self) -> wire.SearchCallItem:
        return wire.SearchCallItem(
            id=self.id, call_id=self.call_id, arguments=_to_object(self.text), status=self.status
        )

    def add(self, arguments: str) -> Iterator[Event]:
        self.parts.append(arguments)
        yield from ()

    def finish(self) -> Iterator[Event]:
        yield from ()


_CALL_KINDS: dict[str, tuple[type[_Call], str]] = {
    "function": (_Call, "fc_"),
    "custom": (_CustomCall, "ctc_"),
    "tool_search": (_SearchCall, "tsc_"),
}


class Output:
    """The items of one answer as it is generated. `push`, `close` and `stop` yield the events of what changed.
    `form`: that of reasoning."""

    def __init__(self, names: ToolNames, form: ReasoningForm) -> None:
        self._names = names
        self._form = form
        self.items: list[_Item] = []
        self._open: list[_Item] = []

    def to_wire(self) -> list[wire.OutputItem]:
        return [item.to_wire() for item in self.items]

    def push(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.reasoning:
            yield from self._add_reasoning(chunk)
        if chunk.text or (chunk.logprobs and not chunk.reasoning and not chunk.tools):
            yield from self._add_text(chunk)
        for delta in chunk.tools:
            yield from self._add_call(delta)

    def close(self, status: Ending = "completed") -> Iterator[Event]:
        """Finish all open items. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._begin(_Message(0, _new_id("msg_")))
        yield from self.stop(status)

    def stop(self, status: Ending = "incomplete") -> Iterator[Event]:
        """Finish all open items without beginning new ones."""
        for item in self._open:
            yield from self._finish_item(item, status)
        self._open.clear()

    def _add_reasoning(self, chunk: Chunk) -> Iterator[Event]:
        item = self._open[-1] if self._open else None
        if not isinstance(item, _Reasoning):
            item = _Reasoning(len(self.items), _new_id("rs_"), form=self._form)
            yield from self._begin(item)
        yield from item.grow(chunk)

    def _add_text(self, chunk: Chunk) -> Iterator[Event]:
        item = self._open[-1] if self._open else None
        if not isinstance(item, _Message):
            item = _Message(len(self.items), _new_id("msg_"))
            yield from self._begin(item)
        yield from item.grow(chunk)

    def _add_call(self, delta: ToolDelta) -> Iterator[Event]:
        calls = (each for each in self._open if isinstance(each, _Call))
        item = next((each for each in calls if each.index == delta.index), None)
        if item is None:
            tool = self._names.restore(delta.name)
            kind, prefix = _CALL_KINDS[tool.kind]
            item = kind(len(self.items), _new_id(prefix), index=delta.index, call_id=delta.id, tool=tool)
            yield from self._begin(item)
        yield from item.add(delta.arguments)

    def _begin(self, item: _Item) -> Iterator[Event]:
        """Begin a new item, after finishing an open text item. Several calls may be open at once."""
        for each in [each for each in self._open if not isinstance(each, _Call)]:
            yield from self._finish_item(each, "completed")
            self._open.remove(each)
        self.items.append(item)
        self._open.append(item)
        yield "output_item.added", {"output_index": item.number, "item": item.to_wire()}
        yield from item.begin()

    def _finish_item(self, item: _Item, status: Ending) -> Iterator[Event]:
        item.status = status
        yield from item.finish()
        yield "output_item.done", {"output_index": item.number, "item": item.to_wire()}


def _new_id(prefix: str) -> str:
    return AnswerHeader.create("", prefix).id


def _to_object(text: str) -> Any:
    """Return the object that a text is the JSON of, else the text."""
    try:
        return _ANY.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text


def _to_logprobs(tokens: list[TokenLogprob]) -> list[Any]:
    return list(to_logprobs(tokens).content)
