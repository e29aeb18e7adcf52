"""Shared code of the text-embeddings-inference routes: limits of a request, and headers of replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import TooManyInputs
from shoal.http.request import JSON, Headers, Request
from shoal.surfaces.shared import batch_headers, token_ids
from shoal.surfaces.tei import wire
from shoal.types import Direction, Result

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard

ERRORS: dict[int, Any] = dict.fromkeys((400, 422, 424, 429, 500, 503, 504), wire.TeiError)
PLAIN_TEXT_NOTE = "Requests that cannot be parsed return plain text (400, 413, 415, 422), as in the original."
EMPTY_INPUT = "Input validation error: `inputs` cannot be empty"

_TIMING_DOCS = {
    "x-compute-type": "Backend and precision that computed it.",
    "x-compute-time": "Total milliseconds.",
    "x-compute-characters": "Characters of the texts, and token ids.",
    "x-compute-tokens": "Tokens that the model processed.",
    "x-total-time": "Total milliseconds.",
    "x-tokenization-time": "Milliseconds of tokenization.",
    "x-queue-time": "Milliseconds of waiting for a batch.",
    "x-inference-time": "Milliseconds of the batch.",
}
HEADER_DOCS = {**batch_headers.HEADER_DOCS, **token_ids.HEADER_DOCS, **_TIMING_DOCS}


def check_count(count: int, limit: int) -> None:
    """Raise TooManyInputs with the original's message."""
    if count > limit:
        raise TooManyInputs(f"batch size {count} > maximum allowed batch size {limit}")


def parse_direction(direction: str | None) -> Direction:
    return "left" if direction is not None and direction.lower() == "left" else "right"


def count_characters(inputs: Sequence[str | Sequence[Any]]) -> int:
    """Counts the characters of texts and of both texts of a pair; each token id counts as one."""
    return sum(len(each) if isinstance(each, str | list) else sum(map(len, each)) for each in inputs)


def build_headers(request: Request, card: ModelCard, count: int, result: Result) -> Headers:
    """Build the content type, the batch headers, and the original's headers with times in whole milliseconds.

    `count` is the number of characters.
    """
    facts = result.facts
    total = b"%d" % ((time.monotonic() - request.started) * 1000)
    kind = "+".join(filter(None, (card.facts.backend, card.facts.precision))) if card.facts is not None else "unknown"
    return [
        JSON,
        *batch_headers.batch_headers(request, result),
        (b"x-compute-type", kind.encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % count),
        (b"x-compute-tokens", b"%d" % sum(result.tokens)),
        (b"x-total-time", total),
        (b"x-tokenization-time", b"%d" % facts.prepare_ms),
        (b"x-queue-time", b"%d" % facts.queue_ms),
        (b"x-inference-time", b"%d" % facts.infer_ms),
    ]
