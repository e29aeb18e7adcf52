"""The names that dialects have for what a text is for, and what a model makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_ROLES = {
    "passage": "document",
    "search_query": "query",
    "search_document": "document",
    "retrieval.query": "query",
    "retrieval.passage": "document",
}
_SUFFIXES = {"-query": "query", "-passage": "document"}


class Role(NamedTuple):
    """As Embed has it: the side that the texts are on, or a prompt by its name."""

    input_type: str | None = None
    prompt_name: str | None = None


def normalize_role(name: str) -> str:
    """ "query" or "document" for what means that; any other name as it is."""
    return _ROLES.get(name, name)


def resolve_purpose(name: str, card: ModelCard) -> Role:
    """What Cohere and Jina call the use of vectors: a side of a search, or the model's prompt of that name. A use that
    the model has no prompt for changes nothing."""
    if name in _ROLES:
        return Role(input_type=_ROLES[name])
    prompts = card.facts.prompts if card.facts is not None else {}
    return Role(prompt_name=name) if name in prompts else Role()


def strip_role_suffix(gateway: Gateway, name: str) -> tuple[str, str | None]:
    """The served model that `MODEL-query` or `MODEL-passage` means, as NVIDIA's clients may call it, and the role; a
    name that is served itself, or that means nothing, as it is."""
    if gateway.registry.get(name) is None:
        for suffix, said in _SUFFIXES.items():
            base = name.removesuffix(suffix)
            if base != name and gateway.registry.get(base) is not None:
                return base, said
    return name, None
