"""Workers of `shoal bulk --ray`: actors that have the model, on the cluster that is there, or on one of this machine.

Plain actors, not Ray Data: see docs/design.md. Imports Ray only when it is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple, cast

import numpy as np

from shoal._version import __version__
from shoal.app import open_models
from shoal.backends.ray.cluster import NO_RAY
from shoal.bulk.computing import Column, Task, Texts
from shoal.bulk.tasks import CALLS, describe_model, plan_task
from shoal.bulk.worker_pool import WorkerDied, WorkerPool
from shoal.config import LoadedConfig
from shoal.core.packed_error import PackedError
from shoal.errors import ConfigError, InternalError, SetupError, ShoalError
from shoal.machine_limits import usable_cores
from shoal.python.background import check_loaded, max_items
from shoal.ray.replica import configure
from shoal.server.memory_allocation import keep_freed_memory

CLOSE_S = 10.0
"""Time that a worker has for closing its model, before it is killed."""
PATIENCE_S = 60.0
"""Between two warnings that no worker is ready."""
CLIENT_SCHEME = "ray://"

logger = logging.getLogger("shoal.ray")


class Job(NamedTuple):
    """What each worker does: a task of `shoal bulk` with the model at an address. As in `plan_task`."""

    loaded: LoadedConfig
    model: str
    task: str
    options: dict[str, Any]
    concurrency: int


class Resources(NamedTuple):
    """Workers, and what Ray reserves for each of them. `cores`: None for an equal share of the cluster's."""

    workers: int
    cores: float | None = None
    gpus: float = 0.0


class Ready(NamedTuple):
    """What a worker says once it has the model. `facts`: as `describe_model`."""

    version: str
    facts: dict[str, str]
    texts_per_call: int
    empty: Mapping[str, Column]


class BulkWorker:
    """The actor."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stack = AsyncExitStack()

    async def start(self) -> Ready | PackedError:
        """Load the model; an error is returned."""
        try:
            return await self._start()
        except ShoalError as error:
            return PackedError.of(error)

    async def _start(self) -> Ready:
        keep_freed_memory()
        job = self._job
        running = await self._stack.enter_async_context(open_models(configure(job.loaded), (job.model,)))
        await running.wait_until_loaded()
        check_loaded(running)
        name = running.gateway.resolve("", job.task)[0]  # type: ignore[arg-type]  # checked with the format
        self._task = plan_task(
            running.gateway,
            name,
            job.task,
            job.options,
            concurrency=job.concurrency,
            max_items=max_items(job.loaded),
        )
        return Ready(__version__, describe_model(running.gateway, name), self._task.texts_per_call, self._task.empty)

    async def call(self, texts: Sequence[Texts]) -> Mapping[str, Column] | PackedError:
        """As `Call`; an error is returned."""
        try:
            return await self._task.call(texts)
        except ShoalError as error:
            return PackedError.of(error)

    async def close(self) -> None:
        await self._stack.aclose()


class _ActorWorker:
    """A Worker: an actor, seen from this process."""

    def __init__(self, actor: Any, ready: Ready) -> None:
        self._actor = actor
        self.ready = ready

    async def call(self, texts: Sequence[Texts]) -> Mapping[str, Column]:
        found: Mapping[str, Column] = await _receive(self._actor.call.remote(texts))
        # The arrays are views of Ray's object store, which has less room than a shard may need.
        return {name: np.array(each) if isinstance(each, np.ndarray) else each for name, each in found.items()}

    async def close(self) -> None:
        with suppress(WorkerDied, TimeoutError, ShoalError):
            async with asyncio.timeout(CLOSE_S):
                await _receive(self._actor.close.remote())
        _kill(self._actor)


@asynccontextmanager
async def open_workers(job: Job, resources: Resources) -> AsyncIterator[tuple[Task, dict[str, str]]]:
    """Start workers, and yield the task that runs on them and the facts of the model, once one is ready. All end on
    leaving.

    Raises ConfigError without Ray, and for resources that the cluster does not have; SetupError for a cluster that
    cannot be reached, and for a model that cannot be loaded.
    """
    with _connected():
        cores = resources.cores if resources.cores is not None else _share_cores(resources)
        expected: list[Ready] = []

        async def start() -> _ActorWorker:
            worker = await _start_worker(job, cores, resources.gpus)
            expected.append(worker.ready)
            if difference := find_difference(expected[0], worker.ready):
                await worker.close()
                raise SetupError(difference)
            return worker

        calls = job.concurrency if job.task == "generate" else CALLS
        async with WorkerPool(start, resources.workers, calls).open() as pool:
            ready = (await _wait_for_first(pool)).ready
            yield Task(pool.call, ready.texts_per_call, calls * resources.workers, ready.empty), ready.facts


async def _wait_for_first(pool: WorkerPool[_ActorWorker]) -> _ActorWorker:
    waiting = asyncio.create_task(pool.wait_for_first())
    try:
        while not (await asyncio.wait((waiting,), timeout=PATIENCE_S))[0]:
            logger.warning("no worker is ready yet: the model is loaded, or Ray has not so many free cores or GPUs")
        return waiting.result()
    finally:
        waiting.cancel()


def find_difference(first: Ready, other: Ready) -> str:
    """Return why two workers cannot share a run; "" if they can."""
    if first.version != other.version:
        return f"a worker has Shoal {other.version}, another one {first.version}: install the same everywhere"
    for name, value in first.facts.items():
        if other.facts.get(name) != value:
            return (
                f"the model's {name} is {value} on one worker and {other.facts.get(name)} on another: "
                "workers need the same files and, with --precision, the same numbers"
            )
    return ""


def plan_cores(nodes: Sequence[float], workers: int) -> int:
    """Return the most cores, the same number for each of the workers, that machines with so many have; 0 if there are
    too few for one each."""
    most = int(max(nodes, default=0))
    return next((each for each in range(most, 0, -1) if sum(int(node // each) for node in nodes) >= workers), 0)


@contextmanager
def _connected() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or to one that runs on this machine; without either, start one here, and
    stop it in the end."""
    try:
        import ray
    except ImportError:
        raise ConfigError(NO_RAY, param="--ray") from None
    if ray.is_initialized():  # by a program that calls this one
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(CLIENT_SCHEME):
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray Client, which --ray does not support: run the command on a machine of the "
            "cluster, or with `ray job submit`",
            param="--ray",
        )
    try:
        _connect(ray, address)
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": "WARNING"}
    if address != "local":
        try:
            ray.init("auto", **quiet)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if address:
                raise SetupError(f"the Ray cluster at RAY_ADDRESS={address} cannot be reached: {error}") from None
        else:
            return
    ray.init("local", num_cpus=usable_cores(), include_dashboard=False, **quiet)


def _share_cores(resources: Resources) -> int:
    import ray

    nodes = [node["Resources"].get("CPU", 0.0) for node in cast(Any, ray).nodes() if node["Alive"]]
    cores = plan_cores(nodes, resources.workers)
    if not cores:
        raise ConfigError(
            f"--ray {resources.workers} needs a core for each worker, and the cluster has {sum(nodes):g}: use fewer "
            "workers, or set --ray-cpus",
            param="--ray",
        )
    return cores


async def _start_worker(job: Job, cores: float, gpus: float) -> _ActorWorker:
    import ray

    options = {"num_cpus": cores, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    actor = cast(Any, ray).remote(BulkWorker).options(**options).remote(job)
    try:
        return _ActorWorker(actor, await _receive(actor.start.remote()))
    except BaseException:  # a cancelled start as well
        _kill(actor)
        raise


async def _receive(reference: Any) -> Any:
    """Return what an actor's method returned. Raises the ShoalError that it returned, and WorkerDied."""
    from ray.exceptions import RayError, RayTaskError

    try:
        found = await reference
    except RayTaskError as error:
        raise InternalError(f"a worker failed: {error}") from error
    except RayError as error:
        raise WorkerDied(" ".join(str(error).split())) from None
    if isinstance(found, PackedError):
        raise found.to_error()
    return found


def _kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # it, or the cluster, may be gone
        ray.kill(actor)
