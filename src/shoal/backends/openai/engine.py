"""One model of an OpenAI-compatible server as an engine of embeddings, and a watch that brings it back into service."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pybase64

from shoal.backends._http_answer import Answer
from shoal.backends._http_client import Client
from shoal.backends._usage import BYTES_PER_TOKEN, divided, size_of
from shoal.backends.openai.errors import engine_error
from shoal.backends.openai.replicas import LOOK_AGAIN_S, LOOK_S, SLOW_LOOKS, look
from shoal.backends.openai.wire import VectorsWire
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import EngineFailed, InternalError, ShoalError, TransportFailed
from shoal.types import Array, Vectors

logger = logging.getLogger("shoal.openai")

SLOTS = 2
"""Batches in flight: the server has the next one when it is done with the first, and Shoal's batches stay large."""

MAX_BATCH_SIZE = 256

ROWS_AT_ONCE = 64
"""Rows that are decoded before others get the loop: lists of floats take about 50 us a row."""

_LIMIT = re.compile(r"batch size.{0,40}?(?:>|maximum|limit|at most|up to)\D*([0-9]+)\D*$")
_VECTORS = msgspec.json.Decoder(VectorsWire)
_FLOATS = msgspec.json.Decoder(list[float])
_TEXT = msgspec.json.Decoder(str)

Admit = Callable[["UpstreamEngine"], Awaitable[None]]


class UpstreamEngine:
    """Engine over POST /embeddings: {"text": object array [rows] of str} to "embedding" float32 [rows, dimension] and
    "token_count" int64 [rows, 1], the server's count divided by the sizes of the texts.

    `admit` is awaited each time the server comes back and raises a ShoalError to keep it out; it may call `infer`. A
    server that takes only smaller batches says so when it refuses one: from then on they are cut. `counted`: its last
    answer told how many tokens it read.
    """

    def __init__(self, client: Client, model: str, name: str, *, admit: Admit, serving: bool = False) -> None:
        self.client = client
        self.model = model
        self.counted = False
        self.reason = "" if serving else "it was not reached yet"
        self._admit = admit
        self._ready = serving
        self._closed = False
        self._base64 = True
        self._running = 0
        self._idle = asyncio.Event()
        self._wake = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._facts = EngineFacts(
            name=name,
            inputs=("text",),
            outputs=("embedding", "token_count"),
            slots=SLOTS,
            max_batch_size=MAX_BATCH_SIZE,
            padded=False,
            precision="",
            details={"server": client.base},
        )

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def ready(self) -> bool:
        return self._ready

    def start(self) -> None:
        """Begin to watch the server; once."""
        self._watch = asyncio.create_task(self._keep(), name=f"watch {self._facts.name}")

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if self._closed:
            raise TransportFailed(f"{self._facts.name} is closed: send the request again")
        if unknown := set(outputs) - set(self._facts.outputs):
            raise InternalError(f"{self._facts.name} has no output {unknown.pop()!r}")
        self._running += 1
        try:
            vectors, tokens = await self._embedded(inputs["text"].tolist(), deadline)
        except TransportFailed as error:
            self._lost(error)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        found: dict[str, Array] = {"embedding": vectors, "token_count": np.asarray(tokens, dtype=np.int64)[:, None]}
        return {name: found[name] for name in outputs}

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

    async def _embedded(self, texts: list[str], deadline: float) -> tuple[Vectors, list[int]]:
        """The vectors of any number of texts, in calls of as many as the server takes."""
        rows: list[Vectors] = []
        tokens: list[int] = []
        while len(tokens) < len(texts):
            some = texts[len(tokens) : len(tokens) + self._facts.max_batch_size]
            answer = await self._asked(some, deadline)
            if answer is None:
                continue  # it takes fewer at once, and has told how many
            found, counts = await _read(answer, some, self.client.base)
            self.counted = counts is not None
            rows.append(found)
            tokens += counts if counts is not None else [max(1, size_of(text) // BYTES_PER_TOKEN) for text in some]
        if len({each.shape[1] for each in rows}) > 1:
            raise EngineFailed(f"the server at {self.client.base} answered vectors of several lengths")
        return (rows[0] if len(rows) == 1 else np.concatenate(rows)), tokens

    async def _asked(self, texts: list[str], deadline: float) -> Answer | None:
        """The answer to a batch; None where the server has told that it takes smaller ones alone."""
        answer = await self._post(texts, deadline)
        if self._base64 and answer.status in (400, 422) and "encoding_format" in answer.own_words:
            self._base64 = False
            answer = await self._post(texts, deadline)
        if answer.status == 200:
            return answer
        limit = batch_limit(answer.own_words) if answer.status in (400, 413, 422) else None
        if limit is not None and limit < len(texts):
            logger.info("%s takes %d texts at once: batches are cut to that", self._facts.name, limit)
            self._facts = replace(self._facts, max_batch_size=limit)
            return None
        raise engine_error(answer, self.client.base)

    async def _post(self, texts: list[str], deadline: float) -> Answer:
        body = {"model": self.model, "input": texts, "encoding_format": "base64" if self._base64 else "float"}
        return await self.client.post("/embeddings", msgspec.json.encode(body), deadline)

    def _lost(self, error: ShoalError) -> None:
        if self._ready:
            logger.warning("%s is out of service: %s", self._facts.name, error.message)
        self._ready = False
        self.reason = error.message
        self._wake.set()

    async def _keep(self) -> None:
        missed = 0
        while True:
            await self._pause(LOOK_S if self._ready and not missed else LOOK_AGAIN_S)
            try:
                await look(self.client)
                if not self._ready:
                    await self._admit(self)
                    self._ready, self.reason = True, ""
                    logger.info("%s is in service", self._facts.name)
                missed = 0
            except ShoalError as error:
                missed += 1
                if isinstance(error, TransportFailed) or missed >= SLOW_LOOKS:
                    self._lost(error)
                elif not self._ready and error.message != self.reason:
                    logger.warning("%s cannot serve: %s", self._facts.name, error.message)
                    self.reason = error.message
            except Exception as error:  # a bug here must not end the watch: the model would never come back
                logger.exception("watching %s failed in an unforeseen way", self._facts.name)
                self._lost(InternalError(f"watching the server failed: {error!r}"))

    async def _pause(self, seconds: float) -> None:
        """Sleep; a request that loses the server while it serves ends it."""
        if not self._ready:
            await asyncio.sleep(seconds)
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass


def batch_limit(words: str) -> int | None:
    """How many inputs a server takes at once, where a refusal says so, as text-embeddings-inference does."""
    match = _LIMIT.search(words.lower())
    limit = int(next(filter(None, match.groups()))) if match is not None else 0
    return limit or None


async def _read(answer: Answer, texts: Sequence[str], where: str) -> tuple[Vectors, list[int] | None]:
    """The rows of an answer in the order of the texts, and the tokens of each where the server counts. Raises
    EngineFailed for what is not one row for each text, all of one length."""
    try:
        told = _VECTORS.decode(answer.body)
        rows: list[Vectors | None] = [None] * len(texts)
        for place, one in enumerate(told.data):
            at = place if one.index is None else one.index
            if not 0 <= at < len(rows) or rows[at] is not None:
                raise EngineFailed(f"the server at {where} answered {len(told.data)} vectors for {len(texts)} texts")
            rows[at] = _vector(bytes(one.embedding))
            if place % ROWS_AT_ONCE == ROWS_AT_ONCE - 1:
                await asyncio.sleep(0)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EngineFailed(f"the server at {where} answered what are no embeddings: {error}") from None
    found = [row for row in rows if row is not None]
    if len(found) != len(texts):
        raise EngineFailed(f"the server at {where} answered {len(found)} vectors for {len(texts)} texts")
    if len({row.size for row in found}) != 1 or not found[0].size:
        raise EngineFailed(f"the server at {where} answered vectors of several lengths, or of none")
    total = told.usage.told().prompt_tokens if told.usage is not None else 0
    return np.stack(found), divided(total, [size_of(text) for text in texts]) if total else None


def _vector(embedding: bytes) -> Vectors:
    if embedding.startswith(b'"'):
        data = pybase64.b64decode(_TEXT.decode(embedding), validate=True)
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    with np.errstate(over="ignore"):  # what no float32 holds becomes an infinity, which fails its own row alone
        return np.asarray(_FLOATS.decode(embedding), dtype=np.float32)
