"""The table that maps a Triton server's errors to Shoal's.

Sources: Triton's mapping of its own errors to gRPC statuses, observed on server 2.51, and gRPC's own statuses. The
message decides where a status is ambiguous: the python backend reports nearly everything as INTERNAL, and UNAVAILABLE
means a full queue as well as a dead server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import grpc

from shoal.errors import (
    BackendError,
    Conflict,
    Crashed,
    DeadlineExceeded,
    InputRejected,
    OutOfMemory,
    Overloaded,
    SetupError,
    ShoalError,
    TransportFailed,
    Unsupported,
    UpstreamFailed,
)

Code = grpc.StatusCode
FULL_QUEUE_S = 0.1
MAX_MESSAGE_CHARS = 400


class ModelGone(TransportFailed):
    """The server is reachable but the model is not: unknown, unloaded, or being unloaded."""


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """A row: an error with any of `codes` (empty: any) and any of `words` in its message (empty: any) becomes a `kind`,
    with `message` before the server's message."""

    codes: tuple[Code, ...]
    words: tuple[str, ...]
    kind: type[ShoalError]
    message: str


ERROR_TABLE: tuple[ErrorRule, ...] = (
    ErrorRule(
        (),
        ("this protocol is restricted",),
        SetupError,
        "Triton restricts this part of its API: set its key in triton_metadata, as 'triton-grpc-protocol-NAME: KEY'",
    ),
    ErrorRule(
        (),
        ("load / unload is not allowed", "model control mode is not explicit"),
        SetupError,
        "Triton was not started to load models on demand: start it with --model-control-mode=explicit",
    ),
    ErrorRule(
        (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED),
        (),
        SetupError,
        "Triton, or a proxy in front of it, rejects Shoal: set credentials with triton_metadata, triton_cert_file and "
        "triton_key_file",
    ),
    ErrorRule(
        (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.UNKNOWN),
        ("maximum queue size", "request timeout expired", "queue is full", "too many requests"),
        Overloaded,
        "the model's own queue on Triton is full: try again",
    ),
    ErrorRule(
        (Code.RESOURCE_EXHAUSTED,),
        ("message larger", "message too large", "message size", "larger than max"),
        OutOfMemory,
        "the batch exceeds the message limit of Triton or a proxy in front of it: lower max_batch_tokens",
    ),
    ErrorRule((Code.RESOURCE_EXHAUSTED,), (), Overloaded, "Triton is overloaded: try again"),
    ErrorRule((Code.INVALID_ARGUMENT,), ("requested model '",), ModelGone, "Triton does not serve the model: load it"),
    ErrorRule((Code.NOT_FOUND,), (), ModelGone, "Triton does not serve the model: load it"),
    ErrorRule(
        (Code.UNAVAILABLE,),
        ("unknown model", "no available versions", "scheduler for model has stopped", "is being unloaded"),
        ModelGone,
        "Triton is unloading the model: load it again",
    ),
    ErrorRule(
        (Code.UNAVAILABLE,),
        ("handshake", "certificate", "wrong_version_number", "ssl_error"),
        TransportFailed,
        "no TLS connection to Triton: check triton_ca_file, triton_cert_file and triton_key_file, and whether its port "
        "uses TLS",
    ),
    ErrorRule((Code.UNAVAILABLE,), (), TransportFailed, "Triton is not reachable: check its address and that it runs"),
    ErrorRule((Code.DEADLINE_EXCEEDED,), (), DeadlineExceeded, "Triton did not answer within the request's deadline"),
    ErrorRule((Code.CANCELLED,), (), TransportFailed, "Triton canceled the call: send the request again"),
    ErrorRule((Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE), (), InputRejected, "Triton rejected the inputs"),
    ErrorRule(
        (Code.UNIMPLEMENTED,),
        ("decoupled",),
        Unsupported,
        "the model streams its responses (decoupled): it does not support calls with a single response",
    ),
    ErrorRule(
        (Code.UNIMPLEMENTED,),
        (),
        Unsupported,
        "the server does not support this call: it is not a Triton, or this part of its API is disabled",
    ),
    ErrorRule((Code.ALREADY_EXISTS,), (), Conflict, "Triton already has it: unload or unregister it first"),
    ErrorRule(
        (Code.INTERNAL, Code.UNKNOWN, Code.ABORTED),
        (
            "out of memory",
            "failed to allocate",
            "cannot allocate",
            "bad_alloc",
            "memoryerror",
            "cuda_error_out_of_memory",
        ),
        OutOfMemory,
        "the batch did not fit into Triton's memory: lower max_batch_tokens",
    ),
    # Triton still reports such a model as READY, and fails every request to it: see Control.revive.
    ErrorRule(
        (Code.INTERNAL, Code.UNKNOWN),
        ("stub process",),
        Crashed,
        "the model's process on Triton has died: load the model again; see Triton's log for the reason",
    ),
    ErrorRule(
        (Code.INTERNAL, Code.UNKNOWN),
        ("rst_stream", "connection reset", "socket closed", "goaway"),
        TransportFailed,
        "the connection to Triton broke: send the request again",
    ),
    ErrorRule((), (), UpstreamFailed, "the model failed on Triton; see Triton's log"),
)
"""The first matching row applies; the last one matches everything."""

REQUEST_ID = re.compile(r"^\s*\[request id: [^\]]*\]\s*")


def to_error(code: grpc.StatusCode, details: str) -> ShoalError:
    """Return the Shoal error for a status, with the server's message at the end of its own."""
    words = shorten_message(details)
    lowered = words.lower()
    row = next(
        row
        for row in ERROR_TABLE
        if (not row.codes or code in row.codes) and (not row.words or any(word in lowered for word in row.words))
    )
    error = row.kind(f"{row.message} ({words or code.name})")
    if isinstance(error, Overloaded):
        error.retry_after = FULL_QUEUE_S
    return error


def rpc_error(error: grpc.aio.AioRpcError) -> ShoalError:
    """Return the Shoal error for a failed call."""
    return to_error(error.code(), error.details() or "")


def infer_error(error: grpc.aio.AioRpcError) -> ShoalError:
    """Return `rpc_error` as an Engine may raise it: errors unrelated to the batch become UpstreamFailed."""
    found = rpc_error(error)
    if isinstance(found, (BackendError, Overloaded, DeadlineExceeded)):
        return found
    return UpstreamFailed(found.message)


def stream_error(message: str) -> ShoalError:
    """Return the Shoal error for the `error_message` of a stream, which has no status: its wording decides."""
    lowered = shorten_message(message).lower()
    for words, code in STREAM_CODES:
        if any(word in lowered for word in words):
            return to_error(code, message)
    return to_error(Code.INTERNAL, message)


STREAM_CODES: tuple[tuple[tuple[str, ...], grpc.StatusCode], ...] = (
    (("unknown model", "no available versions"), Code.NOT_FOUND),
    (("maximum queue size", "request timeout expired", "stopped accepting"), Code.UNAVAILABLE),
    (("request cancelled", "was cancelled"), Code.CANCELLED),
    (
        (
            "unexpected shape",
            "unexpected inference input",
            "data-type is",
            "unable to find data",
            "batch-size must be",
            "inputs but got",
            "string elements",
            "string data",
            "contents field",
            "are reserved",
        ),
        Code.INVALID_ARGUMENT,
    ),
)


def shorten_message(details: str) -> str:
    """Return a server's message on one line of at most MAX_MESSAGE_CHARS, without the request id before it."""
    return " ".join(REQUEST_ID.sub("", details).split())[:MAX_MESSAGE_CHARS]
