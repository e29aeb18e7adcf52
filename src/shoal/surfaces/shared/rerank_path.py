"""POST /rerank, which two dialects share: one with `documents` (Jina, Voyage), one with `texts`
(text-embeddings-inference)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.protocols import Operation, Surface
from shoal.errors import InvalidValue, ShoalError, WrongType
from shoal.http.documented_errors import as_tuple
from shoal.http.json import decoder
from shoal.http.json.refused import UnreadField, is_set
from shoal.http.request import ErrorRenderer, Reply, Request

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Endpoint = Callable[[Request], Awaitable[Reply]]


class RerankPath:
    """The surface of the shared path, composed of two surfaces with one route each.

    Errors use the dialect of `texts` until the body is known to hold `documents`. `request` documents both bodies.
    """

    name = "rerank"

    def __init__(self, documents: Surface, texts: Surface, request: Any, max_inputs: int) -> None:
        self.error: Any = texts.error
        self._documents = documents
        self._texts = texts
        self._request = request
        self._max_inputs = max_inputs

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        (documents,) = self._documents.routes(gateway)
        (texts,) = self._texts.routes(gateway)
        return [
            replace(
                documents,
                endpoint=_EitherBody(
                    documents.endpoint, texts.endpoint, self._documents.render_error, self._max_inputs
                ),
                summary="Rank documents, or texts as text-embeddings-inference does",
                request=self._request,
                response=(*as_tuple(documents.response), *as_tuple(texts.response)),
                errors={
                    status: (*as_tuple(documents.errors.get(status, ())), *as_tuple(texts.errors.get(status, ())))
                    for status in {**documents.errors, **texts.errors}
                },
                headers={**documents.headers, **texts.headers},
                description="With `texts`, the response and errors are those of text-embeddings-inference. "
                + documents.description,
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return self._texts.render_error(error)


class _Shape(msgspec.Struct, kw_only=True):
    """The fields that distinguish the two bodies; the rest is skipped."""

    texts: UnreadField = msgspec.UNSET
    documents: UnreadField = msgspec.UNSET


class _EitherBody:
    """Passes a request to the endpoint that matches its body."""

    def __init__(
        self, documents: Endpoint, texts: Endpoint, render_documents_error: ErrorRenderer, max_inputs: int
    ) -> None:
        self._documents = documents
        self._texts = texts
        self._render_documents_error = render_documents_error
        self._shape = decoder.Decoder(_Shape, "rerank", max_inputs, partial=True)

    async def __call__(self, request: Request) -> Reply:
        shape = await self._shape.decode_async(request.body)
        texts, documents = is_set(shape.texts), is_set(shape.documents)
        if texts and documents:
            raise InvalidValue("'documents' and 'texts' are mutually exclusive; send one of them.", param="texts")
        if texts:
            return await self._texts(request)
        if not documents:
            raise WrongType(
                "Missing required field 'documents' (or 'texts', as in text-embeddings-inference).",
                param="documents",
            )
        request.render_error = self._render_documents_error
        return await self._documents(request)
