"""The server and its models, for REST and gRPC alike: names, states, statistics, loading and unloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shoal import _version
from shoal.errors import ModelNotFound, Unsupported
from shoal.http.request import Request
from shoal.surfaces.kserve import wire
from shoal.surfaces.kserve.signature import PLATFORM, VERSION
from shoal.surfaces.shared import model_jobs
from shoal.surfaces.shared.listing import list_all_entries
from shoal.types import ModelStats

if TYPE_CHECKING:
    from collections.abc import Collection

    from shoal.core.gateway import Gateway

_STATES = {"loaded": "READY", "sleeping": "READY", "loading": "LOADING", "downloading": "LOADING"}
EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)


def describe_server() -> wire.ServerMetadata:
    return wire.ServerMetadata(name=PLATFORM, version=_version.__version__, extensions=list(EXTENSIONS))


async def list_index(gateway: Gateway, *, ready: bool) -> list[wire.IndexEntry]:
    """List all models that are or can be loaded; `ready`: only those that can answer. A sleeping model can."""
    entries: dict[str, wire.IndexEntry] = {}
    for each in await list_all_entries(gateway):
        if each.parent is not None:
            continue  # an adapter is a name for requests, not a model of its own
        state = "UNAVAILABLE" if each.status.failed else _STATES.get(each.status.value, "UNAVAILABLE")
        reason = (each.status.error or "unloaded") if state == "UNAVAILABLE" else ""
        entries[each.id] = wire.IndexEntry(name=each.id, version=VERSION, state=state, reason=reason)
    for name in sorted(gateway.registry.unloaded_names() - entries.keys()):
        entries[name] = wire.IndexEntry(name=name, version=VERSION, state="UNAVAILABLE", reason="unloaded")
    return [each for each in entries.values() if each.state == "READY" or not ready]


async def list_statistics(gateway: Gateway, name: str = "", version: str = "") -> list[ModelStats]:
    """Return the statistics of one model ("": of all). Raises ModelNotFound."""
    if name:
        name, _ = resolve(gateway, name, version)
    found = await gateway.statistics(name)
    return [each if each.version else msgspec.structs.replace(each, version=VERSION) for each in found]


def is_ready(gateway: Gateway, name: str, version: str) -> bool:
    """Whether a model can answer. Raises ModelNotFound."""
    return gateway.registry.find(resolve(gateway, name, version)[0]).can_answer()


def resolve(gateway: Gateway, name: str, version: str) -> tuple[str, str]:
    """Return the served model and the adapter ("": none) of a request. Raises ModelNotFound."""
    if not name:
        raise ModelNotFound("the request names no model: send its name", param="model")
    model, adapter = gateway.resolve(name)
    if version not in ("", VERSION):
        raise ModelNotFound(
            f"the model {model!r} has no version {version[:20]!r}: leave it out, or send {VERSION}", param="model"
        )
    return model, adapter


async def load_model(gateway: Gateway, request: Request, name: str, parameters: Collection[str]) -> None:
    """Load a model by its name or address, and return once it is ready. Raises the error of the load."""
    if parameters:
        raise Unsupported(
            "models are loaded as they are configured: leave out 'config' and 'file:' parameters", param="parameters"
        )
    job = model_jobs.get_lifecycle(gateway).load(model_jobs.check_source(name))
    await model_jobs.await_job(request, job, wait=True)


async def unload_model(gateway: Gateway, request: Request, name: str) -> None:
    """Unload a model, and return once it is gone. Raises ModelNotFound for an unknown one."""
    job = await model_jobs.start_unload(gateway, model_jobs.check_model_name(name))
    await model_jobs.await_job(request, job, wait=True)
