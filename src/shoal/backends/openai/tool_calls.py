"""Assembles tool calls from the fragments that servers stream, each with an index, an id and a name."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.backends.openai.wire import MessageWire, ToolWire
from shoal.decoding import json_decoder
from shoal.types import ToolDelta

_OBJECT = json_decoder(dict[str, Any])


@dataclass(slots=True)
class _Call:
    """A call in progress. `number`: its index in its choice. `has_own_id`: its id is the server's. `name` is "" until
    known; until then its `arguments` are held back. `next_id`: the id of a fragment that repeats the name after the
    arguments are complete and has none itself; if arguments follow, they belong to a new call with this id."""

    number: int
    id: str
    has_own_id: bool
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    next_id: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a complete JSON object, so that no more can follow."""
        text = "".join(self.arguments)
        if not text.rstrip().endswith("}"):
            return False
        try:
            _OBJECT.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class ToolCalls:
    """The calls of one answer, across its choices.

    The first delta of a call has its id and name, later ones do not, although some servers repeat them or send the name
    after the id. A call without an id gets one. Calls are numbered in the order they begin: some servers use index 0 or
    none for every call and distinguish calls by their ids, or only by a repeated name. Others repeat the name in every
    fragment, each time with a new id.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], _Call] = {}
        self._unnamed: dict[int, list[_Call]] = {}
        self._count: Counter[int] = Counter()

    def read(self, index: int, message: MessageWire) -> list[ToolDelta]:
        """Return the tool deltas in a delta or message of the choice at `index`."""
        calls = message.tool_calls or ()
        old = message.function_call  # the API's older form; some servers send a call in both
        if not calls and old is not None and (old.name or old.arguments):
            calls = [ToolWire(function=old)]
        deltas = (self._add_fragment(index, place, call) for place, call in enumerate(calls))
        return [delta for delta in deltas if delta is not None]

    def rest(self, index: int) -> Iterator[ToolDelta]:
        """Return the calls of a finished choice whose name never came."""
        for call in self._unnamed.pop(index, ()):
            yield ToolDelta(index=call.number, id=call.id, arguments="".join(call.arguments))

    def _add_fragment(self, index: int, place: int, fragment: ToolWire) -> ToolDelta | None:
        at = index, place if fragment.index is None else fragment.index
        function = fragment.function
        name = (function.name if function else None) or ""
        arguments = _text(function.arguments) if function else ""
        ident = fragment.id or ""
        call = self._latest.get(at)
        if call is not None and call.next_id and arguments.strip():
            ident, name = ident or call.next_id, name or call.name
        if call is None or _starts_new_call(call, ident, name, arguments):
            call = _Call(self._count[index], ident or f"call_{uuid.uuid4().hex[:24]}", has_own_id=bool(ident))
            self._count[index] += 1
            self._latest[at] = call
            self._unnamed.setdefault(index, []).append(call)
        elif name and ident not in ("", call.id) and not arguments.strip() and call.is_complete:
            call.next_id = ident
        call.arguments.append(arguments)
        if call.name:
            return ToolDelta(index=call.number, arguments=arguments)
        if not name:
            return None
        call.name = name
        self._unnamed[index].remove(call)
        return ToolDelta(index=call.number, id=call.id, name=name, arguments="".join(call.arguments))


def _starts_new_call(call: _Call, ident: str, name: str, arguments: str) -> bool:
    """Whether a fragment with this id and name, at the index of `call`, begins a new call."""
    if not (name and call.name) or (ident == call.id if ident else call.has_own_id):
        return False
    return name != call.name or (call.is_complete and bool(arguments.strip() or not ident))


def _text(arguments: Any) -> str:
    """Return the arguments as text: some servers send the object itself."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()
