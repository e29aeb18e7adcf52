"""POST /, /invocations and /vertex of text-embeddings-inference: the model and the body tell which route is meant."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from shoal.errors import EmptyInput, InvalidValue, Malformed, ShoalError, TooManyInputs, WrongType
from shoal.http.json import decoder
from shoal.http.json.objects import split_objects
from shoal.http.json.refused import UnreadField, is_set
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.shared import default_models, matrices
from shoal.surfaces.tei import replies, wire

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Endpoint: TypeAlias = Callable[[Request], Awaitable[Reply]]

MAX_CONCURRENT_INPUTS = 64
"""Inputs of one request's instances that are answered side by side; an instance of more is answered by itself."""

QUEUE_DIVISOR = 4
"""One part of so many of the queue is for one such request: it must not be refused for what it holds itself."""

MAX_REPLY_BYTES = 12 * matrices.MAX_NUMBERS
"""Of all answers of one request together."""


class _Shape(msgspec.Struct, kw_only=True):
    """What of a body tells where it belongs; the rest is skipped."""

    inputs: UnreadField = msgspec.UNSET
    texts: UnreadField = msgspec.UNSET
    model: str | None = None


class TeiDefault:
    """A body with `texts` reranks, one whose `inputs` is an object compares. Of all others the model decides: it
    classifies, or gives sparse vectors, or dense ones."""

    def __init__(
        self,
        gateway: Gateway,
        options: Options,
        *,
        embed: Endpoint,
        embed_sparse: Endpoint,
        similarity: Endpoint,
        predict: Endpoint,
        rerank: Endpoint,
    ) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._shape = msgspec.json.Decoder(_Shape)
        self._at_once = max(1, min(MAX_CONCURRENT_INPUTS, options.max_queue_items // QUEUE_DIVISOR))
        # Nothing is made of what is inside: it is cut into bodies.
        shell: Any = msgspec.defstruct(
            "TeiVertexRequest", [("instances", msgspec.Raw)], bases=(wire.TeiVertexRequest,), kw_only=True
        )
        self._vertex: decoder.Decoder[Any] = decoder.Decoder(shell, "tei")
        self._embed, self._embed_sparse, self._predict = embed, embed_sparse, predict
        self._similarity, self._rerank = similarity, rerank

    async def default(self, request: Request) -> Reply:
        endpoint = await self._choose_endpoint(request)
        return await endpoint(request)

    async def vertex(self, request: Request) -> Reply:
        """Each instance is a body of its own. They are answered in order, small ones side by side; the first that fails
        speaks for the request, and none that comes after it begins."""
        asked = await self._vertex.decode_async(request.body)
        try:
            instances = await split_objects(memoryview(asked.instances), "instances", self._limit)
        except msgspec.ValidationError as error:
            raise decoder.to_request_error(error, request.body) from None
        if not instances:
            raise EmptyInput("`instances` cannot be empty", param="instances")
        replies.check_count(len(instances), self._limit)
        pieces = [b'{"predictions":[']
        size = 0
        for some in _group_instances(instances, self._at_once):
            found = await asyncio.gather(
                *(self._answer_instance(request, instances[at], at) for at in some), return_exceptions=True
            )
            for at, body in zip(some, found, strict=True):
                if isinstance(body, BaseException):
                    raise body
                size += sum(map(len, body))
                pieces += [b",", *body] if at else body
            if size > MAX_REPLY_BYTES:
                raise TooManyInputs(
                    f"'instances' come to more than the {MAX_REPLY_BYTES} bytes of one answer: split them.",
                    param="instances",
                )
        return Reply(200, [JSON], [*pieces, b"]}"])

    async def _answer_instance(self, request: Request, instance: memoryview, at: int) -> list[bytes]:
        """What the instance is answered. Raises as `default` does, with its place."""
        one = copy.copy(request)
        one.body = bytes(instance)
        try:
            reply = await self.default(one)
        except (WrongType, Malformed) as error:
            raise InvalidValue(f"instances[{at}]: {error.message}", param="instances") from None
        except ShoalError as error:
            raise error.with_message(f"instances[{at}]: {error.message}") from error
        finally:
            request.model, request.handed_over = one.model, request.handed_over or one.handed_over
            request.items += one.items
        assert isinstance(reply.body, bytes | list)
        return reply.body if isinstance(reply.body, list) else [reply.body]

    async def _choose_endpoint(self, request: Request) -> Endpoint:
        shape = await self._decode_shape(request.body)
        if is_set(shape.texts):
            return self._rerank
        if shape.inputs is not msgspec.UNSET and bytes(memoryview(shape.inputs)[:1]) == b"{":
            return self._similarity
        card = await default_models.wake_model(
            self._gateway, request, default_models.find_main_model(self._gateway, shape.model)
        )
        assert card.facts is not None
        if {"rerank", "classify"} & set(card.facts.tasks):
            return self._predict
        return self._embed_sparse if default_models.is_sparse(card.facts) else self._embed

    async def _decode_shape(self, body: bytes) -> _Shape:
        if len(body) > decoder.LARGE:
            await asyncio.sleep(0)
        try:
            return self._shape.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise decoder.to_request_error(error, body) from None


def _group_instances(instances: Sequence[memoryview], most: int) -> Iterator[range]:
    """Places of neighbours that hold no more than `most` inputs together, or of one alone.

    A body has no more inputs than commas and one: to count those costs nothing.
    """
    start = held = 0
    for at, instance in enumerate(instances):
        inputs = bytes(instance).count(b",") + 1
        if at > start and held + inputs > most:
            yield range(start, at)
            start, held = at, 0
        held += inputs
    yield range(start, len(instances))
