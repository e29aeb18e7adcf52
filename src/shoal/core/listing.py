"""Describe models for the model list: served, available and failed ones. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.core.lifecycle.jobs import Job
from shoal.core.lifecycle.loading import Entry
from shoal.core.lifecycle.states import State
from shoal.core.protocols import ModelFacts
from shoal.core.registry import Model
from shoal.errors import ShoalError

Status = Literal["loaded", "sleeping", "loading", "unloaded", "downloading", "unloading", "failed"]

STATUSES: dict[State, Status] = {
    "ready": "loaded",
    "unloaded": "sleeping",
    "loading": "loading",
    "unloading": "unloading",
    "failed": "failed",
}
"""Status of registered models: a registered model that is unloaded is asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A served or available model. `fraction` (0..1) while it loads or downloads, if known; `error` if it failed;
    `note`: what it is doing or waiting for; `size` in bytes, `created` in Unix seconds, 0 if unknown; `digest`: of its
    files, "" if unknown."""

    name: str
    source: str
    backend: str
    status: Status
    fraction: float | None = None
    error: str | None = None
    note: str = ""
    size: int = 0
    managed: bool = True
    created: int = 0
    digest: str = ""
    aliases: tuple[str, ...] = ()
    facts: ModelFacts | None = None


def describe_registered(model: Model, entry: Entry | None, job: Job | None) -> Listing:
    """Describe a registered model; `job` is the job that is loading it."""
    card, plan = model.card(), model.plan
    return Listing(
        name=model.name,
        source=plan.source if plan is not None else "",
        backend=plan.backend if plan is not None else "",
        status=STATUSES[model.state],
        fraction=job.fraction if job is not None else None,
        error=card.error,
        note=card.note,
        size=(plan.size if plan is not None else 0) or (entry.size if entry is not None else 0),
        managed=entry is None or entry.managed,
        created=card.created,
        digest=entry.digest if entry is not None else "",
        aliases=card.aliases,
        facts=card.facts,
    )


def describe_available(entry: Entry, status: Status, error: ShoalError | None, job: Job | None) -> Listing:
    """Describe a model that is not registered; `job` is the job that is downloading it."""
    return Listing(
        name=entry.name,
        source=entry.source,
        backend=entry.backend,
        status=status,
        fraction=job.fraction if job is not None else None,
        error=error.message if error is not None else None,
        note=job.stage if job is not None else entry.reason,
        size=entry.size,
        managed=entry.managed,
        created=entry.created,
        digest=entry.digest,
    )
