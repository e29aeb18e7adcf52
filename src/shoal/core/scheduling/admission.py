"""Who may come in: permits in units of items, refused at once when there is no room, never taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf
from random import random

import msgspec

from shoal.core.scheduling.planner import WEIGHTS
from shoal.errors import Overloaded
from shoal.types import BatchTask, Context, Rerank, TrafficClass

RATE_WINDOW_S = 10.0
"""How far back the drain rate looks: long enough for some batches of a slow model, short enough to follow a change."""

BULK_ABOVE = 8
"""Requests of more items than this are bulk unless they say otherwise."""


def count_items(task: BatchTask) -> int:
    """How many items it has, without making them."""
    return len(task.documents) if isinstance(task, Rerank) else len(task.inputs)


def classify_traffic(ctx: Context, items: int) -> TrafficClass:
    """The class that a request of so many items travels in: what its key or header says, else its size decides."""
    return ctx.traffic or ("bulk" if items > BULK_ABOVE else "interactive")


RESERVED_PART = 8
"""One part of so many is kept free of bulk items: a backlog of theirs must not turn away somebody's single text."""


LATE_PART = 0.9
"""Part of the time that a request has which the work before it may be predicted to take: predictions are not exact, and
what is admitted and not answered in time helps nobody."""

ESTIMATE_DECAY = 0.99
"""Weight that a request keeps at each later one: texts of one kind follow each other."""

CALM_PART = 0.5
"""A queue counts as drained when it takes less than this part of what it may take."""

FEW_REQUESTS = 32
"""So many interactive requests may always wait as long as they have: of a slow model that is no overload."""

OVERLOAD_PART = 0.25
"""Part of `max_queue_s` that a queue may take while more is asked for than is done."""

OVERLOAD = 1.25
"""How many times what is done has to be asked for: callers that each wait for an answer before they ask again ask for
what is done, however many they are."""


def wait_before_retry(seconds: float, jitter: Callable[[], float] = random) -> float:
    """`seconds` as a Retry-After: between 1 and 30 s, and up to half as long again, so that not all who were refused
    come back at once. `jitter` answers between 0 and 1."""
    return min(max(seconds, 1.0), 30.0) * (1 + jitter() / 2)


class Permit(msgspec.Struct):
    """The right of `items` items of one client to be inside; given back exactly once, whatever happened to them."""

    flow: tuple[str, TrafficClass]
    items: int
    tokens: int
    held: bool = True


@dataclass(slots=True)
class _AdmittedCounts:
    """Requests, items and tokens that are inside, of all, of a class or of a flow."""

    requests: int = 0
    items: int = 0
    tokens: int = 0


class _SustainedDelay:
    """Whether a queue has taken longer than `limit` seconds for `patience` seconds."""

    def __init__(self, limit: float, patience: float) -> None:
        self.limit = limit
        self._patience = patience
        self._since: float | None = None

    def observe(self, seconds: float, now: float) -> bool:
        """The queue takes so many `seconds` now."""
        if seconds < self.limit * CALM_PART:
            self._since = None
        elif seconds > self.limit and self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._patience


class _Demand:
    """Items that were asked for, refused ones included, and items that left; older ones count less: after `memory`
    seconds 1/e."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._at = 0.0
        self._asked = self._left = 0.0

    def record(self, now: float, *, asked: int = 0, left: int = 0) -> None:
        part = exp((self._at - now) / self._memory)
        self._asked = self._asked * part + asked
        self._left = self._left * part + left
        self._at = now

    def is_overloaded(self) -> bool:
        """Whether clearly more is asked for than leaves."""
        return self._asked > OVERLOAD * self._left


class Admission:
    """A bounded count of items inside, of which one client holds at most half, counted by class; and a bound on how
    long they take.

    Classes are counted apart because many users may stand behind one address: the bulk job of one of them must not use
    up the share of the others' single texts. When nothing is inside, any request is admitted however large, so that no
    legal request is refused for its size alone. Tokens are estimates until `correct` is called.

    `drain` answers how many seconds so many tokens in so many items take now, None while that is not known. A request
    is refused when what goes before it, by the planner's shares of classes, clients and requests, takes longer than the
    request has. Interactive ones are refused as well when the queue has taken longer than `max_queue_s` for as long as
    that: a burst may take its time, a queue that stays only makes everybody late. While more is asked for than is done,
    `OVERLOAD_PART` of it is enough: nobody gains by a longer queue. `FEW_REQUESTS` may always be inside. Bulk work
    waits until its deadline.
    """

    def __init__(
        self,
        max_items: int,
        clock: Callable[[], float],
        *,
        drain: Callable[[float, float], float | None] = lambda tokens, items: None,
        max_queue_s: float = 0.0,
        jitter: Callable[[], float] = random,
    ) -> None:
        self.max_items = max_items
        self._clock = clock
        self._drain = drain
        self._jitter = jitter
        self._all = _AdmittedCounts()
        self._classes: dict[TrafficClass, _AdmittedCounts] = {name: _AdmittedCounts() for name in WEIGHTS}
        self._flows: dict[tuple[str, TrafficClass], _AdmittedCounts] = {}
        self._left: deque[tuple[float, int]] = deque()
        self._left_items = 0
        self._standing = [_SustainedDelay(part * max_queue_s, max_queue_s) for part in (1.0, OVERLOAD_PART)]
        self._demand = _Demand(max_queue_s / 2) if max_queue_s else None
        self._true = self._estimated = 1.0

    @property
    def items(self) -> int:
        return self._all.items

    @property
    def tokens(self) -> int:
        return self._all.tokens

    def admit(self, client: str, traffic: TrafficClass, items: int, tokens: int, deadline: float = inf) -> Permit:
        """Take a permit, or raise Overloaded with `retry_after` from the rate at which items leave."""
        flow = (client, traffic)
        if self._demand is not None and traffic == "interactive":
            self._demand.record(self._clock(), asked=items)
        own = self._flows.get(flow)
        mine = own.items if own is not None else 0
        kept = self.max_items // RESERVED_PART if traffic == "bulk" else 0
        most = self.max_items - kept
        inside = self._all.items
        if inside and inside + items > most:
            but = f", {kept} of them kept for interactive requests" if kept else ""
            raise Overloaded(
                f"{inside} items are queued or running and {items} more exceed the limit of {self.max_items} "
                f"(max_queue_items){but}: try again later, or send smaller requests",
                retry_after=self._retry_after(inside + items - most),
            )
        if mine and mine + items > self.max_items // 2:
            raise Overloaded(
                f"this client has {mine} items queued or running and {items} more exceed its share of "
                f"{self.max_items // 2}: wait for answers before sending more",
                retry_after=self._retry_after(mine + items - self.max_items // 2),
            )
        if inside:
            self._check_time(own or _AdmittedCounts(), traffic, tokens, deadline)
        if own is None:
            own = self._flows[flow] = _AdmittedCounts()
        self._count(flow, own, 1, items, tokens)
        return Permit(flow, items, tokens)

    def correct(self, permit: Permit, tokens: int) -> None:
        """Replace the permit's estimate by the true token count; never refuses. Estimates of those that are still
        inside are taken to be as wrong as these."""
        if permit.held:
            self._true = ESTIMATE_DECAY * self._true + tokens
            self._estimated = ESTIMATE_DECAY * self._estimated + permit.tokens
            for each in (self._all, self._classes[permit.flow[1]], self._flows[permit.flow]):
                each.tokens += tokens - permit.tokens
            permit.tokens = tokens

    def release(self, permit: Permit) -> None:
        """Give the permit back; a second time does nothing."""
        if not permit.held:
            return
        permit.held = False
        own = self._flows[permit.flow]
        self._count(permit.flow, own, -1, -permit.items, -permit.tokens)
        if not own.requests:
            del self._flows[permit.flow]
        now = self._clock()
        if self._demand is not None and permit.flow[1] == "interactive":
            self._demand.record(now, left=permit.items)
        self._left.append((now, permit.items))
        self._left_items += permit.items
        self._forget()

    def _count(
        self, flow: tuple[str, TrafficClass], own: _AdmittedCounts, requests: int, items: int, tokens: int
    ) -> None:
        for each in (self._all, self._classes[flow[1]], own):
            each.requests += requests
            each.items += items
            each.tokens += tokens

    def _check_time(self, own: _AdmittedCounts, traffic: TrafficClass, tokens: int, deadline: float) -> None:
        seconds = self._estimate_seconds(self._tokens_ahead(own, traffic, tokens))
        if seconds is None:
            return
        now = self._clock()
        left = LATE_PART * (deadline - now)
        if seconds > left:
            raise Overloaded(
                f"the queue takes about {seconds:.1f} s and the request has {max(deadline - now, 0.0):.1f} s: try "
                "again later, or allow more time",
                retry_after=wait_before_retry(seconds - left, self._jitter),
            )
        if traffic == "interactive" and self._demand is not None:
            self._check_queue(seconds, now, self._demand.is_overloaded())

    def _check_queue(self, seconds: float, now: float, overloaded: bool) -> None:
        """Of an interactive request that would wait so many seconds."""
        lane = self._classes["interactive"]
        queue = self._estimate_seconds(self._add_other_classes(lane.tokens, "interactive")) or 0.0
        few = lane.requests < FEW_REQUESTS
        always, tight = self._standing
        bounds = ((always, True, "max_queue_ms"), (tight, overloaded, "under overload; a part of max_queue_ms"))
        for standing, counts, name in bounds:
            # Asked also of few requests, so that a queue that drained is known to have drained.
            if standing.observe(queue, now) and counts and not few and seconds > standing.limit:
                raise Overloaded(
                    f"the queue takes about {seconds:.1f} s, which is over the limit of {standing.limit:g} s ({name}): "
                    "try again later",
                    retry_after=wait_before_retry(seconds - standing.limit, self._jitter),
                )

    def _tokens_ahead(self, own: _AdmittedCounts, traffic: TrafficClass, tokens: int) -> float:
        """Tokens that are computed until this request's are, its own included, if the planner shares fairly: a request
        waits for as much of each other one of its client as it has itself, a client for as much of each other one, and
        a class for what the other's weight allows. Of running batches all of it counts."""
        mine = tokens + min(own.tokens, own.requests * tokens)
        lane = self._classes[traffic]
        flows = len(self._flows) - (own.requests > 0)
        alike = mine + min(lane.tokens - own.tokens, flows * mine)
        return self._add_other_classes(alike, traffic)

    def _add_other_classes(self, tokens: float, traffic: TrafficClass) -> float:
        """`tokens` of one class, and those of the others that its weight lets run in between."""
        others = self._all.tokens - self._classes[traffic].tokens
        return tokens + min(others, tokens * sum(WEIGHTS.values()) / WEIGHTS[traffic] - tokens)

    def _estimate_seconds(self, tokens: float) -> float | None:
        return self._drain(tokens * self._true / self._estimated, tokens * self._all.items / max(self._all.tokens, 1))

    def _forget(self) -> None:
        horizon = self._clock() - RATE_WINDOW_S
        while self._left and self._left[0][0] < horizon:
            self._left_items -= self._left.popleft()[1]

    def _retry_after(self, excess: int) -> float:
        """Seconds until `excess` items will have left at the recent rate; 1 when nothing is known."""
        self._forget()
        if not self._left_items:
            return wait_before_retry(1.0, self._jitter)
        span = max(self._clock() - self._left[0][0], 0.1)
        return wait_before_retry(excess * span / self._left_items, self._jitter)
