"""Runs inference requests, for REST and gRPC alike: finds the model, builds its task, returns tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import Unsupported
from shoal.http.images import ImageReader
from shoal.http.request import Options, Request
from shoal.surfaces.kserve.classification import check_type, classify
from shoal.surfaces.kserve.repository import resolve
from shoal.surfaces.kserve.signature import SCORES, Signature, describe_model
from shoal.surfaces.kserve.tasks import Generation, answer_tensors, build_batch_task, build_generation, to_tensors
from shoal.surfaces.kserve.tensors import (
    InferRequest,
    InferResponse,
    ParameterReader,
    RequestedOutput,
    Tensor,
    select_outputs,
)
from shoal.surfaces.shared import matrices
from shoal.surfaces.shared.default_models import wake_model
from shoal.surfaces.shared.generation import collect
from shoal.surfaces.shared.task_runs import run_task
from shoal.types import BatchTask, Chunk, Embed, Image, Usage

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

UNFINISHED = "None"
"""The finish reason of a response that more will follow, as Triton's vLLM backend writes it."""

_MAX_TIMEOUT_US = 2**53
_MAX_PRIORITY = 2**32 - 1


_INLINE_ELEMENTS = 65_536
"""Elements of a tensor that are sorted in a few milliseconds; a larger one is sorted in a thread."""


class _Found(NamedTuple):
    """A model that a request names. `name`: as the client wrote it."""

    card: ModelCard
    adapter: str
    signature: Signature

    @property
    def name(self) -> str:
        return f"{self.card.name}:{self.adapter}" if self.adapter else self.card.name


class Job(NamedTuple):
    """A checked request. `outputs`: the names of those of a batch task to send."""

    model: str
    id: str
    task: BatchTask | Generation
    outputs: set[str]
    signature: Signature
    requested: Sequence[RequestedOutput]

    @property
    def streams(self) -> bool:
        """Whether it has several responses."""
        return isinstance(self.task, Generation) and self.task.task.stream

    @property
    def is_decoupled(self) -> bool:
        """Whether its model may have any number of responses to a request."""
        return isinstance(self.task, Generation)


class Inference:
    """Runs the requests of one server. All methods raise RequestErrors, and what the gateway raises."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._max_inputs = options.max_inputs
        self._embed_timeout_s = options.embed_timeout_s
        self._images = options.image_reader or ImageReader()

    async def describe(
        self, request: Request, name: str, version: str = "", inputs: Collection[str] = ()
    ) -> tuple[str, Signature]:
        """Return a model's name, and its tensors, those for `inputs` if it has several tasks; wake it if they are
        unknown."""
        found = await self._find(request, name, version, inputs)
        return found.name, found.signature

    async def _find(self, request: Request, name: str, version: str, inputs: Collection[str]) -> _Found:
        model, adapter = resolve(self._gateway, name, version)
        card = await wake_model(self._gateway, request, self._gateway.model(model))
        if card.facts is None:
            raise card.refusal()
        return _Found(card, adapter, describe_model(card.facts, self._max_inputs, inputs))

    async def prepare(self, request: Request, call: InferRequest, *, stream: bool = False) -> Job:
        """Check a request and return its task. `stream`: whether a language model streams if the request does not
        say."""
        found = await self._find(request, call.model, call.version, call.inputs)
        name, signature = found.name, found.signature
        parameters = _read_parameters(request, call)
        outputs = select_outputs(signature, call.outputs)
        _check_classes(signature, call.outputs)
        task: BatchTask | Generation
        if signature.decoupled:
            task = build_generation(
                found.card.name, found.adapter, signature, call, parameters, outputs=outputs, stream=stream
            )
        else:
            # Until here the request had the longer time of a generation.
            request.deadline = min(request.deadline, request.started + self._embed_timeout_s)
            task = build_batch_task(name, signature, call, parameters, outputs=outputs, images=self._images)
            _check_size(found.card, task)
        return Job(name, call.id, task, outputs, signature, call.outputs)

    async def infer(self, request: Request, call: InferRequest) -> InferResponse:
        """Run a request that has one response. A language model returns its whole answer."""
        job = await self.prepare(request, call)
        if job.streams:
            raise Unsupported(
                "this call has one response: leave out 'stream', or use ModelStreamInfer or generate_stream",
                param="stream",
            )
        return await self._run(request, job)

    async def respond(self, request: Request, job: Job) -> AsyncGenerator[InferResponse]:
        """Run a request that may have several responses, which only a streaming language model has."""
        if not isinstance(job.task, Generation) or not job.streams:
            yield await self._run(request, job)
            return
        pieces = AnswerPieces(job.task)
        async with aclosing(self.open_stream(request, job.task)) as chunks:
            async for chunk in chunks:
                if tensors := pieces.push(chunk):
                    yield await _build_response(job, tensors, final=False)
        request.usage = pieces.usage
        yield await _build_response(job, pieces.finish())

    def open_stream(self, request: Request, generation: Generation) -> AsyncGenerator[Chunk]:
        """Return the chunks of a generation."""
        request.model, request.items = generation.task.model, generation.task.choices
        return self._gateway.stream(generation.task, request.context())

    async def _run(self, request: Request, job: Job) -> InferResponse:
        if isinstance(job.task, Generation):
            answer = await collect(self.open_stream(request, job.task))
            request.usage = answer.usage
            texts = [each.reasoning + each.text for each in answer.choices]
            reasons = [each.finish_reason for each in answer.choices]
            tensors = answer_tensors(job.task, texts, reasons, answer.usage or Usage())
        else:
            result = await run_task(self._gateway, request, job.task)
            pads = isinstance(job.task, Embed) and job.task.outputs != ("dense",)
            found = await asyncio.to_thread(to_tensors, result) if pads else to_tensors(result)
            tensors = [each for each in found if each.name in job.outputs]
        return await _build_response(job, tensors)


class AnswerPieces:
    """Converts the chunks of a streamed answer to responses. The last one has the finish reason and the counts."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._rest = ""
        self._reason = "stop"
        self.usage = Usage()

    def push(self, chunk: Chunk) -> list[Tensor]:
        """Return the tensors of a response, or [] if there is nothing to send yet."""
        if chunk.usage is not None:
            self.usage = chunk.usage
        text = chunk.reasoning + chunk.text
        if chunk.finish_reason is not None:
            self._rest, self._reason = text, chunk.finish_reason
            return []
        return answer_tensors(self._generation, [text], [UNFINISHED], None) if text else []

    def finish(self) -> list[Tensor]:
        return answer_tensors(self._generation, [self._rest], [self._reason], self.usage)


def _check_classes(signature: Signature, requested: Sequence[RequestedOutput]) -> None:
    datatypes = {each.name: each.datatype for each in signature.outputs}
    for each in requested:
        if each.classes:
            check_type(each.name, datatypes[each.name])


def _check_size(card: ModelCard, task: BatchTask) -> None:
    """Refuse before inference what would certainly be too large. Raises TooManyInputs."""
    if isinstance(task, Embed) and not {"multi", "tokens"}.isdisjoint(task.outputs):
        matrices.check_inputs(card, [each for each in task.inputs if not isinstance(each, Image)], "inputs")


async def _build_response(job: Job, tensors: list[Tensor], *, final: bool = True) -> InferResponse:
    """Return a response with these outputs, in the form that the request asks for."""
    classes = {each.name: each.classes for each in job.requested if each.classes}
    outputs = [await _classify(job.signature, each, classes.get(each.name, 0)) for each in tensors]
    return InferResponse(model=job.model, id=job.id, outputs=outputs, final=final)


async def _classify(signature: Signature, tensor: Tensor, count: int) -> Tensor:
    if not count:
        return tensor
    labels = signature.labels if tensor.name == SCORES else ()
    call = partial(classify, tensor, count, labels, batched=signature.max_batch_size > 0)
    return await asyncio.to_thread(call) if tensor.array.size > _INLINE_ELEMENTS else call()


def _read_parameters(request: Request, call: InferRequest) -> ParameterReader:
    """Return the request's parameters without Triton's `priority` and `timeout`, which are applied to `request`: 1 is
    the highest priority, for interactive requests, and any other but 0 is for bulk ones. The timeout is in
    microseconds."""
    parameters = ParameterReader(call.parameters)
    priority = parameters.read_integer("priority", 0, _MAX_PRIORITY)
    if priority and request.key_class is None:
        request.key_class = "interactive" if priority == 1 else "bulk"
    timeout = parameters.read_integer("timeout", 0, _MAX_TIMEOUT_US)
    if timeout:
        request.deadline = min(request.deadline, request.started + timeout / 1e6)
    return parameters
