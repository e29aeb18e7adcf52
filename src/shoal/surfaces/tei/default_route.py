"""POST /, /invocations and /vertex of text-embeddings-inference, which route by the model and the body."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from shoal.errors import InvalidValue, Malformed, ShoalError, TooManyInputs, WrongType
from shoal.http.json import decoder
from shoal.http.json.refused import UnreadField, is_set
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.shared import default_models, matrices
from shoal.surfaces.tei import replies, wire

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Endpoint: TypeAlias = Callable[[Request], Awaitable[Reply]]

MAX_CONCURRENT_INPUTS = 64
"""Maximum inputs of one request's instances processed concurrently; an instance with more is processed alone."""

QUEUE_DIVISOR = 4
"""One request uses at most one part in this many of the queue, so that its own instances cannot overload it."""

MAX_REPLY_BYTES = 12 * matrices.MAX_NUMBERS
"""Maximum bytes of all answers of one request together."""


class _Shape(msgspec.Struct, kw_only=True):
    """The fields that decide the route of a body; the rest is skipped."""

    inputs: UnreadField = msgspec.UNSET
    texts: UnreadField = msgspec.UNSET
    parameters: UnreadField = msgspec.UNSET
    model: str | None = None


class _TeiVertexRequest(wire.TeiVertexRequest, kw_only=True):
    """Instances are not decoded here, but split into bodies."""

    instances: list[msgspec.Raw]  # type: ignore[assignment]


class _ClassificationParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that huggingface_hub sends as `parameters` of a text classification, and for no other task."""

    function_to_apply: UnreadField = msgspec.UNSET
    top_k: UnreadField = msgspec.UNSET


class TeiDefault:
    """Routes a body with `texts` to rerank, and one with an object as `inputs` to similarity.

    A body of huggingface_hub's text classification goes to predict: a text as `inputs`, `parameters` with no fields but
    `function_to_apply` and `top_k`, and no `model`. It sends empty `parameters`, too; then a classifier must be served,
    since other clients may mean anything by that. For all others the model decides: predict, sparse vectors, or dense
    vectors.
    """

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
        self._shape = decoder.Decoder(_Shape, "tei", options.max_inputs, partial=True)
        self._parameters = msgspec.json.Decoder(_ClassificationParameters)
        self._concurrency = max(1, min(MAX_CONCURRENT_INPUTS, options.max_queue_items // QUEUE_DIVISOR))
        self._vertex = decoder.Decoder(_TeiVertexRequest, "tei", options.max_inputs)
        self._embed, self._embed_sparse, self._predict = embed, embed_sparse, predict
        self._similarity, self._rerank = similarity, rerank

    async def default(self, request: Request) -> Reply:
        endpoint = await self._choose_endpoint(request)
        return await endpoint(request)

    async def vertex(self, request: Request) -> Reply:
        """Answer each instance as a separate body, in order, and small ones concurrently.

        The first failure fails the request, and no later group of instances starts.
        """
        payload = await self._vertex.decode_async(request.body)
        instances = [memoryview(each) for each in payload.instances[: self._limit]]
        for at, each in enumerate(instances):
            if bytes(each[:1]) != b"{":
                place = f"instances[{at}]"
                raise decoder.FieldError(
                    f"'{place}' is invalid: expected `object`.", at=place, reason="Expected `object`"
                )
        replies.check_count(len(payload.instances), self._limit)
        pieces = [b'{"predictions":[']
        size = 0
        for some in _group_instances(instances, self._concurrency):
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
                    f"the response to 'instances' exceeds {MAX_REPLY_BYTES} bytes: split them.",
                    param="instances",
                )
        return Reply(200, [JSON], [*pieces, b"]}"])

    async def _answer_instance(self, request: Request, instance: memoryview, at: int) -> list[bytes]:
        """Return the body of an instance's answer. Raises what `default` raises, with the instance's index."""
        one = copy.copy(request)
        one.body = bytes(instance)
        try:
            reply = await self.default(one)
        except (WrongType, Malformed) as error:
            raise InvalidValue(f"instances[{at}]: {error.message}", param="instances") from None
        except ShoalError as error:
            raise error.with_message(f"instances[{at}]: {error.message}") from error
        finally:
            request.model, request.is_handed_over = one.model, request.is_handed_over or one.is_handed_over
            request.items += one.items
        assert isinstance(reply.body, bytes | list)
        return reply.body if isinstance(reply.body, list) else [reply.body]

    async def _choose_endpoint(self, request: Request) -> Endpoint:
        shape = await self._shape.decode_async(request.body)
        if is_set(shape.texts):
            return self._rerank
        if shape.inputs is not msgspec.UNSET and bytes(memoryview(shape.inputs)[:1]) == b"{":
            return self._similarity
        if self._means_classification(shape):
            return self._predict
        card = await default_models.wake_model(
            self._gateway, request, default_models.find_main_model(self._gateway, shape.model)
        )
        assert card.facts is not None
        if {"rerank", "classify"} & set(card.facts.tasks):
            return self._predict
        return self._embed_sparse if default_models.is_sparse(card.facts) else self._embed

    def _means_classification(self, shape: _Shape) -> bool:
        if shape.model is not None or shape.parameters is msgspec.UNSET or shape.inputs is msgspec.UNSET:
            return False
        if bytes(memoryview(shape.inputs)[:1]) != b'"':
            return False
        try:
            found = self._parameters.decode(shape.parameters)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return is_set(found.function_to_apply) or is_set(found.top_k) or default_models.has_classifier(self._gateway)


def _group_instances(instances: Sequence[memoryview], max_inputs: int) -> Iterator[range]:
    """Yield ranges of consecutive instances with at most `max_inputs` inputs together, or with one instance.

    A body has at most one input more than commas, which are cheap to count.
    """
    start = total = 0
    for at, instance in enumerate(instances):
        inputs = bytes(instance).count(b",") + 1
        if at > start and total + inputs > max_inputs:
            yield range(start, at)
            start, total = at, 0
        total += inputs
    yield range(start, len(instances))
