"""An engine for the embeddings or scores of one model of an OpenAI-compatible server."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.backends.base.http_client import Client
from shoal.backends.base.items import to_items
from shoal.backends.base.presence import Presence, PresenceMixin
from shoal.backends.base.usage import BYTES_PER_TOKEN, split_proportionally, utf8_size
from shoal.backends.base.vector_width import check_width, cut_vectors
from shoal.backends.openai.calls import RouteCalls, Rows
from shoal.backends.openai.errors import engine_error
from shoal.backends.openai.replicas import LOOK_AGAIN_S, LOOK_S, check_health
from shoal.backends.openai.vectors import EmbeddingCalls
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import InputRejected, InternalError, UpstreamFailed
from shoal.types import Array

logger = logging.getLogger("shoal.openai")

SLOTS = 2
"""Batches in flight: the next one is at the server when the first is done, and Shoal's batches stay large."""

MAX_BATCH_SIZE = 256
"""Well below OpenAI's 2,048 inputs."""

MAX_BATCH_TOKENS = 300_000
"""OpenAI's limit per request, by Shoal's own estimate; the server rejects larger requests as a whole."""

_UNITS = r"(?:texts|inputs|items|elements|documents|strings|entries|pairs)"
_LIMITS = (
    re.compile(r"batch size.{0,40}?(?:>|maximum|limit|at most|up to)\D*([0-9]+)\D*$"),
    re.compile(r"batch size (?:limit|maximum) is ([0-9]+)"),
    re.compile(rf"\b{_UNITS} must be (?:at most|less than or equal to|no more than) ([0-9]+)"),
    re.compile(rf"(?:at most|more than|maximum of|max|limit of|up to)(?: the)? ([0-9]+) {_UNITS}"),
)

Admit = Callable[["UpstreamEngine"], Awaitable[None]]


class UpstreamEngine(PresenceMixin):
    """Engine over routes of one server. Inputs: "text", an object array [rows] of str or list[int]; for scores also
    "pair", of str, or None if the text has no partner. Outputs:

    - "embedding" float32 [rows, dimension] or "scores" float32 [rows, labels], depending on the routes;
    - "token_count" int64 [rows, 1]: the server's count for a call, divided in proportion to the input sizes.

    An item goes to the first of `calls` that accepts it, together with its group. `params` are the options of the call.
    `admit` is awaited each time the server comes back, and raises a ShoalError to keep it out of service; it may call
    `infer`. If the server rejects a batch and names a smaller limit, later batches are split to fit. `reports_tokens`:
    the last answer reported token usage.

    `dimension` is the model's dimension once known. A vector of another length, unless it matches the `dimensions`
    option, raises UpstreamFailed and takes the server out of service. Health checks do not run the model, since a
    server may charge for that.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        name: str,
        *,
        admit: Admit,
        calls: Sequence[RouteCalls] = (),
        slots: int = SLOTS,
        serving: bool = False,
    ) -> None:
        self.client = client
        self.model = model
        self.reports_tokens = False
        self.dimension: int | None = None
        self._calls = tuple(calls) or (EmbeddingCalls(),)
        self._presence = Presence(
            name, logger, look=lambda: check_health(client), admit=lambda: admit(self), serving=serving
        )
        output = self._calls[0].output
        self.facts = EngineFacts(
            name=name,
            inputs=("text",) if output == "embedding" else ("text", "pair"),
            outputs=(output, "token_count"),
            slots=slots,
            max_batch_size=MAX_BATCH_SIZE,
            max_batch_tokens=MAX_BATCH_TOKENS,
            pads_batches=False,
            merges=True,
            precision="",
            details={"server": client.base, "routes": [each.path for each in self._calls]},
        )

    def start(self) -> None:
        """Start the health checks. Call it once."""
        self._presence.start(look_s=LOOK_S, again_s=(LOOK_AGAIN_S,))

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if unknown := set(outputs) - set(self.facts.outputs):
            raise InternalError(f"{self.facts.name} has no output {unknown.pop()!r}")
        with self._presence:
            values, tokens = await self._infer_items(to_items(inputs), params, deadline)
        found: dict[str, Array] = {self.facts.outputs[0]: values, "token_count": tokens[:, None]}
        return {name: found[name] for name in outputs}

    async def _infer_items(
        self, items: Sequence[Any], params: Mapping[str, Any], deadline: float
    ) -> tuple[Array, Array]:
        """Return the rows and token counts of any number of items."""
        parts: list[Array] = []
        order: list[int] = []
        tokens = np.zeros(len(items), dtype=np.int64)
        for calls, places in self._group_items(items):
            done = 0
            while done < len(places):
                some = places[done : done + self.facts.max_batch_size]
                batch = [items[place] for place in some]
                rows = await self._call_route(calls, batch, params, deadline)
                if rows is None:
                    continue  # the server has named a smaller batch limit
                self.reports_tokens = rows.tokens > 0
                tokens[some] = _count_tokens(rows.tokens, batch)
                parts.append(rows.values)
                order += some
                done += len(some)
        if len({part.shape[1] for part in parts}) > 1:
            raise UpstreamFailed(f"the server at {self.client.base} returned rows of different lengths")
        if len(parts) == 1:
            return parts[0], tokens
        values = np.empty((len(items), parts[0].shape[1]), dtype=np.float32)
        values[order] = np.concatenate(parts)
        return values, tokens

    def _group_items(self, items: Sequence[Any]) -> list[tuple[RouteCalls, list[int]]]:
        """Group the items that may share a call: the route's calls and the indices of the items."""
        groups: dict[tuple[int, Hashable], list[int]] = {}
        for place, item in enumerate(items):
            for number, calls in enumerate(self._calls):
                group = calls.group(item)
                if group is not None:
                    groups.setdefault((number, group), []).append(place)
                    break
            else:
                raise InputRejected("the model's server scores pairs of texts: send two texts instead of one")
        return [(self._calls[number], places) for (number, _), places in groups.items()]

    async def _call_route(
        self, calls: RouteCalls, items: Sequence[Any], params: Mapping[str, Any], deadline: float
    ) -> Rows | None:
        """Return the rows of one call, or None if the server rejected it with a smaller batch limit."""
        while True:
            body = msgspec.json.encode(calls.body(self.model, items, **params))
            response_limit = calls.response_limit(len(items), body, self.dimension)
            answer = await self.client.post(calls.path, body, deadline, max_bytes=response_limit.size)
            if answer.status == 200:
                response_limit.check(answer.body, self.client.base)
                rows = await calls.read(answer, items, self.client.base)
                return (
                    rows._replace(values=self._fit_width(rows.values, params)) if self.dimension is not None else rows
                )
            if answer.status not in (400, 413, 422):
                break
            if not calls.adapt_to_refusal(answer):
                limit = parse_batch_limit(answer.raw_message)
                if limit is None or limit >= len(items):
                    break
                logger.info("%s accepts at most %d texts at once: limiting batches to that", self.facts.name, limit)
                self.facts = msgspec.structs.replace(self.facts, max_batch_size=min(limit, self.facts.max_batch_size))
                return None
        raise engine_error(answer, self.client.base)

    def _fit_width(self, vectors: Array, params: Mapping[str, Any]) -> Array:
        """Return vectors of the model's or the requested dimension: not every server supports the option."""
        width, own, requested = vectors.shape[1], self.dimension, params.get("dimensions")
        if width not in (own, requested):
            check_width(self._presence, width, requested or own or width, self.client.base)
        return cut_vectors(vectors, requested, normalize=params.get("normalize") is True)


def parse_batch_limit(words: str) -> int | None:
    """Return the maximum number of inputs that an error message names, or None."""
    words = words.lower()
    match = next(filter(None, (pattern.search(words) for pattern in _LIMITS)), None)
    return (int(match[1]) or None) if match is not None else None


def _count_tokens(total: int, items: Sequence[Any]) -> list[int]:
    """Return the tokens of each item of a call with `total` tokens; estimated if the server reports none."""
    sizes = [_item_size(item) for item in items]
    return split_proportionally(total, sizes) if total else [max(1, size // BYTES_PER_TOKEN) for size in sizes]


def _item_size(item: Any) -> int:
    """Return the size of an item in bytes; a token id counts as the mean length of a token in prose."""
    if isinstance(item, str):
        return utf8_size(item)
    if isinstance(item, tuple):
        return sum(map(utf8_size, item))
    return BYTES_PER_TOKEN * len(item)
