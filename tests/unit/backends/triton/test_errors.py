"""Observed Triton errors for each row, gRPC's own errors, and the Shoal errors that they map to."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from shoal.backends.triton.errors import (
    ERROR_TABLE,
    ModelGone,
    infer_error,
    rpc_error,
    shorten_message,
    stream_error,
    to_error,
)
from shoal.errors import (
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

OBSERVED: list[tuple[grpc.StatusCode, str, type[ShoalError]]] = [
    (Code.NOT_FOUND, "Request for unknown model: 'x' is not found", ModelGone),
    (Code.NOT_FOUND, "Request for unknown model: 'emb' has no available versions", ModelGone),
    (Code.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy", Unsupported),
    (Code.INVALID_ARGUMENT, "[request id: 42] expected 1 inputs but got 2 inputs for model 'emb'", InputRejected),
    (Code.INVALID_ARGUMENT, "[request id: 42] unexpected shape for input 'IN' for model 'emb'.", InputRejected),
    (Code.INVALID_ARGUMENT, "inference input data-type is 'FP32', model expects 'BYTES' for 'emb'", InputRejected),
    (Code.INVALID_ARGUMENT, "expected 2 string elements for inference input 'IN', got 1", InputRejected),
    (Code.INVALID_ARGUMENT, "parameter keys starting with 'triton_' are reserved for Triton usage.", InputRejected),
    (Code.INVALID_ARGUMENT, "inference request batch-size must be <= 32 for 'emb'", InputRejected),
    (Code.INVALID_ARGUMENT, "requested model 'zz' is not available", ModelGone),
    (Code.INTERNAL, "failed to load 'nope', failed to poll from model repository", UpstreamFailed),
    (Code.INVALID_ARGUMENT, "unrecognized load parameter 'foo'.", InputRejected),
    (Code.INTERNAL, "Stub process 'emb_0_0' is not healthy.", Crashed),
    (Code.UNAVAILABLE, "Exceeds maximum queue size", Overloaded),
    (Code.UNAVAILABLE, "[request id: 7] Exceeds maximum queue size", Overloaded),
    (Code.UNAVAILABLE, "Request timeout expired", Overloaded),
    (
        Code.UNAVAILABLE,
        "Server is stopping, scheduler for model has stopped accepting new inference requests",
        ModelGone,
    ),
    (Code.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-x'", SetupError),
    (Code.UNAVAILABLE, "explicit model load / unload is not allowed if polling is enabled", SetupError),
    (Code.UNAVAILABLE, "explicit model load / unload is not allowed", SetupError),
    (Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", TransportFailed),
    (Code.UNAVAILABLE, "Ssl handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", TransportFailed),
    (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded),
    (Code.CANCELLED, "", TransportFailed),
    (Code.RESOURCE_EXHAUSTED, "Sent message larger than max (5000000 vs. 4194304)", OutOfMemory),
    (Code.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max", OutOfMemory),
    (Code.RESOURCE_EXHAUSTED, "the queue of the engine has 1024 requests", Overloaded),
    (Code.INTERNAL, "onnx runtime error 6: CUDA failure 2: out of memory", OutOfMemory),
    (Code.INTERNAL, "Failed to process the request(s), message: MemoryError: unable to allocate", OutOfMemory),
    (Code.INTERNAL, "Received RST_STREAM with error code 2", TransportFailed),
    (Code.INTERNAL, "Failed to process the request(s), message: ValueError: boom", UpstreamFailed),
    (Code.UNKNOWN, "something", UpstreamFailed),
    (Code.ALREADY_EXISTS, "shared memory region 'x' already in manager", Conflict),
    (Code.UNAUTHENTICATED, "no token", SetupError),
    (Code.PERMISSION_DENIED, "not yours", SetupError),
    (Code.UNIMPLEMENTED, "Method not found!", Unsupported),
    (Code.DATA_LOSS, "lost", UpstreamFailed),
]


def failure(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(("code", "details", "kind"), OBSERVED)
def test_each_answer_has_its_error(code: grpc.StatusCode, details: str, kind: type[ShoalError]) -> None:
    error = rpc_error(failure(code, details))
    assert type(error) is kind
    assert "request id" not in error.message
    assert shorten_message(details) in error.message


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
@pytest.mark.parametrize("details", ["", None])
def test_a_status_without_words_is_named(code: grpc.StatusCode, details: str | None) -> None:
    assert code.name in rpc_error(failure(code, details)).message


def test_every_row_is_reached_and_its_message_precedes_the_servers() -> None:
    made = [to_error(code, details) for code, details, _ in OBSERVED]
    messages = {row.message for row in ERROR_TABLE if any(error.message.startswith(row.message) for error in made)}
    assert messages == {row.message for row in ERROR_TABLE}
    assert ERROR_TABLE[-1].codes == () and ERROR_TABLE[-1].words == ()


@pytest.mark.parametrize(("code", "details", "kind"), OBSERVED)
def test_an_engine_raises_only_what_its_seam_allows(
    code: grpc.StatusCode, details: str, kind: type[ShoalError]
) -> None:
    allowed = (InputRejected, OutOfMemory, UpstreamFailed, TransportFailed, DeadlineExceeded, Overloaded)
    error = infer_error(failure(code, details))
    assert isinstance(error, allowed)
    assert type(error) is (kind if issubclass(kind, allowed) else UpstreamFailed)


def test_errors_name_the_next_step() -> None:
    assert "--model-control-mode=explicit" in to_error(Code.UNAVAILABLE, "model load / unload is not allowed").message
    assert "triton_metadata" in to_error(Code.UNAVAILABLE, "This protocol is restricted, expecting 'x'").message
    assert "triton_ca_file" in to_error(Code.UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED").message


def test_a_full_queue_has_a_retry_time() -> None:
    assert to_error(Code.UNAVAILABLE, "Exceeds maximum queue size").retry_after == 0.1
    assert to_error(Code.UNAVAILABLE, "gone").retry_after is None


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[request id: 1] Request for unknown model: 'x' is not found", ModelGone),
        ("Request for unknown model: 'x' has no available versions", ModelGone),
        ("[request id: 1] Exceeds maximum queue size", Overloaded),
        ("[request id: 1] unexpected shape for input 'IN' for model 'm'. Expected [1], got [2]", InputRejected),
        ("[request id: 1] inference request batch-size must be <= 8 for 'm'", InputRejected),
        ("parameter keys starting with 'triton_' are reserved for Triton usage", InputRejected),
        ("inference input 'n' data-type is 'FP32', but model 'llm' expects 'INT32'", InputRejected),
        ("unable to find data for input tensor 'zz' for model 'llm' in request.", InputRejected),
        ("Request cancelled by client", TransportFailed),
        ("Stub process 'm_0_0' is not healthy.", Crashed),
        ("CUDA out of memory", OutOfMemory),
        ("Error generating stream: something", UpstreamFailed),
    ],
)
def test_a_streams_error_has_no_status_and_its_words_must_do(message: str, kind: type[ShoalError]) -> None:
    assert type(stream_error(message)) is kind


def test_a_long_message_is_cut_and_put_on_one_line() -> None:
    assert shorten_message("[request id: a b] one\n  two " + "x" * 1000).startswith("one two xxx")
    assert len(shorten_message("y" * 1000)) == 400
