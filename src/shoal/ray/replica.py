"""One replica of a model's deployment: a model behind a socket, for fronts on any machine of the cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import msgspec

from shoal.app import RunningModels, open_models
from shoal.app.request_log import open_log
from shoal.config import LoadedConfig
from shoal.core.gateway import Gateway
from shoal.core.packed_error import PackedError
from shoal.core.protocols import Observer, Token
from shoal.core.registry import Model, Registry
from shoal.errors import ConfigError, ShoalError, Unsupported
from shoal.ray.metrics import ReplicaMetrics, count_requests
from shoal.ray.scaling import POLICY, QUEUED_TOKENS, REQUESTS
from shoal.server.memory_allocation import keep_freed_memory
from shoal.types import BatchTask, Chunk, Context, Generate, Result
from shoal.workers.models import ModelServer

CODEC_S = 60.0
"""Timeout of a call that tokenizes, which may have to wait for the model."""

logger = logging.getLogger("shoal.ray")


class FarGateway:
    """A gateway for callers with another clock: the deadline of a context is the time that was left when it was sent.
    The way here is not counted, which gives a request some milliseconds more."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def registry(self) -> Registry:
        return self._gateway.registry

    @property
    def draining(self) -> bool:
        return self._gateway.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._gateway.draining = value

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        return await self._gateway.run(task, _to_near(ctx))

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        return self._gateway.stream(task, _to_near(ctx))


def _to_near(ctx: Context) -> Context:
    return msgspec.structs.replace(ctx, deadline=time.monotonic() + ctx.deadline)


class ModelReplica:
    """Runs `address` as `name`. Its methods are called by Ray Serve and by fronts through a handle; tasks arrive over
    its socket."""

    # Serve awaits it.
    async def __init__(self, loaded: LoadedConfig, name: str, address: str) -> None:  # type: ignore[misc]
        _check_policy()
        keep_freed_memory()
        self._name = name
        self._stack = AsyncExitStack()
        self._stop = asyncio.Event()
        self._done = 0
        async with AsyncExitStack() as stack:
            config = configure(loaded)
            log = await open_log(stack, config.settings)
            running = await stack.enter_async_context(open_models(config, (f"{name}={address}",), log=log))
            await running.wait_until_loaded()
            card = running.gateway.model(name)
            if card.error is not None:
                raise RuntimeError(card.error)
            self._running: RunningModels = running
            reporting = asyncio.create_task(ReplicaMetrics(running, name).run(), name="Ray's metrics")
            stack.callback(reporting.cancel)
            self._listen(config.settings.drain_timeout_s)
            stack.push_async_callback(self._drain)
            self._stack = stack.pop_all()

    def address(self) -> tuple[str, str, int, bytes]:
        """Return this replica's name, the host and port where it listens, and the token that it wants to see."""
        from ray import serve

        return (serve.get_replica_context().replica_tag, *self._place, self._token)

    async def tokenize(
        self, texts: Sequence[str], add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]] | PackedError:
        """As TextCodec.tokenize; an error is returned."""
        try:
            async with self._running.gateway.using_codec(self._name, _codec_context()) as codec:
                return await codec.tokenize(texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name)
        except ShoalError as error:
            return PackedError.of(error)

    async def decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str] | PackedError:
        """As TextCodec.decode; an error is returned."""
        try:
            async with self._running.gateway.using_codec(self._name, _codec_context()) as codec:
                return await codec.decode(ids, skip_special_tokens=skip_special_tokens)
        except ShoalError as error:
            return PackedError.of(error)

    def check_health(self) -> None:
        """Raise when the model has failed: Serve then starts another replica."""
        card = self._running.gateway.model(self._name)
        if card.state == "failed":
            raise RuntimeError(card.error or "the model has failed")
        if self._serving.done():
            raise RuntimeError("the replica has stopped listening")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaling policy. A replica that was asked since the last report counts as one request: short
        ones are rarely in flight when Serve looks."""
        done = self._running.counts.stats_for(self._name).inference_count
        asked, self._done = done != self._done, done
        requests = max(count_requests(self._running), int(asked))
        return {REQUESTS: requests, QUEUED_TOKENS: sum(tokens for _, _, tokens in self._running.queues.lengths())}

    async def __del__(self) -> None:
        """Answer what was accepted, then close the model. Serve awaits it when it stops the replica."""
        await self._stack.aclose()

    def _listen(self, drain_s: float) -> None:
        from ray.util import get_node_ip_address

        self._token = secrets.token_bytes(32)
        server = ModelServer(
            cast(Gateway, FarGateway(self._running.gateway)),  # it has what these fronts ask for
            _reject,
            observer=Observer(),
            record_lag=lambda seconds: None,
            describe_remote=_describe_no_remote,
            token=self._token,
        )
        host: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setblocking(False)
        self._place: tuple[str, int] = listener.getsockname()[:2]
        self._serving = asyncio.create_task(server.run(listener, self._stop, drain_s), name="fronts")
        logger.info("%s listens at %s:%d for fronts", self._name, *self._place)

    async def _drain(self) -> None:
        self._stop.set()
        await asyncio.gather(self._serving, return_exceptions=True)


def configure(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration of a process with one model, which Ray starts and stops, and with the cores that Ray has
    reserved for it."""
    import ray

    settings = loaded.settings
    reserved = ray.get_runtime_context().get_assigned_resources()  # type: ignore[no-untyped-call]
    cores = int(reserved.get("CPU", 0))
    backend = "auto" if settings.backend == "ray" else settings.backend
    own = msgspec.structs.replace(
        settings,
        backend=backend,
        ray_application="",
        keep_alive_s=0.0,
        max_loaded_models=0,
        threads=settings.threads or cores,
        explain_requests=0,  # fronts keep the records
    )
    return replace(loaded, settings=own)


def _check_policy() -> None:
    """Raise ConfigError if this deployment scales by Serve's own policy, which sees none of the requests."""
    from ray import serve

    config = serve.get_replica_context()._deployment_config.autoscaling_config
    if config is not None and config.policy.is_default_policy_function():
        raise ConfigError(f"autoscaling_config of a model needs policy: {{policy_function: {POLICY!r}}}")


def _codec_context() -> Context:
    return Context(id="", deadline=time.monotonic() + CODEC_S)


def _describe_no_remote(model: Model) -> bytes:
    return b""


async def _reject(scope: Any, receive: Any, send: Any) -> None:
    raise Unsupported("a replica answers no HTTP requests")
