"""Map the dialects' names for the purpose of a text to the roles and prompts of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import InvalidValue

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
_SIMILAR = {"clustering": "separation"}
"""Names of one dialect by the name that another has for the same purpose: Jina's task for clustering."""

_SUFFIXES = {"-query": "query", "-passage": "document"}


class Role(NamedTuple):
    """The role of the texts as in `Embed`: an input type (query or document), or the name of a prompt."""

    input_type: str | None = None
    prompt_name: str | None = None


def normalize_role(name: str) -> str:
    """Return "query" or "document" for their synonyms, and any other name unchanged."""
    return _ROLES.get(name, name)


def resolve_purpose(name: str, card: ModelCard, param: str) -> Role:
    """Resolve Cohere's or Jina's purpose of vectors: one side of a search, or the model's prompt of that name.

    A purpose without such a prompt has no effect, unless the model has vectors for several: then this raises an
    InvalidValue, naming the field `param`, that lists them.
    """
    if name in _ROLES:
        return Role(input_type=_ROLES[name])
    facts = card.facts
    found = [each for each in (name, _SIMILAR.get(name)) if facts is not None and each in facts.prompts]
    if facts is not None and facts.embedding_tasks and not found:
        known = ", ".join(facts.embedding_tasks)
        raise InvalidValue(f"the model has no task {name!r}; it has: {known}", param=param)
    return Role(prompt_name=found[0]) if found else Role()


def strip_role_suffix(gateway: Gateway, name: str) -> tuple[str, str | None]:
    """Split `MODEL-query` or `MODEL-passage`, as NVIDIA's clients send it, into a served model and its role.

    Return the name unchanged and None if that name is itself served, or if no such model is.
    """
    if gateway.registry.get(name) is None:
        for suffix, role in _SUFFIXES.items():
            base = name.removesuffix(suffix)
            if base != name and gateway.registry.get(base) is not None:
                return base, role
    return name, None
