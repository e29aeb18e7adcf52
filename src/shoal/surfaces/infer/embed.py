"""/infer_text, /infer_image and /infer, which embeds texts and pictures side by side."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import orjson

from shoal.core.batch_facts import together
from shoal.core.concurrency import side_by_side
from shoal.errors import EmptyInput, ShoalError, TooManyInputs
from shoal.http.images import Pictures
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.infer import images, models, wire
from shoal.surfaces.infer.bodies import Body, PictureBody
from shoal.surfaces.shared import batch_headers, vector_encoding
from shoal.types import Embed, Embedded, Image, Result, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is the same for all inputs of a request."""

    model: str
    normalize: bool
    dimensions: int | None

    def task(self, inputs: Sequence[TextItem | Image]) -> Embed:
        return Embed(model=self.model, inputs=inputs, normalize=self.normalize, dimensions=self.dimensions)


class Embeds:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._pictures = options.pictures or Pictures()
        self._text = Body(wire.InferTextRequest, ("text",), self._limit)
        self._image = PictureBody(wire.InferImageRequest, ("image",), self._limit)
        self._both = PictureBody(wire.InferRequest, ("text", "image"), self._limit)

    async def infer_text(self, request: Request) -> Reply:
        return await self._texts(request, b"embedding")

    async def embed_text(self, request: Request) -> Reply:
        return await self._texts(request, b"embeddings")

    async def infer_image(self, request: Request) -> Reply:
        return await self._images(request, b"embedding")

    async def embed_image(self, request: Request) -> Reply:
        return await self._images(request, b"embeddings")

    async def infer(self, request: Request) -> Reply:
        """Both sides at once; where one fails, the other is given up and the error says which it was."""
        asked = await self._both(request)
        body, given = asked.body, asked.pictures
        texts = None if body.text is None else self._counted(body.text)
        if given is not None:
            images.check_count(given, self._limit)
        if texts is None and given is None:
            raise EmptyInput("There is nothing to embed; send `text`, `image` or both.", param="text")
        if given is None:
            assert texts is not None
            card = await models.embedder(self._gateway, request, body, "text")
            return await self._embed(request, _wish(card.name, body), texts, b"text_embeddings")
        if texts is None:
            card = await models.embedder(self._gateway, request, body, "image")
            pictures = self._run_pictures(request, _wish(card.name, body), given, headers_of(body))
            return await _reply(request, {b"image_embeddings": await pictures})
        card = await models.embedder(self._gateway, request, body, "text", "image")
        wish = _wish(card.name, body)
        request.items = len(texts) + len(given)
        of_texts, of_pictures = await side_by_side(
            _of_side("text", self._gateway.run(wish.task(texts), request.context())),
            _of_side("image", self._run_pictures(request, wish, given, headers_of(body))),
        )
        return await _reply(request, {b"text_embeddings": of_texts, b"image_embeddings": of_pictures})

    async def _texts(self, request: Request, key: bytes) -> Reply:
        asked = await self._text(request.body)
        texts = self._counted(asked.text)
        card = await models.embedder(self._gateway, request, asked, "text")
        return await self._embed(request, _wish(card.name, asked), texts, key)

    async def _embed(self, request: Request, wish: Wish, texts: list[TextItem], key: bytes) -> Reply:
        request.model, request.items = wish.model, len(texts)
        return await _reply(request, {key: await self._gateway.run(wish.task(texts), request.context())})

    async def _images(self, request: Request, key: bytes) -> Reply:
        asked = await self._image(request)
        given = asked.pictures or ()
        images.check_count(given, self._limit)
        card = await models.embedder(self._gateway, request, asked.body, "image")
        wish = _wish(card.name, asked.body)
        return await _reply(request, {key: await self._run_pictures(request, wish, given, headers_of(asked.body))})

    async def _run_pictures(
        self, request: Request, wish: Wish, given: Sequence[str | bytes], headers: Mapping[str, str]
    ) -> Embedded:
        request.model, request.items = wish.model, request.items or len(given)
        pictures = await images.read(self._pictures, given, deadline=request.deadline, headers=headers)
        return await self._gateway.run(wish.task(pictures), request.context())

    def _counted(self, text: str | list[str]) -> list[TextItem]:
        """Raises EmptyInput and TooManyInputs."""
        texts = [text] if isinstance(text, str) else text
        if not texts:
            raise EmptyInput("`text` is an empty list; send at least one text.", param="text")
        if len(texts) > self._limit:
            raise TooManyInputs(f"`text` holds more than the {self._limit} texts that one request may; split it.")
        return cast(list[TextItem], texts)


def headers_of(body: wire.InferImageRequest | wire.InferRequest | wire.ClassifyImageRequest) -> Mapping[str, str]:
    return body.image_download_headers or body.also_headers or {}


def milliseconds(request: Request) -> bytes:
    """The last field of every answer, and the end of its object."""
    return b'],"processingTimeMs":%b}' % orjson.dumps(round((time.monotonic() - request.started) * 1000, 3))


def _wish(model: str, body: wire.InferTextRequest | wire.InferImageRequest | wire.InferRequest) -> Wish:
    return Wish(model, body.normalize, body.dimensions)


async def _of_side(side: str, work: Coroutine[Any, Any, Embedded]) -> Embedded:
    try:
        return await work
    except ShoalError as error:
        raise error.saying(f"{side}: {error.message}") from error


async def _reply(request: Request, sides: Mapping[bytes, Embedded]) -> Reply:
    results = list(sides.values())
    request.result = result = _together(results)
    pieces: list[bytes] = []
    for key, each in sides.items():
        head = (b'],"%b":[' if pieces else b'{"%b":[') % key
        written = await vector_encoding.joined(
            vector_encoding.contiguous(each.vectors), lambda _, row: vector_encoding.numbers(row), head, b""
        )
        pieces += [written] if isinstance(written, bytes) else written
    pieces.append(milliseconds(request))
    return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], pieces)


def _together(results: Sequence[Embedded]) -> Result:
    """What the headers and the log tell of a request with two sides."""
    if len(results) == 1:
        return results[0]
    return msgspec.structs.replace(
        results[0],
        tokens=[count for result in results for count in result.tokens],
        truncated=sum(result.truncated for result in results),
        facts=together([result.facts for result in results], max),
    )
