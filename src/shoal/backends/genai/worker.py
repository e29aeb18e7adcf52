"""The process of one language model: `python -m shoal.backends.genai.worker SOCKET PARENT`, a descriptor and a pid.

One thread reads the gateway's messages, steps the pipeline and sends the results. It ends after the current step when
the gateway closes the socket. It blocks while the gateway does not read, so output does not accumulate here. On Linux
it is killed with its gateway at once, since a load or a step may take minutes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.backends.genai import process_limits
from shoal.backends.genai.grammar import clean_message
from shoal.backends.genai.messages import (
    LENGTH,
    Cancel,
    LoadRefused,
    Open,
    Prepare,
    Produced,
    Start,
    ToWorker,
    decode_to_worker,
    encode_frame,
)
from shoal.backends.genai.pipeline import Pipeline, open_pipeline
from shoal.backends.genai.sampling import configure
from shoal.errors import ConfigError, EngineFailed, InvalidValue, MissingExtra, ModelFileError, OutOfMemory, ShoalError
from shoal.parent_process import end_with_parent
from shoal.types import Guide

READ_BYTES = 2**18
MAX_RESTARTS = 8
"""Maximum restarts of a request that was evicted from the cache because of other requests."""

UNKNOWN_CAPACITY = 2**31
"""Tokens assumed for a cache of unknown capacity: practically unlimited."""


class GatewayGone(Exception):
    """The gateway closed the socket."""


class MessageSocket:
    """Sends and receives messages over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._send_lock = threading.Lock()

    def receive(self) -> ToWorker:
        """Wait for the next message and return it. Raises GatewayGone."""
        while (message := self._next()) is None:
            self._read()
        return message

    def pending(self) -> list[ToWorker]:
        """Return the messages received so far, without waiting. Raises GatewayGone."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read(socket.MSG_DONTWAIT)  # select() supports no descriptor above 1023
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def send(self, data: bytes) -> None:
        """Send a frame, and wait if the gateway is slow to read. Raises GatewayGone."""
        try:
            with self._send_lock:
                self._sock.sendall(data)
        except OSError:
            raise GatewayGone from None

    def _next(self) -> ToWorker | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: ToWorker = decode_to_worker(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return message

    def _read(self, flags: int = 0) -> None:
        try:
            data = self._sock.recv(READ_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            raise GatewayGone
        self._buffer += data


@dataclass(slots=True)
class _Answer:
    """One answer in progress. `rules`: its GenerationConfig; `max_tokens`: its maximum tokens; `output_ids`: its ids so
    far, including the one that ends it."""

    start: Start
    rules: Any
    max_tokens: int
    handle: Any = None
    output_ids: list[int] = field(default_factory=list)
    tries: int = 0


class GenerationLoop:
    """Runs the active answers of one pipeline."""

    def __init__(self, pipeline: Pipeline, line: MessageSocket) -> None:
        self._pipeline = pipeline
        self._line = line
        self._answers: dict[int, _Answer] = {}
        self._results: list[Produced] = []
        self._vocabulary: dict[int, bytes] = {}
        self._numbers = 0
        self._cancelled = False

    def run(self) -> None:
        """Run until GatewayGone is raised. Raises RuntimeError if a step fails, since every later step would too."""
        while True:
            if not self._answers and not self._cancelled:
                self._dispatch(self._line.receive())
            for message in self._line.pending():
                self._dispatch(message)
            if self._answers or self._cancelled:
                self._step()
            self._flush()

    def _dispatch(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._begin(message)
        elif isinstance(message, Prepare):
            self._compile(message)
        elif isinstance(message, Cancel) and (answer := self._answers.pop(message.id, None)) is not None:
            answer.handle.cancel()
            self._cancelled = True

    def _compile(self, request: Prepare) -> None:
        """Compile a guide in a thread, which also sends the result, so that steps continue."""

        def then(error: ShoalError | None) -> None:
            failed = None if error is None else (error.kind, error.message, error.param)
            with contextlib.suppress(GatewayGone):
                self._line.send(encode_frame([Produced(id=request.id, error=failed)]))

        if self._pipeline.grammars is None:
            then(_no_guide_error(request.guide))
        else:
            self._pipeline.grammars.prepare(request.guide, then)

    def _begin(self, start: Start) -> None:
        if self._cancelled:
            self._step()  # a step frees the memory of cancelled answers, which this one may need
        try:
            rules = self._rules(start)
            answer = _Answer(start, rules, rules.max_new_tokens)
            self._add(answer)
        except ShoalError as error:
            self._fail(start.id, error)
        except (RuntimeError, ValueError, TypeError) as error:
            self._fail(start.id, InvalidValue(f"the model rejected these parameters: {clean_message(error)}"))
        else:
            self._answers[start.id] = answer

    def _rules(self, start: Start) -> Any:
        pipeline, sampling = self._pipeline, start.sampling
        max_answer_tokens = (pipeline.capacity or UNKNOWN_CAPACITY) - len(start.ids)
        if max_answer_tokens <= 0:
            raise _no_room_error(len(start.ids), pipeline.capacity)
        rules = configure(pipeline.rules(), sampling, max_answer_tokens)
        if sampling.guide is not None:
            if pipeline.grammars is None:
                raise _no_guide_error(sampling.guide)
            rules.structured_output_config = pipeline.grammars.structured_output(sampling.guide)
        return rules

    def _add(self, answer: _Answer) -> None:
        """Add an answer to the pipeline, continuing after its tokens so far."""
        self._numbers += 1
        answer.handle = self._pipeline.add(self._numbers, (*answer.start.ids, *answer.output_ids), answer.rules)

    def _step(self) -> None:
        self._cancelled = False
        if self._pipeline.cb.has_non_finished_requests():
            self._pipeline.cb.step()
        lost = []
        for number, answer in list(self._answers.items()):
            status = self._collect(answer)
            if status != "RUNNING":
                del self._answers[number]
            if status == "IGNORED":
                lost.append(answer)
        for answer in lost:
            self._restart(answer)

    def _collect(self, answer: _Answer) -> str:
        """Record what the last step produced for an answer, and return the library's name of its status."""
        status: str = answer.handle.get_status().name
        ids: list[int] = []
        logs: list[float] = []
        reason = "NONE"
        while answer.handle.can_read():
            for output in answer.handle.read().values():
                ids += output.generated_ids
                logs += output.generated_log_probs
                reason = output.finish_reason.name
        answer.output_ids += ids
        finish: Literal["stop", "length"] | None = None
        if status == "FINISHED":
            finish = "length" if reason == "LENGTH" else "stop"
        if ids or finish:
            kept = ids[:-1] if finish == "stop" and self._ends_hidden(answer) else ids
            logprobs = []
            if answer.start.sampling.logprobs is not None:
                logprobs = [(self._token_bytes(one), log) for one, log in zip(kept, logs, strict=False)]
            number = answer.start.id
            self._results.append(Produced(id=number, ids=kept, tokens=len(ids), logprobs=logprobs, finish=finish))
        return status

    def _ends_hidden(self, answer: _Answer) -> bool:
        """Whether the last token ended the answer and is not part of it."""
        sampling = answer.start.sampling
        last = answer.output_ids[-1] if answer.output_ids else None
        return last in answer.rules.stop_token_ids and not (sampling.include_stop and last in sampling.stop_token_ids)

    def _restart(self, answer: _Answer) -> None:
        """Restart an evicted answer after its tokens so far.

        When the cache has no room for any request's next step, the pipeline drops all requests, even those that only
        waited for one just cancelled. An answer that needs more than the whole cache fails, as does one with a guide,
        which cannot begin in the middle: it goes on without an optional one.
        """
        guide = answer.start.sampling.guide if answer.output_ids else None
        needed, capacity = len(answer.start.ids) + len(answer.output_ids), self._pipeline.capacity
        answer.tries += 1
        if capacity and needed >= capacity:
            self._fail(answer.start.id, _no_room_error(needed, capacity))
        elif answer.tries > MAX_RESTARTS or (guide is not None and not guide.optional):
            self._fail(answer.start.id, OutOfMemory("other requests filled the KV cache: raise kv_cache_mb"))
        else:
            if guide is not None:
                answer.rules.structured_output_config = None
            answer.rules.max_new_tokens = answer.max_tokens - len(answer.output_ids)
            answer.rules.min_new_tokens = max(0, answer.rules.min_new_tokens - len(answer.output_ids))
            self._add(answer)
            self._answers[answer.start.id] = answer

    def _token_bytes(self, token: int) -> bytes:
        if not self._vocabulary:
            self._vocabulary = {number: text for text, number in self._pipeline.tokenizer.get_vocab().items()}
        return self._vocabulary.get(token, b"")

    def _fail(self, number: int, error: ShoalError) -> None:
        self._results.append(Produced(id=number, error=(error.kind, error.message, error.param)))

    def _flush(self) -> None:
        """Send the results, even an empty list: a process that sends nothing counts as stuck."""
        results, self._results = self._results, []
        self._line.send(encode_frame(results))

    def fail_all(self, error: RuntimeError) -> None:
        """Send an error for every answer, as the last message of this process."""
        for number in self._answers:
            self._fail(number, EngineFailed(f"the language model failed ({clean_message(error)}); load it again"))
        self._flush()


def _no_guide_error(guide: Guide) -> InvalidValue:
    return InvalidValue(
        "this model does not support structured output: it has no detokenizer; use another model", param=guide.field
    )


def _no_room_error(tokens: int, capacity: int) -> OutOfMemory:
    return OutOfMemory(
        f"{tokens} tokens do not fit into the KV cache of {capacity} tokens: shorten the prompt, lower max_tokens, or "
        "raise kv_cache_mb"
    )


def _open(line: MessageSocket) -> Pipeline:
    """Load the model that the first message names. Raises GatewayGone, also after reporting that the load failed."""
    message = line.receive()
    assert isinstance(message, Open), message
    try:
        return open_pipeline(Path(message.path), message.options)
    except ModelFileError as error:
        refused = LoadRefused(kind="model_file", message=error.message.removeprefix(f"{error.file}: "), file=error.file)
    except MissingExtra as error:
        refused = LoadRefused(kind="missing_extra", message=error.message)
    except ConfigError as error:
        refused = LoadRefused(kind="config", message=error.message)
    except OutOfMemory as error:
        refused = LoadRefused(kind="out_of_memory", message=error.message)
    line.send(encode_frame(refused))
    raise GatewayGone


def main(sock: socket.socket) -> int:
    """Run until the gateway is gone, close the socket and return the exit code."""
    line = MessageSocket(sock)
    with sock, contextlib.suppress(GatewayGone):
        pipeline = _open(line)
        line.send(encode_frame(pipeline.facts))
        steps = GenerationLoop(pipeline, line)
        try:
            steps.run()
        except RuntimeError as error:
            sys.stderr.write(f"a step failed: {error}\n")
            steps.fail_all(error)
            return 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # so that the gateway can log where the library crashed
    process_limits.prefer_oom_kill()
    end_with_parent(int(sys.argv[2]))
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
