"""Who may come in: permits in units of items, refused at once when there is no room, never taken back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import Overloaded
from shoal.types import Batched, Context, Generate, Rerank, Task, TrafficClass

RATE_WINDOW_S = 10.0
"""How far back the drain rate looks: long enough for some batches of a slow model, short enough to follow a change."""

BULK_ABOVE = 8
"""Requests of more items than this are bulk unless they say otherwise."""


def size_of(task: Batched) -> int:
    """How many items it has, without making them."""
    return len(task.documents) if isinstance(task, Rerank) else len(task.inputs)


def traffic_of(task: Task, ctx: Context) -> TrafficClass:
    """The class that a request travels in: what its key or header says, else its size decides."""
    if ctx.traffic is not None:
        return ctx.traffic
    if isinstance(task, Generate):
        return "interactive"
    return "bulk" if size_of(task) > BULK_ABOVE else "interactive"


RESERVED_PART = 8
"""One part of so many is kept free of bulk items: a backlog of theirs must not turn away somebody's single text."""


@dataclass(slots=True)
class Permit:
    """The right of `items` items of one client to be inside; given back exactly once, whatever happened to them."""

    flow: tuple[str, TrafficClass]
    items: int
    tokens: int
    held: bool = True


class Admission:
    """A bounded count of items inside, of which one client holds at most half, counted by class.

    Classes are counted apart because many users may stand behind one address: the bulk job of one of them must not use
    up the share of the others' single texts. When nothing is inside, any request is admitted however large, so that no
    legal request is refused for its size alone. Tokens are counted for the drain rate and the metrics; they are
    estimates until `correct` is called.
    """

    def __init__(self, max_items: int, clock: Callable[[], float]) -> None:
        self.max_items = max_items
        self.items = 0
        self.tokens = 0
        self._clock = clock
        self._clients: defaultdict[tuple[str, TrafficClass], int] = defaultdict(int)
        self._left: deque[tuple[float, int]] = deque()
        self._left_items = 0

    def admit(self, client: str, traffic: TrafficClass, items: int, tokens: int) -> Permit:
        """Take a permit, or raise Overloaded with `retry_after` from the rate at which items leave."""
        flow = (client, traffic)
        mine = self._clients.get(flow, 0)
        kept = self.max_items // RESERVED_PART if traffic == "bulk" else 0
        most = self.max_items - kept
        if self.items and self.items + items > most:
            but = f", {kept} of them kept for interactive requests" if kept else ""
            raise Overloaded(
                f"{self.items} items are queued or running and {items} more exceed the limit of {self.max_items} "
                f"(max_queue_items){but}: try again later, or send smaller requests",
                retry_after=self._retry_after(self.items + items - most),
            )
        if mine and mine + items > self.max_items // 2:
            raise Overloaded(
                f"this client has {mine} items queued or running and {items} more exceed its share of "
                f"{self.max_items // 2}: wait for answers before sending more",
                retry_after=self._retry_after(mine + items - self.max_items // 2),
            )
        self.items += items
        self.tokens += tokens
        self._clients[flow] += items
        return Permit(flow, items, tokens)

    def correct(self, permit: Permit, tokens: int) -> None:
        """Replace the permit's estimate by the true token count; never refuses."""
        if permit.held:
            self.tokens += tokens - permit.tokens
            permit.tokens = tokens

    def release(self, permit: Permit) -> None:
        """Give the permit back; a second time does nothing."""
        if not permit.held:
            return
        permit.held = False
        self.items -= permit.items
        self.tokens -= permit.tokens
        left = self._clients[permit.flow] - permit.items
        if left:
            self._clients[permit.flow] = left
        else:
            del self._clients[permit.flow]
        self._left.append((self._clock(), permit.items))
        self._left_items += permit.items
        self._forget()

    def _forget(self) -> None:
        horizon = self._clock() - RATE_WINDOW_S
        while self._left and self._left[0][0] < horizon:
            self._left_items -= self._left.popleft()[1]

    def _retry_after(self, excess: int) -> float:
        """Seconds until `excess` items will have left at the recent rate, between 1 and 30; 1 when nothing is known."""
        self._forget()
        if not self._left_items:
            return 1.0
        span = max(self._clock() - self._left[0][0], 0.1)
        return min(max(excess * span / self._left_items, 1.0), 30.0)
