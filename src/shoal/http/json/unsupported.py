"""Rejects fields that other servers of a dialect support and Shoal does not, in requests that generate no text.

Each changes the answer, so it is rejected by name unless its value has no effect; unknown fields are ignored and
logged. Generation fields are in `core/generation/sampling.py`, since upstream servers may support them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.core.generation.sampling import is_neutral
from shoal.errors import Unsupported
from shoal.http.json.raw_fields import raw_fields_decoder

_CUT: Mapping[str, tuple[Any, ...]] = {"truncation_direction": ("right",), "truncation_side": ("right",)}
_VLLM: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (True,),
}
_INSTRUCTIONS: Mapping[str, tuple[Any, ...]] = {"instruction": ("",), "instruct": ("",), "chat_template_kwargs": ({},)}
"""The names of vLLM and SGLang, whose servers have Cohere's and TEI's routes for reranking too."""

KNOWN_FIELDS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    # vLLM; Jina
    "openai": {**_CUT, **_VLLM, "return_multivector": (False,)},
    # vLLM; Jina; Voyage; Infinity
    "rerank": {**_CUT, **_VLLM, **_INSTRUCTIONS, "max_query_length": (), "overlap_tokens": ()},
    "scoring": {**_CUT, **_VLLM, **_INSTRUCTIONS, "embed_dtype": ("float32",), "endianness": ("native",)},
    "ollama": _CUT,
    "tei": _INSTRUCTIONS,
    "cohere": {**_CUT, **_INSTRUCTIONS, "rank_fields": (), "max_chunks_per_doc": ()},
}
"""Values without effect, by the dialect's name in decoders and by field. Fields that the request's type declares are
handled there and not looked up here."""


class UnsupportedFields:
    """Checks for unsupported fields of one dialect, except those declared by the struct fields `known`."""

    def __init__(self, dialect: str, known: frozenset[str]) -> None:
        self._neutral = {name: values for name, values in KNOWN_FIELDS.get(dialect, {}).items() if name not in known}
        self._decode = raw_fields_decoder(*self._neutral)

    def check(self, body: bytes) -> None:
        """Raise Unsupported, or msgspec's error for invalid JSON. Other fields are skipped, however large."""
        if not self._neutral:
            return
        found = self._decode.decode(body)
        for name, neutral in self._neutral.items():
            raw = getattr(found, name)
            if raw is not msgspec.UNSET and not is_neutral(raw, neutral):
                raise Unsupported(f"'{name}' is not supported: omit it.", param=name)
