"""Build model lists: the served models, and those that could be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from shoal.core.lifecycle.lifecycle import Job, Listing
from shoal.core.protocols import ModelFacts, Replicated
from shoal.errors import BackendError, CapacityError
from shoal.http.redaction import redact
from shoal.surfaces.shared import wire_models as wire

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard
    from shoal.http.request import Request

LISTING_TIMEOUT_S = 1.0
"""User interfaces fetch the list on every page, so a Triton that does not answer must not delay it. The served models
are known without it."""

_STATES: dict[str, wire.StatusValue] = {
    "ready": "loaded",
    "loaded": "loaded",
    "loading": "loading",
    "downloading": "downloading",
    "sleeping": "sleeping",
}


UNRESPONSIVE_ERROR = "it is loaded but does not respond: see the server's log, and reload it if this persists"


def find_unresponsive(gateway: Gateway) -> set[str]:
    """Return the names of loaded models that cannot answer, because their worker ended or is unreachable."""
    return {model.name for model in gateway.registry if model.state == "ready" and not model.can_answer()}


def list_statuses(gateway: Gateway) -> dict[str, str]:
    """Map each model to its state or error, and each server that is still awaited to the reason."""
    silent = find_unresponsive(gateway)
    states = {
        card.name: UNRESPONSIVE_ERROR if card.name in silent else card.error or card.status_text
        for card in gateway.models()
    }
    waiting = {redact(name): why for name, why in gateway.pending_sources.items() if name not in states}
    return {name: redact(why) for name, why in (states | waiting).items()}


def build_entry(card: ModelCard, silent: Container[str]) -> wire.ModelEntry:
    """Build the entry of a served model. `silent` holds the names from `find_unresponsive`."""
    value = "sleeping" if card.sleeping else _STATES.get(card.state, "unloaded")
    status = wire.ModelStatus(
        value=value, failed=card.state == "failed", error=_redact_optional(card.error), note=redact(card.note)
    )
    if card.name in silent:
        status = _UNRESPONSIVE
    entry = _entry(card.name, card.created, status)
    entry.aliases = list(card.aliases)
    entry.default_for = list(card.default_for)
    if card.facts is not None:
        _add_facts(entry, card.facts)
    return entry


def list_served(gateway: Gateway) -> list[wire.ModelEntry]:
    """List the served models from memory. Each model is followed by its adapters, which have their own names."""
    silent = find_unresponsive(gateway)
    entries = []
    for card in gateway.models():
        entry = build_entry(card, silent)
        entries += [entry, *_adapters(entry, card.facts)]
    return entries


def get_entry(gateway: Gateway, name: str) -> wire.ModelEntry:
    """Return the entry of a model or adapter, with details that lists omit. Raises ModelNotFound."""
    base = name
    if gateway.registry.get(name) is None and ":" in name:
        base, adapter = gateway.resolve(name)
        name = f"{base}:{adapter}" if adapter else base
    card = gateway.model(base)
    entry = build_entry(card, find_unresponsive(gateway))
    if card.facts is not None:
        entry.details = {key: value for key, value in card.facts.details.items() if key != "chat_template"}
    runner: object = gateway.registry.find(base).runner
    if isinstance(runner, Replicated) and len(replicas := runner.replicas()) > 1:
        # In the order of their addresses, which are not shown to clients.
        entry.replicas = [wire.ReplicaEntry(state=each.state, ejections=each.ejections) for each in replicas]
    return next((each for each in _adapters(entry, card.facts) if each.id == name), entry)


def _adapters(entry: wire.ModelEntry, facts: ModelFacts | None) -> list[wire.ModelEntry]:
    return [
        msgspec.structs.replace(
            entry, id=f"{entry.id}:{name}", parent=entry.id, aliases=[], default_for=[], tasks=["generate"]
        )
        for name in (facts.adapters if facts is not None else ())
    ]


async def list_models(gateway: Gateway) -> list[Listing]:
    """List all models, including those only on disk or in a repository.

    Omit the latter if listing them fails or takes longer than `LISTING_TIMEOUT_S`.
    """
    if gateway.lifecycle is not None:
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                found = await gateway.lifecycle.listing()
        except (TimeoutError, CapacityError, BackendError):
            pass
        else:
            silent = find_unresponsive(gateway)
            return [
                replace(each, status="failed", error=UNRESPONSIVE_ERROR) if each.name in silent else each
                for each in found
            ]
    silent = find_unresponsive(gateway)
    return [_to_listing(card, silent) for card in gateway.models()]


async def list_all_entries(gateway: Gateway) -> list[wire.ModelEntry]:
    """List the entries of all models, with the fields that llama.cpp's router adds to OpenAI's."""
    cards = {card.name: card for card in gateway.models()}
    jobs = {job.model: job for job in gateway.lifecycle.jobs() if job.state == "running"} if gateway.lifecycle else {}
    entries = []
    for each in await list_models(gateway):
        entry = _entry(each.name, each.created, _build_status(each, jobs.get(each.name)))
        entry.managed = each.managed
        entry.backend = each.backend or None
        entry.source = each.source or None
        entry.size = each.size or None
        entry.aliases = list(each.aliases)
        entry.default_for = list(cards[each.name].default_for) if each.name in cards else []
        if each.facts is not None:
            _add_facts(entry, each.facts)
        entry.architecture = _architecture(entry.tasks, each.facts)
        entries += [entry, *_adapters(entry, each.facts)]
    return entries


_UNRESPONSIVE = wire.ModelStatus(value="unloaded", failed=True, error=UNRESPONSIVE_ERROR)


def _entry(name: str, created: int, status: wire.ModelStatus) -> wire.ModelEntry:
    return wire.ModelEntry(id=name, object="model", created=int(created), owned_by="shoal", status=status)


def _add_facts(entry: wire.ModelEntry, facts: ModelFacts) -> None:
    entry.tasks = list(facts.tasks)
    entry.backend = facts.backend
    entry.source = facts.source
    entry.revision = facts.revision or None
    entry.dimension = facts.dimension
    entry.vectors = list(facts.vectors) if "embed" in facts.tasks else []
    entry.labels = list(facts.labels)
    entry.modalities = [] if facts.modalities == ("text",) else list(facts.modalities)
    entry.vision = facts.details.get("vision") is True
    entry.max_input_tokens = facts.max_input_tokens
    entry.max_model_len = facts.context_tokens
    entry.precision = facts.precision or None
    entry.pooling = facts.pooling or None
    entry.prompts = dict(facts.prompts)
    entry.default_prompt_name = facts.default_prompt_name
    entry.space = facts.space or None
    entry.verified = facts.verified or None


def _build_status(each: Listing, job: Job | None) -> wire.ModelStatus:
    status = wire.ModelStatus(
        value=_STATES.get(each.status, "unloaded"),
        failed=each.status == "failed",
        error=_redact_optional(each.error),
        note=redact(each.note),
    )
    if status.value == "downloading":
        done, total = (job.done, job.total) if job is not None else (None, None)
        status.progress = {each.source or each.name: {"done": done or 0, "total": total or 0}}
    elif status.value == "loading" and (each.note or each.fraction is not None):
        status.progress = {
            "stages": [status.note] if status.note else [],
            "current": status.note,
            "value": each.fraction or 0.0,
        }
    return status


def _redact_optional(text: str | None) -> str | None:
    return None if text is None else redact(text)


def _architecture(tasks: Iterable[str], facts: ModelFacts | None) -> wire.Architecture:
    """Derive the modalities from the tasks. A model that was never loaded counts as a text embedder."""
    outputs = ["text"] if "generate" in tasks else []
    if "rerank" in tasks or "classify" in tasks:
        outputs.append("scores")
    if "embed" in tasks or not outputs:
        outputs.append("embeddings")
    modalities: tuple[str, ...] = facts.modalities if facts is not None else ("text",)
    if facts is not None and facts.details.get("vision") is True and "image" not in modalities:
        modalities = (*modalities, "image")
    return wire.Architecture(input_modalities=[*modalities], output_modalities=outputs)


def _to_listing(card: ModelCard, silent: Container[str]) -> Listing:
    entry = build_entry(card, silent)
    return Listing(
        name=card.name,
        source=entry.source or "",
        backend=entry.backend or "",
        status="failed" if entry.status.failed else entry.status.value,
        error=entry.status.error,
        note=card.note,
        created=card.created,
        aliases=card.aliases,
        facts=card.facts,
    )


def hide_addresses(request: Request, entries: Sequence[wire.ModelEntry]) -> list[wire.ModelEntry]:
    """Return the entries, without server addresses unless the client is an admin."""
    return list(entries) if request.has_access("admin") else [_without_address(entry) for entry in entries]


def _without_address(entry: wire.ModelEntry) -> wire.ModelEntry:
    if entry.source is not None and redact(entry.source) != entry.source:
        entry.source = None
    entry.details.pop("servers", None)
    return entry
