"""Encodes batches as calls of text-embeddings-inference: the route and the body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.errors import InternalError

EMBED, EMBED_ALL, EMBED_SPARSE, PREDICT = "/embed", "/embed_all", "/embed_sparse", "/predict"

OPTIONS: Mapping[str, tuple[str, ...]] = {
    EMBED: ("truncate", "truncation_direction", "prompt_name", "normalize", "dimensions"),
    EMBED_ALL: ("truncate", "truncation_direction", "prompt_name"),
    EMBED_SPARSE: ("truncate", "truncation_direction", "prompt_name"),
    PREDICT: ("truncate", "truncation_direction"),
}
"""The options each route reads; it ignores all others."""

ROUTES: Mapping[str, str] = {
    "embedding": EMBED,
    "tokens": EMBED_ALL,
    "sparse": EMBED_SPARSE,
    "scores": PREDICT,
}
"""The route of each engine output."""

_ENCODE = msgspec.json.Encoder().encode


def build_body(route: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> bytes:
    """Return the body of one call. An option that is None is omitted, so the server's default applies.

    Inputs are texts or lists of token ids; for /predict, texts or pairs of them, always sent as a list of lists, since
    /predict reads a plain list of two texts as one pair. Raw scores are requested, since Shoal applies the activation.
    """
    options = {name: params[name] for name in OPTIONS[route] if params.get(name) is not None}
    if route == PREDICT:
        return _ENCODE({"inputs": [_row(each) for each in inputs], **options, "raw_scores": True})
    return _ENCODE({"inputs": list(inputs), **options})


def _row(item: Any) -> list[str]:
    if isinstance(item, str):
        return [item]
    first, second = item
    if not (isinstance(first, str) and isinstance(second, str)):
        raise InternalError("only a text or a pair of texts can be scored")
    return [first, second]
