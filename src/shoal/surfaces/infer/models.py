"""Resolve the model of an `infer` request: a name, or a name and a checkpoint as in open_clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.errors import InvalidValue, ModelNotFound, Unsupported
from shoal.http.request import Request
from shoal.names import is_name
from shoal.surfaces.shared import default_models, model_jobs
from shoal.surfaces.shared.listing import list_models
from shoal.types import Modality

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_PREFIXES = ("hf-hub:", "hf_hub:")


class ModelReference(Protocol):
    @property
    def model_name(self) -> str: ...

    @property
    def pretrained(self) -> str | None: ...


def format_title(reference: ModelReference) -> str:
    """Format a model's name as the original does, which mentions the checkpoint even if there is none."""
    return f"Model {reference.model_name} with checkpoint {reference.pretrained}"


def to_source(reference: ModelReference) -> str:
    """Return the source to load: `NAME/CHECKPOINT` for a pair, else the name. Raises InvalidValue."""
    name = _strip_prefix(reference.model_name)
    return model_jobs.check_source(f"{name}/{reference.pretrained}" if reference.pretrained else name, "model_name")


async def resolve_name(gateway: Gateway, reference: ModelReference) -> str:
    """Return the pair's name if a model is served or stored under it, else the bare name. Raises InvalidValue."""
    name, pair = model_jobs.check_model_name(_strip_prefix(reference.model_name), "model_name"), _pair_name(reference)
    if pair and (gateway.registry.get(pair) or pair in {each.name for each in await list_models(gateway)}):
        return pair
    return name


def find_model(gateway: Gateway, reference: ModelReference) -> ModelCard:
    """Find the model served under the pair's name, else the bare name.

    Raises InvalidValue with the original's message.
    """
    name, pair = model_jobs.check_model_name(_strip_prefix(reference.model_name), "model_name"), _pair_name(reference)
    try:
        return gateway.model(pair if pair and gateway.registry.get(pair) else name)
    except ModelNotFound:
        raise InvalidValue(
            f"{format_title(reference)} is not loaded. Load the model first using /load_model.", param="model_name"
        ) from None


async def find_embedder(
    gateway: Gateway, request: Request, reference: ModelReference, *modalities: Modality
) -> ModelCard:
    """Find the requested model, and check that it embeds these modalities if its facts are known.

    For images, the model is woken first so that they are. Raises InvalidValue and Unsupported, with the original's
    messages.
    """
    card = find_model(gateway, reference)
    if "image" in modalities:
        card = await default_models.wake_model(gateway, request, card)
    facts = card.facts
    for modality in modalities if facts is not None else ():
        if facts is not None and ("embed" not in facts.tasks or modality not in facts.modalities):
            raise Unsupported(f"{format_title(reference)} does not support {modality} inference.", param="model_name")
    return card


def _strip_prefix(name: str) -> str:
    """Remove the prefix that open_clip and timm put before the name of a repository."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _pair_name(reference: ModelReference) -> str:
    """Return the name of the pair, or "" if there is none."""
    pair = f"{_strip_prefix(reference.model_name)}/{reference.pretrained}"
    return pair if reference.pretrained and is_name(pair) else ""
