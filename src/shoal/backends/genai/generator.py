"""The gateway's end of a language model's process: sends requests and receives pieces without blocking the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from copy import copy
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from shoal.backends.genai.compiling import GuideChecker
from shoal.backends.genai.hang_watch import GONE_AT, LOOK_S, Watch
from shoal.backends.genai.messages import (
    GenaiOptions,
    Open,
    Opened,
    Prepare,
    Produced,
    Start,
    decode_produced,
    encode_frame,
)
from shoal.backends.genai.process import CLOSE_S, Worker
from shoal.backends.genai.sampling import PARAMETERS
from shoal.core.protocols import GeneratorFacts, Piece, Prompt
from shoal.errors import (
    Crashed,
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    InvalidValue,
    MissingExtra,
    OutOfMemory,
    ShoalError,
    TransportFailed,
)
from shoal.types import Context, Guide, Sampling, TokenLogprob

logger = logging.getLogger("shoal.backends.genai")

OPTIONAL_S = 2.0
"""Maximum seconds to wait for the trial of an optional guide."""

MAX_OPTIONAL_TRIALS = 4
"""With so many formats being compiled, an optional one is not: those that requests depend on would wait for it."""

MAX_OPTIONAL_BYTES = 2**28
"""Bytes of compiled guides from which on new optional ones are not compiled: the model's process keeps them all."""

_ERRORS: dict[str, type[ShoalError]] = {
    each.kind: each for each in (InvalidValue, OutOfMemory, EngineFailed, InternalError)
}


async def start_generator(path: Path, *, name: str, options: GenaiOptions) -> GenaiGenerator:
    """Load a model in a separate process, generate one token and return its generator.

    `path`: a folder with openvino_model.xml, or a .gguf file. Raises ModelFileError, ConfigError, OutOfMemory,
    MissingExtra, and Crashed if the process dies.
    """
    if find_spec("openvino_genai") is None:
        raise MissingExtra("a language model on this machine", "llm")
    worker = await Worker.spawn(name)
    try:
        worker.enqueue(0, encode_frame(Open(path=str(path), options=options)))
        opened = await worker.wait_opened()
    except BaseException:
        await worker.end(0)
        raise
    return GenaiGenerator(name, worker, opened, options, path=path)


class GenaiGenerator:
    """A TextGenerator over one process, from token ids to token ids.

    All answers share one batch. An answer is not paused for a slow reader: unread output, at most `max_tokens` of ids,
    a few bytes each, waits here.
    """

    def __init__(self, name: str, worker: Worker, opened: Opened, options: GenaiOptions, *, path: Path) -> None:
        limits = [limit for limit in (options.context_tokens, opened.cache_tokens) if limit]
        self._facts = GeneratorFacts(
            name=name,
            parameters=PARAMETERS | ({"guide"} if opened.guided else frozenset()),
            structural_tags=opened.guided,
            top_logprobs=0,
            wants_ids=True,
            output_mode="ids",
            context_tokens=min(limits, default=None),
            details={
                "engine": f"openvino-genai {opened.version}",
                "precision": opened.precision,
                "threads": opened.threads,
                "kv_cache_precision": opened.kv_cache_precision,
                "dynamic_quantization": bool(opened.quantized_together),
                "kv_cache_mb": round(opened.cache_bytes / 2**20, 1),
                "kv_cache_tokens": opened.cache_tokens or None,
                "prefix_caching": options.prefix_caching,
            },
        )
        self._vocabulary = opened.vocab_size
        self._trials = GuideChecker(path, opened.vocab_size, self._prepare)
        self._worker = worker
        self._numbers = count(1)
        self._outputs: dict[int, _PendingOutput] = {}
        self._failure: ShoalError | None = None
        self._closed = False
        self._on_broken: Callable[[ShoalError], None] | None = None
        self._watch = Watch(name, ping=worker.ping, on_silent=self._on_silent)
        self._receive_task = asyncio.create_task(self._receive(), name=f"genai-{name}")

    @property
    def facts(self) -> GeneratorFacts:
        return self._facts

    @property
    def pid(self) -> int:
        """The process id of the model's process."""
        return self._worker.process.pid

    def ready(self) -> bool:
        return self._failure is None and not self._watch.silent

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self._on_broken = call
        if self._failure is not None and not self._closed:  # it died before the callback was registered
            asyncio.get_running_loop().call_soon(call, self._failure)

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        ids = self._check_prompt(prompt, adapter)
        number = next(self._numbers)
        start = _encode_start(Start(id=number, ids=ids, sampling=sampling))
        guide = sampling.guide
        if self._failure is None and guide is not None and "guide" in self._facts.parameters:
            if not guide.optional:
                await self._try_guide(guide, ctx)
            elif not await self._can_use(guide, ctx):
                start = _encode_start(Start(id=number, ids=ids, sampling=replace(sampling, guide=None)))
        if self._failure is not None:
            raise copy(self._failure)
        if self._watch.silent:
            raise TransportFailed("the language model's process is not responding: try again later")
        arrivals = self._outputs[number] = _PendingOutput()
        self._worker.enqueue(number, start)
        self._watch.expect_answer()
        ended = False
        try:
            while not ended:
                try:
                    async with asyncio.timeout(ctx.remaining()):
                        piece = await arrivals.next()
                except TimeoutError:
                    raise DeadlineExceeded("the answer did not finish in time: ask for fewer tokens") from None
                except ShoalError:
                    ended = True
                    raise
                ended = piece.finish_reason is not None
                yield piece
        finally:
            self._outputs.pop(number, None)
            if not ended and self._failure is None:
                self._worker.cancel(number)

    async def _try_guide(self, guide: Guide, ctx: Context) -> None:
        try:
            async with asyncio.timeout(ctx.remaining()):
                await self._trials.check(guide)
        except TimeoutError:
            raise DeadlineExceeded("the output format was not compiled in time: try again") from None

    async def _can_use(self, guide: Guide, ctx: Context) -> bool:
        """Whether the model can follow an optional guide now. A trial that takes longer goes on for later requests."""
        is_full = self._trials.size > MAX_OPTIONAL_BYTES or self._trials.pending >= MAX_OPTIONAL_TRIALS
        if is_full and not self._trials.knows(guide):
            return False
        try:
            async with asyncio.timeout(min(OPTIONAL_S, ctx.remaining())):
                await self._trials.check(guide)
        except (TimeoutError, ShoalError) as error:
            if self._failure is not None:
                raise
            logger.debug("%s answers without a guide for its tool calls: %s", self._facts.name, error)
            return False
        return True

    async def _prepare(self, guide: Guide) -> None:
        """Let the model's process compile a guide that passed its trial, while answers continue."""
        if self._failure is not None:
            raise copy(self._failure)
        number = next(self._numbers)
        arrivals = self._outputs[number] = _PendingOutput()
        self._worker.enqueue(number, encode_frame(Prepare(id=number, guide=guide)))
        self._watch.expect_answer()
        try:
            await arrivals.next()
        finally:
            self._outputs.pop(number, None)

    async def aclose(self) -> None:
        self._closed = True
        self._watch.close()
        self._fail_all(TransportFailed("the model was unloaded during the request"))
        await self._trials.aclose()
        await self._worker.end(CLOSE_S)
        self._receive_task.cancel()
        await asyncio.gather(self._receive_task, return_exceptions=True)

    def _check_prompt(self, prompt: Prompt, adapter: str) -> tuple[int, ...]:
        if adapter:
            raise InvalidValue("this model has no adapters", param="model")
        ids = prompt.ids
        if not ids:
            raise InvalidValue("the prompt has no tokens: add some text", param="prompt")
        if self._vocabulary and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise InvalidValue(f"token ids must be between 0 and {self._vocabulary - 1}", param="prompt")
        return tuple(ids)

    async def _receive(self) -> None:
        """Deliver incoming pieces to their readers until the process is gone."""
        try:
            while True:
                for each in decode_produced(await self._worker.read_frame()):
                    arrivals = self._outputs.get(each.id)
                    if arrivals is not None:
                        arrivals.put(each)
                self._watch.record_message(owes=bool(self._outputs))
        except (asyncio.IncompleteReadError, OSError):
            if self._failure is None:  # else this end closed the socket and has set the reason
                self._mark_broken(await self._worker.crash_error())
        except Exception as unforeseen:  # no reader may wait forever for pieces
            logger.exception("cannot decode a message from the process of %s", self._facts.name)
            self._mark_broken(
                EngineFailed(f"the language model's process sent an invalid message ({unforeseen}); load it again")
            )
        await self._worker.end(0)

    def _on_silent(self) -> None:
        """Mark the process as broken and kill it after it stopped answering."""
        waited = LOOK_S * GONE_AT
        self._mark_broken(
            Crashed(f"the language model's process did not answer for {waited:g} s; load the model again")
        )
        self._worker.kill()

    def _mark_broken(self, error: ShoalError) -> None:
        self._watch.close()
        if self._failure is None:
            logger.error("%s: %s", self._facts.name, error.message)
            self._fail_all(error)
            if self._on_broken is not None:
                self._on_broken(error)

    def _fail_all(self, error: ShoalError) -> None:
        if self._failure is None:
            self._failure = error
            for arrivals in self._outputs.values():
                arrivals.fail(copy(error))


def _encode_start(start: Start) -> bytes:
    """Encode a Start as a frame. Raises InvalidValue."""
    try:
        return encode_frame(start)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidValue(
            f"the request cannot be encoded for the model ({error}): use numbers of at most 64 bits, such as a smaller "
            "seed, and no lone surrogates"
        ) from None


class _PendingOutput:
    """The received and unread output of one answer, merged into one piece."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._error: ShoalError | None = None
        self._has_news = asyncio.Event()

    def put(self, made: Produced) -> None:
        if made.error is not None:
            kind, message, param = made.error
            self.fail(_ERRORS.get(kind, EngineFailed)(message, param=param))
            return
        self._ids += made.ids
        self._tokens += made.tokens
        self._logprobs += [_logprob(*entry) for entry in made.logprobs]
        self._finish = made.finish
        self._has_news.set()

    def fail(self, error: ShoalError) -> None:
        self._error = error
        self._has_news.set()

    async def next(self) -> Piece:
        """Wait for output and return all since the last call. An error of the answer is raised after its output."""
        await self._has_news.wait()
        if not self._tokens and self._finish is None and self._error is not None:
            raise self._error
        if self._error is None:
            self._has_news.clear()
        piece = Piece(ids=self._ids, tokens=self._tokens, logprobs=self._logprobs, finish_reason=self._finish)
        self._ids, self._tokens, self._logprobs = [], 0, []
        return piece


def _logprob(token: bytes, logprob: float) -> TokenLogprob:
    text = token.decode(errors="replace")
    return TokenLogprob(token=text, logprob=logprob, data=token if "\ufffd" in text else None)
