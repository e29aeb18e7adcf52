"""Clients that disconnect, in every phase of an answer and with every kind of model: the model sees it within a second.

What Triton promises (its documentation, and as observed with 2.51): a cancelled call reaches models of the python
backend and of backends built on it, which have to check for it, and those of vLLM and TensorRT-LLM. It does not reach
the running step of an ensemble, nor a model called by another one, so Shoal ends these with a separate request that
names the id. A model that is not decoupled takes one request after the other, and notices a disconnected caller only
when it checks: a request still queued inside Triton starts all the same. Here none is queued there: Shoal itself holds
back requests over `max_streams`, and the model never receives them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.llm_conformance_kit import KINDS, Kind, Stack, processes_of, start_stack
from tests.integration.llm_kit import ask, metric, read_until, until, user_messages
from tests.integration.triton_kit import Triton

TEXT = "one two three four five six seven eight"
LONG = {"ignore_eos": True, "max_tokens": 1900, "n": 8}
"""For the embedded engine, whose speed a prompt cannot set."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def stack(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Each model answers one request at a time; the fake model takes half a second per word."""
    with start_stack(triton, tmp_path_factory.mktemp("leaving"), "--max-streams", "1", pace="token_ms=500") as stack:
        yield stack


@pytest.fixture(autouse=True)
def every_model_is_back(stack: Stack) -> None:
    """After a crash of Triton: see `triton_recovers`."""
    until(stack.front.ready)


class Watched:
    """The model's counts so far: answers started and callers that disconnected."""

    def __init__(self, stack: Stack, kind: Kind) -> None:
        self._stack = stack
        self._kind = kind

    @property
    def started(self) -> int:
        if self._kind.sees:
            return self._count_notes("began")
        if self._kind.name == "dynamo":
            return self._stack.dynamo.calls["ModelStreamInfer"]
        if self._kind.name == "upstream":
            return int(metric(self._stack.upstream, "shoal_requests_received_total", model="far"))
        return -1  # not visible from outside

    def expect_disconnect(self) -> Callable[[], bool]:
        """Return a check that the model has noticed one more disconnected caller than now, and is idle."""
        stack, kind = self._stack, self._kind
        if kind.sees:
            before = self._count_notes("cancelled")
            return lambda: self._count_notes("cancelled") > before
        if kind.name == "dynamo":
            cancelled_before = stack.dynamo.cancelled
            return lambda: stack.dynamo.cancelled > cancelled_before
        if kind.name == "upstream":
            count = metric(stack.upstream, "shoal_cancelled_total", model="far")
            return lambda: (
                metric(stack.upstream, "shoal_cancelled_total", model="far") > count
                and metric(stack.upstream, "shoal_requests_in_flight", model="far") == 0
            )
        if kind.name == "embedded":
            [worker] = processes_of(stack.front, "shoal.backends.genai.worker")
            worked = worker.cpu_ticks()
            until(lambda: worker.cpu_ticks() > worked)  # it ends only after its reader disconnects
            return self._idle
        ended = metric(stack.front, "shoal_cancelled_total", model=kind.name)
        return lambda: metric(stack.front, "shoal_cancelled_total", model=kind.name) > ended

    def _idle(self) -> bool:
        """Return whether the engine's process is idle; while it answers, it uses a full core."""
        [worker] = processes_of(self._stack.front, "shoal.backends.genai.worker")
        before = worker.cpu_ticks()
        time.sleep(0.1)
        return worker.cpu_ticks() - before <= 1

    def _count_notes(self, word: str) -> int:
        return sum(line.startswith(f"{self._kind.sees} {word} ") for line in self._stack.triton.noted())


def start_request(stack: Stack, kind: Kind, *, stream: bool, first_ms: int = 0, delay_ms: int = 0) -> socket.socket:
    """Return a connection with a request for a long answer."""
    prompt = stack.prompt_for(kind, TEXT, first_ms=first_ms, delay_ms=delay_ms)
    fields: dict[str, Any] = LONG if kind.name == "embedded" else prompt.fields
    body = {"model": kind.name, "messages": user_messages(prompt.words), "stream": stream, **fields}
    return ask(stack.front, "/v1/chat/completions", body)


def in_flight(stack: Stack, kind: Kind) -> float:
    return metric(stack.front, "shoal_requests_in_flight", model=kind.name)


def is_free(stack: Stack, kind: Kind) -> None:
    """Assert that the model answers the next request: disconnected callers hold no slot."""
    prompt = stack.prompt_for(kind, "ok")
    body = {"model": kind.name, "messages": user_messages(prompt.words), **prompt.fields}
    status, _, answer = stack.front.request("POST", "/v1/chat/completions", body)
    assert (status, b'"ok"' in answer) == (200, True)


@streams
@kinds
def test_while_it_waits_for_its_turn(stack: Stack, kind: Kind, stream: bool) -> None:
    """The model never receives the request. Then the request before it disconnects as well, before its first token."""
    watched = Watched(stack, kind)
    before = watched.started
    with contextlib.closing(start_request(stack, kind, stream=stream, first_ms=5000)) as first:
        until(lambda: in_flight(stack, kind) == 1 and (watched.started > before or before < 0))
        with contextlib.closing(start_request(stack, kind, stream=stream)):
            until(lambda: in_flight(stack, kind) == 2)
            started = watched.started
        until(lambda: in_flight(stack, kind) == 1)
        expect_disconnect = watched.expect_disconnect()
        first.close()
        until(expect_disconnect)
        until(lambda: in_flight(stack, kind) == 0)
    assert watched.started == started
    is_free(stack, kind)


@streams
@kinds
def test_while_it_is_answered(stack: Stack, kind: Kind, stream: bool) -> None:
    """The client disconnects in the middle of a stream, or of a complete answer."""
    watched = Watched(stack, kind)
    before = watched.started
    with contextlib.closing(start_request(stack, kind, stream=stream, delay_ms=400)) as connection:
        if stream and kind.streams:
            read_until(connection, b'"content":"')
        else:
            until(lambda: in_flight(stack, kind) == 1 and (watched.started > before or before < 0))
        expect_disconnect = watched.expect_disconnect()
    until(expect_disconnect)
    until(lambda: in_flight(stack, kind) == 0)
    is_free(stack, kind)
