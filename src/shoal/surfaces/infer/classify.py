"""/classify_image, with labels of the model or of the request, and the routes that describe a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.image_text_scoring import score_image_texts
from shoal.core.protocols import ModelFacts
from shoal.errors import EmptyInput, InvalidValue, ModelNotFound, TooManyInputs, Unsupported
from shoal.http.images import ImageReader
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.infer import images, models, wire
from shoal.surfaces.infer.bodies import ImageBodyDecoder
from shoal.surfaces.infer.embed import download_headers, encode_timing
from shoal.surfaces.infer.errors import MissingParameter
from shoal.surfaces.shared import batch_headers, default_models, model_jobs, vector_encoding
from shoal.surfaces.shared.listing import list_models
from shoal.types import Classify, Image, Result, Vectors

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class ClassifyImage:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._image_reader = options.image_reader or ImageReader()
        self._decode = ImageBodyDecoder(wire.ClassifyImageRequest, ("image", "labels"), self._limit)

    async def __call__(self, request: Request) -> Reply:
        parsed = await self._decode(request)
        sources, labels = parsed.images or (), parsed.body.labels
        images.check_count(sources, self._limit)
        self._check_labels(labels, len(sources))
        card = await default_models.wake_model(self._gateway, request, models.find_model(self._gateway, parsed.body))
        assert card.facts is not None
        _check_supported(parsed.body, card.facts)
        request.items = len(sources) + len(labels or ())
        inputs = await images.read_images(self._image_reader, sources, request, download_headers(parsed.body))
        scores, result = await self._score(request, card.name, card.facts, inputs, labels)
        request.result = result
        body = await vector_encoding.encode_rows(
            vector_encoding.to_contiguous(scores),
            lambda _, row: vector_encoding.encode_numbers(row),
            b'{"probabilities":[',
            encode_timing(request),
        )
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)

    async def _score(
        self, request: Request, model: str, facts: ModelFacts, inputs: Sequence[Image], labels: Sequence[str] | None
    ) -> tuple[Vectors, Result]:
        if labels is None or facts.contrast is None:
            scored = await self._gateway.run(Classify(model=model, inputs=[*inputs]), request.context())
            return scored.scores, scored
        found = await score_image_texts(self._gateway.run, model, inputs, labels, request.context(), facts.contrast)
        return found.scores, found.embedded

    def _check_labels(self, labels: Sequence[str] | None, count: int) -> None:
        """Raise EmptyInput or TooManyInputs for invalid labels. Each label counts as an input, as each image does."""
        if labels is None:
            return
        if not labels:
            raise EmptyInput("`labels` is an empty list; send at least two, or omit it.", param="labels")
        if len(labels) + count > self._limit:
            raise TooManyInputs(
                f"`labels` and `image` have more than {self._limit} inputs in total; split the request.",
                param="labels",
            )


def _check_supported(body: wire.ClassifyImageRequest, facts: ModelFacts) -> None:
    """Raise Unsupported if the model cannot classify the images, with the original's message if it has one."""
    titled = models.format_title(body)
    if "image" not in facts.modalities:
        raise Unsupported(f"{titled} does not support image inference.", param="model_name")
    if body.labels is None and "classify" not in facts.tasks:
        other = "" if facts.contrast is None else " Send `labels` to compare with the image."
        raise Unsupported(f"{titled} is not a classification model.{other}", param="model_name")
    if body.labels is not None and facts.contrast is None:
        raise Unsupported(
            f"{titled} does not compare images with texts; omit `labels`, or name a CLIP model.", param="labels"
        )


@dataclass(frozen=True, slots=True)
class _Query:
    """The model named in a query, with the same fields as in bodies."""

    model_name: str
    pretrained: str | None


class FactsEndpoints:
    """The routes that describe a served model."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def labels(self, request: Request) -> Reply:
        query, facts = await self._find_facts(request)
        if "classify" not in facts.tasks:
            raise Unsupported(f"Model {query.model_name} is not a classification model.", param="name")
        return model_jobs.json_reply(wire.ModelLabels(labels=list(facts.labels)))

    async def size(self, request: Request) -> Reply:
        query, facts = await self._find_facts(request)
        if "embed" not in facts.tasks:
            raise Unsupported(f"Model {query.model_name} is not an embedding model.", param="name")
        if not facts.dimension:
            raise Unsupported(
                f"Model {query.model_name} does not report the dimension of its vectors; embed a text to find out.",
                param="name",
            )
        return model_jobs.json_reply(wire.EmbeddingSize(size=facts.dimension))

    async def _find_facts(self, request: Request) -> tuple[_Query, ModelFacts]:
        """Find the facts of the model in the query, and wake it if needed.

        Raises MissingParameter, ModelNotFound for an unknown model, and InvalidValue for one that is not loaded.
        """
        name = request.query_parameter("name") or request.query_parameter("model_name")
        if not name:
            raise MissingParameter("name")
        query = _Query(name, request.query_parameter("pretrained"))
        try:
            card = models.find_model(self._gateway, query)
        except InvalidValue:
            stored = await models.resolve_name(self._gateway, query)
            if stored in {each.name for each in await list_models(self._gateway)}:
                raise
            raise ModelNotFound(
                f"Model {name} does not exist in the repository; see GET /repository_models.",
                param="name",
            ) from None
        card = await default_models.wake_model(self._gateway, request, card)
        assert card.facts is not None
        return query, card.facts
