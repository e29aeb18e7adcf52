"""This end of a language model's process: requests go out, pieces come in, and the event loop waits for neither."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import IO

from shoal.backends.genai.messages import (
    LENGTH,
    Cancel,
    First,
    GenaiOptions,
    Open,
    Opened,
    Produced,
    Refused,
    Start,
    ToWorker,
    first,
    frame,
    produced,
)
from shoal.backends.genai.sampling import PARAMETERS
from shoal.core.protocols import GeneratorFacts, Piece, Prompt
from shoal.errors import (
    ConfigError,
    Crashed,
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    InvalidValue,
    MissingExtra,
    ModelFileError,
    OutOfMemory,
    ShoalError,
    TransportFailed,
)
from shoal.types import Context, Sampling, TokenLogprob

logger = logging.getLogger("shoal.backends.genai")

CLOSE_S = 2.0
"""How long the process may take to end by itself: it looks up after each step."""

TAIL_BYTES = 2000
"""Of what a process wrote before it died, for the error."""

_ERRORS: dict[str, type[ShoalError]] = {
    each.kind: each for each in (InvalidValue, OutOfMemory, EngineFailed, InternalError)
}


async def open(path: Path, *, name: str, options: GenaiOptions) -> GenaiGenerator:
    """Load a model in a process of its own and answer its generator, which has made a token already.

    `path`: a folder with openvino_model.xml, or a .gguf file. Raises ModelFileError, ConfigError, OutOfMemory,
    MissingExtra, and Crashed when the process dies of it.
    """
    if find_spec("openvino_genai") is None:
        raise MissingExtra("a language model on this machine", "llm")
    worker = await _Worker.spawn(name)
    try:
        worker.say(Open(path=str(path), options=options))
        opened = await worker.opened()
    except BaseException:
        await worker.end(0)
        raise
    return GenaiGenerator(name, worker, opened, options)


class GenaiGenerator:
    """A TextGenerator over one process. It takes token ids and gives token ids.

    Answers run side by side in one batch, and none runs ahead of its reader by more than its own `max_tokens`: what is
    not read yet waits here as ids, a few bytes each.
    """

    def __init__(self, name: str, worker: _Worker, opened: Opened, options: GenaiOptions) -> None:
        limits = [limit for limit in (options.context_tokens, opened.cache_tokens) if limit]
        self._facts = GeneratorFacts(
            name=name,
            parameters=PARAMETERS | ({"guide"} if opened.guided else frozenset()),
            wants_ids=True,
            gives="ids",
            context_tokens=min(limits, default=None),
            details={
                "engine": f"openvino-genai {opened.version}",
                "precision": opened.precision,
                "threads": opened.threads,
                "kv_cache_mb": round(opened.cache_bytes / 2**20, 1),
                "kv_cache_tokens": opened.cache_tokens or None,
                "prefix_caching": options.prefix_caching,
            },
        )
        self._vocabulary = opened.vocab_size
        self._worker = worker
        self._numbers = count(1)
        self._waiting: dict[int, _Arrivals] = {}
        self._broken: ShoalError | None = None
        self._tell_broken: Callable[[ShoalError], None] | None = None
        self._hearing = asyncio.create_task(self._hear(), name=f"genai-{name}")

    @property
    def facts(self) -> GeneratorFacts:
        return self._facts

    @property
    def pid(self) -> int:
        """Of the model's process."""
        return self._worker.process.pid

    def ready(self) -> bool:
        return self._broken is None

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self._tell_broken = call

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        ids = self._checked(prompt, adapter)
        if self._broken is not None:
            raise self._broken
        number = next(self._numbers)
        arrivals = self._waiting[number] = _Arrivals()
        self._worker.say(Start(id=number, ids=ids, sampling=sampling))
        ended = False
        try:
            while not ended:
                try:
                    async with asyncio.timeout(ctx.remaining()):
                        piece = await arrivals.next()
                except TimeoutError:
                    raise DeadlineExceeded("the answer took too long: ask for fewer tokens") from None
                except ShoalError:
                    ended = True
                    raise
                ended = piece.finish_reason is not None
                yield piece
        finally:
            self._waiting.pop(number, None)
            if not ended and self._broken is None:
                self._worker.say(Cancel(id=number))

    async def aclose(self) -> None:
        self._fail(TransportFailed("the model was unloaded while it answered"))
        await self._worker.end(CLOSE_S)
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)

    def _checked(self, prompt: Prompt, adapter: str) -> tuple[int, ...]:
        if adapter:
            raise InvalidValue("this model has no adapters", param="model")
        ids = prompt.ids
        if not ids:
            raise InvalidValue("the prompt has no tokens: write something", param="prompt")
        if self._vocabulary and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise InvalidValue(f"token ids of this model are 0 to {self._vocabulary - 1}", param="prompt")
        return tuple(ids)

    async def _hear(self) -> None:
        """Hand what comes in to who waits for it, until the process is gone."""
        try:
            while True:
                for each in produced(await self._worker.frame()):
                    arrivals = self._waiting.get(each.id)
                    if arrivals is not None:
                        arrivals.put(each)
        except (asyncio.IncompleteReadError, OSError):
            error: ShoalError = await self._worker.died()
        except Exception as unforeseen:  # whatever it is, nobody may wait for pieces that nobody hands out
            logger.exception("what the process of %s says cannot be read", self._facts.name)
            error = EngineFailed(f"the language model's process is not understood ({unforeseen}); load it again")
        if self._broken is None:
            logger.error("%s: %s", self._facts.name, error.message)
            self._fail(error)
            if self._tell_broken is not None:
                self._tell_broken(error)
        await self._worker.end(0)

    def _fail(self, error: ShoalError) -> None:
        if self._broken is None:
            self._broken = error
            for arrivals in self._waiting.values():
                arrivals.fail(error)


class _Arrivals:
    """What came in for one answer and was not read yet, as one piece."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._error: ShoalError | None = None
        self._came = asyncio.Event()

    def put(self, made: Produced) -> None:
        if made.error is not None:
            kind, message, param = made.error
            self.fail(_ERRORS.get(kind, EngineFailed)(message, param=param))
            return
        self._ids += made.ids
        self._tokens += made.tokens
        self._logprobs += [_logprob(*told) for told in made.logprobs]
        self._finish = made.finish
        self._came.set()

    def fail(self, error: ShoalError) -> None:
        self._error = error
        self._came.set()

    async def next(self) -> Piece:
        """What came since the last call. Raises the error that ended the answer, after what came before it."""
        await self._came.wait()
        if not self._tokens and self._finish is None and self._error is not None:
            raise self._error
        if self._error is None:
            self._came.clear()
        piece = Piece(ids=self._ids, tokens=self._tokens, logprobs=self._logprobs, finish_reason=self._finish)
        self._ids, self._tokens, self._logprobs = [], 0, []
        return piece


def _logprob(token: bytes, logprob: float) -> TokenLogprob:
    text = token.decode(errors="replace")
    return TokenLogprob(token=text, logprob=logprob, data=token if "\ufffd" in text else None)


class _Worker:
    """The process, and the socket to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: IO[bytes],
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._output = output

    @classmethod
    async def spawn(cls, name: str) -> _Worker:
        """In a session of its own: a terminal's Ctrl-C is the gateway's to act upon. Raises Crashed."""
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile(prefix="shoal-")  # noqa: SIM115  # closed with the process
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "shoal.backends.genai.worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            output.close()
            raise Crashed(f"the process of {name} cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, output)

    def say(self, message: ToWorker) -> None:
        """Never waits: what the process has not read yet is kept here, and that is prompts of admitted requests."""
        self._writer.write(frame(message))

    async def frame(self) -> bytes:
        """The next one's body. Raises IncompleteReadError or OSError when the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    async def opened(self) -> Opened:
        """What the process says of the loaded model. Raises the SetupError or OutOfMemory for one that it cannot load,
        and Crashed."""
        try:
            answer: First = first(await self.frame())
        except (asyncio.IncompleteReadError, OSError):
            raise await self.died() from None
        if isinstance(answer, Opened):
            return answer
        raise _refusal(answer)

    async def died(self) -> Crashed:
        """The error for a process that has closed its socket."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.process.wait()
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended ({code})"
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        if tail.strip():
            logger.error("the last that a language model's process wrote:\n%s", tail.strip())
        return Crashed(f"the language model's process {how}; the log has its last words; load the model again")

    async def end(self, patience_s: float) -> None:
        """Close the socket, which ends the process; kill it when it is still there after so many seconds."""
        self._writer.close()
        if self.process.returncode is None and patience_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.process.wait()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self._output.close()


def _refusal(refused: Refused) -> ShoalError:
    if refused.kind == "model_file":
        return ModelFileError(refused.message, file=refused.file)
    if refused.kind == "missing_extra":
        return MissingExtra("a language model on this machine", "llm")
    kinds: dict[str, type[ShoalError]] = {"config": ConfigError, "out_of_memory": OutOfMemory}
    return kinds[refused.kind](refused.message)
