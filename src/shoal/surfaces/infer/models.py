"""Which model a request of the `infer` surface means: a name, or a name and a checkpoint as open_clip has them."""

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


def format_title(asked: ModelReference) -> str:
    """As the original writes it, also where there is no checkpoint."""
    return f"Model {asked.model_name} with checkpoint {asked.pretrained}"


def to_source(asked: ModelReference) -> str:
    """What to load: a pair is called `NAME/CHECKPOINT`. Raises InvalidValue."""
    name = _strip_prefix(asked.model_name)
    return model_jobs.check_source(f"{name}/{asked.pretrained}" if asked.pretrained else name, "model_name")


async def resolve_name(gateway: Gateway, asked: ModelReference) -> str:
    """The name of the pair, where a model is served or stored as that, else the bare name. Raises InvalidValue."""
    name, pair = model_jobs.check_model_name(_strip_prefix(asked.model_name), "model_name"), _pair_name(asked)
    if pair and (gateway.registry.get(pair) or pair in {each.name for each in await list_models(gateway)}):
        return pair
    return name


def find_model(gateway: Gateway, asked: ModelReference) -> ModelCard:
    """The model that is served as the pair, else as the bare name. Raises InvalidValue in the original's words."""
    name, pair = model_jobs.check_model_name(_strip_prefix(asked.model_name), "model_name"), _pair_name(asked)
    try:
        return gateway.model(pair if pair and gateway.registry.get(pair) else name)
    except ModelNotFound:
        raise InvalidValue(
            f"{format_title(asked)} is not loaded. Load the model first using /load_model.", param="model_name"
        ) from None


async def find_embedder(gateway: Gateway, request: Request, asked: ModelReference, *modalities: Modality) -> ModelCard:
    """The model that is asked for, which embeds what is of these modalities, as far as is known of it now.

    Raises InvalidValue and Unsupported, in the original's words. A model that is to take pictures is woken to know it.
    """
    card = find_model(gateway, asked)
    if "image" in modalities:
        card = await default_models.wake_model(gateway, request, card)
    facts = card.facts
    for modality in modalities if facts is not None else ():
        if facts is not None and ("embed" not in facts.tasks or modality not in facts.modalities):
            raise Unsupported(f"{format_title(asked)} does not support {modality} inference.", param="model_name")
    return card


def _strip_prefix(name: str) -> str:
    """Without the word that open_clip and timm put before the name of a repository."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _pair_name(asked: ModelReference) -> str:
    """ "": there is none."""
    pair = f"{_strip_prefix(asked.model_name)}/{asked.pretrained}"
    return pair if asked.pretrained and is_name(pair) else ""
