"""An engine for one text-embeddings-inference server, with health checks that bring it back into service."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.backends.base.items import to_items
from shoal.backends.base.presence import Presence, PresenceMixin
from shoal.backends.base.vector_width import check_width, cut_vectors
from shoal.backends.tei.info import Info
from shoal.backends.tei.link import BatchTooLarge, ExpectedShape, KeyRefused, Link
from shoal.core.protocols import CostModel, EngineFacts, Tensors
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    UpstreamFailed,
)
from shoal.types import Array

logger = logging.getLogger("shoal.tei")

SLOTS = 2
"""Calls in flight: the server tokenizes the next one while it computes the first, and batches stay large."""

COST = CostModel(0.005, 0.00001)
"""Initial cost estimate: a call over a network to an accelerator."""

LOOK_S = 5.0
"""Seconds between health checks of a healthy server; a check requests its health and its info."""

LOOK_AGAIN_S = 1.0
"""Seconds between health checks of an unhealthy server."""

LOOK_TIMEOUT_S = 2.0

ASK_EVERY = 1
"""Number of health checks of a healthy server per check that runs the model: the info of a server restarted with other
weights or another prompt does not change."""

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embedding", "tokens"),
    "splade": ("sparse",),
    "reranker": ("scores",),
    "classifier": ("scores",),
}
"""Outputs by kind of model; each also has "token_count"."""

Admit = Callable[["TeiEngine"], Awaitable[None]]


class TeiEngine(PresenceMixin):
    """Engine over the calls of TEI. Inputs: "text", an object array [rows] of str or list[int]; for scores also "pair",
    of str, or None if the text has no partner. Outputs:

    - "embedding" float32 [rows, dimension], "tokens" object [rows] of float32 [l, dimension], "sparse" object [rows] of
      SparseVector;
    - "scores" float32 [rows, labels], before activation, in the order of the info's labels;
    - "token_count" int64 [rows, 1]: the server's count.

    `params` are the options of the call (truncate, truncation_direction, prompt_name, normalize, dimensions), sent
    unchanged. `info` is what the server reports, read again at each health check; `slots` calls in flight never hold
    more inputs than the server has permits. `admit` is awaited each time the server comes back or changes its model,
    and raises a ShoalError to keep it out of service. `same` is awaited while the server is in service, and raises
    ConfigError if its model has changed; the server is then out of service until admitted again. Both may call `infer`.

    `dimension` is the model's dimension once known: a vector of any other length raises UpstreamFailed and takes the
    server out of service.
    """

    def __init__(
        self,
        link: Link,
        info: Info,
        name: str,
        *,
        admit: Admit,
        same: Admit | None = None,
        slots: int = SLOTS,
        serving: bool = False,
    ) -> None:
        self.link = link
        self.info = info
        self.dimension: int | None = None
        self._name = name
        self._verify = same
        self._slots = slots
        self._refused_size: int | None = None
        self._token_width: int | None = None
        self._shape = ExpectedShape(info, None)
        self._calls = 0
        self._checks = 0
        self._admit = admit
        self._presence = Presence(name, logger, look=self._check_health, admit=self._admit_server, serving=serving)
        self.facts = self._build_facts()

    def start(self) -> None:
        """Start the health checks. Call it once."""
        self._presence.start(look_s=LOOK_S, again_s=(LOOK_AGAIN_S,))

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if unknown := set(outputs) - set(self.facts.outputs):
            raise InternalError(f"{self._name} has no output {unknown.pop()!r}")
        with self._presence:
            self._calls += 1
            try:
                return await self._infer_items(to_items(inputs), outputs, params, deadline)
            finally:
                self._calls -= 1

    def _build_facts(self) -> EngineFacts:
        info = self.info
        # An input takes one permit: all slots together must not hold more inputs than there are permits.
        slots = max(1, min(self._slots, info.max_concurrent_requests))
        most = min(info.max_client_batch_size, info.max_concurrent_requests // slots)
        scores = not info.embeds
        return EngineFacts(
            name=self._name,
            inputs=("text", "pair") if scores else ("text",),
            outputs=(*OUTPUTS[info.kind], "token_count"),
            slots=slots,
            parallel=1,  # its device computes one batch at a time
            max_batch_size=min(most, self._refused_size or most),
            max_batch_tokens=info.max_batch_tokens,
            pads_batches=False,
            merges=True,
            precision=info.dtype,
            cost=COST,
            details={
                "server": self.link.base,
                "version": info.version,
                "max_client_batch_size": info.max_client_batch_size,
                "max_concurrent_requests": info.max_concurrent_requests,
            },
        )

    async def _infer_items(
        self, items: list[Any], outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        """Return the outputs. Calls run one after another, so that only one batch of inputs is in flight."""
        names = [name for name in outputs if name != "token_count"] or [OUTPUTS[self.info.kind][0]]
        found: dict[str, Array] = {}
        counts: list[int] = []
        for name in names:
            parts, counts = await self._call_server(name, items, params, deadline)
            # The lengths may differ while `dimension` is unknown.
            if name == "embedding" and len(parts) > 1 and len({part.shape[1] for part in parts}) > 1:
                raise UpstreamFailed(f"the server at {self.link.base} returned vectors of different lengths")
            found[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        found["token_count"] = np.asarray(counts, dtype=np.int64)[:, None]
        return {name: found[name] for name in outputs}

    async def _call_server(
        self, name: str, items: list[Any], params: Mapping[str, Any], deadline: float
    ) -> tuple[list[Array], list[int]]:
        """Return one output of any number of items, in calls of the size the server accepts, and each item's tokens."""
        parts: list[Array] = []
        counts: list[int] = []
        while len(counts) < len(items):
            some = items[len(counts) : len(counts) + self.facts.max_batch_size]
            width, shape = self._token_width if name == "tokens" else self.dimension, self._shape
            if shape.width != width or shape.info is not self.info:
                shape = self._shape = ExpectedShape(self.info, width)
            try:
                rows, tokens = await self.link.rows(name, some, params, deadline, shape)
            except BatchTooLarge as refused:
                self._lower_batch_limit(refused.limit)
                continue
            except KeyRefused as error:  # fails for every batch; another replica may accept the key
                self._presence.mark_lost(error)
                raise
            parts.append(self._check_rows(name, rows, params))
            counts += tokens
        return parts, counts

    def _lower_batch_limit(self, limit: int) -> None:
        """Send at most `limit` inputs per call from now on."""
        logger.info("%s accepts at most %d inputs at once: limiting batches to that", self._name, limit)
        self._refused_size = limit
        self.facts = msgspec.structs.replace(self.facts, max_batch_size=min(limit, self.facts.max_batch_size))

    def _check_rows(self, name: str, rows: Array, params: Mapping[str, Any]) -> Array:
        """Return the rows, cut to the requested dimension. Raises UpstreamFailed if their width is not the model's."""
        if name == "embedding":
            requested = params.get("dimensions")
            if self.dimension is not None and rows.shape[1] != requested:
                self._check_width(rows.shape[1], self.dimension)
            # Servers before 1.8 ignore `dimensions`; newer ones normalize the vectors they cut.
            return cut_vectors(rows, requested, normalize=params.get("normalize") is not False)
        if name == "tokens":
            # This can differ from the model's dimension, which layers after pooling may change.
            self._token_width = self._token_width or rows[0].shape[1]
            self._check_width(rows[0].shape[1], self._token_width)
        return rows

    def _check_width(self, found: int, expected: int) -> None:
        check_width(self._presence, found, expected, self.link.base)

    async def _admit_server(self) -> None:
        self._token_width = None
        await self._admit(self)

    async def _check_health(self) -> None:
        """Check the server's health and refresh its info. Raises ShoalError."""
        info = await self.link.check_health(LOOK_TIMEOUT_S)
        if info == self.info:
            await self._verify_model()
            return
        if not info.same_model(self.info):
            self._presence.mark_lost(
                UpstreamFailed(f"the server at {self.link.base} now has another model: {info.model_id}")
            )
        self.info, self._refused_size = info, None
        self.facts = self._build_facts()

    async def _verify_model(self) -> None:
        """Check that the model has not changed. Skipped while this could take a permit that a batch needs: a restart
        breaks the calls in flight, which takes the server out of service anyway."""
        self._checks += 1
        facts = self.facts
        spare = not self._calls or facts.slots * facts.max_batch_size < self.info.max_concurrent_requests
        if self._verify is None or not self.ready() or self._checks % ASK_EVERY or not spare:
            return
        try:
            await self._verify(self)
        except (Overloaded, DeadlineExceeded):  # a busy server does not show whether its model changed
            pass
        except ConfigError as error:
            self._presence.mark_lost(error)
