"""A Runner for text generators: turns a task into prompts, choices, chunks and usage.

Behavior common to all language models lives here and in the pipeline: unsupported fields, several prompts and choices,
stop conditions, finish reasons and usage.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from shoal.core.generation.affinity import NO_DEMAND, Demand, Routing, estimate_demand
from shoal.core.generation.merging import merge_streams
from shoal.core.generation.replica_selection import ReplicaSelector
from shoal.core.generation.sampling import (
    APPLIED_BY_SHOAL,
    TOKEN_ID_FIELDS,
    UNSET,
    check_unsupported_fields,
    merge_sampling,
)
from shoal.core.protocols import (
    Breakable,
    ChatPipeline,
    Decoder,
    ModelFacts,
    Piece,
    Prompt,
    ReplicaStatus,
    TextGenerator,
)
from shoal.core.recording import name_error, record_attempt
from shoal.core.threads import Threads
from shoal.errors import EngineFailed, InvalidValue, Overloaded, ShoalError, TransportFailed, Unavailable, Unsupported
from shoal.types import BatchTask, Chunk, Context, Generate, Result, Sampling, Usage

logger = logging.getLogger("shoal.core")

CHOICES_AT_ONCE = 16
"""Choices of one request that run concurrently; the others wait."""

INLINE_CHARS = 4_000
"""Prompts up to this size are rendered and tokenized on the event loop (about 100 us); a thread hop costs as much."""

MESSAGE_CHARS = 64

UNBOUNDED_TOKENS = 1024
"""Token limit when neither the request, the settings nor the context sets one and the model requires one."""

PATIENCE_S = 10.0
"""Seconds to wait for a first piece before preferring other replicas."""

SEEDS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Generation settings of one model.

    `model` is its name here. `sampling` holds its defaults (supported fields only). `default_max_tokens` is the answer
    length if a request sets none (0: whatever fits the context). Unsupported fields in `ignore` are ignored. A replica
    that keeps a request for `patience_s` without a first piece is avoided. `routing`: how replicas are chosen.
    """

    model: str
    sampling: Sampling = UNSET
    default_max_tokens: int = 0
    ignore: frozenset[str] = frozenset()
    threads: Threads | None = None
    patience_s: float = PATIENCE_S
    routing: Routing = "session"


@dataclass(slots=True)
class _Answer:
    """One choice in progress, with its part of the usage.

    `task` has the sampling in effect. Shoal ends the answer after `limit` tokens, because the backend cannot. `echo` is
    emitted with the first piece: alone it would count as the first token. `reason` is the finish reason, "" so far.
    """

    task: Generate
    prompt: Prompt
    decoder: Decoder
    limit: int | None
    echo: list[Chunk]
    reason: str
    prompt_tokens: int | None = None
    cached_tokens: int = 0

    def push(self, piece: Piece) -> list[Chunk]:
        """Return the chunks of a piece. If it ends the answer, `reason` is set."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens
        decoder = self.decoder
        chunks = decoder.push(piece)
        if self.echo:
            chunks = self.echo + chunks
            self.echo = []
        if decoder.stopped:
            self.reason = "stop"
        elif self.limit is not None and decoder.tokens >= self.limit:
            self.reason = "length"
        else:
            self.reason = piece.finish_reason or ""
        return chunks

    def finish(self) -> list[Chunk]:
        """Return the last chunks, after the last piece."""
        most = self.task.sampling.max_tokens
        if not self.reason:
            self.reason = "length" if most is not None and self.decoder.tokens >= most else "stop"
        return self.echo + self.decoder.flush(self.reason)


@dataclass(slots=True)
class _Request:
    """The answers of a request, by prompt. `best_of` of each prompt are generated. `cut`, `ignored` and `replica` are
    those of Chunk, for the first one; `is_marked`: that one has them, or there are none."""

    prompts: Sequence[Prompt]
    best_of: int
    cut: int
    ignored: tuple[str, ...]
    answers: list[list[_Answer]] = field(default_factory=list)
    replica: int | None = None
    is_marked: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_marked = not (self.cut or self.ignored)

    def set_replica(self, number: int) -> None:
        self.replica = number
        self.is_marked = False

    def mark(self, chunk: Chunk) -> Chunk:
        """Return the chunk, which is the first one, with what is to be said of the request."""
        self.is_marked = True
        return msgspec.structs.replace(chunk, cut=self.cut, ignored=self.ignored, replica=self.replica)

    def usage(self) -> Usage:
        """Sum the usage. A backend's prompt count takes precedence over ours: it saw what the model actually read."""
        prompt = cached = completion = reasoning = 0
        for each, answers in zip(self.prompts, self.answers, strict=True):
            reported = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
            prompt += reported[0] if reported else estimate_prompt_tokens(each)
            cached += max((answer.cached_tokens for answer in answers), default=0)
            completion += sum(answer.decoder.tokens for answer in answers)
            reasoning += sum(answer.decoder.reasoning_tokens for answer in answers)
        return Usage(
            prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, reasoning_tokens=reasoning
        )


def estimate_prompt_tokens(prompt: Prompt) -> int:
    """Count the tokens of a prompt; estimate four bytes per token if no tokenizer counted them."""
    return prompt.tokens if prompt.tokens is not None else max(1, len(prompt.text.encode()) // 4)


class GenerationRunner:
    """Generates through the identical replicas of one model."""

    def __init__(
        self,
        pipeline: ChatPipeline,
        generators: Sequence[TextGenerator],
        facts: ModelFacts,
        options: GenerationOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.generators = generators
        self.options = options
        self._clock = clock
        self._facts = facts
        self._selector = ReplicaSelector([each.facts.name for each in generators], options.patience_s, clock)
        self._generator_facts = generators[0].facts
        self._logged_names: set[str] = set()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        raise Unsupported(f"the model {task.model!r} only generates text", param="model")

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        if task.choices == 1 and (task.best_of or 1) == 1:
            return self._stream_single(task, ctx)
        return self._stream_choices(task, ctx)

    async def _stream_single(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        """Stream a request of one answer: with the loop of `_stream_answer`, because a generator around that one would
        be another step for every token."""
        request = await self._prepare(task)
        ((answer,),) = request.answers
        if not answer.reason:
            async with self._open_pieces(answer, ctx) as (number, first, pieces):
                if len(self.generators) > 1:
                    request.set_replica(number)
                piece = first
                while piece is not None:
                    for chunk in answer.push(piece):
                        yield chunk if request.is_marked else request.mark(chunk)
                    piece = None if answer.reason else await anext(pieces, None)
        for chunk in answer.finish():
            yield chunk if request.is_marked else request.mark(chunk)
        yield Chunk(usage=request.usage())

    async def _stream_choices(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        request = await self._prepare(task)
        streams = [self._stream_answer(answer, ctx) for answers in request.answers for answer in answers]
        chunks = merge_streams(streams, at_once=CHOICES_AT_ONCE)
        if request.best_of > task.n:
            chunks = _select_best(task, chunks, request.best_of)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk if request.is_marked else request.mark(chunk)
        yield Chunk(usage=request.usage())

    def check(self, task: Generate) -> None:
        self._resolve_sampling(task, [])

    async def count_tokens(self, task: Generate, ctx: Context) -> int:
        """Count the tokens of the rendered prompts, also of those that do not fit, without any work of a replica."""
        self.pipeline.check(task)
        return sum(map(estimate_prompt_tokens, await self._render_prompts(task, whole=True)))

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        for generator in self.generators:
            if isinstance(generator, Breakable):
                generator.when_broken(call)

    def replicas(self) -> list[ReplicaStatus]:
        return [
            self._selector.status(at, generator.facts.name, present=generator.ready())
            for at, generator in enumerate(self.generators)
        ]

    def ready(self) -> bool:
        return any(generator.ready() for generator in self.generators)

    async def aclose(self) -> None:
        await asyncio.gather(*(generator.aclose() for generator in self.generators))

    def _report_ignored(self, names: Sequence[str]) -> None:
        """Log each name once: every answer already lists it in a header."""
        for name in names:
            if name not in self._logged_names:
                self._logged_names.add(name)
                logger.warning("%s does not support %r and answers without it", self.options.model, name)

    def _resolve_sampling(self, task: Generate, ignored: list[str]) -> Sampling:
        """Return the sampling to use and append the ignored fields to `ignored`. Raises errors that concern the task as
        a whole."""
        self.pipeline.check(task)
        if task.adapter and task.adapter not in self._generator_facts.adapters:
            raise InvalidValue(f"this model has no adapter {task.adapter!r}", param="model")
        requested = self._with_tools(task, ignored)
        able = (
            self._generator_facts.parameters
            | APPLIED_BY_SHOAL
            | (TOKEN_ID_FIELDS if self._generator_facts.output_mode == "ids" else frozenset())
        )
        sampling = merge_sampling(
            requested, self.options.sampling, able, self.options.ignore, task.names, ignored=ignored
        )
        sampling = self._with_logprobs(task, sampling, ignored)
        check_unsupported_fields(task.extras, self.options.ignore, ignored=ignored)
        if task.echo and sampling.logprobs is not None:
            raise Unsupported(
                "this model does not return log probabilities of prompt tokens: omit 'echo' or 'logprobs'",
                param="logprobs",
            )
        if sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
            raise InvalidValue(
                f"min_tokens {sampling.min_tokens} is greater than max_tokens {sampling.max_tokens}: lower it",
                param="min_tokens",
            )
        if task.best_of is not None and task.best_of > task.n:
            if "logprobs" not in self._generator_facts.parameters:
                if "best_of" not in self.options.ignore:
                    why = "this model does not return the scores that 'best_of' needs: omit 'best_of'"
                    raise Unsupported(why, param="best_of")
                ignored.append("best_of")
            elif sampling.logprobs is None:
                sampling = msgspec.structs.replace(sampling, logprobs=0)
        return sampling

    def _with_logprobs(self, task: Generate, sampling: Sampling, ignored: list[str]) -> Sampling:
        most, requested = self._generator_facts.top_logprobs, sampling.logprobs
        if most is None or requested is None or requested <= most:
            return sampling
        name = "top_logprobs" if task.messages else "logprobs"
        if name not in self.options.ignore and "top_logprobs" not in self.options.ignore:
            raise Unsupported(
                f"this model's engine returns only the probability of the chosen token: send {name} {most} (the "
                "operator can ignore larger values with top_logprobs in ignore_parameters)",
                param=name,
            )
        ignored.append(name)
        return msgspec.structs.replace(sampling, logprobs=most)

    def _with_tools(self, task: Generate, ignored: list[str]) -> Sampling:
        """Return the requested sampling, with a guide that forces a tool call where one is required, and that keeps
        calls valid elsewhere, and possible beside a requested guide, if the model can follow one."""
        facts = self._generator_facts
        required = task.tool_choice in ("required", "function")
        requested = task.sampling.guide
        if not task.tools or not (required or facts.structural_tags or requested):
            return task.sampling
        if required and requested:
            raise InvalidValue(
                f"an answer cannot be both a tool call and match {requested.field!r}: omit one of them",
                param=requested.field,
            )
        guide = self.pipeline.tools_guide(task, tags=facts.structural_tags) if "guide" in facts.parameters else None
        if guide is not None:
            return msgspec.structs.replace(task.sampling, guide=guide)
        if not required:
            return task.sampling
        if "tool_choice" not in self.options.ignore:
            raise Unsupported(
                "this model cannot be forced to call a tool: use tool_choice 'auto' (the operator can accept other "
                "values with ignore_parameters)",
                param="tool_choice",
            )
        ignored.append("tool_choice")
        return task.sampling

    async def _render_prompts(self, task: Generate, *, whole: bool = False) -> list[Prompt]:
        threads = self.options.threads
        if threads is None or _estimate_chars(task) <= INLINE_CHARS:
            return self.pipeline.prompts(task, whole=whole)
        return await threads.run(lambda: self.pipeline.prompts(task, whole=whole))

    async def _prepare(self, task: Generate) -> _Request:
        """Return the request with its answers, of which none has started."""
        ignored: list[str] = []
        sampling = self._resolve_sampling(task, ignored)
        prompts = await self._render_prompts(task)
        best_of = task.n if "best_of" in ignored else max(task.best_of or 0, task.n)
        cut = sum(prompt.cut for prompt in prompts)
        names = tuple(dict.fromkeys((*(name for prompt in prompts for name in prompt.ignored), *ignored)))
        request = _Request(prompts, best_of, cut, names)
        self._add_answers(request, task, sampling)
        self._report_ignored(names)
        return request

    def _add_answers(self, request: _Request, task: Generate, sampling: Sampling) -> None:
        """Add `best_of` answers to each prompt, numbered prompt by prompt."""
        seed = sampling.seed
        if seed is None and request.best_of > 1 and "seed" in self._generator_facts.parameters:
            # Some backends use a fixed default seed, which would make all choices identical.
            seed = random.randrange(SEEDS)
        for prompt in request.prompts:
            own = self._with_length(sampling, prompt)
            first = len(request.answers) * request.best_of
            choice_task = msgspec.structs.replace(task, sampling=own)
            answers: list[_Answer] = []
            for number in range(request.best_of):
                decoder = self.pipeline.decoder(choice_task, prompt, first + number, self._generator_facts.output_mode)
                if seed is not None:
                    choice_task = msgspec.structs.replace(
                        choice_task, sampling=msgspec.structs.replace(own, seed=seed + number)
                    )
                answers.append(self._build_answer(choice_task, prompt, decoder))
            request.answers.append(answers)

    def _build_answer(self, task: Generate, prompt: Prompt, decoder: Decoder) -> _Answer:
        most = task.sampling.max_tokens
        limit = most if "max_tokens" not in self._generator_facts.parameters else None
        echo = [Chunk(text=prompt.text, index=decoder.index)] if task.echo and prompt.text else []
        return _Answer(task, prompt, decoder, limit, echo, "length" if most == 0 else "")

    def _with_length(self, sampling: Sampling, prompt: Prompt) -> Sampling:
        """Limit the answer to the requested length and the room left in the context."""
        room = None
        if self._generator_facts.context_tokens is not None and prompt.tokens is not None:
            room = max(1, self._generator_facts.context_tokens - prompt.tokens)
        most = sampling.max_tokens
        if most is None:
            most = self.options.default_max_tokens or room
        if most is None and "max_tokens" in self._generator_facts.parameters:
            most = UNBOUNDED_TOKENS
        if most is not None and room is not None:
            most = min(most, room)
        return sampling if most == sampling.max_tokens else msgspec.structs.replace(sampling, max_tokens=most)

    def _to_backend_sampling(self, task: Generate) -> Sampling:
        """Return the sampling for the backend, with only the fields it supports."""
        sampling = self.pipeline.to_backend_sampling(task, task.sampling)
        able = self._generator_facts.parameters
        lacking = {name: None for name in ("max_tokens", "skip_special_tokens", "include_stop") if name not in able}
        return msgspec.structs.replace(sampling, **lacking) if lacking else sampling

    async def _stream_answer(self, answer: _Answer, ctx: Context) -> AsyncGenerator[Chunk]:
        """Stream one of several answers."""
        if not answer.reason:
            async with self._open_pieces(answer, ctx) as (_, first, pieces):
                piece = first
                while piece is not None:
                    for chunk in answer.push(piece):
                        yield chunk
                    piece = None if answer.reason else await anext(pieces, None)
        for chunk in answer.finish():
            yield chunk

    @asynccontextmanager
    async def _open_pieces(
        self, answer: _Answer, ctx: Context
    ) -> AsyncGenerator[tuple[int, Piece | None, AsyncGenerator[Piece]]]:
        """Open one answer on a replica: its number, its first piece (None: it has none) and the later ones. Falls back
        to another replica if that one cannot be reached, or is full, before its first piece."""
        task = answer.task
        sampling = self._to_backend_sampling(task)
        demand = NO_DEMAND
        if len(self.generators) > 1:
            demand = estimate_demand(task, ctx, self.options.routing)
        tried: set[int] = set()
        while True:
            number = self._pick_replica(tried, demand)
            tried.add(number)
            generate = self.generators[number].generate
            began = self._selector.begin(number, demand)
            opened = answered = failed = False
            started, problem = self._clock(), ""
            try:
                async with aclosing(
                    generate(answer.prompt, sampling, ctx, adapter=task.adapter, stream=task.stream)
                ) as pieces:
                    first = await anext(pieces, None)
                    opened, answered = True, first is not None
                    if answered:
                        self._selector.record_first_piece(number)
                    yield number, first, pieces
                return
            except BaseException as error:
                problem = name_error(error)
                failed = isinstance(error, TransportFailed | EngineFailed)
                lacks_place = isinstance(error, TransportFailed | Overloaded)
                if opened or not lacks_place or not self._untried_replicas(tried):
                    raise
            finally:
                self._selector.end(number, began, answered=answered, failed=failed, demand=demand)
                record_attempt(self.generators[number].facts.name, started, self._clock(), problem)

    def _untried_replicas(self, tried: Collection[int]) -> list[int]:
        return [at for at, generator in enumerate(self.generators) if at not in tried and generator.ready()]

    def _pick_replica(self, tried: Collection[int], demand: Demand) -> int:
        """Pick a replica's number. Raises Unavailable if none is ready."""
        there = self._untried_replicas(tried)
        if not there:
            raise Unavailable(f"no replica of {self.options.model!r} is available: try again soon", retry_after=1.0)
        return self._selector.pick(there, demand)


async def _select_best(task: Generate, chunks: AsyncGenerator[Chunk], best_of: int) -> AsyncGenerator[Chunk]:
    """Yield the `n` likeliest of `best_of` answers to each prompt, by mean log probability of the tokens."""
    found: dict[int, list[Chunk]] = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            found.setdefault(chunk.index, []).append(chunk)
    with_logprobs = task.sampling.logprobs is not None
    for prompt in range(max(1, len(task.prompts))):
        own = [found[index] for index in range(prompt * best_of, (prompt + 1) * best_of)]
        for number, answer in enumerate(sorted(own, key=_mean_logprob, reverse=True)[: task.n]):
            for chunk in answer:
                logprobs = chunk.logprobs if with_logprobs else []
                yield msgspec.structs.replace(chunk, index=prompt * task.n + number, logprobs=logprobs)


def _mean_logprob(answer: Sequence[Chunk]) -> float:
    values = [each.logprob for chunk in answer for each in chunk.logprobs]
    return sum(values) / len(values) if values else float("-inf")


def _estimate_chars(task: Generate) -> int:
    """Estimate the characters to render and tokenize; each message counts MESSAGE_CHARS extra."""
    size = sum(len(prompt) for prompt in task.prompts) + MESSAGE_CHARS * len(task.messages)
    for message in task.messages:
        parts = message.content if isinstance(message.content, list) else ()
        size += len(message.content) if isinstance(message.content, str) else 0
        size += sum(MESSAGE_CHARS + len(part.text) for part in parts)
        size += sum(MESSAGE_CHARS + len(call.arguments) for call in message.tool_calls) + len(message.reasoning or "")
    if task.tools or task.template_kwargs:
        size += len(_ENCODER.encode((task.tools, task.template_kwargs)))
    return size


_ENCODER = msgspec.msgpack.Encoder()
