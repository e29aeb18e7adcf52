"""The replicas of one model: picks one for each request and ejects those that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from shoal.backends.base.http_client import Client
from shoal.backends.base.presence import Presence
from shoal.core.generation.affinity import NO_DEMAND, Demand, Load, choose
from shoal.core.protocols import ReplicaStatus
from shoal.core.recording import name_error, record_attempt
from shoal.core.scheduling.ejection import Ejection
from shoal.errors import (
    DeadlineExceeded,
    TransportFailed,
    Unavailable,
    UpstreamFailed,
    UpstreamRefused,
)

logger = logging.getLogger("shoal.openai")

LOOK_S = 5.0
"""Seconds between health checks of a healthy server; a check is one GET /models, which costs no token."""

LOOK_AGAIN_S = 1.0
"""Seconds between health checks of an unhealthy server."""

LOOK_TIMEOUT_S = 2.0

SILENCE = 0.95
"""Fraction of the first-token timeout after which a cancellation counts as that timeout, since its timer starts
slightly before the request is sent."""

LONGEST_PAUSE_S = 5.0
"""Maximum seconds of an ejection: health checks run every few seconds as well."""


@dataclass(slots=True, eq=False)
class Replica(Ejection):
    """One server, with its names for the model and its LoRAs. `tokens`: those of the requests in flight, as estimated;
    `last_pick`: a counter value from its last pick."""

    client: Client
    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    in_flight: int = 0
    tokens: int = 0
    last_pick: int = 0
    longest_s: float = field(default=LONGEST_PAUSE_S, kw_only=True)
    _presence: Presence = field(init=False)

    def __post_init__(self) -> None:
        self._presence = Presence(
            self.client.base, logger, look=lambda: check_health(self.client), admit=self._end_ejection, serving=True
        )

    @property
    def alive(self) -> bool:
        """Whether the server passed the last health check."""
        return self._presence.ready

    @property
    def doubtful(self) -> bool:
        """Whether the next health check is due."""
        return self._presence.check_due

    def is_usable(self, now: float) -> bool:
        return self.alive and self.can_take(now, self.in_flight)

    def record_failure(self, now: float, *, unreachable: bool = False) -> None:
        if unreachable:
            self._presence.check_now()
        Ejection.record_failure(self, now, unreachable=unreachable)

    def start(self) -> None:
        """Start the health checks. Call it once."""
        self._presence.start(look_s=LOOK_S, again_s=(LOOK_AGAIN_S,))

    async def aclose(self) -> None:
        """Stop the health checks."""
        await self._presence.aclose()

    async def _end_ejection(self) -> None:
        self.ejected_until = 0.0


class Attempt:
    """One request in flight at one replica, of so many tokens; the replica records how it ends.

    `first_s`: seconds that the request may wait for its first piece, counted from `since` (infinite: until `deadline`);
    times are of `time.monotonic()`. A cancellation after that is a timeout, an earlier one a client disconnect.
    `has_response`: the replica accepted the request, and its answer is being read.
    """

    def __init__(self, replica: Replica, *, since: float, first_s: float, deadline: float, tokens: int = 0) -> None:
        self.replica = replica
        self._tokens = tokens
        self._silent_at = since + SILENCE * first_s
        self._deadline = deadline
        self._has_answered = False
        self._started = time.monotonic()
        self.has_response = False

    def record_first_piece(self) -> None:
        """Record that a first piece of the answer arrived."""
        if not self._has_answered:
            self._has_answered = True
            self.replica.end_trial()

    def record(self, error: BaseException | None) -> None:
        """Note the attempt and how it ended, for `shoal explain` and traces."""
        now = time.monotonic()
        late = isinstance(error, asyncio.CancelledError) and (now >= self._deadline or self._is_silent(now))
        kind = DeadlineExceeded.kind if late else name_error(error)
        record_attempt(self.replica.client.base, self._started, now, kind)

    def _is_silent(self, now: float) -> bool:
        """Whether the first piece is late."""
        return not self._has_answered and now >= self._silent_at

    def __enter__(self) -> Self:
        self.replica.in_flight += 1
        self.replica.tokens += self._tokens
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.replica.in_flight -= 1
        self.replica.tokens -= self._tokens
        if self.has_response or error is not None:
            self.record(error)
        if error is None:
            return
        if isinstance(error, UpstreamRefused):
            error.server = self.replica.client.base
        now = time.monotonic()
        if isinstance(error, asyncio.CancelledError | DeadlineExceeded):
            late = isinstance(error, DeadlineExceeded) or now >= self._deadline
            silent = now >= self._silent_at
            if not self._has_answered and (late or silent):
                self.replica.record_failure(now, unreachable=silent)
        elif isinstance(error, TransportFailed | UpstreamFailed) or (
            isinstance(error, UpstreamRefused) and error.status >= 500
        ):
            self.replica.record_failure(now, unreachable=False)


class ServerPool:
    """The replicas of one model and their health checks. `pick` prefers usable replicas; if all are ejected or out of
    service, it returns the least busy of them."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = replicas
        self._clock = clock
        self._picks = 0

    def start(self) -> None:
        """Start the health checks. Call it once."""
        for replica in self.replicas:
            replica.start()

    def ready(self) -> bool:
        return any(replica.alive for replica in self.replicas)

    def pick(self, tried: Collection[Replica] = (), demand: Demand = NO_DEMAND) -> Replica:
        """Return a replica that is not in `tried` (see core.generation.affinity). Raises Unavailable if all were
        tried."""
        left = [replica for replica in self.replicas if replica not in tried] if tried else self.replicas
        if not left:
            raise Unavailable("no server of the model can accept the request now: try again soon", retry_after=1.0)
        choice = left[0]
        if len(left) > 1:
            now = self._clock()
            usable = [replica for replica in left if replica.is_usable(now)] or left
            loads = [Load(each.in_flight, each.tokens, each.last_pick) for each in usable]
            choice = usable[choose([each.client.base for each in usable], loads, demand)]
        self._picks += 1
        choice.last_pick = self._picks
        return choice

    def has_alternative(self, tried: Collection[Replica]) -> bool:
        """Whether a usable replica is left that is not in `tried`."""
        now = self._clock()
        return any(replica.is_usable(now) for replica in self.replicas if replica not in tried)

    def status(self) -> list[ReplicaStatus]:
        now = self._clock()
        return [each.status(each.client.base, now, present=each.alive) for each in self.replicas]

    async def aclose(self) -> None:
        await asyncio.gather(*(replica.aclose() for replica in self.replicas))


async def check_health(client: Client) -> None:
    """Check that the server responds; an error status such as 404 is fine. Raises TransportFailed, DeadlineExceeded,
    and UpstreamFailed if it, or a proxy in front of it, reports that it cannot serve."""
    answer = await client.get("/models", time.monotonic() + LOOK_TIMEOUT_S)
    if answer.status >= 500 and answer.status != 501:
        raise UpstreamFailed(f"{client.base}/models returns status {answer.status}")
