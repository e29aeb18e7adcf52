"""One language model on one Triton server as a text generator: one call a generation, ended when its reader leaves."""

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
from shoal.backends.triton.llm_answer import Answer
from shoal.backends.triton.llm_request import Adapter, GenerationRequest, ModelTokenizer, RequestBuilder
from shoal.backends.triton.llm_schema import LlmSchema, detect_llm
from shoal.backends.triton.presence import ModelPresence
from shoal.backends.triton.protocol_pb2 import ModelInferRequest, ModelInferResponse
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
from shoal.types import Context, Sampling

logger = logging.getLogger("shoal.triton")

CANCEL_S = 2.0
"""For a request that ends another one; a model that is too busy for it notices the broken call later."""


class ErrorRule(NamedTuple):
    """What a model's words mean that come without a status: `words` of which the message has one."""

    words: tuple[str, ...]
    kind: type[RequestError]
    saying: str
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
    # vLLM's backend logs what is wrong with the parameters and goes on with None.
    ErrorRule(
        ("has no attribute 'lora_name'",),
        InvalidValue,
        "vLLM on Triton refuses these sampling parameters; Triton's log says which",
    ),
    ErrorRule(
        ("must be in (", "must be in [", "must be non-negative", "must be at least", "must be greater than"),
        InvalidValue,
        "the model refuses a sampling parameter",
    ),
)
"""The first row that fits counts. Sources: vLLM's SamplingParams and its input checks; TensorRT-LLM's executor."""


class TritonGenerator(PresenceMixin):
    """TextGenerator over one model. It is ready while the model is called as `schema` says.

    Raises ConfigError for a model of token ids without `words`, and as `RequestBuilder` does. `start` begins to watch.
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
                f"{name} takes token ids, and nothing says which tokenizer makes them: set `tokenizer` of the model in"
                ' shoal.toml, as "hf:org/name" or a folder'
            )
        self.endpoint = endpoint
        self._words = words
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
            gives=schema.gives,
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
        """Begin to watch the model; once."""
        self._presence.start(look_s=engine.LOOK_S, again_s=backoff.RETRY_S)
        self._presence.check_now()

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        if self._closed:
            raise TransportFailed(f"{self._facts.name} is closed: send the request again")
        asked = GenerationRequest(id=uuid.uuid4().hex, prompt=prompt, sampling=sampling, stream=stream, adapter=adapter)
        answer = Answer(self.schema, asked, self._words)
        request = self._requests.build_generation(asked)
        over = False
        try:
            async with aclosing(_read_responses(self.endpoint, self.schema, request, ctx.deadline)) as responses:
                async for response in responses:
                    piece = answer.read(response)
                    if piece is not None:
                        over = piece.finish_reason is not None
                        yield piece
            over = True
            if (last := answer.end()) is not None:
                yield self._finalize_piece(last, sampling)
        except ShoalError as error:
            over = not isinstance(error, DeadlineExceeded)  # a model that failed has ended it
            failed = self._to_error(error)
            if failed is error:
                raise
            raise failed from error
        finally:
            if not over:
                self._cancel(asked.id)

    async def aclose(self) -> None:
        self._closed = True
        await super().aclose()
        while self._cancellations:
            await asyncio.gather(*self._cancellations)

    async def _admit(self) -> None:
        """A generator has nothing to compare with its peers but how it is called."""

    def _finalize_piece(self, last: Piece, sampling: Sampling) -> Piece:
        """A model that tells neither its tokens nor why it ended may have been cut at the length that was asked for:
        then whoever counts the tokens says the reason."""
        tells = bool(self.schema.flags) or self.schema.family == "tokens"
        return last if tells or sampling.max_tokens is None else msgspec.structs.replace(last, finish_reason=None)

    def _to_error(self, error: ShoalError) -> ShoalError:
        """The error as a generator may raise it; a replica that is gone is looked after."""
        if isinstance(error, RequestError):
            return error
        lowered = error.message.lower()
        for row in ERROR_TABLE:
            if any(word in lowered for word in row.words):
                return row.kind(f"{row.saying} ({error.message})", param=row.param)
        if isinstance(error, TransportFailed):
            if type(error) is TransportFailed and error.__cause__ is None and not self._closed:
                return UpstreamFailed(error.message)  # said on a stream: whoever says so is there
            self._presence.mark_lost(error)
        if isinstance(error, (BackendError, Overloaded, DeadlineExceeded)):
            return error
        return UpstreamFailed(error.message)

    def _cancel(self, id: str) -> None:
        """Have the model told that nobody reads the answer of that id any more. The broken call says so, too, but
        Triton does not pass that on to the running step of an ensemble, nor every model to those that it calls."""
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
        except ShoalError as error:  # the LLM API answers "cancelled" to the one that cancels
            logger.debug("%s: ending %s: %s", self._facts.name, id, error.message)

    async def _find_canceller(self) -> tuple[Endpoint, LlmSchema]:
        """The model that ends generations by their id: this one, or the engine that it is made of, to which it passes
        its requests' ids on."""
        for name in sorted(self.schema.parts) if not self.schema.cancel else ():
            part = replace(self.endpoint, model=name, version="")
            try:
                schema = detect_llm(*await part.describe())
            except (ConfigError, ModelGone):  # a part that is no language model, or a name that is none
                continue
            if schema is not None and schema.cancel:
                return part, schema
        return self.endpoint, self.schema


def _read_responses(
    endpoint: Endpoint, schema: LlmSchema, request: ModelInferRequest, deadline: float
) -> AsyncGenerator[ModelInferResponse]:
    if schema.decoupled:
        return endpoint.client.stream_infer(request, deadline)
    return _one_response(endpoint, request, deadline)


async def _one_response(
    endpoint: Endpoint, request: ModelInferRequest, deadline: float
) -> AsyncGenerator[ModelInferResponse]:
    with endpoint.client.long_call() as line:
        yield await line.infer(request, deadline)
