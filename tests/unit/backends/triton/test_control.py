"""Models on a server in this process: index, load, push, unload, statistics. No test sleeps."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import numpy as np
import pytest

from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control, IndexEntry, load_request, to_model_stats
from shoal.backends.triton.errors import ModelGone
from shoal.errors import Crashed, DeadlineExceeded, ModelFailed, ModelNotFound, SetupError, TransportFailed
from shoal.kserve import codec
from shoal.kserve import protocol_pb2 as pb
from shoal.types import BatchStats, DurationStat, InferenceStats, MemoryUsage, ModelStats
from tests.fakes.triton import FakeModel, FakeTriton, embedder


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


class Pauses:
    """Replaces sleeping: records each pause and advances the server."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.then: Callable[[], object] = lambda: None

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.then()


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    async with FakeTriton() as server:
        server.add(FakeModel("emb", config=embedder("emb")))
        server.add(FakeModel("idle", config=embedder("idle"), loaded=False))
        yield server


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
async def control(triton: FakeTriton, pauses: Pauses) -> AsyncIterator[Control]:
    client = Client(triton.target)
    yield Control(client, sleep=pauses, pauses=(0.01, 0.02))
    await client.aclose()


FILES = {"1/model.py": b"\x00code"}


async def test_the_index_has_state_version_and_reason(triton: FakeTriton, control: Control) -> None:
    triton.add(FakeModel("bad", loaded=False, state="UNAVAILABLE", reason="no such file"))
    assert await control.index(deadline=soon()) == [
        IndexEntry(name="emb", version="1", state="READY"),
        IndexEntry(name="idle"),  # never loaded: neither version nor state
        IndexEntry(name="bad", version="1", state="UNAVAILABLE", reason="no such file"),
    ]


async def test_ready_config_and_metadata(control: Control) -> None:
    assert await control.is_ready("emb", deadline=soon())
    assert not await control.is_ready("idle", deadline=soon())
    assert not await control.is_ready("nope", "3", deadline=soon())
    config = await control.config("emb", deadline=soon())
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([1], [4])
    metadata = await control.metadata("emb", deadline=soon())
    shapes = [list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)]
    assert shapes == [[-1, 1], [-1, 4]]  # with the batch axis
    with pytest.raises(ModelGone):
        await control.config("idle", deadline=soon())
    with pytest.raises(ModelGone):
        await control.metadata("nope", deadline=soon())


async def test_load_waits_until_the_model_is_ready(triton: FakeTriton, control: Control, pauses: Pauses) -> None:
    await control.load("idle", deadline=soon())
    assert triton.models["idle"].state == "READY"
    assert pauses.slept == []
    await control.load("idle", deadline=soon())  # again: nothing happens
    assert triton.models["idle"].state == "READY"


async def test_load_keeps_looking_while_the_server_is_slow(
    triton: FakeTriton, control: Control, pauses: Pauses
) -> None:
    model = triton.add(FakeModel("slow", loaded=False, loading=True))
    pauses.then = lambda: setattr(model, "state", "READY" if len(pauses.slept) == 4 else "LOADING")
    await control.load("slow", deadline=soon())
    assert pauses.slept == [0.01, 0.02, 0.02, 0.02]


async def test_a_load_that_fails_while_waiting_has_a_reason(
    triton: FakeTriton, control: Control, pauses: Pauses
) -> None:
    model = triton.add(FakeModel("slow", loaded=False, loading=True))

    def fail() -> None:
        model.state, model.reason = "UNAVAILABLE", "out of luck"

    pauses.then = fail
    with pytest.raises(ModelFailed, match="could not load 'slow': out of luck"):
        await control.load("slow", deadline=soon())


async def test_a_load_that_takes_too_long(triton: FakeTriton, control: Control, pauses: Pauses) -> None:
    triton.add(FakeModel("slow", loaded=False, loading=True))
    control = Control(control.client, sleep=pauses, pauses=(10.0,))
    with pytest.raises(DeadlineExceeded, match="load_timeout_s"):
        await control.load("slow", deadline=soon(5.0))
    assert pauses.slept == []


async def test_a_failed_load_has_the_reason_of_the_index(triton: FakeTriton, control: Control) -> None:
    """The call's own error says only that no version is available."""
    triton.add(FakeModel("bad", loaded=False, load_error="Internal: ImportError: no module named 'x'\n  At: model.py"))
    with pytest.raises(ModelFailed, match=r"'bad': Internal: ImportError: no module named 'x' At: model.py"):
        await control.load("bad", deadline=soon())
    assert await control.client.server_live(deadline=soon())
    assert await control.is_ready("emb", deadline=soon())


async def test_a_model_whose_process_died_is_ready_until_a_request_and_recovers_by_a_load(
    triton: FakeTriton, control: Control
) -> None:
    triton.models["emb"].broken = True
    assert await control.is_ready("emb", deadline=soon())
    text = np.array([["a"]], dtype=object)
    request = pb.ModelInferRequest(model_name="emb")
    codec.add_input(request, "text", "BYTES", text)
    with pytest.raises(Crashed):
        await control.client.infer(request, soon())
    await control.load("emb", deadline=soon())
    await control.client.infer(request, soon())


async def test_files_that_are_not_accepted_are_no_missing_model(triton: FakeTriton, control: Control) -> None:
    with pytest.raises(ModelFailed, match="failed to poll"):
        await control.load("ghost", config=embedder("other"), deadline=soon())


async def test_a_failed_load_without_a_reason_has_the_error_of_the_call(triton: FakeTriton, control: Control) -> None:
    triton.add(FakeModel("bad", loaded=False, load_error="unloaded"))
    with pytest.raises(ModelFailed, match="no version is available"):
        await control.load("bad", deadline=soon())


async def test_a_model_that_is_not_in_the_repository(control: Control) -> None:
    with pytest.raises(ModelNotFound, match=r"no readable model 'nope'.*config\.pbtxt"):
        await control.load("nope", deadline=soon())


@pytest.mark.parametrize("mode", ["poll", "none"])
async def test_the_error_of_another_mode_says_how_to_start(triton: FakeTriton, control: Control, mode: str) -> None:
    triton.mode = mode
    with pytest.raises(SetupError, match="--model-control-mode=explicit"):
        await control.load("idle", deadline=soon())
    with pytest.raises(SetupError, match="--model-control-mode=explicit"):
        await control.unload("emb", deadline=soon())


async def test_a_pushed_model_is_remembered_though_the_index_leaves_it_out(
    triton: FakeTriton, control: Control
) -> None:
    await control.load("pushed", config=embedder("pushed", max_batch_size=7), files=FILES, deadline=soon())
    names = [each.name for each in (await control.client.repository_index(deadline=soon())).models]
    assert "pushed" not in names
    assert (await control.index(deadline=soon()))[-1] == IndexEntry(name="pushed", state="READY", pushed=True)
    assert (await control.config("pushed", deadline=soon())).max_batch_size == 7
    request = next(request for name, request in triton.requests if name == "RepositoryModelLoad")
    assert isinstance(request, pb.RepositoryModelLoadRequest)
    assert request.parameters["file:1/model.py"].bytes_param == b"\x00code"
    assert not request.repository_name


async def test_a_pushed_model_is_pushed_again_after_the_servers_restart(triton: FakeTriton, control: Control) -> None:
    config = embedder("pushed", max_batch_size=7)
    await control.load("pushed", config=config, files=FILES, deadline=soon())
    triton.models = {name: model for name, model in triton.models.items() if not model.pushed}
    assert (await control.index(deadline=soon()))[-1] == IndexEntry(name="pushed", state="UNAVAILABLE", pushed=True)
    await control.load("pushed", deadline=soon())
    assert (await control.config("pushed", deadline=soon())).max_batch_size == 7


class Lazy(Mapping[str, bytes]):
    """File contents that are read on access; `reads` counts."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, path: str) -> bytes:
        self.reads += 1
        return FILES[path]

    def __iter__(self) -> Iterator[str]:
        return iter(FILES)

    def __len__(self) -> int:
        return len(FILES)


async def test_files_may_be_read_when_they_are_needed(control: Control) -> None:
    files = Lazy()
    await control.load("pushed", config=embedder("pushed"), files=files, deadline=soon())
    await control.load("pushed", deadline=soon())
    assert files.reads == 2


async def test_a_push_that_fails_is_forgotten(triton: FakeTriton, control: Control) -> None:
    await control.load("a", config=embedder("a", max_batch_size=3), files=FILES, deadline=soon())
    triton.models["a"].load_error = "boom"
    for name in ("a", "b"):
        triton.add(FakeModel(name, loaded=False, load_error="boom", pushed=True))
        with pytest.raises(ModelFailed):
            await control.load(name, config=embedder(name), files=FILES, deadline=soon())
    found = [each.name for each in await control.index(deadline=soon()) if each.pushed]
    assert found == ["a"]  # its first push stays known


async def test_files_without_a_configuration_are_refused_by_the_server(control: Control) -> None:
    with pytest.raises(ModelFailed, match="'config' parameter must also be provided"):
        await control.load("x", files=FILES, deadline=soon())


async def test_a_configuration_alone_overrides_the_repositorys(triton: FakeTriton, control: Control) -> None:
    await control.load("idle", config=embedder("idle", max_batch_size=64), deadline=soon())
    assert (await control.config("idle", deadline=soon())).max_batch_size == 64
    assert not any(each.pushed for each in await control.index(deadline=soon()))


def test_the_configuration_travels_as_json_with_the_protocols_names() -> None:
    config = embedder("emb")
    config.parameters["k"].string_value = "v"
    config.dynamic_batching.max_queue_delay_microseconds = 5
    sent = json.loads(load_request("emb", config, {}).parameters["config"].string_param)
    assert sent["max_batch_size"] == 32
    assert sent["input"][0]["data_type"] == "TYPE_STRING"
    assert sent["parameters"] == {"k": {"string_value": "v"}}
    assert sent["dynamic_batching"] == {"max_queue_delay_microseconds": "5"}


async def test_unload_waits_until_the_server_let_it_go(triton: FakeTriton, control: Control, pauses: Pauses) -> None:
    triton.models["emb"].unloading = 3
    await control.unload("emb", deadline=soon())
    assert triton.models["emb"].state == "UNAVAILABLE"
    assert pauses.slept == [0.01, 0.02, 0.02]


@pytest.mark.parametrize("name", ["nope", "idle"])
async def test_unloading_what_is_not_loaded_is_done_at_once(control: Control, pauses: Pauses, name: str) -> None:
    await control.unload(name, deadline=soon())
    await control.unload(name, dependents=True, deadline=soon())
    assert pauses.slept == []


async def test_an_unload_that_takes_too_long(triton: FakeTriton, control: Control, pauses: Pauses) -> None:
    triton.models["emb"].unloading = 10**6
    control = Control(control.client, sleep=pauses, pauses=(10.0,))
    with pytest.raises(DeadlineExceeded, match="did not unload emb in time"):
        await control.unload("emb", deadline=soon(5.0))


async def test_an_ensemble_goes_with_its_parts(triton: FakeTriton, control: Control) -> None:
    config = embedder("all")
    config.ensemble_scheduling.step.add(model_name="emb")
    triton.add(FakeModel("all", config=config))
    await control.unload("all", dependents=True, deadline=soon())
    assert triton.models["all"].state == triton.models["emb"].state == "UNAVAILABLE"


async def test_without_dependents_the_parts_stay(triton: FakeTriton, control: Control) -> None:
    config = embedder("all")
    config.ensemble_scheduling.step.add(model_name="emb")
    triton.add(FakeModel("all", config=config))
    await control.unload("all", deadline=soon())
    assert triton.models["all"].state == "UNAVAILABLE"
    assert triton.models["emb"].state == "READY"


async def test_unload_forgets_what_was_pushed(triton: FakeTriton, control: Control) -> None:
    await control.load("pushed", config=embedder("pushed"), files=FILES, deadline=soon())
    await control.unload("pushed", deadline=soon())
    assert not any(each.pushed for each in await control.index(deadline=soon()))
    with pytest.raises(ModelNotFound):
        del triton.models["pushed"]
        await control.load("pushed", deadline=soon())


async def test_kserves_own_server_is_not_mistaken_for_success(triton: FakeTriton, control: Control) -> None:
    """It reads the model's name from another field and finds none, so it did not load the model."""
    triton.repository_first = True
    with pytest.raises(ModelFailed, match="failed to load ''"):
        await control.load("idle", deadline=soon())
    assert triton.models["idle"].state == ""


async def test_a_server_that_is_gone_is_no_failure_of_the_model(triton: FakeTriton, control: Control) -> None:
    await triton.stop()
    with pytest.raises(TransportFailed):
        await control.load("idle", deadline=soon())
    with pytest.raises(TransportFailed):
        await control.unload("emb", deadline=soon())


def statistics() -> pb.ModelStatistics:
    found = pb.ModelStatistics(name="emb", version="1", last_inference=2**40, inference_count=9, execution_count=3)
    for number, field in enumerate(InferenceStats.__struct_fields__, 1):
        duration = getattr(found.inference_stats, field)
        duration.count, duration.ns = number, number * 1000
    batch = found.batch_stats.add(batch_size=4)
    batch.compute_infer.count = 2
    batch.compute_infer.ns = 77
    batch.compute_output.ns = 5
    found.memory_usage.add(type="CPU", id=0, byte_size=2**33)
    return found


async def test_statistics_are_tritons_own_numbers(triton: FakeTriton, control: Control) -> None:
    triton.models["emb"].statistics = statistics()
    (found,) = await control.statistics("emb", deadline=soon())
    assert (
        found
        == to_model_stats(statistics())
        == ModelStats(
            name="emb",
            version="1",
            last_inference=2**40,
            inference_count=9,
            execution_count=3,
            inference_stats=InferenceStats(
                success=DurationStat(count=1, ns=1000),
                fail=DurationStat(count=2, ns=2000),
                queue=DurationStat(count=3, ns=3000),
                compute_input=DurationStat(count=4, ns=4000),
                compute_infer=DurationStat(count=5, ns=5000),
                compute_output=DurationStat(count=6, ns=6000),
                cache_hit=DurationStat(count=7, ns=7000),
                cache_miss=DurationStat(count=8, ns=8000),
            ),
            batch_stats=[
                BatchStats(batch_size=4, compute_infer=DurationStat(count=2, ns=77), compute_output=DurationStat(ns=5))
            ],
            memory_usage=[MemoryUsage(type="CPU", id=0, byte_size=2**33)],
        )
    )
    assert len(await control.statistics(deadline=soon())) == 2
    with pytest.raises(ModelGone):
        await control.statistics("nope", deadline=soon())
