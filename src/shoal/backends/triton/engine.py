"""One model on one Triton server as an engine: batches out over gRPC, and a watch that notices when the server or the
model goes and brings it back into service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.backends.triton import codec
from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control, lasting
from shoal.backends.triton.protocol_pb2 import ModelInferRequest, ModelInferResponse
from shoal.backends.triton.schema import Embedder, Names, detect
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import ConfigError, Crashed, EngineFailed, InternalError, ShoalError, TransportFailed
from shoal.types import Array

logger = logging.getLogger("shoal.triton")

LOOK_S = 2.0
"""Between looks at a model that serves: how late a silent restart of the server is noticed. A look is one RPC of about
0.2 ms."""

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Between looks at a model that does not; the last one goes on for ever."""

ANY_BATCH = 1024
"""Items in a call to a model without a batch limit of its own; max_batch_size and max_batch_tokens narrow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which model on which server. `version` empty: the server's choice.

    `load` and `unload` bring the model back, and take it off, where its name alone would not do, because its files were
    pushed; `whole`: the ensemble that it is a part of, "" for none.
    """

    client: Client
    control: Control
    address: str
    model: str
    version: str = ""
    whole: str = ""
    names: Names = field(default_factory=Names)
    rpc_timeout_s: float = 5.0
    load_timeout_s: float = 600.0
    load: Callable[[], Awaitable[None]] | None = None
    unload: Callable[[], Awaitable[None]] | None = None

    async def find(self, *, again: bool = False, reload: bool = False) -> Embedder:
        """Its schema, once it is ready to serve; loads it where that is needed and possible. `reload`: its process has
        died, which its server does not see.

        `again`: it has served before. Then a model that somebody unloaded on the server is left as it is, while one
        that a restart of the server lost is loaded. Raises TransportFailed while the server is not there or the model
        was unloaded, EngineFailed and SetupError for what the server says of the model.
        """
        serving = await self.serving()
        if not serving:
            await self._check_absent(again)
        if serving and reload:
            await self.control.revive(self.model, deadline=time.monotonic() + self.load_timeout_s)
        elif not serving:
            if self.load is not None:
                await self.load()
            else:
                await self.control.load(self.model, deadline=time.monotonic() + self.load_timeout_s)
        return await self.schema()

    async def schema(self) -> Embedder:
        """How it is called. Raises ModelGone where it is not loaded, ConfigError where it cannot be served."""
        config = await self.control.config(self.model, self.version, deadline=self.soon())
        metadata = await self.control.metadata(self.model, self.version, deadline=self.soon())
        return detect(config, metadata, self.names)

    async def serving(self) -> bool:
        return await self.control.ready(self.model, self.version, deadline=self.soon())

    async def _check_absent(self, again: bool) -> None:
        """Raise TransportFailed where the server loads or unloads the model already, or somebody there unloaded it by
        hand: the index gives that as a reason, which it does not for what was never loaded. Raise ConfigError where
        other versions of it serve: loading it anew would disturb them and bring nothing."""
        index = await self.control.index(deadline=self.soon())
        mine = [one for one in index if one.name == self.model]
        for state in ("LOADING", "UNLOADING"):
            if any(one.state == state for one in mine):
                raise TransportFailed(f"the server is {state.lower()} the model")
        if again and any(one.reason == "unloaded" for one in mine):
            raise TransportFailed("the model was unloaded on the server: load it there, or through Shoal")
        there = [one.version for one in mine if one.state == "READY"]
        if self.version and there:
            raise ConfigError(f"{self.model} has no version {self.version} on the server; it has {', '.join(there)}")

    async def release(self, timeout_s: float) -> None:
        """Unload it, and return once the server says that it is gone. Raises what Control.unload raises."""
        if self.unload is not None:
            await self.unload()
            return
        deadline = time.monotonic() + timeout_s
        await self.control.unload(self.whole or self.model, dependents=True, deadline=deadline)

    async def take_back(self) -> None:
        """Unload what was loaded in vain; a server that is away has nothing loaded."""
        try:
            await self.release(self.load_timeout_s)
        except ShoalError as error:
            logger.warning("%s may stay loaded: %s", self.address, error.message)

    def soon(self) -> float:
        """The deadline of a call that the server answers at once when it is there."""
        return time.monotonic() + self.rpc_timeout_s


Admit = Callable[["TritonEngine"], Awaitable[None]]


class TritonEngine:
    """Engine over one Triton model. Until `embedder` is known and `admit` has agreed, it is not ready.

    `admit` is awaited each time the model comes (back) into service and raises a ShoalError to keep it out; it may
    call `infer`. A model whose tensors changed meanwhile is kept out until they are as before.
    """

    def __init__(self, target: Target, name: str, *, embedder: Embedder, admit: Admit, serving: bool = False) -> None:
        self.target = target
        self.embedder = embedder
        self.reason = "" if serving else "it was not reached yet"
        self._admit = admit
        self._ready = self._served = serving
        self._broken = False
        self._closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._look = asyncio.Event()
        self._facts = facts_of(name, embedder)
        self._inputs = {port.canonical: port for port in embedder.inputs}
        self._outputs = {port.canonical: port for port in embedder.outputs}
        self._watch: asyncio.Task[None] | None = None

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def ready(self) -> bool:
        return self._ready

    def start(self) -> None:
        """Begin to watch the model; once."""
        self._watch = asyncio.create_task(self._keep(), name=f"watch {self._facts.name}")

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if self._closed:
            raise TransportFailed(f"{self._facts.name} is closed: send the request again")
        request = self._request(inputs, outputs, params)
        self._running += 1
        try:
            response = await self.target.client.infer(request, deadline)
        except TransportFailed as error:  # also: the model is not loaded there any more
            # Triton goes on calling a model ready whose process has died; only loading it anew heals it.
            self._broken = self._broken or isinstance(error, Crashed)
            self._lost(error)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        return self._answer(response, outputs, len(next(iter(inputs.values()))))

    async def aclose(self) -> None:
        self._closed = True
        self._ready = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    def _request(self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any]) -> ModelInferRequest:
        request = ModelInferRequest(model_name=self.target.model, model_version=self.target.version)
        for canonical, array in inputs.items():
            port = self._inputs.get(canonical)
            if port is None:
                raise InternalError(f"{self._facts.name} has no input {canonical!r}")
            codec.add_input(request, port.name, port.datatype, self.embedder.sent(port, array))
        for canonical in outputs:
            if canonical not in self._outputs:
                raise InternalError(f"{self._facts.name} has no output {canonical!r}")
            request.outputs.add(name=self._outputs[canonical].name)
        for name, value in params.items():
            codec.set_parameter(request.parameters, name, value)
        return request

    def _answer(self, response: ModelInferResponse, outputs: Sequence[str], rows: int) -> dict[str, Array]:
        arrays = codec.read_outputs(response)
        answer: dict[str, Array] = {}
        for canonical in outputs:
            port = self._outputs[canonical]
            array = arrays.get(port.name)
            if array is None:
                raise EngineFailed(f"{self._facts.name} did not answer {port.name!r}, which was asked for")
            array = self.embedder.answered(port, array, rows)
            answer[canonical] = array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array
        return answer

    def _lost(self, error: ShoalError) -> None:
        if self._ready:
            logger.warning("%s is out of service: %s", self._facts.name, error.message)
        self._ready = False
        self.reason = error.message
        self._look.set()

    async def _keep(self) -> None:
        pauses = lasting(RETRY_S)
        failing = False
        while True:
            self._look.clear()  # before the look, so that what a request notices during it is looked at next
            try:
                await self._look_after()
                failing, pauses = False, lasting(RETRY_S)
            except ShoalError as error:
                if not failing and not self._ready and error.message != self.reason:
                    logger.warning("%s cannot serve: %s", self._facts.name, error.message)
                self._lost(error)
                failing = True
            except Exception as error:  # a bug here must not end the watch: the model would never come back
                logger.exception("watching %s failed in an unforeseen way", self._facts.name)
                self._lost(InternalError(f"watching the model failed: {error!r}"))
                failing = True
            await self._pause(next(pauses) if failing else LOOK_S, wake=not failing)

    async def _look_after(self) -> None:
        if self._ready:
            if await self.target.serving():
                return
            raise TransportFailed("the model is not loaded on the server any more")
        found = await self.target.find(again=self._served, reload=self._broken)
        if found.tensors != self.embedder.tensors:
            if self._served:
                raise ConfigError("the model's tensors are not what they were: load it anew to serve it as it is now")
            raise ConfigError("the model's tensors are not those of its peers: serve it under a name of its own")
        self.embedder = found
        await self._admit(self)
        self._ready = self._served = True
        self._broken = False
        self.reason = ""
        logger.info("%s is in service", self._facts.name)

    async def _pause(self, seconds: float, *, wake: bool) -> None:
        if not wake:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            pass


def facts_of(name: str, embedder: Embedder) -> EngineFacts:
    """What a model's configuration says, for the planner. One batch more than its instances may be in flight, so that
    the next one is there when an instance gets free."""
    return EngineFacts(
        name=name,
        inputs=tuple(port.canonical for port in embedder.inputs),
        outputs=tuple(port.canonical for port in embedder.outputs),
        slots=embedder.instances + 1,
        parallel=embedder.instances,
        # Padding that the model is not told of would change the vectors: such a text goes alone.
        max_batch_size=(embedder.max_batch_size or ANY_BATCH) if embedder.masked else 1,
        length_buckets=(embedder.length,) if embedder.length else (),
        padded=embedder.style == "tokens",
        precision=embedder.precision,
        details={"instances": embedder.instances, "version": embedder.version},
    )
