"""POST /, /invocations and /vertex of text-embeddings-inference: the model and the body tell which route is meant."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from shoal.errors import EmptyInput, InvalidValue, Malformed, WrongType
from shoal.surfaces import _tei_models, _tei_replies, _wire, _wire_tei
from shoal.surfaces._request import JSON, Options, Reply, Request

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Endpoint: TypeAlias = Callable[[Request], Awaitable[Reply]]

AT_ONCE = 64
"""Instances of one request that are answered side by side."""


class _Shape(msgspec.Struct, kw_only=True):
    """What of a body tells where it belongs; the rest is skipped."""

    inputs: msgspec.Raw = msgspec.Raw(b"")
    texts: msgspec.Raw = msgspec.Raw(b"")
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
        self._vertex = _wire.Decoder(_wire_tei.TeiVertexRequest, "tei")
        self._embed, self._embed_sparse, self._predict = embed, embed_sparse, predict
        self._similarity, self._rerank = similarity, rerank

    async def default(self, request: Request) -> Reply:
        endpoint = await self._endpoint(request)
        return await endpoint(request)

    async def vertex(self, request: Request) -> Reply:
        """Each instance is a body of its own. All are answered; the first that fails speaks for the request."""
        asked = await self._vertex.in_turns(request.body)
        if not asked.instances:
            raise EmptyInput("`instances` cannot be empty", param="instances")
        _tei_replies.check_count(len(asked.instances), self._limit)
        places = asyncio.Semaphore(AT_ONCE)

        async def answered(instance: msgspec.Raw) -> list[bytes]:
            one = copy.copy(request)
            one.body = bytes(instance)
            async with places:
                try:
                    reply = await self.default(one)
                except (WrongType, Malformed) as error:
                    raise InvalidValue(error.message, param="instances") from None
                finally:
                    request.model, request.handed_over = one.model, request.handed_over or one.handed_over
                    request.items += one.items
            assert isinstance(reply.body, bytes | list)
            return reply.body if isinstance(reply.body, list) else [reply.body]

        found = await asyncio.gather(*map(answered, asked.instances), return_exceptions=True)
        pieces = [b'{"predictions":[']
        for at, body in enumerate(found):
            if isinstance(body, BaseException):
                raise body
            pieces += [b",", *body] if at else body
        return Reply(200, [JSON], [*pieces, b"]}"])

    async def _endpoint(self, request: Request) -> Endpoint:
        shape = await self._shape_of(request.body)
        if bytes(shape.texts):
            return self._rerank
        if bytes(shape.inputs).lstrip()[:1] == b"{":
            return self._similarity
        card = await _tei_models.awake(self._gateway, request, _tei_models.main(self._gateway, shape.model))
        assert card.facts is not None
        if {"rerank", "classify"} & set(card.facts.tasks):
            return self._predict
        return self._embed_sparse if _tei_models.is_sparse(card.facts) else self._embed

    async def _shape_of(self, body: bytes) -> _Shape:
        if len(body) > _wire.LARGE:
            await asyncio.sleep(0)
        try:
            return self._shape.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _wire.refusal(error, body) from None
