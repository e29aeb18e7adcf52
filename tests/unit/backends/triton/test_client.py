"""The client against a server in this process: every call, deadlines, cancellation, TLS, restarts, streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from shoal.backends.triton import client as client_module
from shoal.backends.triton import infer_stream
from shoal.backends.triton.client import OPTIONS, Client, Tls
from shoal.backends.triton.errors import ModelGone
from shoal.backends.triton.infer_stream import InferStream
from shoal.backends.triton.response import read_outputs
from shoal.core.recording import RECORD, TaskRecord
from shoal.errors import DeadlineExceeded, InputRejected, OutOfMemory, SetupError, TransportFailed, UpstreamFailed
from shoal.kserve import EMPTY_FINAL, codec
from shoal.kserve import protocol_pb2 as pb
from tests.fakes import certificates, triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, Refused, embedder, empty, reply

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

FOREVER = 30.0


def soon(seconds: float = FOREVER) -> float:
    return time.monotonic() + seconds


def texts(*values: str | bytes, model: str = "emb", **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    array = np.empty((len(values), 1), dtype=object)
    array[:, 0] = values
    codec.add_input(request, "text", "BYTES", array)
    return request


def lengths(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Returns four floats per text, all its length in bytes."""
    found = triton_codec.read_inputs(request)["text"]
    return reply(request, vectors=np.array([[len(each)] * 4 for each in found[:, 0]], np.float32).reshape(-1, 4))


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with FakeTriton() as server:
        server.add(FakeModel("emb", config=embedder("emb"), answer=lengths))
        yield server


@pytest.fixture
async def client(triton: FakeTriton) -> AsyncIterator[Client]:
    connection = Client(triton.target)
    yield connection
    await connection.aclose()


def stream_model(triton: FakeTriton, answer: Any, name: str = "llm") -> FakeModel:
    config = pb.ModelConfig(name=name)
    config.model_transaction_policy.decoupled = True
    return triton.add(FakeModel(name, config=config, answer=answer))


async def collect(client: Client, request: pb.ModelInferRequest, seconds: float = FOREVER) -> list[int]:
    """Return the numbers that a streaming model returned."""
    async with aclosing(client.stream_infer(request, soon(seconds))) as stream:
        answers = [answer async for answer in stream]
    return [int(read_outputs(answer)["n"][0]) for answer in answers]


def number(request: pb.ModelInferRequest, n: int, final: bool | None = None) -> pb.ModelInferResponse:
    return reply(request, final=final, n=np.array([n], np.int32))


async def test_infer_sends_tensors_and_reads_the_answer(client: Client) -> None:
    answer = await client.infer(texts("a", "äö", b"\xff\x00\xff"), soon())
    assert read_outputs(answer)["vectors"][:, 0].tolist() == [1, 4, 3]


async def test_nothing_is_connected_before_the_first_call(triton: FakeTriton) -> None:
    unreachable = Client("localhost:1")
    await unreachable.aclose()
    await unreachable.aclose()


async def test_every_call_reaches_its_path_and_types(triton: FakeTriton, client: Client) -> None:
    assert await client.server_live(deadline=soon())
    assert await client.model_ready("emb", deadline=soon())
    assert (await client.model_metadata("emb", "1", deadline=soon())).inputs[0].datatype == "BYTES"
    assert (await client.model_config("emb", "1", deadline=soon())).max_batch_size == 32
    await client.infer(texts("a"), soon())
    assert [s.name for s in (await client.model_statistics(deadline=soon())).model_stats] == ["emb"]
    assert [m.state for m in (await client.repository_index(deadline=soon())).models] == ["READY"]
    await client.repository_model_load(pb.RepositoryModelLoadRequest(model_name="emb"), deadline=soon())
    await client.repository_model_unload("emb", dependents=True, deadline=soon())


async def test_readiness_has_its_oddities(triton: FakeTriton, client: Client) -> None:
    """An unknown model is not ready, without an error; a server that is not ready is live; unloading an unknown model
    succeeds."""
    assert not await client.model_ready("nope", deadline=soon())
    triton.ready = False
    assert await client.server_live(deadline=soon())
    await client.repository_model_unload("nope", deadline=soon())


async def test_metadata_goes_with_every_call(triton: FakeTriton) -> None:
    triton.key = ("triton-grpc-protocol-shared", "s3cret")
    stream_model(triton, lambda request: number(request, 1, final=True))
    stranger = Client(triton.target)
    with pytest.raises(SetupError, match="triton_metadata"):
        await stranger.server_live(deadline=soon())
    with pytest.raises(UpstreamFailed, match="triton_metadata"):
        await stranger.infer(texts("a"), soon())
    await stranger.aclose()
    known = Client(triton.target, metadata=[triton.key])
    RECORD.set(TaskRecord("r", "m", "embed", 1, 0.0, PARENT))
    assert await known.server_live(deadline=soon())
    await known.infer(texts("a"), soon())
    assert await collect(known, pb.ModelInferRequest(model_name="llm")) == [1]
    RECORD.set(None)
    assert [each.get("traceparent") for each in triton.metadata[-3:]] == [None, PARENT, PARENT], "ready, infer, stream"
    await known.aclose()


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_and_a_certificate_of_ones_own(mutual: bool) -> None:
    credentials = grpc.ssl_server_credentials(
        [(certificates.SERVER_KEY, certificates.SERVER_CERT)], certificates.CA if mutual else None, mutual
    )
    async with FakeTriton(credentials=credentials) as triton:
        own = (certificates.CLIENT_CERT, certificates.CLIENT_KEY) if mutual else ()
        client = Client(triton.target, tls=Tls(certificates.CA, *own))
        assert await client.server_live(deadline=soon())
        await client.aclose()
        for tls in (None, Tls(), *([Tls(certificates.CA)] if mutual else [])):
            stranger = Client(triton.target, tls=tls)
            with pytest.raises(TransportFailed):
                await stranger.server_live(deadline=soon())
            await stranger.aclose()


async def test_a_deadline_ends_the_call(triton: FakeTriton, client: Client) -> None:
    async def never(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        await asyncio.Event().wait()
        raise AssertionError

    triton.models["emb"].answer = never
    with pytest.raises(DeadlineExceeded):
        await client.infer(texts("a"), soon(0.1))
    await asyncio.wait_for(triton.left.wait(), 30)


async def test_a_deadline_that_is_over_sends_nothing(triton: FakeTriton, client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.infer(texts("a"), time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded):
        await client.server_live(deadline=time.monotonic())
    with pytest.raises(DeadlineExceeded):
        await collect(client, texts("a"), -1)
    assert not triton.calls


@pytest.mark.parametrize("rpc", ["infer", "stream", "unary"])
async def test_cancelling_a_call_reaches_the_server(triton: FakeTriton, client: Client, rpc: str) -> None:
    started = asyncio.Event()

    async def never(request: Any) -> pb.ModelInferResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    triton.models["emb"].answer = never
    stream_model(triton, never)
    if rpc == "unary":
        request = client.unary("ModelInfer", texts("a"), pb.ModelInferResponse, soon())
        task: asyncio.Task[Any] = asyncio.create_task(request)
    elif rpc == "infer":
        task = asyncio.create_task(client.infer(texts("a"), soon()))
    else:
        task = asyncio.create_task(collect(client, pb.ModelInferRequest(model_name="llm")))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(triton.left.wait(), 30)
    assert triton.cancelled == 1


async def test_a_cancelled_member_harms_no_other(triton: FakeTriton, client: Client) -> None:
    gate = asyncio.Event()

    async def wait_forever(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        await gate.wait()
        return lengths(request)

    triton.models["emb"].answer = wait_forever
    tasks = [asyncio.create_task(client.infer(texts("x" * n), soon())) for n in range(1, 4)]
    await triton.wait_for_calls("ModelInfer", 3)
    tasks[1].cancel()
    await asyncio.wait_for(triton.left.wait(), 30)
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    for index in (0, 2):
        answer = results[index]
        assert isinstance(answer, pb.ModelInferResponse)
        assert read_outputs(answer)["vectors"][0, 0] == index + 1


async def test_an_answer_may_be_larger_than_four_mebibytes(triton: FakeTriton, client: Client) -> None:
    big = np.ones((32, 50_000), np.float32)
    triton.models["emb"].answer = lambda request: reply(request, vectors=big)
    answer = read_outputs(await client.infer(texts("a" * 6_000_000), soon()))["vectors"]
    assert answer.nbytes == 6_400_000 and (answer == 1).all()


async def test_a_batch_over_the_models_limit_is_refused_by_name(client: Client) -> None:
    with pytest.raises(InputRejected, match=r"batch-size must be <= 32 for 'emb'") as caught:
        await client.infer(texts(*"x" * 33, id="42"), soon())
    assert "request id" not in caught.value.message


async def test_the_models_own_failures(triton: FakeTriton, client: Client) -> None:
    def refuse(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        raise Refused("CUDA out of memory")

    triton.models["emb"].answer = refuse
    with pytest.raises(OutOfMemory):
        await client.infer(texts("a"), soon())
    triton.models["emb"].state = "UNAVAILABLE"
    with pytest.raises(ModelGone):
        await client.infer(texts("a"), soon())
    with pytest.raises(ModelGone):
        await client.infer(texts("a", model="nope"), soon())


async def test_raw_and_typed_contents_must_not_be_mixed(client: Client) -> None:
    request = texts("a")
    request.inputs[0].contents.bytes_contents.append(b"a")
    with pytest.raises(InputRejected, match="raw_input_contents"):
        await client.infer(request, soon())


async def test_typed_requests_and_answers_of_other_servers(triton: FakeTriton, client: Client) -> None:
    triton.typed = True  # Dynamo
    request = pb.ModelInferRequest(model_name="emb")
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"abc")
    answer = await client.infer(request, soon())
    assert not answer.raw_output_contents
    assert read_outputs(answer)["vectors"].tolist() == [[3.0] * 4]


async def test_a_single_answer_of_a_streaming_model_is_refused(triton: FakeTriton, client: Client) -> None:
    stream_model(triton, empty)
    with pytest.raises(UpstreamFailed, match="decoupled"):
        await client.infer(pb.ModelInferRequest(model_name="llm"), soon())
    assert triton.calls["ModelInfer"] == 1


async def test_a_stream_ends_with_the_empty_final_answer(triton: FakeTriton, client: Client) -> None:
    async def three(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        assert triton_codec.get_parameter(request.parameters, EMPTY_FINAL) is True
        for n in range(3):
            yield number(request, n, final=False)

    stream_model(triton, three)
    assert await collect(client, pb.ModelInferRequest(model_name="llm")) == [0, 1, 2]


@pytest.mark.parametrize("flagged", [True, False])
async def test_a_server_without_empty_final_answers_is_accepted(
    triton: FakeTriton, client: Client, flagged: bool
) -> None:
    async def two(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1)
        yield number(request, 2, final=True if flagged else None)

    triton.empty_final = False
    stream_model(triton, two)
    assert await collect(client, pb.ModelInferRequest(model_name="llm")) == [1, 2]


async def test_nothing_is_awaited_after_the_final_flag(triton: FakeTriton, client: Client) -> None:
    async def endless(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1, final=True)
        await asyncio.Event().wait()

    stream_model(triton, endless)
    assert await collect(client, pb.ModelInferRequest(model_name="llm")) == [1]
    await asyncio.wait_for(triton.left.wait(), 30)


async def test_a_model_may_answer_nothing_at_all(triton: FakeTriton, client: Client) -> None:
    async def nothing(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        for response in list[pb.ModelInferResponse]():
            yield response

    stream_model(triton, nothing)
    assert await collect(client, pb.ModelInferRequest(model_name="llm")) == []


async def test_a_refused_stream_request_ends_without_a_final_flag(triton: FakeTriton, client: Client) -> None:
    """The server sends only an error message, and the RPC ends with OK: waiting for the flag would hang."""
    with pytest.raises(InputRejected, match="unexpected shape"):
        await collect(client, pb.ModelInferRequest(model_name="emb", id="7", inputs=[_flat()]))
    with pytest.raises(ModelGone):
        await collect(client, pb.ModelInferRequest(model_name="nope"))


def _flat() -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])


async def test_a_models_error_ends_the_stream_after_what_came(triton: FakeTriton, client: Client) -> None:
    async def fails(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1)
        raise Refused("Error generating stream: boom")

    stream_model(triton, fails)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    assert read_outputs(await anext(stream))["n"] == [1]
    with pytest.raises(UpstreamFailed, match="boom"):
        await anext(stream)


async def test_reserved_parameters_are_refused(triton: FakeTriton, client: Client) -> None:
    request = texts("a")
    codec.set_parameter(request.parameters, "triton_grpc_error", True)
    with pytest.raises(InputRejected, match="reserved"):
        await client.infer(request, soon())


async def test_leaving_a_stream_cancels_it_on_the_server(
    triton: FakeTriton, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that never pauses."""
    monkeypatch.setattr(infer_stream, "READ_ON_S", 0.01)

    async def endless(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        n = 0
        while True:
            yield number(request, n := n + 1)

    stream_model(triton, endless)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    assert [read_outputs(await anext(stream))["n"][0] for _ in range(3)] == [1, 2, 3]
    await stream.aclose()
    await asyncio.wait_for(triton.left.wait(), 30)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_stream_that_pauses_is_cancelled_at_once(
    triton: FakeTriton, client: Client, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """After a short while if it has answered."""
    monkeypatch.setattr(infer_stream, "READ_ON_S", 3600.0)
    monkeypatch.setattr(infer_stream, "PAUSE_S", 0.01 if answered else 3600.0)

    async def waits(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1)
        await asyncio.Event().wait()

    received = asyncio.Event()

    async def silent(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        received.set()
        await asyncio.Event().wait()
        yield number(request, 1)

    stream_model(triton, waits if answered else silent)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    if answered:
        await anext(stream)
    else:
        await received.wait()
    await stream.aclose()
    await asyncio.wait_for(triton.left.wait(), 30)


async def test_a_short_answer_that_is_left_ends_by_itself(
    triton: FakeTriton, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tritonserver may crash if a call is canceled while it answers."""
    monkeypatch.setattr(infer_stream, "READ_ON_S", 3600.0)
    monkeypatch.setattr(infer_stream, "PAUSE_S", 3600.0)

    async def five(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        for n in range(5):
            yield number(request, n)

    stream_model(triton, five)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    await anext(stream)
    await stream.aclose()
    await asyncio.gather(*infer_stream._ENDING)
    assert (triton.cancelled, client._long_calls) == (0, 0)


async def last_then(triton: FakeTriton, client: Client, ends: asyncio.Event, *, fails: bool) -> InferStream:
    """A stream whose last response is an error or final, and that ends when `ends` is set."""

    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        if not fails:
            yield number(request, 1, final=True)
            await ends.wait()
            return
        triton.after_error = ends
        raise Refused("boom")

    stream_model(triton, answer)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    if fails:
        with pytest.raises(UpstreamFailed, match="boom"):
            await anext(stream)
    else:
        assert read_outputs(await anext(stream))["n"] == [1]
    return stream


async def test_a_connection_that_cannot_be_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are closed all the same."""
    monkeypatch.setattr(client_module, "LONG_CALLS", 1)
    with client.long_call() as first, client.long_call() as extra:
        assert first is client
        for each in (client, extra):
            await each.server_live(deadline=soon())
    assert client._channel is not None
    close = client._channel.close

    async def fail() -> None:
        await close()
        raise RuntimeError("broken")

    monkeypatch.setattr(client._channel, "close", fail)
    with pytest.raises(RuntimeError, match="broken"):
        await client.aclose()
    with pytest.raises(TransportFailed):
        await extra.server_live(deadline=soon())


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_is_over_ends_by_itself(triton: FakeTriton, client: Client, fails: bool) -> None:
    """tritonserver may crash if a call is canceled while it ends. Until its end it counts as a stream."""
    ends = asyncio.Event()
    stream = await last_then(triton, client, ends, fails=fails)
    await stream.aclose()
    await stream.aclose()
    await client.server_live(deadline=soon())  # a cancellation would have arrived before it
    assert (triton.cancelled, client._long_calls) == (0, 1)
    ends.set()
    await asyncio.gather(*infer_stream._ENDING)
    assert client._long_calls == 0
    assert triton.cancelled == 0


async def test_a_stream_that_never_ends_is_cancelled(
    triton: FakeTriton, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_stream, "END_S", 0.01)
    stream = await last_then(triton, client, asyncio.Event(), fails=False)
    await stream.aclose()
    await asyncio.wait_for(triton.left.wait(), 30)
    await asyncio.gather(*infer_stream._ENDING)
    assert client._long_calls == 0


async def test_closing_the_client_ends_what_was_left_to_end(triton: FakeTriton, client: Client) -> None:
    stream = await last_then(triton, client, asyncio.Event(), fails=False)
    await stream.aclose()
    await client.aclose()
    await asyncio.wait_for(triton.left.wait(), 30)
    await asyncio.gather(*infer_stream._ENDING)
    assert client._long_calls == 0


async def test_mlservers_unwrapped_stream_is_read_too(triton: FakeTriton, client: Client) -> None:
    async def two(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1)
        yield number(request, 2)

    triton.unwrapped, triton.empty_final = True, False
    stream_model(triton, two)
    assert await collect(client, pb.ModelInferRequest(model_name="llm", id="x")) == [1, 2]


async def test_a_server_that_stops_in_mid_stream_is_a_transport_failure(triton: FakeTriton, client: Client) -> None:
    async def one(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        yield number(request, 1)
        await asyncio.Event().wait()

    stream_model(triton, one)
    stream = client.stream_infer(pb.ModelInferRequest(model_name="llm"), soon())
    await anext(stream)
    await triton.stop()
    with pytest.raises(TransportFailed):
        await anext(stream)


async def test_after_a_restart_the_first_calls_work_again(triton: FakeTriton, client: Client) -> None:
    await client.infer(texts("a"), soon())
    await triton.stop()
    with pytest.raises(TransportFailed, match="check its address"):
        await client.infer(texts("a"), soon())
    await triton.start()
    while True:
        try:
            answer = await client.infer(texts("abc"), soon())
            break
        except TransportFailed:
            await asyncio.sleep(0.01)  # real time: gRPC's own pause between attempts runs
    assert read_outputs(answer)["vectors"][0, 0] == 3


async def test_closing_breaks_off_calls_in_flight_and_refuses_new_ones(triton: FakeTriton, client: Client) -> None:
    started = asyncio.Event()

    async def never(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    triton.models["emb"].answer = never
    stream_model(triton, never)
    calls = [
        asyncio.create_task(client.infer(texts("a"), soon())),
        asyncio.create_task(client.unary("ModelInfer", texts("a"), pb.ModelInferResponse, soon())),
        asyncio.create_task(collect(client, pb.ModelInferRequest(model_name="llm"))),
    ]
    await started.wait()
    await triton.wait_for_calls("ModelInfer", 2)
    await triton.wait_for_calls("ModelStreamInfer")
    await client.aclose()
    await client.aclose()
    for call in calls:
        with pytest.raises(TransportFailed, match="closed"):
            await call
    with pytest.raises(TransportFailed, match="closed"):
        await client.infer(texts("a"), soon())
    with pytest.raises(TransportFailed, match="closed"):
        await client.server_live(deadline=soon())


def test_keepalive_stays_below_the_servers_ping_limit() -> None:
    """Triton allows a ping without data every 300 s and closes the connection after two early ones."""
    options = dict(OPTIONS)
    assert options["grpc.keepalive_time_ms"] > 300_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == -1
    assert options["grpc.max_reconnect_backoff_ms"] <= 1000
