"""Admit requests: permits in units of items, refused at once when there is no room and never revoked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf
from random import random

import msgspec

from shoal.core.scheduling.drain_rate import DrainTime
from shoal.core.scheduling.fair_queue import WEIGHTS
from shoal.errors import Overloaded
from shoal.types import BatchTask, Context, Rerank, TrafficClass

RATE_WINDOW_S = 10.0
"""Window of the drain rate: long enough for some batches of a slow model, short enough to follow a change."""

BULK_ABOVE = 8
"""Requests with more items than this are bulk, unless a key or header sets their class."""


def count_items(task: BatchTask) -> int:
    """Count the items of a task without building them."""
    return len(task.documents) if isinstance(task, Rerank) else len(task.inputs)


def classify_traffic(ctx: Context, items: int) -> TrafficClass:
    """Return the traffic class of a request: from its key or header, else from its size."""
    return ctx.traffic or ("bulk" if items > BULK_ABOVE else "interactive")


RESERVED_PART = 8
"""1/RESERVED_PART of the queue is reserved for interactive items: a bulk backlog must not reject a single text."""


LATE_PART = 0.9
"""Fraction of a request's remaining time that the work ahead of it may take. Below 1 because predictions are inexact,
and a request that is admitted but misses its deadline is wasted work."""

ESTIMATE_DECAY = 0.99
"""Decay of older requests at each new one, for the ratio of true to estimated tokens: similar texts come in a row."""

CALM_PART = 0.5
"""Fraction of its limit below which a queue delay counts as drained."""

FEW_REQUESTS = 32
"""Below this many interactive requests, only deadlines limit the wait: for a slow model that is no overload."""

FEW_CALLERS = 128
"""The same while demand does not exceed throughput: so many callers, each of whom waits for an answer before the next
request, make a long queue on a slow model, and to refuse some of them makes none of them faster."""

OVERLOAD_PART = 0.25
"""Fraction of `max_queue_s` that the queue may take while demand exceeds throughput."""

OVERLOAD = 1.25
"""Ratio of demand to throughput above which a lane is overloaded. Callers that each wait for an answer before the next
request have a ratio of 1, however many they are."""


SLACK_PART = 0.25
"""Fraction of the queue that is no sign of overload, see `_Demand`."""


def wait_before_retry(seconds: float, jitter: Callable[[], float] = random) -> float:
    """Return `seconds` as a Retry-After: clamped to 1 to 30 s, plus up to 50 % so that rejected clients spread out.

    `jitter` returns a number between 0 and 1.
    """
    return min(max(seconds, 1.0), 30.0) * (1 + jitter() / 2)


class Permit(msgspec.Struct):
    """The right of one client to have `items` items queued or running; released exactly once, whatever happens."""

    flow: tuple[str, TrafficClass]
    items: int
    tokens: int
    is_held: bool = True


@dataclass(slots=True)
class _AdmittedCounts:
    """Requests, items and tokens that are queued or running: in total, of a class or of a flow."""

    requests: int = 0
    items: int = 0
    tokens: int = 0


class _SustainedDelay:
    """For how long a queue has taken longer than `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since: float | None = None

    def observe(self, seconds: float, now: float) -> float:
        """Record that the queue takes `seconds` now; returns for how many seconds it has been too long."""
        if seconds < self.limit * CALM_PART:
            self.since = None
        elif seconds > self.limit and self.since is None:
            self.since = now
        return now - self.since if self.since is not None else 0.0


class _Demand:
    """Requested items, rejected ones included, and released items. Add to both counts; they decay to 1/e after `memory`
    seconds, at each question."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._asked_at = 0.0
        self.requested_items = self.released_items = 0.0

    def restart(self, now: float) -> None:
        self.requested_items = self.released_items = 0.0
        self._asked_at = now

    def is_overloaded(self, now: float, slack: float) -> bool:
        """Whether clearly more items are requested than released: more than the `slack` of items that are released
        together and requested again a little later."""
        part = exp((self._asked_at - now) / self._memory)
        self.requested_items *= part
        self.released_items *= part
        self._asked_at = now
        return self.requested_items > OVERLOAD * self.released_items + slack


class Admission:
    """Bounds the items that are queued or running, and the time that they take.

    One client holds at most half of `max_items`, counted per class. Classes are counted separately because many users
    may share one address: the bulk job of one of them must not use up the share of the others' single texts. An empty
    lane admits any request however large, so that no legal request is rejected for its size alone. Tokens are those of
    work (`CostModel.work`); they are estimates, corrected by the ratio of true to estimated tokens of the requests
    answered before.

    `drain(tokens, items)` predicts how long this much work takes now, or returns None while that is unknown. A request
    is rejected if the work ahead of it, by the planner's shares of classes, clients and requests, takes longer than its
    remaining time. An interactive request is also rejected once the queue has taken longer than `max_queue_s` for
    `max_queue_s` seconds: a burst may take its time, but a standing queue only delays every request. While demand
    exceeds throughput, `OVERLOAD_PART` of `max_queue_s` is the limit, because a longer queue adds no throughput.
    Neither of these queue limits applies to bulk work, nor to few interactive requests (`FEW_CALLERS`, under overload
    `FEW_REQUESTS`).
    """

    def __init__(
        self,
        max_items: int,
        clock: Callable[[], float],
        *,
        drain: Callable[[float, float], DrainTime | None] = lambda tokens, items: None,
        max_queue_s: float = 0.0,
        jitter: Callable[[], float] = random,
    ) -> None:
        self.max_items = max_items
        self._clock = clock
        self._drain = drain
        self._jitter = jitter
        self._total = _AdmittedCounts()
        self._classes: dict[TrafficClass, _AdmittedCounts] = {name: _AdmittedCounts() for name in WEIGHTS}
        self._flows: dict[tuple[str, TrafficClass], _AdmittedCounts] = {}
        self._releases: deque[tuple[float, int]] = deque()
        self._released_items = 0
        self._max_queue_s = max_queue_s
        self._sustained_delays = [_SustainedDelay(part * max_queue_s) for part in (1.0, OVERLOAD_PART)]
        self._calm_s = CALM_PART * OVERLOAD_PART * max_queue_s if max_queue_s else inf
        self._demand = _Demand(2 * max_queue_s) if max_queue_s else None
        self._true_tokens = self._estimated_tokens = 1.0

    @property
    def items(self) -> int:
        return self._total.items

    @property
    def tokens(self) -> int:
        return self._total.tokens

    def admit(self, client: str, traffic: TrafficClass, items: int, tokens: int, deadline: float = inf) -> Permit:
        """Take a permit. Raises Overloaded, with `retry_after` derived from the rate at which items are released."""
        flow = (client, traffic)
        if self._demand is not None and traffic == "interactive":
            self._demand.requested_items += items
        own = self._flows.get(flow)
        mine = own.items if own is not None else 0
        kept = self.max_items // RESERVED_PART if traffic == "bulk" else 0
        most = self.max_items - kept
        inside = self._total.items
        if inside and inside + items > most:
            but = f", {kept} of them reserved for interactive requests" if kept else ""
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
        else:
            self._reset_delays()
        if own is None:
            own = self._flows[flow] = _AdmittedCounts()
        self._count(flow, own, 1, items, tokens)
        return Permit(flow, items, tokens)

    def release(self, permit: Permit, tokens: int | None = None) -> None:
        """Release the permit; a second call does nothing. `tokens`: the true count of a request that was answered."""
        if not permit.is_held:
            return
        permit.is_held = False
        if tokens is not None:
            self._true_tokens = ESTIMATE_DECAY * self._true_tokens + tokens
            self._estimated_tokens = ESTIMATE_DECAY * self._estimated_tokens + permit.tokens
        own = self._flows[permit.flow]
        self._count(permit.flow, own, -1, -permit.items, -permit.tokens)
        if not own.requests:
            del self._flows[permit.flow]
        now = self._clock()
        if self._demand is not None and permit.flow[1] == "interactive":
            self._demand.released_items += permit.items
        self._releases.append((now, permit.items))
        self._released_items += permit.items
        self._forget()

    def _count(
        self, flow: tuple[str, TrafficClass], own: _AdmittedCounts, requests: int, items: int, tokens: int
    ) -> None:
        for each in (self._total, self._classes[flow[1]], own):
            each.requests += requests
            each.items += items
            each.tokens += tokens

    def _check_time(self, own: _AdmittedCounts, traffic: TrafficClass, tokens: int, deadline: float) -> None:
        longest = self._predict(self._total.tokens + tokens)
        if longest is None:
            return
        now = self._clock()
        left = LATE_PART * (deadline - now)
        if longest.last <= left and longest.seconds <= self._calm_s:  # even behind everything, whatever its share
            if traffic == "interactive":
                self._reset_delays()
            return
        ahead = self._predict(self._tokens_ahead(own, traffic, tokens))
        if ahead is None:
            return
        if ahead.last > left:
            raise Overloaded(
                f"the queue takes about {ahead.last:.1f} s, too long for a request with "
                f"{max(deadline - now, 0.0):.1f} s left: try again later, or allow more time",
                retry_after=wait_before_retry(ahead.last - left, self._jitter),
            )
        if traffic == "interactive" and self._demand is not None:
            self._check_queue(tokens, ahead, now, self._demand)

    def _reset_delays(self) -> None:
        """Record that the queue takes no time worth noting."""
        for standing in self._sustained_delays:
            standing.since = None

    def _check_queue(self, tokens: int, ahead: DrainTime, now: float, demand: _Demand) -> None:
        """Raise Overloaded for an interactive request with `ahead` before it, its own tokens included, behind a
        standing queue.

        A wait no longer than one batch is not refused: on a slow engine, fair sharing still puts the requests of a
        modest client into the next batch, however many another client sends.
        """
        lane = self._classes["interactive"]
        standing_queue = self._predict(self._add_other_classes(lane.tokens, "interactive"))
        queue = standing_queue.seconds if standing_queue is not None else 0.0
        always, tight = self._sustained_delays
        # Observed for few requests too, so that a drained queue is noticed.
        always_s, tight_s = always.observe(queue, now), tight.observe(queue, now)
        if tight_s < self._max_queue_s / 2:
            # The burst that began the queue is no sign of what follows: many callers may start at the same moment.
            demand.restart(now)
        overloaded = demand.is_overloaded(now, lane.items * SLACK_PART)
        bounds = (
            (always, always_s, FEW_CALLERS, "max_queue_ms"),
            (tight, tight_s, FEW_REQUESTS if overloaded else inf, "a fraction of max_queue_ms, under overload"),
        )
        for standing, stood_s, few, name in bounds:
            if stood_s < self._max_queue_s or lane.requests < few or ahead.seconds <= standing.limit:
                continue
            own = self._predict(tokens)
            wait_s = ahead.seconds - (own.seconds if own is not None else 0.0)
            if wait_s > max(standing.limit, ahead.batch):
                raise Overloaded(
                    f"the queue takes about {wait_s:.1f} s, over the limit of {standing.limit:g} s ({name}): try again "
                    "later",
                    retry_after=wait_before_retry(wait_s - standing.limit, self._jitter),
                )

    def _tokens_ahead(self, own: _AdmittedCounts, traffic: TrafficClass, tokens: int) -> float:
        """Tokens that are computed until this request is done, its own included, under the planner's fair sharing.

        A request waits for as many tokens of each other request of its client as it has itself, a client for as many
        of each other client, and a class for the share that the other's weight allows. Running batches count in full.
        """
        mine = tokens + min(own.tokens, own.requests * tokens)
        lane = self._classes[traffic]
        flows = len(self._flows) - (own.requests > 0)
        alike = mine + min(lane.tokens - own.tokens, flows * mine)
        return self._add_other_classes(alike, traffic)

    def _add_other_classes(self, tokens: float, traffic: TrafficClass) -> float:
        """Add to `tokens` of one class the tokens of other classes that run in between, by weight."""
        others = self._total.tokens - self._classes[traffic].tokens
        return tokens + min(others, tokens * sum(WEIGHTS.values()) / WEIGHTS[traffic] - tokens)

    def _predict(self, tokens: float) -> DrainTime | None:
        return self._drain(
            tokens * self._true_tokens / self._estimated_tokens, tokens * self._total.items / max(self._total.tokens, 1)
        )

    def _forget(self) -> None:
        horizon = self._clock() - RATE_WINDOW_S
        while self._releases and self._releases[0][0] < horizon:
            self._released_items -= self._releases.popleft()[1]

    def _retry_after(self, excess: int) -> float:
        """Seconds until `excess` items are released at the recent rate; from 1 s when the rate is unknown."""
        self._forget()
        if not self._released_items:
            return wait_before_retry(1.0, self._jitter)
        span = max(self._clock() - self._releases[0][0], 0.1)
        return wait_before_retry(excess * span / self._released_items, self._jitter)
