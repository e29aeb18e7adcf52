"""Clients that go away, in every phase of an answer and of every kind of model: the model sees it within a second.

What Triton promises (its documentation, and as seen of 2.51): a cancelled call reaches models of the python backend
and of its kin, which have to look for it; so do those of vLLM and TensorRT-LLM. It does not reach the running step of
an ensemble, nor a model that another one calls, so that these are ended by a request of their own that names the id. A
model that is not decoupled takes one request after the other, and hears of a caller that left only while it looks: a
request that still waits inside of Triton is begun all the same. Here none does: Shoal itself holds back what is over
`max_streams`, and the model is never told of it.
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
"""For the embedded engine, which has no pace of its own."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def stack(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One answer of a model at a time; the fake model takes half a second a word."""
    with start_stack(triton, tmp_path_factory.mktemp("leaving"), "--max-streams", "1", pace="token_ms=500") as made:
        yield made


class Watched:
    """What a model has seen so far: answers that it began, and callers that left."""

    def __init__(self, stack: Stack, kind: Kind) -> None:
        self._house = stack
        self._kind = kind

    @property
    def started(self) -> int:
        if self._kind.sees:
            return self._noted("began")
        if self._kind.name == "dynamo":
            return self._house.dynamo.calls["ModelStreamInfer"]
        if self._kind.name == "upstream":
            return int(metric(self._house.upstream, "shoal_requests_received_total", model="far"))
        return -1  # nobody outside sees it

    def left(self) -> Callable[[], bool]:
        """Says whether the model has seen one caller more leave than now, and does nothing any more."""
        stack, kind = self._house, self._kind
        if kind.sees:
            before = self._noted("cancelled")
            return lambda: self._noted("cancelled") > before
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
            until(lambda: worker.cpu_ticks() > worked)  # it is not over before its reader leaves
            return self._idle
        ended = metric(stack.front, "shoal_cancelled_total", model=kind.name)
        return lambda: metric(stack.front, "shoal_cancelled_total", model=kind.name) > ended

    def _idle(self) -> bool:
        """The engine's process uses no processor any more; while it answers, it uses all of one."""
        [worker] = processes_of(self._house.front, "shoal.backends.genai.worker")
        before = worker.cpu_ticks()
        time.sleep(0.1)
        return worker.cpu_ticks() - before <= 1

    def _noted(self, word: str) -> int:
        return sum(line.startswith(f"{self._kind.sees} {word} ") for line in self._house.triton.noted())


def start_request(stack: Stack, kind: Kind, *, stream: bool, first_ms: int = 0, delay_ms: int = 0) -> socket.socket:
    """A connection on which it was asked for an answer that takes long."""
    prompt = stack.prompt_for(kind, TEXT, first_ms=first_ms, delay_ms=delay_ms)
    fields: dict[str, Any] = LONG if kind.name == "embedded" else prompt.fields
    body = {"model": kind.name, "messages": user_messages(prompt.words), "stream": stream, **fields}
    return ask(stack.front, "/v1/chat/completions", body)


def in_flight(stack: Stack, kind: Kind) -> float:
    return metric(stack.front, "shoal_requests_in_flight", model=kind.name)


def is_free(stack: Stack, kind: Kind) -> None:
    """The model answers the next one: no place is held by who has left."""
    prompt = stack.prompt_for(kind, "ok")
    body = {"model": kind.name, "messages": user_messages(prompt.words), **prompt.fields}
    status, _, answer = stack.front.request("POST", "/v1/chat/completions", body)
    assert (status, b'"ok"' in answer) == (200, True)


@streams
@kinds
def test_while_it_waits_for_its_turn(stack: Stack, kind: Kind, stream: bool) -> None:
    """The model never hears of it; then the one before it leaves as well, without a token yet."""
    watched = Watched(stack, kind)
    before = watched.started
    with contextlib.closing(start_request(stack, kind, stream=stream, first_ms=5000)) as first:
        until(lambda: in_flight(stack, kind) == 1 and (watched.started > before or before < 0))
        with contextlib.closing(start_request(stack, kind, stream=stream)):
            until(lambda: in_flight(stack, kind) == 2)
            started = watched.started
        until(lambda: in_flight(stack, kind) == 1)
        left = watched.left()
        first.close()
        until(left)
        until(lambda: in_flight(stack, kind) == 0)
    assert watched.started == started
    is_free(stack, kind)


@streams
@kinds
def test_while_it_is_answered(stack: Stack, kind: Kind, stream: bool) -> None:
    """In the middle of a stream, or of an answer that is wanted whole."""
    watched = Watched(stack, kind)
    before = watched.started
    with contextlib.closing(start_request(stack, kind, stream=stream, delay_ms=400)) as connection:
        if stream and kind.streams:
            read_until(connection, b'"content":"')
        else:
            until(lambda: in_flight(stack, kind) == 1 and (watched.started > before or before < 0))
        left = watched.left()
    until(left)
    until(lambda: in_flight(stack, kind) == 0)
    is_free(stack, kind)
