"""A text generator over one model on one Triton server: one call per generation, canceled when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import msgspec

from shoal.backends.base import backoff
from shoal.backends.base.presence import PresenceMixin
from shoal.backends.triton import engine
from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.errors import ModelGone
from shoal.backends.triton.infer_stream import InferStream
from shoal.backends.triton.llm_answer import Answer
from shoal.backends.triton.llm_request import Adapter, GenerationRequest, ModelTokenizer, RequestBuilder
from shoal.backends.triton.llm_schema import LlmSchema, detect_llm
from shoal.backends.triton.presence import ModelPresence
from shoal.core.protocols import GeneratorFacts, Piece, Prompt
from shoal.errors import (
    BackendError,
    ConfigError,
    DeadlineExceeded,
    InvalidValue,
    Overloaded,
    RequestError,
    ShoalError,
    TooLong,
    TransportFailed,
    UpstreamFailed,
)
from shoal.kserve.protocol_pb2 import ModelInferRequest, ModelInferResponse
from shoal.types import Context, Sampling

logger = logging.getLogger("shoal.triton")

CANCEL_S = 2.0
"""Timeout in seconds of a cancellation request; a model that is too busy for it notices the broken call later."""


class ErrorRule(NamedTuple):
    """Maps a model's error message without a status, if it contains any of `words`."""

    words: tuple[str, ...]
    kind: type[RequestError]
    message: str
    param: str | None = None


ERROR_TABLE = (
    ErrorRule(
        (
            "maximum model length",
            "maximum context length",
            "exceeds maximum input length",
            "exceeds the maximum input length",
            "longer than the maximum",
            "max_seq_len",
        ),
        TooLong,
        "the prompt does not fit the model: send a shorter one",
    ),
    ErrorRule(
        ("lora feature is not enabled", "we currently support", "lora task", "lora_task_id", "lora_path does not"),
        InvalidValue,
        "the model does not have this adapter on Triton",
        "model",
    ),
    # vLLM's backend logs invalid parameters and continues with None.
    ErrorRule(
        ("has no attribute 'lora_name'",),
        InvalidValue,
        "vLLM on Triton rejects these sampling parameters; see Triton's log for which",
    ),
    ErrorRule(
        ("must be in (", "must be in [", "must be non-negative", "must be at least", "must be greater than"),
        InvalidValue,
        "the model rejects a sampling parameter",
    ),
)
"""The first matching row applies. Sources: vLLM's SamplingParams and its input checks; TensorRT-LLM's executor."""


class TritonGenerator(PresenceMixin):
    """TextGenerator over one model. It is ready while the model's tensors match `schema`.

    Raises ConfigError for a model of token ids without `words`, and as `RequestBuilder` does. `start` starts checks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        *,
        schema: LlmSchema,
        words: ModelTokenizer | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        context_tokens: int | None = None,
        serving: bool = False,
    ) -> None:
        if schema.family == "tokens" and words is None:
            raise ConfigError(
                f"{name} takes token ids and needs a tokenizer: set `tokenizer` of the model in"
                ' shoal.toml, as "hf:org/name" or a folder'
            )
        self.endpoint = endpoint
        self._vocabulary = words
        self._requests = RequestBuilder(schema, endpoint.model, endpoint.version, words=words, adapters=adapters)
        self._presence: ModelPresence[LlmSchema] = ModelPresence(name, endpoint, schema, self._admit, serving=serving)
        self._closed = False
        self._cancellations: set[asyncio.Task[None]] = set()
        self._canceller: tuple[Endpoint, LlmSchema] | None = None
        self._facts = GeneratorFacts(
            name=name,
            parameters=schema.parameters,
            top_logprobs=None if schema.family == "vllm" else 0,
            wants_ids=schema.family == "tokens",
            output_mode=schema.output_mode,
            context_tokens=context_tokens or schema.context_tokens,
            adapters=tuple(adapters or ()),
            details={"schema": schema.family, "version": schema.version, "instances": schema.instances},
        )

    @property
    def facts(self) -> GeneratorFacts:
        return self._facts

    @property
    def schema(self) -> LlmSchema:
        return self._presence.schema

    def start(self) -> None:
        """Start the periodic checks of the model. Call it once."""
        self._presence.start(look_s=engine.LOOK_S, again_s=backoff.RETRY_S)
        self._presence.check_now()

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        if self._closed:
            raise TransportFailed(f"{self._facts.name} is closed: send the request again")
        generation = GenerationRequest(
            id=uuid.uuid4().hex, prompt=prompt, sampling=sampling, stream=stream, adapter=adapter
        )
        answer = Answer(self.schema, generation, self._vocabulary)
        request = self._requests.build_generation(generation)
        over = False
        try:
            async with aclosing(_read_responses(self.endpoint, self.schema, request, ctx.deadline)) as responses:
                async for response in responses:
                    piece = answer.read(response)
                    if piece is not None:
                        over = piece.finish_reason is not None
                        if over and isinstance(responses, InferStream):
                            responses.mark_over()  # the client may leave now
                        yield piece
            over = True
            if (last := answer.end()) is not None:
                yield self._finalize_piece(last, sampling)
        except ShoalError as error:
            over = not isinstance(error, DeadlineExceeded)  # on any other error the model has stopped
            failed = self._to_error(error)
            if failed is error:
                raise
            raise failed from error
        finally:
            if not over:
                self._cancel(generation.id)

    async def aclose(self) -> None:
        self._closed = True
        await super().aclose()
        while self._cancellations:
            await asyncio.gather(*self._cancellations)

    async def _admit(self) -> None:
        """Do nothing: replicas of a generator are only compared by schema."""

    def _finalize_piece(self, last: Piece, sampling: Sampling) -> Piece:
        """Clear the finish reason if the model reports neither tokens nor a reason, since it may have stopped at
        `max_tokens`: the caller counts the tokens and sets it."""
        reports_end = bool(self.schema.flags) or self.schema.family == "tokens"
        return last if reports_end or sampling.max_tokens is None else msgspec.structs.replace(last, finish_reason=None)

    def _to_error(self, error: ShoalError) -> ShoalError:
        """Return the error as a generator may raise it; mark the model as lost if its server is."""
        if isinstance(error, RequestError):
            return error
        lowered = error.message.lower()
        for row in ERROR_TABLE:
            if any(word in lowered for word in row.words):
                return row.kind(f"{row.message} ({error.message})", param=row.param)
        if isinstance(error, TransportFailed):
            if type(error) is TransportFailed and error.__cause__ is None and not self._closed:
                return UpstreamFailed(error.message)  # reported on a stream: the server is reachable
            self._presence.mark_lost(error)
        if isinstance(error, (BackendError, Overloaded, DeadlineExceeded)):
            return error
        return UpstreamFailed(error.message)

    def _cancel(self, id: str) -> None:
        """Cancel the generation `id` on the model. Canceling the call alone is not enough: Triton does not forward that
        to the running step of an ensemble, nor does every model to those that it calls."""
        if self._closed or not (self.schema.cancel or self.schema.parts):
            return
        task = asyncio.create_task(self._send_cancel(id), name=f"cancel {id}")
        self._cancellations.add(task)
        task.add_done_callback(self._cancellations.discard)

    async def _send_cancel(self, id: str) -> None:
        deadline = time.monotonic() + CANCEL_S
        try:
            if self._canceller is None:
                self._canceller = await self._find_canceller()
            endpoint, schema = self._canceller
            request = RequestBuilder(schema, endpoint.model, endpoint.version).build_cancellation(id)
            if request is None:
                return
            async with aclosing(_read_responses(endpoint, schema, request, deadline)) as responses:
                async for _ in responses:
                    pass
        except ShoalError as error:  # the LLM API answers the cancellation itself with "cancelled"
            logger.debug("%s: ending %s: %s", self._facts.name, id, error.message)

    async def _find_canceller(self) -> tuple[Endpoint, LlmSchema]:
        """Return the model that cancels generations by id: this one, or the engine among its parts, to which it passes
        its requests' ids on."""
        for name in sorted(self.schema.parts) if not self.schema.cancel else ():
            part = replace(self.endpoint, model=name, version="")
            try:
                schema = detect_llm(*await part.describe())
            except (ConfigError, ModelGone):  # not a language model, or there is no such model
                continue
            if schema is not None and schema.cancel:
                return part, schema
        return self.endpoint, self.schema


def _read_responses(
    endpoint: Endpoint, schema: LlmSchema, request: ModelInferRequest, deadline: float
) -> InferStream | AsyncGenerator[ModelInferResponse]:
    if schema.decoupled:
        return endpoint.client.stream_infer(request, deadline)
    return _one_response(endpoint, request, deadline)


async def _one_response(
    endpoint: Endpoint, request: ModelInferRequest, deadline: float
) -> AsyncGenerator[ModelInferResponse]:
    with endpoint.client.long_call() as line:
        yield await line.infer(request, deadline)
