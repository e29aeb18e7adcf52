"""Responses kept in memory, so that later requests can refer to them: bounded in bytes, each for a while after its last
use, and each for its owner alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Self

import msgspec

TURN_BYTES = 2048
"""What a stored response takes beside its bytes."""
ITEM_BYTES = 512
"""What an item takes beside its bytes: its id and its places in tables."""


class StoredItem(msgspec.Struct, frozen=True):
    """An item as JSON, with its id."""

    id: str
    data: bytes


class _Identified(msgspec.Struct):
    id: str = ""


class _Body(msgspec.Struct):
    output: list[msgspec.Raw] = []


_ID = msgspec.json.Decoder(_Identified)
_BODY = msgspec.json.Decoder(_Body)


class Turn:
    """A response and the items that were new in its request. `previous`: the response that it goes on from, which lives
    as long as this one. `body`: the response as its client got it."""

    __slots__ = ("body", "id", "inputs", "owner", "previous", "size", "used_at", "users")

    def __init__(self, owner: str, id: str, previous: Turn | None, inputs: Sequence[StoredItem], body: bytes) -> None:
        self.owner = owner
        self.id = id
        self.previous = previous
        self.inputs = inputs
        self.body = body
        self.used_at = 0.0
        self.users = 0
        items = len(inputs) + len(self.outputs())
        self.size = TURN_BYTES + items * ITEM_BYTES + len(body) + sum(len(item.data) for item in inputs)

    def outputs(self) -> list[StoredItem]:
        raw = _BODY.decode(self.body).output
        return [StoredItem(_ID.decode(each).id, bytes(each)) for each in raw]

    def before(self) -> list[StoredItem]:
        """Return the items that this response answers, from the first turn on."""
        turns = [self]
        while turns[-1].previous is not None:
            turns.append(turns[-1].previous)
        made: list[StoredItem] = []
        for turn in reversed(turns):
            made += turn.inputs
            made += turn.outputs() if turn is not self else ()
        return made


class ResponseStore:
    """Stored responses, `max_bytes` in all. An owner's oldest go first, and those of the owner with the most bytes."""

    def __init__(self, max_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._turns: dict[str, dict[str, Turn]] = {}  # by owner, in the order of their last use
        self._items: dict[tuple[str, str], Turn] = {}
        self._bytes: Counter[str] = Counter()

    @classmethod
    def create(cls, megabytes: int, lifetime_s: float) -> Self | None:
        """Return a store of so many MB of 2^20 bytes; None for none."""
        return cls(megabytes << 20, lifetime_s) if megabytes else None

    @property
    def size(self) -> int:
        """Bytes of all turns, those included that others go on from."""
        return self._bytes.total()

    def add(self, turn: Turn) -> None:
        """Keep a response, unless it is too large to be kept beside anything else."""
        self._forget_old()
        if turn.size > self._max_bytes // 2:
            return
        turn.used_at = self._clock()
        self._turns.setdefault(turn.owner, {})[turn.id] = turn
        for item in (*turn.inputs, *turn.outputs()):
            self._items.setdefault((turn.owner, item.id), turn)  # an id that a client gave again names the first item
        self._hold(turn)
        while self.size > self._max_bytes:
            self._forget_one()

    def get(self, owner: str, id: str) -> Turn | None:
        """Return a response of this owner, which counts as a use of it."""
        self._forget_old()
        turns = self._turns.get(owner, {})
        turn = turns.pop(id, None)
        if turn is not None:
            turn.used_at = self._clock()
            turns[id] = turn
        return turn

    def find_item(self, owner: str, id: str) -> StoredItem | None:
        """Return an item of a response of this owner, or of its request."""
        turn = self._items.get((owner, id))
        if turn is None or self.get(owner, turn.id) is None:
            return None
        return next((item for item in (*turn.outputs(), *turn.inputs) if item.id == id), None)

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response. Those that go on from it keep its items."""
        turn = self._turns.get(owner, {}).pop(id, None)
        if turn is not None:
            self._forget(turn)
        return turn is not None

    def _forget_old(self) -> None:
        limit = self._clock() - self._lifetime_s
        for turns in [*self._turns.values()]:
            for turn in [*takewhile(lambda each: each.used_at < limit, turns.values())]:
                del turns[turn.id]
                self._forget(turn)

    def _forget_one(self) -> None:
        """Forget the oldest response of the owner with the most bytes."""
        owner = max(self._turns, key=lambda each: self._bytes[each])
        turns = self._turns[owner]
        self._forget(turns.pop(next(iter(turns))))

    def _forget(self, turn: Turn) -> None:
        for item in (*turn.inputs, *turn.outputs()):
            if self._items.get((turn.owner, item.id)) is turn:
                del self._items[turn.owner, item.id]
        if not self._turns.get(turn.owner, True):
            del self._turns[turn.owner]
        self._release(turn)

    def _hold(self, turn: Turn | None) -> None:
        """Count the bytes of a turn while something refers to it, and again those of the turns before it if they were
        forgotten while this one was made."""
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                return
            self._bytes[turn.owner] += turn.size
            turn = turn.previous

    def _release(self, turn: Turn | None) -> None:
        """Count the bytes of a turn no more once nothing refers to it, nor those of the turns before it."""
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self._bytes[turn.owner] -= turn.size
            if not self._bytes[turn.owner]:
                del self._bytes[turn.owner]
            turn = turn.previous
