"""Which model answers a route of the original, which knows one model and no names: a default for each route here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.protocols import ModelFacts
from shoal.errors import ModelNotFound, ModelNotReady, Unsupported
from shoal.http.request import Request
from shoal.types import Context, TaskKind, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


NOT_SPECIFIED = "default/not-specified"
"""What Infinity's clients call the model that they do not name."""


@dataclass(frozen=True, slots=True)
class ModelRequirement:
    """What a route needs of a model; `refusal` is what the original says of one without it, word for word, and
    `of_sparse` what it says of SPLADE ("": the same)."""

    task: TaskKind
    refusal: str
    vectors: VectorKind | None = None
    of_sparse: str = ""

    def fits(self, facts: ModelFacts) -> bool:
        return self.task in facts.tasks and (self.vectors is None or self.vectors in facts.vectors)

    def build_refusal(self, name: str, facts: ModelFacts) -> Unsupported:
        """The original knows models with other vectors by SPLADE alone; of all others Shoal says what they give."""
        if self.task not in facts.tasks or self.vectors in (None, "sparse"):
            return Unsupported(self.refusal, param="model")
        if is_sparse(facts) and self.of_sparse:
            return Unsupported(self.of_sparse, param="model")
        return Unsupported(
            f"the model {name!r} gives no vectors of the kind {self.vectors}; it gives: {', '.join(facts.vectors)}",
            param="model",
        )


_NOT_EMBEDDING = "Backend error: Model is not an embedding model"
NORMALIZED = ModelRequirement(
    "embed", _NOT_EMBEDDING, "dense", "Backend error: `normalize` is not available for SPLADE models"
)
DENSE = ModelRequirement("embed", _NOT_EMBEDDING, "dense")
TOKENS = ModelRequirement(
    "embed", _NOT_EMBEDDING, "tokens", "Backend error: `embed_all` is not available for SPLADE models"
)
SPARSE = ModelRequirement("embed", f"{_NOT_EMBEDDING} with SPLADE pooling", "sparse")
RERANK = ModelRequirement("rerank", "Backend error: model is not a re-ranker model")
CLASSIFY = ModelRequirement("classify", "Backend error: Model is not a classifier model")


def is_sparse(facts: ModelFacts) -> bool:
    """What the original calls SPLADE pooling: it gives weights of the vocabulary and no dense vectors."""
    return "sparse" in facts.vectors and "dense" not in facts.vectors


async def find_model(gateway: Gateway, request: Request, name: str | None, wanted: ModelRequirement) -> ModelCard:
    """The model of that name, or the default one of the route; awake, where its facts are not known otherwise.

    Raises Unsupported for a model that lacks what is wanted, ModelNotFound, and why a model cannot answer now.
    """
    card = gateway.model(name) if name else _find_default(gateway, wanted)
    card = await wake_model(gateway, request, card)
    if card.facts is not None and not wanted.fits(card.facts):
        raise wanted.build_refusal(card.name, card.facts)
    return card


async def find_default_model(gateway: Gateway, request: Request, name: str | None, task: TaskKind) -> ModelCard:
    """The model of that name, else the default one of the task; awake, where its facts are not known otherwise.

    Raises ModelNotFound, and why a model cannot answer now: what it can do is not known before it was loaded.
    """
    wanted = "" if name is None or name == NOT_SPECIFIED else name
    card = gateway.registry.find(wanted, task).card()
    request.model = card.name
    return await wake_model(gateway, request, card)


async def wake_model(gateway: Gateway, request: Request, card: ModelCard) -> ModelCard:
    """The card with its facts: a model that was never loaded is. Raises why a model cannot answer now."""
    request.model = card.name
    if card.facts is None:
        await gateway.wake(card.name, wait_context(request))
        card = gateway.model(card.name)
        if card.facts is None:
            raise card.refusal()
    return card


def find_main_model(gateway: Gateway, name: str | None = None) -> ModelCard:
    """The model that stands for the server, on /info and /: the default one for vectors, else the first that scores."""
    if name:
        return gateway.model(name)
    try:
        return gateway.model("")
    except (ModelNotFound, ModelNotReady):
        for card in gateway.models():
            if card.facts is not None and {"rerank", "classify"} & set(card.facts.tasks):
                return card
        raise


def wait_context(request: Request) -> Context:
    """For a model that has to wake first. It is no task, so what becomes of it stays the front's to count."""
    return Context(id=request.id, deadline=request.deadline, client=request.client)


def _find_default(gateway: Gateway, wanted: ModelRequirement) -> ModelCard:
    """The task's default where it has what is wanted, else the first model that has."""
    try:
        card = gateway.registry.find("", wanted.task).card()
    except ModelNotFound:
        if gateway.models():
            raise Unsupported(wanted.refusal, param="model") from None
        raise
    if card.facts is None or wanted.fits(card.facts):
        return card
    others = (each for each in gateway.models() if each.facts is not None and wanted.fits(each.facts))
    return next(others, card)
