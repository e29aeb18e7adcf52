"""/infer_text, /infer_image and /infer, which embeds texts and images concurrently."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import orjson

from shoal.core.batch_facts import merge_batch_facts
from shoal.core.concurrency import run_concurrently
from shoal.errors import EmptyInput, ShoalError, TooManyInputs
from shoal.http.images import ImageReader
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.infer import images, models, wire
from shoal.surfaces.infer.bodies import BodyDecoder, ImageBodyDecoder
from shoal.surfaces.shared import batch_headers, vector_encoding
from shoal.types import Embed, Embedded, Image, Result, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """Options that apply to all inputs of a request."""

    model: str
    normalize: bool
    dimensions: int | None

    def to_task(self, inputs: Sequence[TextItem | Image]) -> Embed:
        return Embed(model=self.model, inputs=inputs, normalize=self.normalize, dimensions=self.dimensions)


class EmbedEndpoints:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._image_reader = options.image_reader or ImageReader()
        self._text = BodyDecoder(wire.InferTextRequest, self._limit)
        self._image = ImageBodyDecoder(wire.InferImageRequest, ("image",), self._limit)
        self._both = ImageBodyDecoder(wire.InferRequest, ("text", "image"), self._limit)

    async def infer_text(self, request: Request) -> Reply:
        return await self._embed_texts(request, b"embedding")

    async def embed_text(self, request: Request) -> Reply:
        return await self._embed_texts(request, b"embeddings")

    async def infer_image(self, request: Request) -> Reply:
        return await self._embed_images(request, b"embedding")

    async def embed_image(self, request: Request) -> Reply:
        return await self._embed_images(request, b"embeddings")

    async def infer(self, request: Request) -> Reply:
        """Embed texts and images concurrently. If one side fails, cancel the other and name the side in the error."""
        parsed = await self._both(request)
        body, sources = parsed.body, parsed.images
        texts = None if body.text is None else self._check_texts(body.text)
        if sources is not None:
            images.check_count(sources, self._limit)
        if texts is None and sources is None:
            raise EmptyInput("The request has no inputs; send `text`, `image` or both.", param="text")
        if sources is None:
            assert texts is not None
            card = await models.find_embedder(self._gateway, request, body, "text")
            return await self._embed(request, _to_options(card.name, body), texts, b"text_embeddings")
        if texts is None:
            card = await models.find_embedder(self._gateway, request, body, "image")
            embedded = self._run_images(request, _to_options(card.name, body), sources, download_headers(body))
            return await _build_reply(request, {b"image_embeddings": await embedded})
        card = await models.find_embedder(self._gateway, request, body, "text", "image")
        options = _to_options(card.name, body)
        request.items = len(texts) + len(sources)
        of_texts, of_images = await run_concurrently(
            _name_side("text", self._gateway.run(options.to_task(texts), request.context())),
            _name_side("image", self._run_images(request, options, sources, download_headers(body))),
        )
        return await _build_reply(request, {b"text_embeddings": of_texts, b"image_embeddings": of_images})

    async def _embed_texts(self, request: Request, key: bytes) -> Reply:
        body = await self._text(request.body)
        texts = self._check_texts(body.text)
        card = await models.find_embedder(self._gateway, request, body, "text")
        return await self._embed(request, _to_options(card.name, body), texts, key)

    async def _embed(self, request: Request, options: EmbedOptions, texts: list[TextItem], key: bytes) -> Reply:
        request.model, request.items = options.model, len(texts)
        return await _build_reply(request, {key: await self._gateway.run(options.to_task(texts), request.context())})

    async def _embed_images(self, request: Request, key: bytes) -> Reply:
        parsed = await self._image(request)
        sources = parsed.images or ()
        images.check_count(sources, self._limit)
        card = await models.find_embedder(self._gateway, request, parsed.body, "image")
        options = _to_options(card.name, parsed.body)
        return await _build_reply(
            request, {key: await self._run_images(request, options, sources, download_headers(parsed.body))}
        )

    async def _run_images(
        self, request: Request, options: EmbedOptions, sources: Sequence[str | bytes], headers: Mapping[str, str]
    ) -> Embedded:
        request.model, request.items = options.model, request.items or len(sources)
        inputs = await images.read_images(self._image_reader, sources, request, headers)
        return await self._gateway.run(options.to_task(inputs), request.context())

    def _check_texts(self, text: str | list[str]) -> list[TextItem]:
        """Return the texts as a list. Raises EmptyInput and TooManyInputs."""
        texts = [text] if isinstance(text, str) else text
        if not texts:
            raise EmptyInput("`text` is an empty list; send at least one text.", param="text")
        if len(texts) > self._limit:
            raise TooManyInputs(f"`text` has more than {self._limit} texts; split the request.")
        return cast(list[TextItem], texts)


def download_headers(body: wire.InferImageRequest | wire.InferRequest | wire.ClassifyImageRequest) -> Mapping[str, str]:
    return body.image_download_headers or body.also_headers or {}


def encode_timing(request: Request) -> bytes:
    """Encode the processing time, the last field of every answer, and close the object."""
    return b'],"processingTimeMs":%b}' % orjson.dumps(round((time.monotonic() - request.started) * 1000, 3))


def _to_options(model: str, body: wire.InferTextRequest | wire.InferImageRequest | wire.InferRequest) -> EmbedOptions:
    return EmbedOptions(model, body.normalize, body.dimensions)


async def _name_side(side: str, work: Coroutine[Any, Any, Embedded]) -> Embedded:
    try:
        return await work
    except ShoalError as error:
        raise error.with_message(f"{side}: {error.message}") from error


async def _build_reply(request: Request, sides: Mapping[bytes, Embedded]) -> Reply:
    results = list(sides.values())
    request.result = result = _merge_results(results)
    pieces: list[bytes] = []
    for key, each in sides.items():
        head = (b'],"%b":[' if pieces else b'{"%b":[') % key
        written = await vector_encoding.encode_rows(
            vector_encoding.to_contiguous(each.vectors), lambda _, row: vector_encoding.encode_numbers(row), head, b""
        )
        pieces += [written] if isinstance(written, bytes) else written
    pieces.append(encode_timing(request))
    return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], pieces)


def _merge_results(results: Sequence[Embedded]) -> Result:
    """Merge the results of both sides for the headers and the log."""
    if len(results) == 1:
        return results[0]
    return msgspec.structs.replace(
        results[0],
        tokens=[count for result in results for count in result.tokens],
        truncated=sum(result.truncated for result in results),
        facts=merge_batch_facts([result.facts for result in results], max),
    )
