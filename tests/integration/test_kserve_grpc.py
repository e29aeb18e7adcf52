"""KServe v2 over gRPC: a running server, called by Shoal's own Triton client and by gRPC itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.backends.triton.client import Client
from shoal.backends.triton.response import read_outputs
from shoal.errors import Overloaded, SetupError, UpstreamFailed
from shoal.kserve import EMPTY_FINAL, FINAL, SERVICE, codec
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve.grpc_calls import MAX_HEALTH_READS
from tests.integration.llm_kit import free_port, metric, running, until
from tests.integration.server_kit import Server

Code = grpc.StatusCode
MODELS = ("embedder=fake:delay_ms=10", "reranker=fake:labels=1", "slow=fake:delay_ms=400", "talker=fake:token_ms=20")


class Door:
    """A running server, and where it listens for gRPC."""

    def __init__(self, server: Server, port: int, socket: Path) -> None:
        self.server = server
        self.target = f"127.0.0.1:{port}"
        self.socket = socket


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder, port = tmp_path_factory.mktemp("door"), free_port()
    flags = ("--grpc-port", str(port), "--grpc-socket", str(folder / "grpc.sock"))
    with running(folder, *MODELS, flags=flags) as server:
        yield Door(server, port, folder / "grpc.sock")


@asynccontextmanager
async def calling(target: str, **metadata: str) -> AsyncIterator[Client]:
    client = Client(target, metadata=tuple(metadata.items()))
    try:
        yield client
    finally:
        await client.aclose()


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def texts(*values: str, model: str = "embedder", id: str = "", **inputs: tuple[str, ...]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id)
    for name, each in {"text": values, **inputs}.items():
        if each:
            codec.add_input(request, name, "BYTES", np.array(each, dtype=object)[:, None])
    return request


def prompt(text: str, *, id: str = "", stream: bool = True, **sampling: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="talker", id=id)
    codec.add_input(request, "text_input", "BYTES", np.array([text], dtype=object))
    codec.add_input(request, "stream", "BOOL", np.array([stream]))
    for name, value in sampling.items():
        codec.set_parameter(request.parameters, name, value)
    return request


def vector(text: str) -> Any:
    expected = compute_vector(tokenize_item(text), 32)
    return expected / np.linalg.norm(expected)


async def in_flight(server: Server, model: str) -> None:
    """Wait until the server has accepted a request for a model."""
    await asyncio.to_thread(until, lambda: metric(server, "shoal_requests_in_flight", model=model) > 0)


async def refusal(client: Client, request: pb.ModelInferRequest) -> grpc.aio.AioRpcError:
    """Return the error of a call, as gRPC has it."""
    try:
        await client.infer(request, soon())
    except Exception as error:
        assert isinstance(error.__cause__, grpc.aio.AioRpcError), error
        return error.__cause__
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("way", ["port", "socket"])
async def test_vectors(door: Door, way: str) -> None:
    async with calling(door.target if way == "port" else str(door.socket)) as client:
        words = [f"text number {at}" for at in range(40)]
        response = await client.infer(texts(*words, id="mine"), soon())
        assert (response.model_name, response.model_version, response.id) == ("embedder", "1", "mine")
        outputs = read_outputs(response)
        assert np.allclose(outputs["embeddings"], [vector(word) for word in words], atol=1e-6)
        assert outputs["token_count"].tolist() == [[3]] * 40
        scores = await client.infer(texts(model="reranker", query=("fish",) * 2, document=("a", "b")), soon())
        assert read_outputs(scores)["scores"].shape == (2, 1)


async def test_only_the_owner_opens_the_socket(door: Door) -> None:
    assert stat.S_IMODE(os.stat(door.socket).st_mode) == 0o600


async def test_typed_contents(door: Door) -> None:
    """As clients of the standard protocol send them."""
    request = pb.ModelInferRequest(model_name="embedder")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[2, 1])
    tensor.contents.bytes_contents.extend([b"a fish", b"bread"])
    async with calling(door.target) as client:
        outputs = read_outputs(await client.infer(request, soon()))
        assert np.allclose(outputs["embeddings"], [vector("a fish"), vector("bread")], atol=1e-6)


async def test_many_callers(door: Door) -> None:
    """Their texts share batches, and each gets its own vector."""
    before = metric(door.server, "shoal_batches_total", model="embedder")
    async with calling(door.target) as client:

        async def one(number: int) -> None:
            text = f"caller number {number}"
            [found] = read_outputs(await client.infer(texts(text), soon()))["embeddings"]
            assert np.allclose(found, vector(text), atol=1e-6)

        await asyncio.gather(*map(one, range(200)))
    assert metric(door.server, "shoal_batches_total", model="embedder") - before < 150


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (texts("a", model="nobody"), Code.NOT_FOUND, "available models"),
        (texts(), Code.INVALID_ARGUMENT, "the input 'text_input' is missing"),
        (texts("a", model="reranker"), Code.INVALID_ARGUMENT, "it has query, document"),
        (texts(other=("a",)), Code.INVALID_ARGUMENT, "the model has no input 'other'"),
        (texts(*["a"] * 2049), Code.INVALID_ARGUMENT, "the limit is 2048"),
        (prompt("a"), Code.INVALID_ARGUMENT, "ModelStreamInfer"),
        (prompt("a", stream=False, frobnicate=1), Code.INVALID_ARGUMENT, "unknown field `frobnicate`"),
        (texts("poison-item"), Code.INTERNAL, "the engine failed"),
    ],
    ids=lambda value: "",
)
async def test_refusals(door: Door, request_: pb.ModelInferRequest, code: grpc.StatusCode, words: str) -> None:
    async with calling(door.target) as client:
        error = await refusal(client, request_)
        assert error.code() is code, error
        assert words in (error.details() or "")
        assert read_outputs(await client.infer(texts("a"), soon()))["embeddings"].shape == (1, 32)


async def test_broken_tensors(door: Door) -> None:
    async with calling(door.target) as client:
        broken = texts("a")
        broken.raw_input_contents[0] = b"\xff\xff\xff\xff"
        assert (await refusal(client, broken)).code() is Code.INVALID_ARGUMENT
        unknown = texts("a")
        unknown.inputs[0].datatype = "TEXT"
        assert "must have the datatype BYTES" in ((await refusal(client, unknown)).details() or "")
        shared = texts("a")
        codec.set_parameter(shared.inputs[0].parameters, "shared_memory_region", "x")
        assert "shared_memory_region" in ((await refusal(client, shared)).details() or "")
        large = texts("a" * 17_000_000)
        assert (await refusal(client, large)).code() is Code.RESOURCE_EXHAUSTED


async def test_a_deadline(door: Door) -> None:
    """Of the call, and as Triton's `timeout` in microseconds."""
    async with calling(door.target) as client:
        request = texts("a", model="slow")
        codec.set_parameter(request.parameters, "timeout", 50_000)
        error = await refusal(client, request)
        assert error.code() is Code.DEADLINE_EXCEEDED


async def test_describing(door: Door) -> None:
    """Shoal's client finds the models, and Shoal serves them as those of a Triton."""
    async with calling(door.target) as client:
        assert await client.server_live(deadline=soon())
        assert await client.model_ready("embedder", deadline=soon())
        assert not await client.model_ready("nobody", deadline=soon())
        config = await client.model_config("embedder", deadline=soon())
        metadata = await client.model_metadata("talker", deadline=soon())
        assert config.model_transaction_policy.decoupled  # a fake model also generates, which counts first
        assert [each.name for each in metadata.inputs][:2] == ["text_input", "stream"]
        index = await client.repository_index(deadline=soon())
        assert {each.name: each.state for each in index.models} == dict.fromkeys(
            ("embedder", "reranker", "slow", "talker"), "READY"
        )
        statistics = await client.model_statistics("embedder", deadline=soon())
        assert statistics.model_stats[0].name == "embedder"


async def test_health_check(door: Door) -> None:
    """grpc.health.v1, as probes of Kubernetes use it."""
    async with grpc.aio.insecure_channel(door.target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda data: data, lambda data: data)
        assert await check(b"", timeout=20) == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\n\x05other", timeout=20)
        assert caught.value.code() is Code.NOT_FOUND
        unknown = channel.unary_unary(SERVICE + "TraceSetting", lambda data: data, lambda data: data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"", timeout=20)
        assert caught.value.code() is Code.UNIMPLEMENTED


async def test_health_checks_that_send_no_message(door: Door) -> None:
    """They do not keep others from their answer."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async with grpc.aio.insecure_channel(door.target) as channel:
        check: Any = channel.stream_unary("/grpc.health.v1.Health/Check", None, None)
        waiting = [check(nothing(), timeout=20) for _ in range(MAX_HEALTH_READS + 2)]
        answered, _ = await asyncio.wait(
            [asyncio.ensure_future(each) for each in waiting], return_when=asyncio.FIRST_COMPLETED, timeout=20
        )
        assert next(iter(answered)).result() == b"\x08\x01"
        assert await check(iter((b"",)), timeout=20) == b"\x08\x01"
        for each in waiting:
            each.cancel()


async def exchange(target: str, *requests: pb.ModelInferRequest) -> list[pb.ModelStreamInferResponse]:
    """Send all requests on one stream, half-close it, and return the responses."""
    async with grpc.aio.insecure_channel(target) as channel:
        open_stream: Any = channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            lambda message: message.SerializeToString(),
            pb.ModelStreamInferResponse.FromString,
        )
        call = open_stream(iter(requests), timeout=20)
        return [response async for response in call]


async def test_a_stream_of_requests(door: Door) -> None:
    """Pieces come as they are made; single responses in order, whichever is ready first; an error ends only its
    request."""
    talk = prompt("one two three", id="talk", max_tokens=2)
    talk.parameters[EMPTY_FINAL].bool_param = True
    requests = (talk, texts("a", model="slow", id="1"), texts(id="bad"), texts("b", id="2"))
    responses = await exchange(door.target, *requests)
    ids = [each.infer_response.id for each in responses]
    assert [id for id in ids if id != "talk"] == ["1", "bad", "2"]
    [failed] = [each for each in responses if each.error_message]
    assert failed.infer_response.id == "bad" and "is missing" in failed.error_message
    talked = [each.infer_response for each in responses if each.infer_response.id == "talk"]
    pieces = [read_outputs(each)["text_output"][0] for each in talked if each.outputs]
    assert (b"".join(pieces), len(pieces)) == (b"one two", 3)
    assert [each.parameters[FINAL].bool_param for each in talked] == [False, False, False, True]
    assert not talked[-1].outputs
    assert ids.index("talk") < ids.index("1") and ids[-1] == "2"


async def test_leaving_a_stream(door: Door) -> None:
    """A client that leaves ends the generation; nothing is left in flight."""
    async with calling(door.target) as client:
        stream = client.stream_infer(prompt(" ".join(["word"] * 400)), soon())
        assert read_outputs(await anext(stream))["text_output"].tolist() == [b"word"]
        await stream.aclose()
        leaving = asyncio.create_task(client.infer(texts("a", model="slow"), soon()))
        await in_flight(door.server, "slow")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

        def have_left() -> bool:
            return metric(door.server, "shoal_requests_total", outcome="cancelled") >= 2

        await asyncio.to_thread(until, have_left)


async def test_keys(tmp_path: Path) -> None:
    """As over HTTP; health needs none. Managing models needs an admin key where there is one."""
    port = free_port()
    flags = ("--grpc-port", str(port), "--api-key", "user", "--admin-key", "root")
    with running(tmp_path, *MODELS[:1], flags=flags):
        target = f"127.0.0.1:{port}"
        async with calling(target) as client:
            assert await client.server_live(deadline=soon())
            error = await refusal(client, texts("a"))
            assert error.code() is Code.UNAUTHENTICATED and "API key" in (error.details() or "")
            stream = client.stream_infer(texts("a"), soon())
            with pytest.raises(SetupError, match="API key"):
                await anext(stream)
            await stream.aclose()
        async with calling(target, authorization="Bearer user") as client:
            assert read_outputs(await client.infer(texts("a"), soon()))["embeddings"].shape == (1, 32)
            with pytest.raises(SetupError):
                await client.repository_model_unload("embedder", deadline=soon())
        async with calling(target, authorization="Bearer root") as client:
            await client.repository_model_unload("embedder", deadline=soon())
            assert not await client.model_ready("embedder", deadline=soon())
            load = pb.RepositoryModelLoadRequest(model_name="embedder")
            await client.repository_model_load(load, deadline=soon())
            assert await client.model_ready("embedder", deadline=soon())


@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer", "RepositoryModelLoad"])
async def test_a_key_is_checked_before_the_message(tmp_path: Path, call: str) -> None:
    """A caller without a key is refused before it has sent a message, and so is one that would send for minutes."""
    port = free_port()

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    with running(tmp_path, MODELS[0], flags=("--grpc-port", str(port), "--api-key", "user")):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                start: Any = channel.stream_unary(SERVICE + call, None, None)
                await start(nothing(), timeout=20)
            assert caught.value.code() is Code.UNAUTHENTICATED


async def test_calls_without_a_message(door: Door) -> None:
    """Those whose message has no fields do not read it; all others need one."""
    async with grpc.aio.insecure_channel(door.target) as channel:
        for name in ("ServerLive", "ServerReady"):
            assert await channel.stream_unary(SERVICE + name, None, None)(iter(()), timeout=20) == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(SERVICE + "ModelInfer", None, None)(iter(()), timeout=20)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        assert "no message" in (caught.value.details() or "")


async def test_without_keys_only_this_machine_manages_models(door: Door) -> None:
    async with calling(door.target, **{"x-forwarded-for": "1.2.3.4"}) as client:
        with pytest.raises(SetupError, match="came through a proxy"):
            await client.repository_model_unload("slow", deadline=soon())
        assert await client.model_ready("slow", deadline=soon())


async def test_overload(tmp_path: Path) -> None:
    """Shoal's client sees a full queue as such, with the time after which to try again."""
    port = free_port()
    flags = ("--grpc-port", str(port), "--max-queue-items", "8", "--max-batch-size", "1")
    with running(tmp_path, "slow=fake:delay_ms=200", flags=flags):
        async with calling(f"127.0.0.1:{port}") as client:
            calls = [client.infer(texts(f"a {at}", model="slow"), soon()) for at in range(40)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            refused = [each for each in found if isinstance(each, Exception)]
            assert 0 < len(refused) < 40
            assert all(isinstance(each, Overloaded) for each in refused), refused


async def test_a_drain(tmp_path: Path) -> None:
    """SIGTERM: calls in flight are answered, and the port is free afterwards."""
    port = free_port()
    with running(tmp_path, "slow=fake:delay_ms=500", flags=("--grpc-port", str(port))) as server:
        async with calling(f"127.0.0.1:{port}") as client:
            flying = asyncio.create_task(client.infer(texts("a", model="slow"), soon()))
            await in_flight(server, "slow")
            server.process.send_signal(signal.SIGTERM)
            assert read_outputs(await flying)["embeddings"].shape == (1, 32)
            assert await asyncio.to_thread(server.exit_code) == 0
    with running(tmp_path / "again", MODELS[0], flags=("--grpc-port", str(port))):
        pass


async def test_a_drain_of_streams(tmp_path: Path) -> None:
    """A stream takes nothing more and ends once its requests are answered; an answer that outlasts the drain ends with
    an error that says why."""
    port, flags = free_port(), ("--drain-timeout-s", "2")
    with running(tmp_path, MODELS[3], flags=("--grpc-port", str(port), *flags)) as server:
        async with calling(f"127.0.0.1:{port}") as client:
            stream = client.stream_infer(prompt(" ".join(["word"] * 400)), soon())
            assert read_outputs(await anext(stream))["text_output"].tolist() == [b"word"]
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(UpstreamFailed, match="shutting down"):
                async for _ in stream:
                    pass
            await stream.aclose()
            assert await asyncio.to_thread(server.exit_code) == 0


async def test_a_drain_of_an_idle_stream(tmp_path: Path) -> None:
    """A client that keeps its stream open does not delay the end."""
    port = free_port()
    with running(tmp_path, MODELS[1], flags=("--grpc-port", str(port))) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(SERVICE + "ModelStreamInfer", None, None)()
            await call.write(texts(model="reranker", query=("a",), document=("b",)).SerializeToString())
            assert not pb.ModelStreamInferResponse.FromString(await call.read()).error_message
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert await call.read() is grpc.aio.EOF
            assert await asyncio.to_thread(server.exit_code) == 0
            assert time.monotonic() - began < 15  # the drain's limit is 30 s


def test_a_port_in_use(door: Door, tmp_path: Path) -> None:
    """It is reported before models load, with the next step."""
    port = door.target.rpartition(":")[2]
    with running(tmp_path, MODELS[0], flags=("--grpc-port", port), wait=False) as server:
        assert server.exit_code() != 0
    assert "choose another with --grpc-port" in server.log.read_text()


async def test_shoal_behind_shoal(door: Door, tmp_path: Path) -> None:
    """The models of one server are those of a Triton to another."""
    config = '[models."reranker"]\nactivation = "identity"\n'
    (tmp_path / "shoal.toml").write_text(config)
    addresses = [f"triton://{door.target}#{name}" for name in ("reranker", "talker")]
    with running(tmp_path, *addresses) as front:
        body = {"model": "reranker", "query": "fish", "documents": ["a shoal", "bread"]}
        both = [json.loads(each.request("POST", "/v1/rerank", body)[2])["results"] for each in (front, door.server)]
        assert both[0] == both[1]
        prompted = {"model": "talker", "prompt": "one two three", "max_tokens": 2}
        status, _, answer = front.request("POST", "/v1/completions", prompted)
        assert status == 200 and b'"text":"one two"' in answer, answer


async def test_poison_fails_alone(door: Door) -> None:
    """A text that the model rejects fails its own call only."""
    async with calling(door.target) as client:
        calls = [client.infer(texts("poison-item" if at == 3 else f"good {at}"), soon()) for at in range(8)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, Exception) for each in found] == [at == 3 for at in range(8)]
