"""/classify_image, by labels of the model or of the request; and what is known of models by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.image_text_scoring import compare
from shoal.core.protocols import ModelFacts
from shoal.errors import EmptyInput, InvalidValue, ModelNotFound, TooManyInputs, Unsupported
from shoal.http.images import Pictures
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.infer import images, models, wire
from shoal.surfaces.infer.bodies import PictureBody
from shoal.surfaces.infer.embed import headers_of, milliseconds
from shoal.surfaces.infer.errors import NotAsked
from shoal.surfaces.shared import batch_headers, default_models, model_jobs, vector_encoding
from shoal.surfaces.shared.listing import listing
from shoal.types import Classify, Image, Result, Vectors

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class ClassifyImage:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._pictures = options.pictures or Pictures()
        self._decode = PictureBody(wire.ClassifyImageRequest, ("image", "labels"), self._limit)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode(request)
        given, labels = asked.pictures or (), asked.body.labels
        images.check_count(given, self._limit)
        self._check_labels(labels, len(given))
        card = await default_models.awake(self._gateway, request, models.find(self._gateway, asked.body))
        assert card.facts is not None
        _check_able(asked.body, card.facts)
        request.items = len(given) + len(labels or ())
        pictures = await images.read(self._pictures, given, deadline=request.deadline, headers=headers_of(asked.body))
        scores, result = await self._scored(request, card.name, card.facts, pictures, labels)
        request.result = result
        body = await vector_encoding.joined(
            vector_encoding.contiguous(scores),
            lambda _, row: vector_encoding.numbers(row),
            b'{"probabilities":[',
            milliseconds(request),
        )
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)

    async def _scored(
        self, request: Request, model: str, facts: ModelFacts, pictures: Sequence[Image], labels: Sequence[str] | None
    ) -> tuple[Vectors, Result]:
        if labels is None or facts.contrast is None:
            scored = await self._gateway.run(Classify(model=model, inputs=[*pictures]), request.context())
            return scored.scores, scored
        found = await compare(self._gateway.run, model, pictures, labels, request.context(), facts.contrast)
        return found.scores, found.embedded

    def _check_labels(self, labels: Sequence[str] | None, pictures: int) -> None:
        """Raises EmptyInput and TooManyInputs. Each label is an input like each picture."""
        if labels is None:
            return
        if not labels:
            raise EmptyInput("`labels` is an empty list; send at least two, or leave it out.", param="labels")
        if len(labels) + pictures > self._limit:
            raise TooManyInputs(
                f"`labels` and `image` hold more than the {self._limit} inputs that one request may; split it.",
                param="labels",
            )


def _check_able(asked: wire.ClassifyImageRequest, facts: ModelFacts) -> None:
    """Raises Unsupported, in the original's words where it has some."""
    titled = models.titled(asked)
    if "image" not in facts.modalities:
        raise Unsupported(f"{titled} does not support image inference.", param="model_name")
    if asked.labels is None and "classify" not in facts.tasks:
        other = "" if facts.contrast is None else " Send `labels` to compare the picture with."
        raise Unsupported(f"{titled} is not a classification model.{other}", param="model_name")
    if asked.labels is not None and facts.contrast is None:
        raise Unsupported(
            f"{titled} does not compare pictures with texts; leave `labels` out, or name a CLIP model.", param="labels"
        )


@dataclass(frozen=True, slots=True)
class _Query:
    """The model that a query names, as bodies name it."""

    model_name: str
    pretrained: str | None


class Known:
    """What is known of a model that is served, by name."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def labels(self, request: Request) -> Reply:
        asked, facts = await self._facts(request)
        if "classify" not in facts.tasks:
            raise Unsupported(f"Model {asked.model_name} is not a classification model.", param="name")
        return model_jobs.encoded(wire.ModelLabels(labels=list(facts.labels)))

    async def size(self, request: Request) -> Reply:
        asked, facts = await self._facts(request)
        if "embed" not in facts.tasks:
            raise Unsupported(f"Model {asked.model_name} is not an embedding model.", param="name")
        if not facts.dimension:
            raise Unsupported(
                f"Model {asked.model_name} does not say how long its vectors are; embed a text to see.", param="name"
            )
        return model_jobs.encoded(wire.EmbeddingSize(size=facts.dimension))

    async def _facts(self, request: Request) -> tuple[_Query, ModelFacts]:
        """Raises NotAsked, ModelNotFound for what nobody has, and InvalidValue for what is not loaded."""
        name = request.argument("name") or request.argument("model_name")
        if not name:
            raise NotAsked("name")
        asked = _Query(name, request.argument("pretrained"))
        try:
            card = models.find(self._gateway, asked)
        except InvalidValue:
            stored = await models.known(self._gateway, asked)
            if stored in {each.name for each in await listing(self._gateway)}:
                raise
            raise ModelNotFound(
                f"Model {name} does not exist in the repository; GET /repository_models lists those that do.",
                param="name",
            ) from None
        card = await default_models.awake(self._gateway, request, card)
        assert card.facts is not None
        return asked, card.facts
