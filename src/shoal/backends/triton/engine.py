"""One model on one Triton server, found or loaded there, and an engine that sends batches over gRPC to one that embeds
or scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shoal.backends.base import backoff
from shoal.backends.base.presence import PresenceMixin
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.llm_schema import LlmSchema, detect_llm
from shoal.backends.triton.pixels import detect_pixels
from shoal.backends.triton.presence import ModelPresence
from shoal.backends.triton.response import read_outputs
from shoal.backends.triton.schema import Embedder, TensorNames, detect_embedder
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import ConfigError, InternalError, ShoalError, TransportFailed, UpstreamFailed
from shoal.kserve import codec
from shoal.kserve.protocol_pb2 import (
    ModelConfig,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
)
from shoal.types import Array

logger = logging.getLogger("shoal.triton")

LOOK_S = 2.0
"""Seconds between checks of a serving model: how long a silent server restart can go unnoticed. A check is one RPC of
about 0.2 ms."""

Schema: TypeAlias = Embedder | LlmSchema

DEFAULT_BATCH_SIZE = 1024
"""Items per call to a model without its own batch limit; max_batch_size and max_batch_tokens reduce it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One model on one server. `version` empty: the server chooses.

    `load` and `unload` are set if the model's files were pushed, so that its name is not enough; `ensemble`: the
    ensemble that it is a part of, "" for none.
    """

    client: Client
    control: Control
    address: str
    model: str
    version: str = ""
    ensemble: str = ""
    names: TensorNames = field(default_factory=TensorNames)
    rpc_timeout_s: float = 5.0
    load_timeout_s: float = 600.0
    load: Callable[[], Awaitable[None]] | None = None
    unload: Callable[[], Awaitable[None]] | None = None

    async def find(self, *, again: bool = False, reload: bool = False) -> Schema:
        """Return its schema once it is ready to serve; load it if needed and possible. `reload`: its process has died,
        which its server does not detect.

        `again`: it has served before. Then a model that was unloaded on the server stays unloaded, while one that a
        restart of the server lost is loaded. Raises TransportFailed while the server is unreachable or the model was
        unloaded, UpstreamFailed and SetupError for what the server reports about the model.
        """
        async with self.control.load_lock(self.model):
            serving = await self.is_serving()
            if not serving:
                await self._check_absent(again)
            if serving and reload:
                await self.control.revive(self.model, deadline=time.monotonic() + self.load_timeout_s)
            elif not serving:
                if self.load is not None:
                    await self.load()
                else:
                    await self.control.load(self.model, deadline=time.monotonic() + self.load_timeout_s)
            return await self.fetch_schema()

    async def fetch_schema(self) -> Schema:
        """Return how it is called. Raises ModelGone if it is not loaded, ConfigError if it cannot be served."""
        return detect_schema(*await self.describe(), self.names)

    async def describe(self) -> tuple[ModelConfig, ModelMetadataResponse]:
        """Return its configuration and metadata. Raises ModelGone if it is not loaded."""
        config = await self.control.config(self.model, self.version, deadline=self.rpc_deadline())
        return config, await self.control.metadata(self.model, self.version, deadline=self.rpc_deadline())

    async def is_serving(self) -> bool:
        return await self.control.is_ready(self.model, self.version, deadline=self.rpc_deadline())

    async def _check_absent(self, again: bool) -> None:
        """Raise TransportFailed if the server is loading or unloading the model, or it was unloaded there by hand: the
        index gives the reason "unloaded" then, but none for a model that was never loaded. Raise ConfigError if other
        versions of it serve: a reload would disturb them to no effect."""
        index = await self.control.index(deadline=self.rpc_deadline())
        mine = [one for one in index if one.name == self.model]
        for state in ("LOADING", "UNLOADING"):
            if any(one.state == state for one in mine):
                raise TransportFailed(f"the server is {state.lower()} the model")
        if again and any(one.reason == "unloaded" for one in mine):
            raise TransportFailed("the model was unloaded on the server: load it there, or through Shoal")
        there = [one.version for one in mine if one.state == "READY"]
        if self.version and there:
            raise ConfigError(f"{self.model} has no version {self.version} on the server; it has {', '.join(there)}")

    @property
    def users(self) -> set[object]:
        """Those who use the model on this server: replicas of any served name, until they are closed."""
        return self.control.users(self.model)

    async def release(self, timeout_s: float) -> None:
        """Unload it, and return once the server confirms that, unless another served name uses it. Raises as
        Control.unload does."""
        if self.users or self.control.users(self.ensemble):
            logger.info("%s stays loaded: another model is served from it", self.address)
            return
        if self.unload is not None:
            await self.unload()
            return
        deadline = time.monotonic() + timeout_s
        await self.control.unload(self.ensemble or self.model, dependents=True, deadline=deadline)

    async def undo_load(self) -> None:
        """Unload a model that cannot be used after all. Errors are only logged: an unreachable server has no model."""
        try:
            await self.release(self.load_timeout_s)
        except ShoalError as error:
            logger.warning("%s may stay loaded: %s", self.address, error.message)

    def rpc_deadline(self) -> float:
        """Return the deadline of a call that a reachable server answers at once."""
        return time.monotonic() + self.rpc_timeout_s


def detect_schema(config: ModelConfig, metadata: ModelMetadataResponse, names: TensorNames | None = None) -> Schema:
    """Return how a model is called. Raises ConfigError, with the reason, for one that cannot be served."""
    named = names is not None and (names.inputs or names.outputs or names.scores)  # generative models have none
    own = detect_pixels(config, metadata) or (None if named else detect_llm(config, metadata))
    return own or detect_embedder(config, metadata, names)


Admit = Callable[["TritonEngine"], Awaitable[None]]


class TritonEngine(PresenceMixin):
    """Engine over one Triton model. With `serving` it is ready at once, else when `admit` has accepted it.

    `admit` is awaited each time the model comes (back) into service and raises a ShoalError to keep it out; it may call
    `infer`. A model whose tensors changed meanwhile stays out of service until they match again.
    """

    def __init__(
        self, endpoint: Endpoint, name: str, *, embedder: Embedder, admit: Admit, serving: bool = False
    ) -> None:
        self.endpoint = endpoint
        self._facts = build_facts(name, embedder)
        self._inputs = {port.canonical: port for port in embedder.inputs}
        self._outputs = {port.canonical: port for port in embedder.outputs}
        self._presence: ModelPresence[Embedder] = ModelPresence(
            name, endpoint, embedder, lambda: admit(self), serving=serving
        )

    @property
    def embedder(self) -> Embedder:
        return self._presence.schema

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def start(self) -> None:
        """Start the periodic checks of the model. Call it once."""
        self._presence.start(look_s=LOOK_S, again_s=backoff.RETRY_S)
        self._presence.check_now()

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        with self._presence:  # marks the model as lost if the server has unloaded it, too
            request = self._build_request(inputs, outputs, params)
            response = await self.endpoint.client.infer(request, deadline)
        return self._read_answer(response, outputs, len(next(iter(inputs.values()))))

    def _build_request(self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any]) -> ModelInferRequest:
        request = ModelInferRequest(model_name=self.endpoint.model, model_version=self.endpoint.version)
        for canonical, array in inputs.items():
            port = self._inputs.get(canonical)
            if port is None:
                raise InternalError(f"{self._facts.name} has no input {canonical!r}")
            codec.add_input(request, port.name, port.datatype, self.embedder.shape_input(port, array))
        for canonical in outputs:
            if canonical not in self._outputs:
                raise InternalError(f"{self._facts.name} has no output {canonical!r}")
            request.outputs.add(name=self._outputs[canonical].name)
        for name, value in params.items():
            codec.set_parameter(request.parameters, name, value)
        return request

    def _read_answer(self, response: ModelInferResponse, outputs: Sequence[str], rows: int) -> dict[str, Array]:
        arrays = read_outputs(response)
        answer: dict[str, Array] = {}
        for canonical in outputs:
            port = self._outputs[canonical]
            array = arrays.get(port.name)
            if array is None:
                raise UpstreamFailed(f"{self._facts.name} did not return the requested output {port.name!r}")
            array = self.embedder.shape_output(port, array, rows)
            answer[canonical] = array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array
        return answer


def build_facts(name: str, embedder: Embedder) -> EngineFacts:
    """Return the planner's facts, from a model's configuration. One batch more than its instances may be in flight, so
    that an instance that finishes can start the next one at once."""
    return EngineFacts(
        name=name,
        inputs=tuple(port.canonical for port in embedder.inputs),
        outputs=tuple(port.canonical for port in embedder.outputs),
        slots=embedder.instances + 1,
        parallel=embedder.instances,
        # Without a mask padding would change the vectors: each text is sent alone.
        max_batch_size=(embedder.max_batch_size or DEFAULT_BATCH_SIZE) if embedder.has_mask else 1,
        length_buckets=(embedder.length,) if embedder.length else (),
        pads_batches=embedder.style == "tokens",
        merges=True,
        precision=embedder.precision,
        details={"instances": embedder.instances, "version": embedder.version},
    )
