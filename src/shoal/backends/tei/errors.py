"""Maps errors of text-embeddings-inference servers over HTTP to Shoal's.

Source: router/src/http/server.rs and core/src/lib.rs of that project. Its bodies are {"error", "error_type"}; since
1.9.0 a Validation error has status 422, before that 413. Errors of the underlying HTTP layer are plain text.
"""

from __future__ import annotations

import re

import msgspec

from shoal.backends.base.http_answer import Answer, quote_message, rejected_key_error, retry_after
from shoal.decoding import json_decoder
from shoal.errors import InputRejected, OutOfMemory, Overloaded, ShoalError, TransportFailed, UpstreamFailed

_LIMIT = re.compile(r"batch size \d+ > maximum allowed batch size (\d+)")
MEMORY = ("out of memory", "bad_alloc", "failed to allocate", "cannot allocate", "out_of_memory")
UNHEALTHY = "backend is unhealthy"


class _ErrorWire(msgspec.Struct):
    error_type: str = ""


_ERROR = json_decoder(_ErrorWire)


def parse_batch_limit(answer: Answer) -> int | None:
    """Return the maximum number of inputs per call that the answer names, if that was the reason for the error."""
    found = _LIMIT.search(answer.raw_message) if answer.status in (413, 422) else None
    return (int(found[1]) or None) if found is not None else None


def engine_error(answer: Answer, where: str) -> ShoalError:
    """Return the error of a batch, as an Engine may raise it. A status for one bad input (400, 413, 422, 424) fails the
    whole call; the batch is then halved until the bad input is alone."""
    status, words = answer.status, quote_message(answer)
    if refused := rejected_key_error(answer, where):
        return refused
    if status == 429:
        return Overloaded(
            f"the server at {where} is too busy{words}: try again", retry_after=retry_after(answer.headers)
        )
    if status in (502, 503, 504) or UNHEALTHY in answer.raw_message.lower():
        return TransportFailed(f"the server at {where} cannot serve now (status {status}){words}: try again")
    if any(memory in answer.raw_message.lower() for memory in MEMORY):
        return OutOfMemory(f"the batch did not fit into the memory of the server at {where}{words}")
    kind = _error_type(answer)
    if kind in ("validation", "tokenizer", "empty"):
        return InputRejected(f"the model's server refused the input{words}")
    if status == 413:  # from the HTTP layer: the body exceeds --payload-limit
        return OutOfMemory(
            f"the call is larger than the server at {where} accepts{words}: raise its --payload-limit, or lower"
            " max_batch_size"
        )
    if status in (400, 422):
        return InputRejected(f"the server at {where} refused these inputs{words}")
    if 300 <= status < 400:
        return UpstreamFailed(f"the server at {where} redirects, which Shoal does not follow: use its final address")
    if status < 400:
        return UpstreamFailed(f"the server at {where} returned status {status} instead of 200")
    return UpstreamFailed(f"the server at {where} failed with status {status}{words}: see its log")


def _error_type(answer: Answer) -> str:
    """Return the `error_type` in lower case, as in the server's documentation; its answers capitalize it."""
    try:
        return _ERROR.decode(answer.body).error_type.lower()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
