"""The model of the fake text-embeddings-inference, a hash of its tokens, and its script.

Each word is a token, and a text has two special ones. Each function takes the script of the server.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.types import Vectors

VOCABULARY = 30522
CLS, SEP = 101, 102
Text = str | list[int]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The server's flags and its behavior; each field is a flag of the process, where `prompts` is JSON. `era`: before
    1.9 invalid input has status 413, and long texts are truncated only on request. `misbehaves`: "html" answers a page,
    "short" one row too few, "empty" no rows, "labels" other labels, "500" that status.
    """

    kind: Literal["embedding", "splade", "reranker", "classifier"] = "embedding"
    labels: int = 3
    model_id: str = "org/model"
    model_sha: str = ""
    pooling: str = "mean"
    dimension: int = 16
    seed: int = 0
    era: str = "1.9"
    delay_ms: float = 0.0
    slow_ms: float = 30000.0
    max_client_batch_size: int = 32
    max_concurrent_requests: int = 512
    max_batch_tokens: int = 16384
    max_input_length: int = 512
    payload_limit: int = 2_000_000
    api_key: str = ""
    prompts: str = "{}"
    default_prompt: str = ""
    unhealthy: bool = False
    misbehaves: str = ""

    @property
    def new(self) -> bool:
        return self.era != "1.8"

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(f"LABEL_{at}" for at in range(1 if self.kind == "reranker" else self.labels))


def word_id(word: str) -> int:
    return 1000 + zlib.crc32(word.encode()) % (VOCABULARY - 1000)


def ids_of(item: Text | Pair, max_tokens: int = 512, direction: str = "right") -> list[int]:
    """Return the tokens that the model reads: words with the special tokens; of a pair, both texts."""
    if isinstance(item, tuple):
        return [CLS, *map(word_id, item[0].split()), SEP, *map(word_id, item[1].split()), SEP][:max_tokens]
    words = list(item) if isinstance(item, list) else [word_id(word) for word in item.split()]
    limit = max_tokens - 2
    return [CLS, *(words[-limit:] if direction == "left" else words[:limit]), SEP]


def draw(ids: Sequence[int], size: int, seed: int = 0) -> Vectors:
    made = np.random.default_rng([seed, *ids]).standard_normal(size) * 3
    return made.astype(np.float32)


def dense_of(
    item: Text, script: Script | None = None, *, normalize: bool = True, dimensions: int | None = None
) -> Vectors:
    """Return the vector of a text: truncated first, then normalized."""
    script = script or Script()
    vector = draw(ids_of(item, script.max_input_length), script.dimension, script.seed)[:dimensions]
    if not normalize:
        return vector
    scale = np.float32(1.0 / np.sqrt(np.sum(vector.astype(np.float64) ** 2)))
    return np.asarray(vector * scale, dtype=np.float32)


def tokens_of(item: Text, script: Script | None = None) -> Vectors:
    script = script or Script()
    ids = ids_of(item, script.max_input_length)
    return np.stack([draw([one, at], script.dimension, script.seed) for at, one in enumerate(ids)])


def sparse_of(item: Text, script: Script | None = None) -> dict[int, float]:
    """Return weights by token: the number of its occurrences."""
    indices, counts = np.unique(ids_of(item, (script or Script()).max_input_length), return_counts=True)
    return {int(index): float(count) for index, count in zip(indices, counts, strict=True)}


def logits_of(item: str | Pair, script: Script) -> Vectors:
    return draw(ids_of(item, script.max_input_length), len(script.label_names), script.seed)
