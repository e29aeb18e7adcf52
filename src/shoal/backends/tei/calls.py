"""Batches as calls of text-embeddings-inference: which route, which body."""

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
"""What each route reads beside its inputs; it ignores the rest."""

ROUTES: Mapping[str, str] = {
    "embedding": EMBED,
    "tokens": EMBED_ALL,
    "sparse": EMBED_SPARSE,
    "scores": PREDICT,
}
"""By an engine's outputs."""

_ENCODE = msgspec.json.Encoder().encode


def build_body(route: str, inputs: Sequence[Any], params: Mapping[str, Any]) -> bytes:
    """The body of one call. An option that is None is left out, and the server's own default holds.

    Inputs are texts or lists of token ids; of /predict, texts or pairs of them. Its inputs always go as a list of
    lists: a plain list of two texts would be one pair there. Scores are asked for raw, since activation is Shoal's.
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
        raise InternalError("what is scored is a text or a pair of texts")
    return [first, second]
