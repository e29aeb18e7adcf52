"""Pick the default model of a route, for dialects whose original server has one model and no model names."""

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
"""The name that Infinity's clients send when they name no model."""


@dataclass(frozen=True, slots=True)
class ModelRequirement:
    """What a route needs from a model.

    `refusal` is the original server's error, word for word, for a model without it. `sparse_refusal` is its error for
    SPLADE models ("": the same).
    """

    task: TaskKind
    refusal: str
    vectors: VectorKind | None = None
    sparse_refusal: str = ""

    def fits(self, facts: ModelFacts) -> bool:
        return self.task in facts.tasks and (self.vectors is None or self.vectors in facts.vectors)

    def build_refusal(self, name: str, facts: ModelFacts) -> Unsupported:
        """Return the error for a model that does not fit.

        The original has an error only for SPLADE models. For other vectors, the error lists the kinds the model has.
        """
        if self.task not in facts.tasks or self.vectors in (None, "sparse"):
            return Unsupported(self.refusal, param="model")
        if is_sparse(facts) and self.sparse_refusal:
            return Unsupported(self.sparse_refusal, param="model")
        return Unsupported(
            f"the model {name!r} has no {self.vectors} vectors; it has: {', '.join(facts.vectors)}",
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
    """Whether the model has sparse vectors and no dense ones, which the original calls SPLADE pooling."""
    return "sparse" in facts.vectors and "dense" not in facts.vectors


async def find_model(gateway: Gateway, request: Request, name: str | None, requirement: ModelRequirement) -> ModelCard:
    """Find the named model, or the route's default. Wake it if its facts are unknown.

    Raises Unsupported for a model that does not fit `requirement`, ModelNotFound, and the reason why a model cannot
    answer now.
    """
    card = gateway.model(name) if name else _find_default(gateway, requirement)
    card = await wake_model(gateway, request, card)
    if card.facts is not None and not requirement.fits(card.facts):
        raise requirement.build_refusal(card.name, card.facts)
    return card


async def find_default_model(gateway: Gateway, request: Request, name: str | None, task: TaskKind) -> ModelCard:
    """Find the named model, or the task's default. Wake it if its facts are unknown, as before its first load.

    Raises ModelNotFound, and the reason why a model cannot answer now.
    """
    model_name = "" if name is None or name == NOT_SPECIFIED else name
    card = gateway.registry.find(model_name, task).card()
    request.model = card.name
    return await wake_model(gateway, request, card)


async def wake_model(gateway: Gateway, request: Request, card: ModelCard) -> ModelCard:
    """Return the card with its facts, loading the model if needed. Raises the reason why it cannot answer."""
    request.model = card.name
    if card.facts is None:
        await gateway.wake(card.name, wait_context(request))
        card = gateway.model(card.name)
        if card.facts is None:
            raise card.refusal()
    return card


def find_main_model(gateway: Gateway, name: str | None = None) -> ModelCard:
    """Find the model that /info and / describe: the default embedder, else the first that reranks or classifies."""
    if name:
        return gateway.model(name)
    try:
        return gateway.model("")
    except (ModelNotFound, ModelNotReady):
        for card in gateway.models():
            if card.facts is not None and {"rerank", "classify"} & set(card.facts.tasks):
                return card
        raise


def has_classifier(gateway: Gateway) -> bool:
    """Whether the default model for classification is a classifier. Rerankers, which classify as well, do not count."""
    try:
        facts = gateway.registry.find("", "classify").card().facts
    except (ModelNotFound, ModelNotReady):
        return False
    return facts is not None and "classify" in facts.tasks and "rerank" not in facts.tasks


def wait_context(request: Request) -> Context:
    """Return a context for waking a model. Waking is not a task, so the HTTP layer still counts its failures."""
    return Context(id=request.id, deadline=request.deadline, client=request.client)


def _find_default(gateway: Gateway, requirement: ModelRequirement) -> ModelCard:
    """Return the task's default model if it fits `requirement`, else the first model that does."""
    try:
        card = gateway.registry.find("", requirement.task).card()
    except ModelNotFound:
        if gateway.models():
            raise Unsupported(requirement.refusal, param="model") from None
        raise
    if card.facts is None or requirement.fits(card.facts):
        return card
    others = (each for each in gateway.models() if each.facts is not None and requirement.fits(each.facts))
    return next(others, card)
