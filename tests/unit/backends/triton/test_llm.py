"""Language models on a server in this process as generators: streams, whole answers, failures, and cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from shoal.backends.base import backoff
from shoal.backends.triton import client as client_module
from shoal.backends.triton import engine as engine_module
from shoal.backends.triton import infer_stream
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.llm import TritonGenerator
from shoal.backends.triton.llm_request import ModelTokenizer
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.core.protocols import Piece, Prompt
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    InputRejected,
    InvalidValue,
    Overloaded,
    ShoalError,
    TooLong,
    TransportFailed,
    UpstreamFailed,
)
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Context, Sampling
from tests.fakes.triton import Code, FakeTriton, Refused
from tests.fakes.triton_llm import TENSORS, Kind, Script, Talker, talker
from tests.unit.backends.triton.open.kit import forgotten, grpc_in_use, requests_of, until

WORDS = ModelTokenizer(encode=lambda text: [ord(letter) for letter in text], piece=chr, ends=(2,))
PROMPT = Prompt(text="Say hello", ids=(5, 6, 7), tokens=3)


def soon(seconds: float = 30.0) -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run health checks without pauses."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with grpc_in_use(), FakeTriton() as server:
        yield server


@pytest.fixture
async def target(triton: FakeTriton) -> AsyncIterator[Endpoint]:
    client = Client(triton.target)
    yield Endpoint(client=client, control=Control(client, pauses=(0.0,)), address="triton://here#llm", model="llm")
    await client.aclose()


class Bench:
    """Models of the fake server as generators."""

    def __init__(self, triton: FakeTriton, target: Endpoint) -> None:
        self.triton = triton
        self.target = target
        self.made: list[TritonGenerator] = []

    async def open(self, model: Talker, **fields: Any) -> TritonGenerator:
        self.triton.add(model)
        schema = await self.target.find()
        assert isinstance(schema, LlmSchema)
        generator = TritonGenerator(self.target, "llm-0", schema=schema, words=WORDS, serving=True, **fields)
        self.made.append(generator)
        return generator


@pytest.fixture
async def bench(triton: FakeTriton, target: Endpoint) -> AsyncIterator[Bench]:
    made = Bench(triton, target)
    yield made
    for generator in made.made:
        await generator.aclose()


async def collect(
    generator: TritonGenerator, *, stream: bool = True, ctx: Context | None = None, adapter: str = "", **sampling: Any
) -> list[Piece]:
    answers = generator.generate(PROMPT, Sampling(**sampling), ctx or soon(), adapter=adapter, stream=stream)
    return [piece async for piece in answers]


async def read_into(found: list[Piece], generator: TritonGenerator) -> None:
    """Collect as `collect` does; pieces before an error are kept."""
    async for piece in generator.generate(PROMPT, Sampling(), soon()):
        found.append(piece)  # noqa: PERF401 - an error must not lose them


def text_of(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", TENSORS)
async def test_every_kind_answers(bench: Bench, kind: Kind, stream: bool) -> None:
    """Streamed and whole, without the prompt and with a finish reason."""
    words: Any = [72, 105, 33] if kind == "tokens" else ["Hello", " wo", "rld"]
    model = talker(kind, Script(words))
    generator = await bench.open(model)
    found = await collect(generator, stream=stream, max_tokens=99 if kind != "dynamo" else None)
    if kind == "tokens":
        assert [id for piece in found for id in piece.ids] == words
    elif generator.facts.output_mode == "cumulative":
        assert found[-1].text == "Hello world"
    else:
        assert text_of(found) == "Hello world"
    # If the model reports neither the reason nor the number of tokens, the caller counts them.
    reasons = [] if kind in ("old_vllm", "gpt", "text") else ["stop"]
    assert [piece.finish_reason for piece in found if piece.finish_reason] == reasons
    assert len(found) > 2 or not (stream and generator.schema.streams)
    assert len(model.script.requests) == 1
    assert bench.triton.calls["ModelStreamInfer"] == (1 if generator.schema.decoupled else 0)


class TestFacts:
    async def test_they_follow_the_schema(self, bench: Bench) -> None:
        facts = (await bench.open(talker("tokens"), adapters={"doll": 7}, context_tokens=128)).facts
        assert (facts.name, facts.wants_ids, facts.output_mode, facts.context_tokens) == ("llm-0", True, "ids", 128)
        assert (facts.adapters, facts.details["schema"]) == (("doll",), "tokens")
        assert "top_k" in facts.parameters

    async def test_the_context_of_the_configuration(self, bench: Bench) -> None:
        model = talker("ensemble")
        model.config.parameters["max_seq_len"].string_value = "77"
        assert (await bench.open(model)).facts.context_tokens == 77

    async def test_what_cannot_be_is_refused_at_once(self, triton: FakeTriton, target: Endpoint) -> None:
        triton.add(talker("gpt"))
        schema = await target.find()
        assert isinstance(schema, LlmSchema)
        with pytest.raises(ConfigError, match="does not support LoRA"):
            TritonGenerator(target, "llm-0", schema=schema, adapters={"doll": 1})
        triton.add(talker("tokens"))
        schema = await target.find()
        assert isinstance(schema, LlmSchema)
        with pytest.raises(ConfigError, match="set `tokenizer` of the model in"):
            TritonGenerator(target, "llm-0", schema=schema)


class TestRequests:
    async def test_each_generation_has_an_id_of_its_own(self, bench: Bench) -> None:
        model = talker("vllm")
        generator = await bench.open(model)
        await asyncio.gather(*(collect(generator) for _ in range(3)))
        assert len(set(model.script.ids)) == 3

    async def test_version_and_adapter_go_along(self, bench: Bench) -> None:
        bench.target = replace(bench.target, version="1")
        model = talker("ensemble")
        await collect(await bench.open(model, adapters={"doll": 7}), adapter="doll")
        assert model.script.requests[0]["lora_task_id"] == 7
        assert requests_of(bench.triton, "ModelStreamInfer")[0].model_version == "1"

    async def test_unsupported_requests_are_not_sent(self, bench: Bench) -> None:
        generator = await bench.open(talker("ensemble"))
        assert generator.facts.top_logprobs == 0
        with pytest.raises(InvalidValue):
            await collect(generator, logprobs=5)
        assert not bench.triton.calls["ModelStreamInfer"]

    async def test_a_stream_without_empty_final_answers(self, bench: Bench) -> None:
        """A server that ignores the request for them and marks no response as final ends the stream."""
        bench.triton.empty_final = False
        assert text_of(await collect(await bench.open(talker("ensemble")))) == "Hello world"

    async def test_an_answer_that_is_marked_final(self, bench: Bench) -> None:
        model = talker("ensemble", Script(["all"], final=True, hold=1))
        assert text_of(await collect(await bench.open(model))) == "all"


class TestFailures:
    @pytest.mark.parametrize(
        ("message", "error", "words"),
        [
            ("CUDA error: device-side assert", UpstreamFailed, "device-side"),
            ("The decoder prompt (length 5000) is longer than the maximum model length of 2048.", TooLong, "shorter"),
            ("Prompt length (33) exceeds maximum input length (32).", TooLong, "shorter"),
            ("Error generating stream: 'NoneType' object has no attribute 'lora_name'", InvalidValue, "log for which"),
            ("LoRA x is not supported, we currently support ['a']", InvalidValue, "adapter"),
            ("LoRA feature is not enabled.", InvalidValue, "adapter"),
            ("Error generating stream: top_p must be in (0, 1], got 2.0.", InvalidValue, "sampling parameter"),
            ("[request id: 7] unexpected shape for input 'text_input'", InputRejected, "unexpected shape"),
            ("Exceeds maximum queue size", Overloaded, "queue"),
            ("Request was cancelled", UpstreamFailed, "cancelled"),
        ],
    )
    @pytest.mark.parametrize("accepted", [True, False])
    async def test_in_mid_stream(
        self, bench: Bench, message: str, error: type[ShoalError], words: str, accepted: bool
    ) -> None:
        """An error ends the stream, marked final or not; earlier pieces are returned, and the replica stays in
        service."""
        generator = await bench.open(talker("vllm", Script(["Hello"], fails=message, accepted=accepted)))
        found: list[Piece] = []
        with pytest.raises(error, match=words):
            await read_into(found, generator)
        assert text_of(found) == "Hello"
        assert generator.ready()

    async def test_the_text_of_an_error_is_no_answer(self, bench: Bench) -> None:
        """vLLM's backend sends "N/A" with it."""
        model = talker("vllm", Script([], fails="Error generating stream: x"))
        generator = await bench.open(model)
        stream = bench.triton.stream

        async def with_text(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
            async for answer in stream(request):
                answer.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
                answer.infer_response.raw_output_contents.append(b"\x03\x00\x00\x00N/A")
                yield answer

        bench.triton.stream = with_text  # type: ignore[method-assign]
        found: list[Piece] = []
        with pytest.raises(UpstreamFailed, match="Error generating stream"):
            await read_into(found, generator)
        assert not found

    @pytest.mark.parametrize(
        ("refused", "error"),
        [
            (Refused("Exceeds maximum queue size", Code.UNAVAILABLE), Overloaded),
            (Refused("bad shape", Code.INVALID_ARGUMENT), InputRejected),
            (Refused("division by zero"), UpstreamFailed),
            (Refused("nobody may", Code.PERMISSION_DENIED), UpstreamFailed),
        ],
    )
    async def test_of_a_whole_answer(self, bench: Bench, refused: Refused, error: type[ShoalError]) -> None:
        model = talker("gpt")
        generator = await bench.open(model)

        def fail(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            raise refused

        model.answer = fail
        with pytest.raises(error):
            await collect(generator)
        assert generator.ready()

    async def test_an_answer_that_the_model_gave_up(self, bench: Bench) -> None:
        generator = await bench.open(talker("vllm", Script(["a"], finish="abort")))
        with pytest.raises(UpstreamFailed, match="abort"):
            await collect(generator)

    async def test_a_server_that_stops_in_mid_stream(self, bench: Bench) -> None:
        generator = await bench.open(talker("vllm", Script(["a"], hold=1)))
        found = []
        with pytest.raises(TransportFailed):
            async for piece in generator.generate(PROMPT, Sampling(), soon()):
                found.append(piece)
                await bench.triton.stop()
        assert text_of(found) == "a"
        assert not generator.ready()
        assert generator.reason

    async def test_a_deadline_ends_it(self, bench: Bench) -> None:
        """On the server too, and at once if the model accepts cancellations."""
        model = talker("tokens", Script([65], hold=1))
        generator = await bench.open(model)
        with pytest.raises(DeadlineExceeded):
            await collect(generator, ctx=soon(0.2))
        await until(lambda: model.script.cancelled == model.script.ids)
        assert generator.ready()


class TestLeaving:
    @pytest.mark.parametrize("kind", ["vllm", "tokens", "llmapi", "ensemble", "dynamo"])
    async def test_a_reader_that_leaves(self, bench: Bench, kind: Kind) -> None:
        """Its stream is canceled, and a model that cancels generations by id gets a cancellation."""
        model = talker(kind, Script([65] if kind == "tokens" else ["a"], hold=1))
        generator = await bench.open(model)
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            await anext(pieces)
        await bench.triton.left.wait()
        ids = model.script.ids if kind in ("tokens", "llmapi") else []
        await until(lambda: model.script.cancelled == ids)
        assert generator.ready()

    async def test_the_end_of_an_answer_is_not_cancelled(self, bench: Bench) -> None:
        """If a reader leaves at the finish reason, before the stream has ended: see `infer_stream`."""
        model, ends = talker("vllm"), asyncio.Event()
        answer: Callable[..., Any] = model.answer

        async def lingers(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
            async for response in answer(request):
                yield response
            await ends.wait()

        model.answer = lingers
        generator = await bench.open(model)
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            while not (await anext(pieces)).finish_reason:
                pass
        # Any cancellation would arrive before this call.
        assert await generator.endpoint.client.server_live(deadline=soon().deadline)
        assert bench.triton.cancelled == 0
        ends.set()
        await asyncio.gather(*infer_stream._ENDING)
        assert bench.triton.cancelled == 0

    async def test_an_ensembles_engine_gets_the_stop(self, bench: Bench) -> None:
        """Triton cancels no running step of an ensemble, so Shoal sends the cancellation to the part that accepts
        it."""
        model = talker("ensemble", Script(["a"], hold=1))
        for part in ("preprocessing", "gone", "tensorrt_llm"):
            model.config.ensemble_scheduling.step.add(model_name=part)
        bench.triton.add(talker("gpt", name="preprocessing"))
        engine = talker("tokens", name="tensorrt_llm")
        bench.triton.add(engine)
        generator = await bench.open(model)
        for _ in range(2):
            async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
                await anext(pieces)
        await until(lambda: sorted(engine.script.cancelled) == sorted(model.script.ids))
        assert len(model.script.ids) == 2

    async def test_an_ensemble_without_such_a_part(self, bench: Bench) -> None:
        model = talker("ensemble", Script(["a"], hold=1))
        model.config.ensemble_scheduling.step.add(model_name="gone")
        generator = await bench.open(model)
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            await anext(pieces)
        await generator.aclose()
        assert bench.triton.calls["ModelStreamInfer"] == 1

    @pytest.mark.parametrize("kind", ["vllm", "gpt", "llmapi"])
    async def test_one_that_is_cancelled_while_it_waits(self, bench: Bench, kind: Kind) -> None:
        model = talker(kind, Script(["a"], hold=0))
        if kind == "gpt":
            model.answer = stuck
        generator = await bench.open(model)
        reading = asyncio.create_task(collect(generator, stream=False))
        await bench.triton.wait_for_calls("ModelInfer" if kind == "gpt" else "ModelStreamInfer")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await bench.triton.left.wait()
        assert bench.triton.cancelled == 1
        await until(lambda: model.script.cancelled == (model.script.ids if kind == "llmapi" else []))

    @pytest.mark.parametrize("kind", ["tokens", "llmapi"])
    async def test_a_finished_answer_is_not_stopped(self, bench: Bench, kind: Kind) -> None:
        model = talker(kind, Script([65, 66] if kind == "tokens" else ["a", "ab"]))
        generator = await bench.open(model)
        await collect(generator)
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            async for piece in pieces:
                if piece.finish_reason:
                    break
        model.script.fails = "out of luck"
        with pytest.raises(UpstreamFailed):
            await collect(generator)
        await generator.aclose()
        assert not model.script.cancelled

    async def test_a_cancellation_that_fails_hurts_nobody(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It has its own timeout, and closing waits for it."""
        monkeypatch.setattr("shoal.backends.triton.llm.CANCEL_S", 0.05)
        model = talker("tokens", Script([65], hold=1))
        generator = await bench.open(model)
        caplog.set_level("DEBUG", "shoal.triton")
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            await anext(pieces)
            model.answer = stuck
        await generator.aclose()
        assert f"ending {model.script.ids[0]}: " in caplog.text
        assert not [each for each in caplog.records if each.levelname != "DEBUG"]

    async def test_after_it_is_closed(self, bench: Bench) -> None:
        generator = await bench.open(talker("tokens", Script([65], hold=1)))
        async with aclosing(generator.generate(PROMPT, Sampling(), soon())) as pieces:
            await anext(pieces)
            await generator.aclose()
            await generator.aclose()
        assert not generator.ready()
        with pytest.raises(TransportFailed, match="closed"):
            await collect(generator)


async def stuck(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


class TestWatch:
    async def test_it_comes_back_after_a_restart(self, bench: Bench) -> None:
        generator = await bench.open(talker("vllm"))
        generator.start()
        await bench.triton.stop()
        await until(lambda: not generator.ready())
        forgotten(bench.triton)
        await bench.triton.start()
        await until(generator.ready)
        assert text_of(await collect(generator)) == "Hello world"
        assert [each.model_name for each in requests_of(bench.triton, "RepositoryModelLoad")] == ["llm"]

    async def test_a_dead_process_is_started_anew(self, bench: Bench) -> None:
        model = talker("vllm")
        generator = await bench.open(model)
        model.broken = True
        generator.start()
        with pytest.raises(TransportFailed, match="has died"):
            await collect(generator)
        await until(generator.ready)
        assert bench.triton.calls["RepositoryModelLoad"] == 1

    async def test_other_tensors_keep_it_out(self, bench: Bench) -> None:
        """Also those of another kind of model."""
        model = talker("ensemble")
        before = model.config
        generator = await bench.open(model)
        generator.start()
        await bench.triton.stop()
        await until(lambda: not generator.ready())
        model.config = talker("vllm").config
        await bench.triton.start()
        await until(lambda: "have changed: reload" in generator.reason)
        model.config = before
        await until(generator.ready)


class TestConnections:
    @pytest.mark.parametrize("kind", ["vllm", "gpt"])
    async def test_long_calls_spread(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
        """Servers allow about 100 streams per connection: Shoal opens another connection before that, and keeps it."""
        monkeypatch.setattr(client_module, "LONG_CALLS", 2)
        go_on = asyncio.Event()
        model = talker(kind)
        answer: Callable[..., Any] = model.answer

        async def hang(request: pb.ModelInferRequest) -> Any:
            await go_on.wait()
            return answer(request)

        async def held_stream(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
            await go_on.wait()
            async for response in answer(request):
                yield response

        model.answer = hang if kind == "gpt" else held_stream
        connected: list[Client] = []
        clients: list[Client] = []
        connect = Client._connect

        def counted(client: Client) -> Any:
            connected.append(client)
            clients.append(client)
            return connect(client)

        monkeypatch.setattr(Client, "_connect", counted)
        generator = await bench.open(model)
        connected.clear()
        rpc = "ModelInfer" if kind == "gpt" else "ModelStreamInfer"
        for calls in (5, 10):
            go_on.clear()
            reading = [asyncio.create_task(collect(generator)) for _ in range(5)]
            await bench.triton.wait_for_calls(rpc, calls)
            go_on.set()
            assert {text_of(found) for found in await asyncio.gather(*reading)} == {"Hello world"}
            await until(lambda: not any(client._long_calls for client in clients))  # streams are read to their end
        assert len(connected) == 2, "five calls on three connections, of which one was there"

    async def test_closing_the_client_closes_them_all(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client_module, "LONG_CALLS", 1)
        generator = await bench.open(talker("vllm", Script(["a"], hold=1)))
        streams = [generator.generate(PROMPT, Sampling(), soon()) for _ in range(3)]
        for stream in streams:
            assert (await anext(stream)).text == "a"
        await bench.target.client.aclose()
        for stream in streams:
            with pytest.raises(TransportFailed, match="closed"):
                await anext(stream)
