"""What engines raise, to what Shoal raises: one table."""

from __future__ import annotations

import re

from shoal.errors import BackendError, EngineFailed, InputRejected, OutOfMemory

ERROR_TABLE: tuple[tuple[type[BackendError], tuple[type[BaseException], ...], tuple[str, ...]], ...] = (
    (
        OutOfMemory,
        (MemoryError,),
        ("bad_alloc", "bad allocation", "out of memory", "failed to allocate", "cannot allocate", "can't allocate"),
    ),
    (
        InputRejected,
        (TypeError, ValueError, IndexError),
        (
            "shape",
            "dimension",
            "broadcast",
            "out of data bounds",
            "input data type",
            "element type",
            "invalid_argument",
        ),
    ),
)
"""Error, exception types that mean it, and words in a message that do: the engines raise RuntimeError for nearly all.
The first row that fits counts; what fits none is EngineFailed."""

MESSAGES = {
    OutOfMemory: "the batch did not fit into memory; lower max_batch_tokens",
    InputRejected: "the engine refused these inputs; check their lengths and ids",
    EngineFailed: "the engine failed on this batch; the log has the cause",
}
MAX_MESSAGE_CHARS = 300


def engine_error(error: BaseException) -> BackendError:
    """The Shoal error for what an engine raised, with the engine's own words at the end of its message."""
    text = str(error)
    lowered = text.lower()
    kind: type[BackendError] = EngineFailed
    for meaning, types, words in ERROR_TABLE:
        if isinstance(error, types) or any(word in lowered for word in words):
            kind = meaning
            break
    return kind(f"{MESSAGES[kind]} ({shorten_message(text) or type(error).__name__})")


def shorten_message(text: str) -> str:
    """An engine's message without the source files that it names, on one line."""
    lines = (
        re.sub(r"(Caught )?[Ee]xception from \S+:\d+:|/\S+\.(?:h|cc|cpp|cuh):\d+", "", line)
        for line in text.split("\n")
    )
    return " ".join(" ".join(lines).split())[:MAX_MESSAGE_CHARS]
