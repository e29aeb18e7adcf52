"""Maps errors of text-embeddings-inference servers over gRPC to Shoal's.

Source: router/src/grpc/server.rs and core/src/lib.rs of that project (its messages are those of the HTTP build), and
gRPC's own statuses. FAILED_PRECONDITION means a failure of the device or the tokenizer; the message distinguishes them.
"""

from __future__ import annotations

import grpc

from shoal.backends.base.http_answer import LONGEST_WORDS, SHORTEST_SECRET
from shoal.backends.tei.errors import MEMORY, UNHEALTHY
from shoal.backends.tei.link import KeyRefused
from shoal.errors import (
    DeadlineExceeded,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)

Code = grpc.StatusCode

_TOKENIZER = "tokenizer error"
_TOO_LARGE = ("message larger", "message too large", "message length too large", "message size")
_INPUTS = (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE)
_BROKEN = (Code.CANCELLED, Code.ABORTED)
_KEY = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


def status_error(code: grpc.StatusCode, details: str, where: str, *, key: str = "") -> ShoalError:
    """Return the error of a call, as an Engine may raise it. `key`: Shoal's own, which no message may quote."""
    if code in _KEY:  # the server's message is not passed on: it may quote a part of the key
        return KeyRefused(
            f"the server at {where} rejects Shoal's key ({code.name}): the operator must set upstream_api_key to a"
            " valid key"
        )
    words, low = _quote_message(details, key), details.lower()
    if code is Code.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{where} did not answer within the request's deadline")
    if code is Code.UNAVAILABLE and not details.startswith("unhealthy"):
        return TransportFailed(
            f"{where} is not reachable: check its address, that it runs, and that it is the gRPC build{words}"
        )
    if code is Code.UNAVAILABLE or UNHEALTHY in low:
        return TransportFailed(f"the server at {where} cannot serve now{words}: try again")
    if code in _BROKEN:
        return TransportFailed(f"the connection to {where} broke: send the request again{words}")
    return _batch_error(code, low, words, where)


def _batch_error(code: grpc.StatusCode, low: str, words: str, where: str) -> ShoalError:
    if code is Code.RESOURCE_EXHAUSTED and any(size in low for size in _TOO_LARGE):
        return UpstreamFailed(f"a message to or from {where} is too large{words}: send smaller inputs")
    if code is Code.RESOURCE_EXHAUSTED:
        return Overloaded(f"the server at {where} is too busy{words}: try again")
    if any(memory in low for memory in MEMORY):
        return OutOfMemory(f"the batch did not fit into the memory of the server at {where}{words}")
    if code in _INPUTS or (code is Code.FAILED_PRECONDITION and low.startswith(_TOKENIZER)):
        return InputRejected(f"the model's server refused the input{words}")
    if code is Code.UNIMPLEMENTED:
        return UpstreamFailed(f"the server at {where} does not have this call{words}: check its address and version")
    return UpstreamFailed(f"the server at {where} failed with status {code.name}{words}: see its log")


def _quote_message(details: str, key: str) -> str:
    """Return the server's message in parentheses after a space, or "" if it is empty or quotes the key."""
    if len(key) >= SHORTEST_SECRET and key in details:
        return ""
    text = " ".join(details.split())[:LONGEST_WORDS]
    return f" ({text})" if text else ""
