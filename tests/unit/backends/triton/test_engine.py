"""One model on a server in this process as an engine: batches, errors, and its return into service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.backends.base import backoff
from shoal.backends.triton import engine as engine_module
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import DEFAULT_BATCH_SIZE, Endpoint, TritonEngine, build_facts
from shoal.backends.triton.errors import ModelGone
from shoal.backends.triton.schema import Embedder, TensorNames
from shoal.errors import (
    ConfigError,
    Crashed,
    DeadlineExceeded,
    InputRejected,
    InternalError,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array
from tests.fakes import triton_codec
from tests.fakes.triton import Code, FakeModel, FakeTriton, Refused, reply
from tests.unit.backends.triton.open.kit import (
    DIMENSION,
    forgotten,
    grpc_in_use,
    requests_of,
    text_model,
    token_model,
    until,
    vector_of,
)

WORDS = ["one", "two", "three"]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def batch(*texts: str) -> dict[str, Array]:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return {"text": array}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run health checks without pauses."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with grpc_in_use(), FakeTriton() as server:
        server.add(text_model("emb"))
        yield server


@pytest.fixture
async def target(triton: FakeTriton) -> AsyncIterator[Endpoint]:
    client = Client(triton.target)
    control = Control(client, pauses=(0.0,))
    yield Endpoint(client=client, control=control, address=f"triton://{triton.target}#emb", model="emb")
    await client.aclose()


class FakeAdmission:
    """The check before the model may serve; `refuses` keeps it out."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls = 0

    async def __call__(self, engine: TritonEngine) -> None:
        self.calls += 1
        assert not engine.ready()
        await ask(engine, "probe")
        if self.error is not None:
            raise self.error


@pytest.fixture
def admission() -> FakeAdmission:
    return FakeAdmission()


@pytest.fixture
async def engine(target: Endpoint, admission: FakeAdmission) -> AsyncIterator[TritonEngine]:
    """An engine in service without health checks."""
    made = TritonEngine(target, "emb-0", embedder=await found(target), admit=admission, serving=True)
    yield made
    await made.aclose()


async def found(target: Endpoint) -> Embedder:
    schema = await target.find()
    assert isinstance(schema, Embedder)
    return schema


async def ask(engine: TritonEngine, *texts: str, seconds: float = 30.0, **params: Any) -> Array:
    return (await engine.infer(batch(*texts), ["embedding"], params, soon(seconds)))["embedding"]


async def serves(engine: TritonEngine) -> bool:
    return bool(np.array_equal((await ask(engine, "one"))[0], vector_of("one")))


async def engine_for(
    target: Endpoint, model: FakeModel, triton: FakeTriton, names: TensorNames | None = None
) -> TritonEngine:
    triton.add(model)
    target = replace(target, model=model.name, names=names or TensorNames())
    return TritonEngine(target, model.name, embedder=await found(target), admit=FakeAdmission(), serving=True)


class TestBatches:
    async def test_rows_are_in_order_and_float32(self, engine: TritonEngine) -> None:
        rows = await ask(engine, *WORDS)
        assert rows.dtype == np.float32
        assert np.array_equal(rows, np.stack([vector_of(word) for word in WORDS]))

    async def test_names_and_types_are_the_models_own(self, triton: FakeTriton, target: Endpoint) -> None:
        """int64 is sent as INT32 under the model's name; FP16 is returned as float32 under the canonical name."""
        config = pb.ModelConfig(name="own", max_batch_size=8)
        config.input.add(name="ids", data_type=pb.TYPE_INT32, dims=[-1])
        config.output.add(name="vec", data_type=pb.TYPE_FP16, dims=[2])

        def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            ids = triton_codec.read_inputs(request)["ids"]
            assert ids.dtype == np.int32
            return reply(request, vec=np.stack([ids.sum(1), ids[:, 0]], 1).astype(np.float16))

        names = TensorNames(inputs={"input_ids": "ids"}, outputs={"sentence_embedding": "vec"})
        engine = await engine_for(target, FakeModel("own", config=config, answer=answer), triton, names)
        ids = np.array([[1, 2], [3, 4]])
        answered = await engine.infer({"input_ids": ids}, ["sentence_embedding"], {}, soon())
        assert answered["sentence_embedding"].dtype == np.float32
        assert answered["sentence_embedding"].tolist() == [[3, 1], [7, 3]]
        assert [each.name for each in requests_of(triton, "ModelInfer")[-1].outputs] == ["vec"]

    async def test_parameters_and_version_go_along(self, triton: FakeTriton, engine: TritonEngine) -> None:
        engine.endpoint = replace(engine.endpoint, version="1")
        await ask(engine, "one", input_type="query", dimensions=4)
        sent = requests_of(triton, "ModelInfer")[-1]
        assert {key: triton_codec.get_parameter(sent.parameters, key) for key in sent.parameters} == {
            "input_type": "query",
            "dimensions": 4,
        }
        assert sent.model_version == "1"

    async def test_an_input_that_it_does_not_have_is_a_bug_here(self, engine: TritonEngine) -> None:
        with pytest.raises(InternalError, match="no input 'pixels'"):
            await engine.infer({"pixels": np.zeros((1, 3))}, ["embedding"], {}, soon())

    async def test_an_answer_without_the_output_is_a_failure(self, triton: FakeTriton, engine: TritonEngine) -> None:
        triton.models["emb"].answer = lambda request: reply(request, other=np.zeros((1, 8), np.float32))
        with pytest.raises(UpstreamFailed, match="'vectors'"):
            await ask(engine, "one")

    async def test_an_answer_with_too_few_rows_is_a_failure(self, triton: FakeTriton, engine: TritonEngine) -> None:
        triton.models["emb"].answer = lambda request: reply(request, vectors=np.zeros((1, 8), np.float32))
        with pytest.raises(UpstreamFailed, match="for 2 inputs"):
            await ask(engine, "one", "two")
        assert engine.ready()

    @pytest.mark.parametrize(
        ("refused", "error"),
        [
            (Refused("Exceeds maximum queue size", Code.UNAVAILABLE), Overloaded),
            (Refused("bad shape", Code.INVALID_ARGUMENT), InputRejected),
            (Refused("CUDA out of memory"), OutOfMemory),
            (Refused("division by zero"), UpstreamFailed),
        ],
    )
    async def test_what_is_about_the_batch_leaves_it_in_service(
        self, triton: FakeTriton, engine: TritonEngine, refused: Refused, error: type[ShoalError]
    ) -> None:
        def fail(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            raise refused

        triton.models["emb"].answer = fail
        with pytest.raises(error) as caught:
            await ask(engine, "one")
        assert engine.ready()
        if error is Overloaded:
            assert caught.value.retry_after == 0.1

    async def test_the_deadline_ends_a_call(self, triton: FakeTriton, engine: TritonEngine) -> None:
        triton.models["emb"].answer = stuck
        with pytest.raises(DeadlineExceeded):
            await ask(engine, "one", seconds=0.05)
        with pytest.raises(DeadlineExceeded):
            await ask(engine, "one", seconds=-1.0)
        assert engine.ready()
        await triton.left.wait()

    async def test_cancelling_breaks_the_call_off(self, triton: FakeTriton, engine: TritonEngine) -> None:
        triton.models["emb"].answer = stuck
        call = asyncio.create_task(ask(engine, "one"))
        await triton.wait_for_calls("ModelInfer")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await triton.left.wait()
        assert triton.cancelled == 1
        assert engine.ready()


async def stuck(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


class TestWatch:
    async def test_a_restart_is_noticed_by_the_next_request(
        self,
        triton: FakeTriton,
        engine: TritonEngine,
        admission: FakeAdmission,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The model is out of service at once, and back after the server listens, loads and admits it again."""
        monkeypatch.setattr(engine_module, "LOOK_S", 3600.0)
        engine.start()
        await triton.wait_for_calls("ModelReady", triton.calls["ModelReady"] + 1)
        await triton.stop()
        with caplog.at_level(logging.INFO, "shoal.triton"):
            with pytest.raises(TransportFailed):
                await ask(engine, "one")
            assert not engine.ready()
            assert "not reachable" in engine.reason
            forgotten(triton)
            await triton.start()
            await until(engine.ready)
        assert (engine.reason, admission.calls) == ("", 1)
        assert await serves(engine)
        assert [each.model_name for each in requests_of(triton, "RepositoryModelLoad")] == ["emb"]
        messages = [record.getMessage() for record in caplog.records if record.name == "shoal.triton"]
        assert len(messages) == 2, messages  # one line for out and one for in again; none per check

    async def test_a_silent_loss_is_noticed_by_a_look(self, triton: FakeTriton, engine: TritonEngine) -> None:
        """Without a request: the model is loaded again, because nobody unloaded it by hand."""
        engine.start()
        forgotten(triton)
        await triton.wait_for_calls("RepositoryModelLoad")
        await until(engine.ready)
        assert await serves(engine)

    async def test_a_loss_seen_during_a_look_is_looked_at_next(
        self, triton: FakeTriton, engine: TritonEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a request fails during a successful check, the next check runs at once."""
        monkeypatch.setattr(engine_module, "LOOK_S", 3600.0)
        looking, go_on = asyncio.Event(), asyncio.Event()

        async def ready(*args: Any, **options: Any) -> bool:
            looking.set()
            await go_on.wait()
            return True

        monkeypatch.setattr(engine.endpoint.control, "is_ready", ready)
        engine.start()
        await looking.wait()
        model = triton.models["emb"]
        model.state = "UNAVAILABLE"
        with pytest.raises(ModelGone):
            await ask(engine, "one")
        model.state = "READY"
        go_on.set()
        await until(engine.ready)

    async def test_what_was_unloaded_by_hand_stays_so(self, triton: FakeTriton, engine: TritonEngine) -> None:
        """Shoal does not load it again, and serves it after it is loaded by hand."""
        model = triton.models["emb"]
        model.state, model.reason = "UNAVAILABLE", "unloaded"
        with pytest.raises(TransportFailed):
            await ask(engine, "one")
        engine.start()
        await triton.wait_for_calls("RepositoryIndex", 3)
        await until(lambda: "was unloaded on the server" in engine.reason)
        assert not triton.calls["RepositoryModelLoad"]
        model.state, model.reason = "READY", ""
        await until(engine.ready)

    @pytest.mark.parametrize("state", ["LOADING", "UNLOADING"])
    async def test_a_model_that_is_on_its_way_there_is_left_alone(
        self, triton: FakeTriton, engine: TritonEngine, state: str
    ) -> None:
        """Loading it would undo an unload in progress."""
        triton.models["emb"].state, triton.models["emb"].unloading = state, 10**6
        engine.start()
        await until(lambda: f"is {state.lower()} the model" in engine.reason)
        assert not triton.calls["RepositoryModelLoad"]
        triton.models["emb"].state = "READY"
        await until(engine.ready)

    async def test_what_was_pushed_is_pushed_again(
        self, triton: FakeTriton, target: Endpoint, admission: FakeAdmission
    ) -> None:
        """A restart loses pushed files: loading by name would not find them."""
        loads = 0

        async def load() -> None:
            nonlocal loads
            loads += 1
            triton.add(text_model("emb", pushed=True))

        triton.models["emb"].pushed = True
        target = replace(target, load=load)
        engine = TritonEngine(target, "emb-0", embedder=await found(target), admit=admission, serving=True)
        await triton.stop()
        await triton.start()
        assert "emb" not in triton.models
        engine.start()
        await until(lambda: loads == 1 and engine.ready())
        assert await serves(engine)
        await engine.aclose()

    async def test_a_dead_process_of_the_model_is_started_anew(
        self, triton: FakeTriton, engine: TritonEngine, admission: FakeAdmission
    ) -> None:
        """Triton still reports the model as ready; only a reload helps."""
        triton.models["emb"].broken = True
        with pytest.raises(Crashed):
            await ask(engine, "one")
        assert not engine.ready()
        engine.start()
        await until(engine.ready)
        assert triton.calls["RepositoryModelLoad"] == 1
        assert await serves(engine)

    async def test_other_tensors_keep_it_out(
        self, triton: FakeTriton, engine: TritonEngine, admission: FakeAdmission, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Until they match again; the error names the next step and is logged once."""
        engine.start()
        await triton.stop()
        await until(lambda: not engine.ready())
        model = triton.models["emb"]
        model.config.output[0].dims[0] = DIMENSION + 1
        await triton.start()
        await until(lambda: "tensors have changed: reload it" in engine.reason)
        assert not engine.ready()
        assert caplog.text.count("tensors have changed: reload") == 1
        model.config.output[0].dims[0] = DIMENSION
        await until(engine.ready)
        assert admission.calls == 1

    async def test_the_door_keeps_it_out(
        self, triton: FakeTriton, target: Endpoint, admission: FakeAdmission, caplog: pytest.LogCaptureFixture
    ) -> None:
        """While the admission check fails; its reason is logged once."""
        admission.error = ConfigError("it is a different model")
        engine = TritonEngine(target, "emb-1", embedder=await found(target), admit=admission)
        assert (engine.ready(), engine.reason) == (False, "it has not been reached yet")
        engine.start()
        await until(lambda: admission.calls > 3)
        assert (engine.ready(), engine.reason) == (False, "it is a different model")
        assert [each.getMessage() for each in caplog.records] == ["emb-1 cannot serve: it is a different model"]
        admission.error = None
        await until(engine.ready)
        await engine.aclose()

    async def test_a_bug_does_not_end_the_watch(
        self, target: Endpoint, admission: FakeAdmission, caplog: pytest.LogCaptureFixture
    ) -> None:
        admission.error = ZeroDivisionError("by hand")
        engine = TritonEngine(target, "emb-1", embedder=await found(target), admit=admission)
        engine.start()
        await until(lambda: "by hand" in engine.reason)
        assert "unexpectedly" in caplog.text
        admission.error = None
        await until(engine.ready)
        await engine.aclose()

    async def test_a_replica_that_never_served_loads_its_model(
        self, triton: FakeTriton, target: Endpoint, admission: FakeAdmission
    ) -> None:
        """Also one that was unloaded by hand: for the first time Shoal must load it."""
        embedder = await found(target)
        triton.models["emb"].state, triton.models["emb"].reason = "UNAVAILABLE", "unloaded"
        engine = TritonEngine(target, "emb-1", embedder=embedder, admit=admission)
        engine.start()
        await until(engine.ready)
        await engine.aclose()

    async def test_pauses_grow_and_then_stay(
        self, triton: FakeTriton, engine: TritonEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between checks of a missing model; the last pause repeats."""
        slept: list[float] = []
        pause = asyncio.sleep

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await pause(0)

        monkeypatch.setattr(backoff, "RETRY_S", (0.01, 0.02, 0.03))
        triton.models["emb"].state = "LOADING"
        monkeypatch.setattr(asyncio, "sleep", sleep)
        engine.start()
        while len(slept) < 5:
            await pause(0.001)
        assert slept[:5] == [0.01, 0.02, 0.03, 0.03, 0.03]


class TestClosing:
    async def test_twice_is_once(self, engine: TritonEngine) -> None:
        engine.start()
        await engine.aclose()
        await engine.aclose()
        assert not engine.ready()
        with pytest.raises(TransportFailed, match="closed"):
            await ask(engine, "one")

    async def test_a_call_in_flight_is_answered(self, triton: FakeTriton, engine: TritonEngine) -> None:
        """The engine does not close the connection."""
        go_on = asyncio.Event()
        answer = triton.models["emb"].answer

        async def slow(request: pb.ModelInferRequest) -> Any:
            await go_on.wait()
            return answer(request)

        triton.models["emb"].answer = slow
        call = asyncio.create_task(ask(engine, "one"))
        await triton.wait_for_calls("ModelInfer")
        closing = asyncio.create_task(engine.aclose())
        go_on.set()
        await closing
        assert np.array_equal((await call)[0], vector_of("one"))


class TestTarget:
    async def test_an_unloaded_model_is_loaded(self, triton: FakeTriton, target: Endpoint) -> None:
        triton.models["emb"].state = ""
        assert (await target.find()).style == "text"
        assert triton.calls["RepositoryModelLoad"] == 1

    async def test_no_server_is_a_transport_failure(self, triton: FakeTriton, target: Endpoint) -> None:
        await triton.stop()
        with pytest.raises(TransportFailed):
            await target.find()


def embedder_of(**fields: Any) -> Embedder:
    return Embedder(**{"name": "m", "style": "tokens", "inputs": (), "outputs": (), "batch": "config"} | fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_batch_size": 16, "instances": 3}, {"slots": 4, "parallel": 3, "max_batch_size": 1}),
        ({"max_batch_size": 16, "style": "text"}, {"slots": 2, "max_batch_size": 16, "pads_batches": False}),
        ({"max_batch_size": 0, "style": "nim"}, {"max_batch_size": DEFAULT_BATCH_SIZE, "pads_batches": False}),
        ({"max_batch_size": 8, "length": 128}, {"length_buckets": (128,), "pads_batches": True}),
    ],
)
def test_facts_follow_the_configuration(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """One batch more than there are instances; one text per batch for a model without a mask."""
    facts = build_facts("m-0", embedder_of(**fields))
    assert {key: getattr(facts, key) for key in expected} == expected


async def test_facts_of_a_masked_model(triton: FakeTriton, target: Endpoint) -> None:
    engine = await engine_for(target, token_model("tok"), triton)
    assert (engine.facts.inputs, engine.facts.outputs) == (("input_ids", "attention_mask"), ("sentence_embedding",))
    assert engine.facts.max_batch_size == 8
    assert engine.facts is engine.facts
