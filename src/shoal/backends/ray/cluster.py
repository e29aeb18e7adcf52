"""Ray Serve as the control plane of a cluster: what runs, where its replicas listen, start and delete.

The only module here that imports Ray. Requests of clients take no way through it, but a connection to a replica: a call
of a deployment handle costs one to three milliseconds of processor time, a message between Shoal's processes 10 us.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from shoal.errors import ConfigError, TransportFailed, install_command

T = TypeVar("T")

FRESH_S = 4.0
"""Age at which a known state is asked for again. Serve's status takes some 60 ms of processor time to read."""
ASK_S = 10.0
"""Timeout of a question to all replicas of a deployment."""
FRONT = "front"
"""Name of the deployment that answers HTTP; no model has it."""
_ALIVE = ("STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION")
NO_RAY = f"Ray is not installed; {install_command('ray')}"


class DeploymentId(NamedTuple):
    application: str
    name: str

    def __str__(self) -> str:
        return f"{self.application}#{self.name}"


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Ray Serve says of a deployment. `replicas`: their number by Serve's name of their state."""

    status: str
    message: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)

    @property
    def running(self) -> int:
        return self.replicas.get("RUNNING", 0)

    @property
    def failed(self) -> bool:
        """Whether Serve has given up; of one that is unhealthy it starts another replica."""
        return self.status == "DEPLOY_FAILED" and not any(self.replicas.get(state) for state in _ALIVE)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in sorted(self.replicas.items()) if count)
        if self.status == "HEALTHY":
            return counts or "scaled to zero"
        return f"{self.status.lower().replace('_', ' ')}: {counts or 'no replica'}"


States = Mapping[DeploymentId, DeploymentState]


class ReplicaAddress(NamedTuple):
    """Where a replica listens for fronts, and the token that it wants to see."""

    replica: str
    host: str
    port: int
    token: bytes


def deployment_name(model: str) -> str:
    """Return the name of a model's deployment: Ray makes names of files of it, so "/" is written "~"."""
    return model.replace("/", "~")


def loaded_application(application: str, model: str) -> str:
    """Return the name of the application of a model that was loaded while `application` ran."""
    return f"{application}.{deployment_name(model)}"


def is_loaded_later(deployment: DeploymentId) -> bool:
    """Whether a model's deployment has an application of its own, which can be deleted."""
    return deployment.application.endswith(f".{deployment.name}")


def find_models(states: States, application: str) -> dict[str, DeploymentId]:
    """Return the models of an application, by name: its deployments, and those that were loaded while it ran."""
    return {
        each.name.replace("~", "/"): each
        for each in states
        if (each.application == application and each.name != FRONT) or each.application == f"{application}.{each.name}"
    }


class Cluster:
    """The Ray cluster of this process. Every method raises TransportFailed while Ray Serve does not answer, and
    ConfigError where Ray is missing."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="ray")  # Ray's calls block, a deletion up to a minute
        self._handles: dict[DeploymentId, Any] = {}
        self._is_connected = False
        self._states: dict[DeploymentId, DeploymentState] = {}
        self._states_at = -math.inf

    async def states(self, max_age_s: float = 0.0) -> dict[DeploymentId, DeploymentState]:
        """Return the state of each deployment, as it was at most `max_age_s` ago."""
        if time.monotonic() - self._states_at > max_age_s:
            self._states = await self._read_states()
            self._states_at = time.monotonic()
        return self._states

    async def _read_states(self) -> dict[DeploymentId, DeploymentState]:
        status = await self._call(_get_status)
        return {
            DeploymentId(application, name): DeploymentState(found.status.value, found.message, found.replica_states)
            for application, overview in status.applications.items()
            for name, found in overview.deployments.items()
        }

    async def find_replicas(self, deployment: DeploymentId) -> list[ReplicaAddress]:
        """Return the addresses of all running replicas; those that do not answer are left out."""
        handle = await self._get_handle(deployment)
        with _as_transport_errors(f"asking the replicas of {deployment}"):
            answers = await handle.broadcast("address").results_async(timeout_s=ASK_S, return_exceptions=True)
        return [ReplicaAddress(*each) for each in answers if not isinstance(each, BaseException)]

    async def wake(self, deployment: DeploymentId) -> ReplicaAddress:
        """Return the address of a replica, once there is one: Serve starts one for a request that waits."""
        return ReplicaAddress(*await self.call(deployment, "address"))

    async def call(self, deployment: DeploymentId, method: str, *arguments: Any) -> Any:
        """Call a method of one replica."""
        handle = await self._get_handle(deployment)
        with _as_transport_errors(f"calling {deployment}"):
            return await getattr(handle, method).remote(*arguments)

    async def start(self, application: Any, name: str) -> None:
        """Deploy an application that has no route; returns before it runs."""

        def run() -> None:
            from ray import serve

            target = serve.RunTarget(application, name, route_prefix=None)
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

        await self._call(run)

    async def delete(self, name: str) -> None:
        """Delete an application, and return when it is gone."""

        def delete() -> None:
            from ray import serve

            serve.delete(name)

        await self._call(delete)
        self._handles = {each: handle for each, handle in self._handles.items() if each.application != name}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _get_handle(self, deployment: DeploymentId) -> Any:
        if deployment not in self._handles:

            def get() -> Any:
                from ray import serve

                return serve.get_deployment_handle(deployment.name, deployment.application)

            self._handles[deployment] = await self._call(get)
        return self._handles[deployment]

    async def _call(self, ask: Callable[[], T]) -> T:
        def run() -> T:
            if not self._is_connected:
                _connect()
                self._is_connected = True
            return ask()

        with _as_transport_errors("asking Ray Serve"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)


def _get_status() -> Any:
    from ray import serve

    return serve.status()


def _connect() -> None:
    """Join the cluster of this machine; a process that Ray started is in it. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError(NO_RAY) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise TransportFailed(f"no Ray cluster is running on this machine (`ray start`): {error}") from None


@contextmanager
def _as_transport_errors(what: str) -> Iterator[None]:
    """Turn what Ray raises into TransportFailed."""
    try:
        yield
    except (ConfigError, TransportFailed):
        raise
    except Exception as error:  # Ray's own errors, those of its transport, and those of the called method
        raise TransportFailed(f"{what} failed: {type(error).__name__}: {error}") from error
