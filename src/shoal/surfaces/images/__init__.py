"""POST /rank: rank texts by how well they describe an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.core.image_text_scoring import ImageTextScores, score_image_texts
from shoal.core.protocols import ModelFacts, Operation
from shoal.errors import EmptyInput, InvalidValue, ModelNotFound, ShoalError, TooManyInputs, Unsupported, WrongType
from shoal.http.errors import OpenAIError, render_error
from shoal.http.images import ImageReader
from shoal.http.json import decoder
from shoal.http.request import JSON, Options, Reply, Request
from shoal.specs import ContrastSpec
from shoal.surfaces.images import wire as wire
from shoal.surfaces.shared import batch_headers, default_models, input_parsing, ranking
from shoal.types import Array, Image

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

MAX_PAIRS: Final = 65_536
"""Maximum pairs of an image and a text in one reply, a few MB of JSON."""

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), OpenAIError)
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


class Images:
    name = "images"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(
                method="POST",
                path="/rank",
                endpoint=_RankEndpoint(gateway, self._options),
                summary="Rank texts by how well they describe an image",
                request=wire.ImageRankRequest,
                response=(wire.ImageRankResponse, wire.ImagesRankResponse),
                errors=_ERRORS,
                headers=batch_headers.HEADER_DOCS,
                description="With `images` instead of `image`, the response has a ranking for each image.",
                example={"image": f"data:image/png;base64,{_PIXEL}", "texts": ["a red square", "a photo of a cat"]},
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


class _RankEndpoint:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._image_reader = options.image_reader or ImageReader()
        self._decode = decoder.Decoder(wire.ImageRankRequest, "images", options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        references = self._parse_images(payload)
        card = await default_models.wake_model(self._gateway, request, _find_model(self._gateway, payload.model))
        contrast = _require_contrast(card)
        input_parsing.check_modalities(self._gateway, card.name, [*references, *payload.texts])
        request.items = len(references) + len(payload.texts)
        read = await input_parsing.read_images(self._image_reader, references, request, payload.image_download_headers)
        inputs = [each for each in read if isinstance(each, Image)]
        found = await score_image_texts(
            self._gateway.run, card.name, inputs, payload.texts, request.context(), contrast
        )
        request.result = found.embedded
        total = sum(found.embedded.tokens[: len(payload.texts)])
        head = ranking.open_object(
            {"model": card.name, "activation": contrast.activation}, "results" if payload.images is None else "images"
        )
        tail = ranking.close_object({"usage": {"prompt_tokens": total, "total_tokens": total}})
        body = [head, *await _encode_rankings(payload, found), tail]
        return Reply(200, [JSON, *batch_headers.batch_headers(request, found.embedded)], body)

    def _parse_images(self, payload: wire.ImageRankRequest) -> list[input_parsing.ImageReference]:
        """Parse `image` or `images`, and check the number of images and texts.

        Raises WrongType if both are missing, InvalidValue if both are there, EmptyInput and TooManyInputs.
        """
        if payload.image is not None and payload.images is not None:
            raise InvalidValue("'image' and 'images' are mutually exclusive; send one of them.", param="images")
        if payload.image is not None:
            images = [payload.image]
        elif payload.images is not None:
            images = payload.images
        else:
            raise WrongType("Missing required field 'image' (or 'images').", param="image")
        for name, sent in (("images", images), ("texts", payload.texts)):
            if not sent:
                raise EmptyInput(f"'{name}' is an empty list; send at least one.", param=name)
        if "" in payload.texts:
            at = payload.texts.index("")
            raise EmptyInput(f"'texts[{at}]' is empty; omit it or send a text.", param="texts")
        if len(images) + len(payload.texts) > self._limit:
            raise TooManyInputs(
                f"the request has more than {self._limit} images and texts; split it.",
                param="texts",
            )
        if len(images) * len(payload.texts) > MAX_PAIRS:
            raise TooManyInputs(
                f"the request has more than {MAX_PAIRS} pairs of an image and a text; split it.",
                param="images",
            )
        if payload.image is not None:
            return [input_parsing.to_image_reference(payload.image, "image")]
        return [input_parsing.to_image_reference(each, f"images[{at}]") for at, each in enumerate(images)]


def _find_model(gateway: Gateway, name: str | None) -> ModelCard:
    """Find the named model, else the first known to compare images and texts, else the default embedder."""
    if name:
        return gateway.model(name)
    for card in gateway.models():
        if card.facts is not None and _can_compare(card.facts):
            return card
    try:
        return gateway.registry.find("", "embed").card()
    except ModelNotFound:
        if not gateway.models():
            raise
        raise Unsupported(
            "no served model compares images with texts: serve one that does (CLIP, SigLIP)", param="model"
        ) from None


def _can_compare(facts: ModelFacts) -> bool:
    return facts.contrast is not None and {"text", "image"} <= set(facts.modalities)


def _require_contrast(card: ModelCard) -> ContrastSpec:
    if card.facts is None or card.facts.contrast is None:
        raise Unsupported(
            f"the model {card.name!r} does not compare images with texts: name one that does (CLIP, SigLIP)",
            param="model",
        )
    return card.facts.contrast


async def _encode_rankings(payload: wire.ImageRankRequest, found: ImageTextScores) -> list[bytes]:
    """Encode one image's results (`image`), or an entry per image (`images`)."""
    if payload.images is None:
        return await _encode_results(payload, found.cosine[0], found.scores[0])
    pieces: list[bytes] = []
    for at, (cosine, scores) in enumerate(zip(found.cosine, found.scores, strict=True)):
        pieces.append(b'%b{"index":%d,"results":' % (b"," if at else b"[", at))
        pieces += [*await _encode_results(payload, cosine, scores), b"}"]
    return [*pieces, b"]"]


async def _encode_results(payload: wire.ImageRankRequest, cosine: Array, scores: Array) -> list[bytes]:
    def entry(place: int) -> dict[str, Any]:
        return {"index": place, "text": payload.texts[place], "cosine": cosine[place], "score": scores[place]}

    # Sort by cosine, which has the order of the scores: those may be too close to 0 or 1 to distinguish.
    listed = await ranking.encode_results(ranking.sort_descending(cosine, payload.top_n), entry)
    assert isinstance(listed, bytes | list)
    return [listed] if isinstance(listed, bytes) else listed
