"""Targets of models on Triton, the models that a server offers, and what both kinds of runners share: statistics and
unloading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shoal.backends.base.backend import Resources, Target
from shoal.backends.triton.engine import Endpoint, Schema, detect_schema
from shoal.backends.triton.errors import ModelGone
from shoal.backends.triton.llm_schema import LlmSchema, find_parts
from shoal.backends.triton.naming import is_part, served_name
from shoal.config.settings import ModelTable
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.errors import ConfigError, ShoalError, TransportFailed
from shoal.kserve.protocol_pb2 import ModelConfig
from shoal.models.address import Address, ServedModel, check_name
from shoal.models.store import StoredModel
from shoal.types import ModelStats

logger = logging.getLogger("shoal.triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTarget(Target):
    """One model to open: its replicas' endpoints in place of addresses and, if this process wrote it into the
    repository, the files that it was made from (`stored`). `prepare` fetches and converts a model's files; it blocks,
    so call it in a thread."""

    endpoints: Sequence[Endpoint]
    prepare: Callable[[Address], StoredModel]
    stored: StoredModel | None = None


def make_target(
    target: Target,
    endpoints: Sequence[Endpoint],
    resources: Resources,
    report: ProgressReporter,
    stored: StoredModel | None = None,
) -> TritonTarget:
    """Return the target with these endpoints. Call it on the event loop."""
    loop = asyncio.get_running_loop()

    def prepare(address: Address) -> StoredModel:
        return asyncio.run_coroutine_threadsafe(resources.prepare(target, address, report), loop).result()

    return TritonTarget(
        name=target.name,
        source=target.source,
        settings=target.settings,
        table=target.table,
        endpoints=endpoints,
        prepare=prepare,
        stored=stored,
    )


class TritonMixin:
    """A runner of a model on Triton, called `name` in Shoal. Closing it leaves the model loaded on its servers;
    `unload` does not. `names`: one for each endpoint, if they are not all of one model on the server."""

    def __init__(self, name: str, endpoints: Sequence[Endpoint], names: Sequence[str] = ()) -> None:
        self.endpoints = endpoints
        self._names = names or [name] * len(endpoints)
        self._stats: dict[int, ModelStats] = {}

    async def statistics(self) -> list[ModelStats]:
        """Return Triton's own counts, one per endpoint under its name in Shoal; the last known ones if a server does
        not answer."""
        for number, stats in enumerate(await asyncio.gather(*map(_statistics, self.endpoints))):
            if stats is not None:
                self._stats[number] = msgspec.structs.replace(stats, name=self._names[number])
        return [self._stats.get(number) or ModelStats(name=name) for number, name in enumerate(self._names)]

    async def unload(self, timeout_s: float) -> None:
        """Unload the model from its servers and return when they confirm it. Close the runner first: its checks would
        load the model again. Raises as Control.unload does, after trying every server."""
        releases = (endpoint.release(timeout_s) for endpoint in self.endpoints)
        outcomes = await asyncio.gather(*releases, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


async def _statistics(endpoint: Endpoint) -> ModelStats | None:
    try:
        found = await endpoint.control.statistics(endpoint.model, endpoint.version, deadline=endpoint.rpc_deadline())
    except ShoalError as error:
        logger.debug("no statistics of %s: %s", endpoint.address, error.message)
        return None
    # Without a version in the address Triton reports all that are loaded; the newest is the one that answers.
    return max(found, key=lambda stats: stats.last_inference, default=None)


async def list_offers(
    server: Endpoint, address: Address, table: Callable[[str], ModelTable] = lambda _: ModelTable()
) -> dict[str, ServedModel | str]:
    """Return the loaded models of a server, by the name to serve them under: what to serve, or why it cannot be served.

    `table` returns the configuration of a model, by that name. Parts of models that can be served are left out, as is
    TensorRT-LLM's BLS beside an ensemble over the same engine: one model would be listed twice.
    """
    found: dict[str, ServedModel | str] = {}
    wholes: dict[str, ModelConfig] = {}
    for one in await server.control.index(deadline=server.rpc_deadline()):
        if one.state != "READY" or one.name in found or is_part(one.name):
            continue
        try:
            name = check_name(served_name(one.name) or one.name)
            config, metadata = await replace(server, model=one.name, version="").describe()
            _check_servable(name, detect_schema(config, metadata), table(name))
            found[name] = ServedModel(name=name, addresses=(msgspec.structs.replace(address, model=one.name),))
            wholes[one.name] = config
        except ModelGone:  # unloaded meanwhile
            continue
        except TransportFailed:
            raise
        except ShoalError as error:
            found[one.name] = error.message
    hidden = _hidden_models(wholes)
    return {name: what for name, what in found.items() if _server_model(name, what) not in hidden}


def _check_servable(name: str, schema: Schema, table: ModelTable) -> None:
    """Raise ConfigError for a model that cannot serve requests as configured."""
    if isinstance(schema, LlmSchema) and schema.family == "tokens" and table.for_language_model.tokenizer is None:
        raise ConfigError(
            f"it takes token ids and needs a tokenizer: set `tokenizer` in "
            f'[models."{name}"] of shoal.toml, as "hf:org/name" or a folder'
        )


def _hidden_models(wholes: Mapping[str, ModelConfig]) -> set[str]:
    """Return the models that are parts or duplicates of others, by their names on the server."""
    ensembles = {name: find_parts(config) for name, config in wholes.items() if config.HasField("ensemble_scheduling")}
    used = set().union(*ensembles.values())
    others = {name: find_parts(config) for name, config in wholes.items() if name not in ensembles}
    again = {name for name, parts in others.items() if parts & used}
    return used.union(again, *others.values()) if others else used


def _server_model(name: str, what: ServedModel | str) -> str:
    return name if isinstance(what, str) else what.addresses[0].model
