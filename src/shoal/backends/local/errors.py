"""Maps errors of engines to Shoal's errors."""

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
"""Each row has an error, the exception types that map to it, and words in a message that do, because engines raise
RuntimeError for nearly everything. The first matching row counts; without a match the error is EngineFailed."""

MESSAGES = {
    OutOfMemory: "the batch did not fit into memory; lower max_batch_tokens",
    InputRejected: "the engine rejected these inputs; check their lengths and token ids",
    EngineFailed: "the engine failed on this batch; see the log for the cause",
}
MAX_MESSAGE_CHARS = 300


def engine_error(error: BaseException) -> BackendError:
    """Return the Shoal error for an engine's exception. Its message ends with the engine's own."""
    text = str(error)
    lowered = text.lower()
    kind: type[BackendError] = EngineFailed
    for meaning, types, words in ERROR_TABLE:
        if isinstance(error, types) or any(word in lowered for word in words):
            kind = meaning
            break
    return kind(f"{MESSAGES[kind]} ({shorten_message(text) or type(error).__name__})")


def shorten_message(text: str) -> str:
    """Return an engine's message on one line, without source file names."""
    lines = (
        re.sub(r"(Caught )?[Ee]xception from \S+:\d+:|/\S+\.(?:h|cc|cpp|cuh):\d+", "", line)
        for line in text.split("\n")
    )
    return " ".join(" ".join(lines).split())[:MAX_MESSAGE_CHARS]
