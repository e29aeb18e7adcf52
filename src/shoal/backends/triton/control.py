"""The models of a Triton server: index, loading, unloading and statistics.

Source: Triton's model repository, configuration and statistics extensions. It must run with
--model-control-mode=explicit; in other modes `load` and `unload` raise a SetupError that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import grpc.aio
from google.protobuf import json_format

from shoal.backends.base.backoff import retry_pauses
from shoal.backends.triton.client import Client
from shoal.backends.triton.errors import ModelGone, shorten_message
from shoal.errors import (
    DeadlineExceeded,
    InputRejected,
    ModelFailed,
    ModelNotFound,
    OutOfMemory,
    ShoalError,
    Unsupported,
    UpstreamFailed,
)
from shoal.kserve import protocol_pb2 as pb
from shoal.types import BatchStats, DurationStat, InferenceStats, MemoryUsage, ModelStats

PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Seconds between checks of a model that is loading or unloading; the last one repeats."""

MODEL_ERRORS = (UpstreamFailed, InputRejected, OutOfMemory, ModelGone, Unsupported)
"""Errors of a load that concern the model, not the connection or the server's setup."""

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A model of the server. `state`: READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded (then
    `version` is "" too). `reason`: why it is UNAVAILABLE. `pushed`: it was loaded with a configuration or files, is in
    no repository, and is known only to this Control."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    pushed: bool = False


@dataclass(frozen=True, slots=True)
class PushedModel:
    config: pb.ModelConfig
    files: Files


class Control:
    """Loads and unloads the models of one server. Methods raise as the client does, and as their docstrings say.

    `sleep` and `pauses` (seconds) set the wait between two checks.
    """

    def __init__(
        self,
        client: Client,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        pauses: tuple[float, ...] = PAUSES_S,
    ) -> None:
        self.client = client
        self._sleep = sleep
        self._pauses = pauses
        self._pushed_models: dict[str, PushedModel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, set[object]] = {}

    def load_lock(self, model: str) -> asyncio.Lock:
        """Return the lock to hold while checking whether a model is loaded, and loading it if not: two concurrent
        callers would load it twice."""
        return self._locks.setdefault(model, asyncio.Lock())

    def users(self, model: str) -> set[object]:
        """Return those who use a model, a set that each joins and leaves by itself: nobody unloads it from under
        another."""
        return self._users.setdefault(model, set())

    async def index(self, *, deadline: float) -> list[IndexEntry]:
        """Return every version of every model in the server's repositories, and the pushed models, which the server's
        own index leaves out."""
        found = [
            IndexEntry(name=each.name, version=each.version, state=each.state, reason=each.reason)
            for each in (await self.client.repository_index(deadline=deadline)).models
        ]
        named = {each.name for each in found}
        for name in [name for name in self._pushed_models if name not in named]:
            state = "READY" if await self.is_ready(name, deadline=deadline) else "UNAVAILABLE"
            found.append(IndexEntry(name=name, state=state, pushed=True))
        return found

    async def is_ready(self, name: str, version: str = "", *, deadline: float) -> bool:
        """Return whether the model can be called; False if it does not exist."""
        return await self.client.model_ready(name, version, deadline=deadline)

    async def config(self, name: str, version: str = "", *, deadline: float) -> pb.ModelConfig:
        """Return the configuration of a loaded model. Raises ModelGone for any other."""
        return await self.client.model_config(name, version, deadline=deadline)

    async def metadata(self, name: str, version: str = "", *, deadline: float) -> pb.ModelMetadataResponse:
        """Return the metadata of a loaded model. Raises ModelGone for any other."""
        return await self.client.model_metadata(name, version, deadline=deadline)

    async def statistics(self, name: str = "", version: str = "", *, deadline: float) -> list[ModelStats]:
        """Return one entry per version, of all models if `name` is empty. Raises ModelGone if it is not loaded."""
        found = await self.client.model_statistics(name, version, deadline=deadline)
        return [to_model_stats(each) for each in found.model_stats]

    async def load(
        self, name: str, *, config: pb.ModelConfig | None = None, files: Files | None = None, deadline: float
    ) -> None:
        """Load or reload a model, and return once it is ready.

        `config` replaces the one in the repository. `files` maps `<version>/<name>` to contents and needs `config`;
        such a model need not be in the repository. Both are remembered, and pushed again by a load without either, as
        after the server's restart; `files` is kept as passed, so it may read its contents on access (in a thread).
        Raises ModelNotFound, ModelFailed with the server's actual reason, SetupError if the server does not load on
        demand, DeadlineExceeded.
        """
        known = self._pushed_models.get(name)
        if config is None and files is None and known is not None:
            config, files = known.config, known.files
        elif config is not None:
            self._pushed_models[name] = PushedModel(config, files or {})
        request = await asyncio.to_thread(load_request, name, config, files or {})
        try:
            await self.client.repository_model_load(request, deadline=deadline)
            await self._await_ready(name, deadline)
        except MODEL_ERRORS as error:
            self._restore_pushed(name, known)
            raise await self._load_error(name, error, deadline, pushing=config is not None or bool(files)) from error
        except ShoalError:
            self._restore_pushed(name, known)
            raise

    async def revive(self, name: str, *, deadline: float) -> None:
        """Reload a model whose process has died, and return once it is ready.

        Triton reports such a model as READY. It skips a load of unchanged files, and keeps the instances of an
        unchanged configuration: so this changes a parameter that nothing reads. Raises as `load` does.
        """
        config = await self.config(name, deadline=deadline)
        config.parameters["shoal_revived"].string_value = str(time.time_ns())
        known = self._pushed_models.get(name)
        files = known.files if known is not None else {}
        request = await asyncio.to_thread(load_request, name, config, files)
        try:
            await self.client.repository_model_load(request, deadline=deadline)
            await self._await_ready(name, deadline)
        except MODEL_ERRORS as error:
            raise await self._load_error(name, error, deadline, pushing=bool(files)) from error

    async def unload(self, name: str, *, dependents: bool = False, deadline: float) -> None:
        """Unload a model and return once the server has released it; at once if it is not loaded.

        `dependents`: also the models that an ensemble consists of. The server first finishes requests in flight.
        """
        names = {name} | (await self._ensemble_models(name, deadline) if dependents else set())
        with contextlib.suppress(ModelGone):  # it is unloaded already
            await self.client.repository_model_unload(name, dependents=dependents, deadline=deadline)
        await self._await_gone(names, deadline)
        for each in names:
            self._pushed_models.pop(each, None)

    async def _await_ready(self, name: str, deadline: float) -> None:
        for pause in retry_pauses(self._pauses):
            if await self.is_ready(name, deadline=deadline):
                return
            reason = await self._failure_reason(name, deadline)
            if reason:
                raise UpstreamFailed(reason)
            await self._wait(pause, deadline, f"{name} was not ready on Triton in time: increase load_timeout_s")

    async def _await_gone(self, names: set[str], deadline: float) -> None:
        for pause in retry_pauses(self._pauses):
            index = await self.index(deadline=deadline)
            if not any(each.name in names and each.state in ("READY", "LOADING", "UNLOADING") for each in index):
                return
            await self._wait(pause, deadline, f"Triton did not unload {', '.join(sorted(names))} in time")

    async def _ensemble_models(self, name: str, deadline: float) -> set[str]:
        """Return the models of an ensemble; none for any other."""
        try:
            config = await self.config(name, deadline=deadline)
        except (ModelGone, InputRejected):  # not loaded: nothing to wait for
            return set()
        return {step.model_name for step in config.ensemble_scheduling.step}

    async def _failure_reason(self, name: str, deadline: float) -> str:
        """Return why the newest version that failed is unavailable; "" while none has failed."""
        models = [each for each in await self.index(deadline=deadline) if each.name == name]
        if any(each.state in ("READY", "LOADING") for each in models):
            return ""
        reasons = [each.reason for each in models if each.state == "UNAVAILABLE" and each.reason != "unloaded"]
        return next((shorten_message(reason) for reason in reversed(reasons) if reason), "")

    async def _load_error(self, name: str, error: ShoalError, deadline: float, *, pushing: bool) -> ShoalError:
        """Return the error of a load, with the repository's reason if it has one, which is more specific."""
        cause = error.__cause__
        words = shorten_message(cause.details() or "") if isinstance(cause, grpc.aio.AioRpcError) else error.message
        try:
            index = await self.index(deadline=deadline)
            reason = await self._failure_reason(name, deadline)
        except ShoalError:  # report the first error
            index, reason = [], ""
        if "failed to poll" in words and not pushing and not any(each.name == name for each in index):
            return ModelNotFound(
                f"Triton's repository has no readable model {name!r}: check the name, or Triton's log for errors in "
                f"its config.pbtxt ({words})"
            )
        return ModelFailed(f"Triton could not load {name!r}: {reason or words}")

    def _restore_pushed(self, name: str, known: PushedModel | None) -> None:
        """Restore what was pushed before a failed load."""
        if known is None:
            self._pushed_models.pop(name, None)
        else:
            self._pushed_models[name] = known

    async def _wait(self, seconds: float, deadline: float, late: str) -> None:
        if time.monotonic() + seconds >= deadline:
            raise DeadlineExceeded(late)
        await self._sleep(seconds)


def load_request(name: str, config: pb.ModelConfig | None, files: Files) -> pb.RepositoryModelLoadRequest:
    """Return the request that loads a model, with its own configuration and files if there are any."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    if config is not None:
        text = json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)
        request.parameters["config"].string_param = text
    for path, content in files.items():
        request.parameters[f"file:{path}"].bytes_param = content
    return request


def to_model_stats(stats: pb.ModelStatistics) -> ModelStats:
    """Convert Triton's statistics of one version to Shoal's."""
    whole = stats.inference_stats
    return ModelStats(
        name=stats.name,
        version=stats.version,
        last_inference=stats.last_inference,
        inference_count=stats.inference_count,
        execution_count=stats.execution_count,
        inference_stats=InferenceStats(
            **{field: _to_duration(getattr(whole, field)) for field in InferenceStats.__struct_fields__}
        ),
        batch_stats=[
            BatchStats(
                batch_size=each.batch_size,
                compute_input=_to_duration(each.compute_input),
                compute_infer=_to_duration(each.compute_infer),
                compute_output=_to_duration(each.compute_output),
            )
            for each in stats.batch_stats
        ],
        memory_usage=[MemoryUsage(type=each.type, id=each.id, byte_size=each.byte_size) for each in stats.memory_usage],
    )


def _to_duration(duration: pb.StatisticDuration) -> DurationStat:
    return DurationStat(count=duration.count, ns=duration.ns)
