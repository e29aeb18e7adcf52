"""Replicas of a model on servers in this process: joining, waiting, and offered models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.triton.engine import TritonEngine
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.models import list_offers
from shoal.backends.triton.open.probing import ProbeResult
from shoal.backends.triton.open.reading import TextReader
from shoal.config.settings import ModelTable, Settings
from shoal.core.scheduling.ejection import MAX_FAILURES
from shoal.errors import ConfigError, ModelFailed, TransportFailed, UpstreamFailed
from shoal.kserve import protocol_pb2 as pb
from shoal.models.address import ServedModel
from shoal.types import ModelStats
from tests.fakes import triton_codec
from tests.fakes.triton import Code, FakeModel, FakeTriton, Refused, empty, reply
from tests.unit.backends.triton.open.kit import DIMENSION, Open, requests_of, text_model, until, vector_of, vectors


class TestReplicas:
    async def test_replicas_share_the_work(self, triton: FakeTriton, second: FakeTriton, opened: Open) -> None:
        for server in (triton, second):
            server.add(text_model("emb"))
        runner = await opened("emb", triton, second)
        await until(lambda: all(replica.engine.ready() for replica in runner.lane.replicas))
        assert runner.facts.details["servers"] == [f"triton://{each.target}#emb" for each in (triton, second)]

    async def test_one_is_enough_and_the_other_joins(
        self, triton: FakeTriton, second: FakeTriton, opened: Open
    ) -> None:
        """The first one is unreachable at the start."""
        for server in (triton, second):
            server.add(text_model("emb"))
        await triton.stop()
        runner = await opened("emb", triton, second)
        assert [replica.engine.ready() for replica in runner.lane.replicas] == [False, True]
        assert np.array_equal((await vectors(runner, "a"))[0], vector_of("a"))
        await triton.start()
        await until(runner.lane.replicas[0].engine.ready)

    @pytest.mark.parametrize(
        ("other", "reason"),
        [
            (text_model("emb", seed=1), "returns different vectors than the other replicas"),
            (text_model("emb", DIMENSION * 2), "tensors differ from the other replicas'"),
        ],
        ids=["weights", "dimension"],
    )
    async def test_another_model_under_the_name_stays_out(
        self, triton: FakeTriton, second: FakeTriton, opened: Open, other: FakeModel, reason: str
    ) -> None:
        """It would mix two vector spaces in one index."""
        triton.add(text_model("emb"))
        second.add(other)
        runner = await opened("emb", triton, second)
        stranger: Any = runner.lane.replicas[1].engine
        await until(lambda: reason in stranger.reason)
        assert (stranger.ready(), runner.ready()) == (False, True)

    async def test_a_dimension_known_only_from_an_answer(
        self, triton: FakeTriton, second: FakeTriton, opened: Open
    ) -> None:
        """The schemas are equal; only the probe finds the difference."""
        for server, dimension in ((triton, DIMENSION), (second, 3)):
            server.add(text_model("emb", dimension)).config.output[0].dims[0] = -1
        runner = await opened("emb", triton, second)
        stranger: Any = runner.lane.replicas[1].engine
        await until(lambda: "returns 3 dimensions, but the other replicas return 8" in stranger.reason)

    async def test_other_weights_after_a_restart_stay_out(self, triton: FakeTriton, opened: Open) -> None:
        """Even for a single replica: clients may have indexed vectors of the old weights."""
        triton.add(text_model("emb"))
        runner = await opened("emb")
        engine: Any = runner.lane.replicas[0].engine
        await triton.stop()
        await until(lambda: not engine.ready())
        triton.add(text_model("emb", seed=1))
        await triton.start()
        await until(lambda: "returns different vectors" in engine.reason)
        triton.add(text_model("emb"))
        await until(runner.ready)


class TestWaiting:
    async def test_a_server_that_is_away_is_waited_for(self, triton: FakeTriton, opened: Open) -> None:
        """The reason is reported."""
        triton.add(text_model("emb"))
        await triton.stop()
        notes: list[str] = []
        opening = asyncio.create_task(opened("emb", notes=notes))
        await until(lambda: len(notes) > 2)
        assert notes[0].startswith(f"waiting for triton://{triton.target}#emb: Triton is not reachable")
        await triton.start()
        assert (await opening).ready()

    async def test_a_server_that_answers_nothing_is_waited_for(
        self, triton: FakeTriton, opened: Open, offline: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A host that drops packets causes timeouts, not refused connections."""
        triton.add(text_model("emb"))
        call, hung = triton.call, True

        async def hang(name: str, request: Any) -> Any:
            if hung and name == "ModelReady":
                await asyncio.Event().wait()
            return await call(name, request)

        monkeypatch.setattr(triton, "call", hang)
        notes: list[str] = []
        impatient = msgspec.structs.replace(offline, connect_timeout_s=0.02)
        opening = asyncio.create_task(opened("emb", notes=notes, settings=impatient))
        await until(lambda: len(notes) > 1)
        assert "did not answer" in notes[0]
        hung = False
        impatient = offline
        assert (await opening).ready()

    async def test_a_model_that_cannot_be_served_ends_the_wait(self, triton: FakeTriton, opened: Open) -> None:
        """The server is up and reports the error."""
        triton.add(text_model("emb", loaded=False, load_error="no such file: model.onnx"))
        with pytest.raises(ModelFailed, match=r"no such file: model\.onnx"):
            await opened("emb")

    async def test_a_failed_open_closes_what_it_opened(self, triton: FakeTriton, opened: Open) -> None:
        """No health check keeps running."""
        before = asyncio.all_tasks()
        triton.add(text_model("emb")).answer = lambda request: (_ for _ in ()).throw(Refused("broken"))
        with pytest.raises(Exception, match="broken"):
            await opened("emb")
        assert not [task for task in asyncio.all_tasks() - before if task.get_name().startswith("watch")]

    async def test_cancelling_leaves_nothing(self, triton: FakeTriton, opened: Open) -> None:
        await triton.stop()
        notes: list[str] = []
        before = asyncio.all_tasks()
        opening = asyncio.create_task(opened("emb", notes=notes))
        await until(lambda: bool(notes))
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await until(lambda: asyncio.all_tasks() <= before)


class TestRunner:
    async def test_unloading_takes_the_whole_ensemble(self, triton: FakeTriton, opened: Open) -> None:
        """Shoal calls one part, and unloads it with its ensemble, unless another name uses that."""
        triton.add(text_model("m~~encoder"))
        whole = triton.add(text_model("m"))
        whole.config.ensemble_scheduling.step.add(model_name="m~~encoder")
        runner = await opened("m~~encoder")
        runner.endpoints = [replace(runner.endpoints[0], ensemble="m")]
        other = await opened("m")
        await runner.aclose()
        await runner.unload(10.0)
        assert [each.state for each in triton.models.values()] == ["READY", "READY"]
        await other.aclose()
        await runner.unload(10.0)
        assert [each.state for each in triton.models.values()] == ["UNAVAILABLE", "UNAVAILABLE"]
        assert requests_of(triton, "RepositoryModelUnload")[0].model_name == "m"

    async def test_a_server_that_is_away_keeps_no_other_from_unloading(
        self, triton: FakeTriton, second: FakeTriton, opened: Open
    ) -> None:
        """The caller still gets the error."""
        for server in (triton, second):
            server.add(text_model("emb"))
        runner = await opened("emb", triton, second)
        await triton.stop()
        await runner.aclose()
        with pytest.raises(TransportFailed):
            await runner.unload(10.0)
        assert second.models["emb"].state == "UNAVAILABLE"

    async def test_a_second_name_of_a_model_keeps_it_loaded(
        self, triton: FakeTriton, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The name that loaded it may fail, or be unloaded; the last one unloads it."""
        triton.add(text_model("emb", loaded=False))
        loaded, go_on, probe = asyncio.Event(), asyncio.Event(), TextReader.probe_engine

        async def probe_slowly(reader: TextReader, engine: TritonEngine) -> ProbeResult:
            if reader.target.table.dimension is not None:
                loaded.set()
                await go_on.wait()
            return await probe(reader, engine)

        monkeypatch.setattr(TextReader, "probe_engine", probe_slowly)
        failing = asyncio.create_task(opened("emb", table=ModelTable(dimension=DIMENSION + 1)))
        await loaded.wait()
        others = [await opened("emb"), await opened("emb")]
        go_on.set()
        with pytest.raises(ConfigError, match="dimension"):
            await failing
        for runner, state in zip(others, ("READY", "UNAVAILABLE"), strict=True):
            assert triton.models["emb"].state == "READY"
            await runner.aclose()
            await runner.unload(10.0)
            assert triton.models["emb"].state == state

    async def test_closing_leaves_the_model_loaded(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(text_model("emb"))
        await (await opened("emb")).aclose()
        assert triton.models["emb"].state == "READY"
        assert not triton.calls["RepositoryModelUnload"]

    async def test_statistics_bear_the_served_name(self, triton: FakeTriton, second: FakeTriton, opened: Open) -> None:
        """One entry per server; the last known one if a server does not answer."""
        for server, count in ((triton, 5), (second, 7)):
            model = server.add(text_model("emb"))
            model.statistics = pb.ModelStatistics(name="emb", version="1", inference_count=count)
        runner = await opened("emb", triton, second)
        assert [(each.name, each.inference_count) for each in await runner.statistics()] == [("m", 5), ("m", 7)]
        await second.stop()
        found = await runner.statistics()
        assert found[0] == ModelStats(name="m", version="1", inference_count=5)
        await second.start()


class TestOffered:
    async def offers(self, triton: FakeTriton, tritons: TritonConnections) -> dict[str, ServedModel | str]:
        address = parse_address(f"triton://{triton.target}")
        return await list_offers(await tritons.endpoint(address, ModelTable(), Settings()), address)

    async def test_every_loaded_embedder_by_its_name(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        """Shoal's own folders have their served names; unloaded models are not offered."""
        triton.add(text_model("emb"))
        triton.add(text_model("org~mini"))
        triton.add(text_model("idle", loaded=False))
        found = await self.offers(triton, tritons)
        assert list(found) == ["emb", "org/mini"]
        mini = found["org/mini"]
        assert isinstance(mini, ServedModel)
        assert str(mini) == f"org/mini=triton://{triton.target}#org~mini"

    async def test_what_cannot_be_served_has_a_reason(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        """Such as a model that generates text, and one with an invalid name."""
        config = pb.ModelConfig(name="llm", backend="vllm")
        config.input.add(name="text_input", data_type=pb.TYPE_STRING, dims=[1])
        triton.add(FakeModel("llm", config=config))
        triton.add(text_model("load"))
        found = await self.offers(triton, tritons)
        assert "generates text" in str(found["llm"])
        assert "reserved" in str(found["load"])

    async def test_versions_of_one_model_are_one(
        self, triton: FakeTriton, tritons: TritonConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        triton.add(text_model("emb"))
        index = triton._index

        def twice() -> pb.RepositoryIndexResponse:
            answer = index()
            answer.models.add(name="emb", version="2", state="READY")
            return answer

        monkeypatch.setattr(triton, "_index", twice)
        assert list(await self.offers(triton, tritons)) == ["emb"]

    async def test_a_model_that_goes_meanwhile_is_not_offered(
        self, triton: FakeTriton, tritons: TritonConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Listing does not load it again either."""
        for name in ("emb", "stays"):
            triton.add(text_model(name))
        index = triton._index

        def then_gone() -> pb.RepositoryIndexResponse:
            answer = index()
            triton.models["emb"].state = "UNAVAILABLE"
            return answer

        monkeypatch.setattr(triton, "_index", then_gone)
        assert list(await self.offers(triton, tritons)) == ["stays"]
        assert not triton.calls["RepositoryModelLoad"]

    async def test_a_server_that_goes_meanwhile_is_away(
        self, triton: FakeTriton, tritons: TritonConnections, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That is an error of the server, not of a model."""
        triton.add(text_model("emb"))
        call = triton.call

        async def fail(name: str, request: Any) -> Any:
            if name == "ModelConfig":
                raise Refused("connection lost", Code.UNAVAILABLE)
            return await call(name, request)

        monkeypatch.setattr(triton, "call", fail)
        with pytest.raises(TransportFailed):
            await self.offers(triton, tritons)


class TestOneThatFailsFast:
    @pytest.mark.parametrize("how", ["INTERNAL", "UNKNOWN", "rows", "nothing"])
    async def test_the_other_answers(self, triton: FakeTriton, second: FakeTriton, opened: Open, how: str) -> None:
        """A failing replica would attract work because it is always free; it is ejected, and no request fails."""

        codes = {"INTERNAL": Code.INTERNAL, "UNKNOWN": Code.UNKNOWN}

        def fails(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            if how in codes:
                raise Refused("onnx runtime error 1: something in a kernel", codes[how])
            count = len(triton_codec.read_inputs(request)["text"].ravel())
            return (
                reply(request, vectors=np.zeros((count + 1, DIMENSION), np.float32))
                if how == "rows"
                else empty(request)
            )

        one = triton.add(text_model("emb"))
        two = second.add(text_model("emb"))
        works, served = two.answer, [0, 0]
        runner = await opened("emb", triton, second)
        await until(lambda: all(replica.engine.ready() for replica in runner.lane.replicas))

        def counted(at: int, answer: Any) -> Any:
            async def call(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
                served[at] += 1
                await asyncio.sleep(0.003 * at)
                found: pb.ModelInferResponse = answer(request)
                return found

            return call

        one.answer, two.answer = counted(0, fails), counted(1, works)
        for wave in range(40):
            texts = [f"text {wave} {at}" for at in range(8)]
            answers = await asyncio.gather(*(vectors(runner, text) for text in texts))
            assert all(np.array_equal(rows[0], vector_of(text)) for rows, text in zip(answers, texts, strict=True))
        assert 1 <= served[0] <= served[1] / 2
        first, last = runner.replicas()
        # The scheduler decides how replicas share the work: one with little work is not ejected.
        assert served[0] < MAX_FAILURES or first.state != "in_service"
        assert last.state == "in_service"

    async def test_alone_its_failure_is_a_bad_gateways(self, triton: FakeTriton, opened: Open) -> None:
        def fails(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            raise Refused("a kernel failed", Code.INTERNAL)

        model = triton.add(text_model("emb"))
        runner = await opened("emb", triton)
        model.answer = fails
        with pytest.raises(UpstreamFailed, match="a kernel failed"):
            await vectors(runner, "a")
