"""Calls of tools as servers stream them, as fragments that have a number, an id and a name of their own."""

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
    """A call that began: its number among those of its choice. `own`: its id is the server's. `name` is "" until it is
    known, and until then what came of `arguments` waits for it. `next`: the id that its name came again under, once
    the arguments were whole, with none yet: another call's if any follow."""

    number: int
    id: str
    own: bool
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    next: str = ""

    @property
    def is_complete(self) -> bool:
        """Its arguments are an object that is closed: no more can follow."""
        text = "".join(self.arguments)
        if not text.rstrip().endswith("}"):
            return False
        try:
            _OBJECT.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class ToolCalls:
    """The calls of one answer, of all of its choices.

    Each is told with its id and its name first, and once, though some servers repeat them, or name a call only after
    its id; one without an id is given one. Calls are numbered as they begin: some servers give each of them the number
    0, or none, and tell them apart by their ids, or by nothing but that a name comes again. Others repeat the name with
    every piece, under an id that is always new.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], _Call] = {}
        self._unnamed: dict[int, list[_Call]] = {}
        self._count: Counter[int] = Counter()

    def read(self, index: int, told: MessageWire) -> list[ToolDelta]:
        """What a delta or a message of the choice at `index` tells of calls."""
        calls = told.tool_calls or ()
        old = told.function_call  # what the API had before it had tools; some servers tell a call both ways
        if not calls and old is not None and (old.name or old.arguments):
            calls = [ToolWire(function=old)]
        deltas = (self._add_fragment(index, place, call) for place, call in enumerate(calls))
        return [delta for delta in deltas if delta is not None]

    def rest(self, index: int) -> Iterator[ToolDelta]:
        """At the end of a choice: calls whose name never came."""
        for call in self._unnamed.pop(index, ()):
            yield ToolDelta(index=call.number, id=call.id, arguments="".join(call.arguments))

    def _add_fragment(self, index: int, place: int, told: ToolWire) -> ToolDelta | None:
        at = index, place if told.index is None else told.index
        function = told.function
        name = (function.name if function else None) or ""
        arguments = _text(function.arguments) if function else ""
        ident = told.id or ""
        call = self._latest.get(at)
        if call is not None and call.next and arguments.strip():
            ident, name = ident or call.next, name or call.name
        if call is None or _starts_new_call(call, ident, name, arguments):
            call = _Call(self._count[index], ident or f"call_{uuid.uuid4().hex[:24]}", own=bool(ident))
            self._count[index] += 1
            self._latest[at] = call
            self._unnamed.setdefault(index, []).append(call)
        elif name and ident not in ("", call.id) and not arguments.strip() and call.is_complete:
            call.next = ident
        call.arguments.append(arguments)
        if call.name:
            return ToolDelta(index=call.number, arguments=arguments)
        if not name:
            return None
        call.name = name
        self._unnamed[index].remove(call)
        return ToolDelta(index=call.number, id=call.id, name=name, arguments="".join(call.arguments))


def _starts_new_call(call: _Call, ident: str, name: str, arguments: str) -> bool:
    """Whether a fragment with this id and name, under the number of `call`, is the first of another one."""
    if not (name and call.name) or (ident == call.id if ident else call.own):
        return False
    return name != call.name or (call.is_complete and bool(arguments.strip() or not ident))


def _text(arguments: Any) -> str:
    """Some servers send the object itself instead of its text."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()
