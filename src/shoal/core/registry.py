"""The registry of served models, with their names and states."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count

import msgspec

from shoal.core.awaited_servers import AwaitedServers
from shoal.core.lifecycle.loading import Plan
from shoal.core.lifecycle.states import State, StateEvent, next_state
from shoal.core.protocols import ModelFacts, Runner
from shoal.errors import AddressError, CapacityError, ModelFailed, ModelNotFound, ModelNotReady, ShoalError
from shoal.types import TaskKind

LONGEST_SHOWN = 200
"""Characters of an unknown name that are compared and shown, more than any model's name has."""


class ModelCard(msgspec.Struct, frozen=True):
    """The public state of a served model. `created` is in Unix seconds; `facts` are known from the first load and kept
    while it sleeps. `note`: what it is doing or waiting for, or "". `sleeping`: not loaded, and loaded again by the
    next request. `broken`: it was loaded and has stopped."""

    name: str
    aliases: tuple[str, ...]
    state: State
    created: int
    facts: ModelFacts | None
    error: str | None
    default_for: tuple[TaskKind, ...]
    note: str = ""
    sleeping: bool = False
    broken: bool = False

    @property
    def status_text(self) -> str:
        """The state as text, with the note. A sleeping model can answer, so it is not called "unloaded"."""
        asleep = self.sleeping and self.state in ("unloading", "unloaded")
        state = "sleeping" if asleep else self.state
        return f"{state}: {self.note}" if self.note else state

    def refusal(self) -> CapacityError:
        """The error of a request to it: ModelFailed with the reason, else ModelNotReady."""
        if self.state == "failed" and self.error is not None:
            what = "stopped working" if self.broken else "failed to load"
            return ModelFailed(f"the model {self.name!r} {what}: {self.error}", param="model")
        doing = f"{self.state} ({self.note})" if self.note else self.state
        return ModelNotReady(f"the model {self.name!r} is {doing}: try again soon", param="model", retry_after=2.0)


_MOST_NAMED = 8
"""Maximum models listed in a message."""

_MOST_UNLOADED = 1000
"""Maximum remembered names of unloaded models."""


def _ignore(model: Model) -> None: ...


@dataclass(slots=True, eq=False)
class Model:
    """A served name and, once loaded, its runner.

    `plan`: how to load it again (None: nothing loads it). `required`: named at startup, so readiness depends on it.
    `is_sleeping`: falling asleep, asleep or waking; requests wait for it. `inflight`: requests being answered or
    waiting for it to wake. `last_used`: when it was loaded or last became idle, on Lifecycle's clock; `idle` is called
    with the model when it becomes idle. `crashed`: when its process last died, on the same clock. `note`: see
    ModelCard.
    """

    name: str
    aliases: tuple[str, ...] = ()
    default_for: tuple[TaskKind, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    state: State = "loading"
    runner: Runner | None = None
    error: ShoalError | None = None
    plan: Plan | None = None
    required: bool = True
    is_sleeping: bool = False
    inflight: int = 0
    last_used: float = 0.0
    crashed: float = -math.inf
    note: str = ""
    idle: Callable[[Model], None] = _ignore
    facts: ModelFacts | None = None

    def transition(self, happening: StateEvent) -> None:
        self.state = next_state(self.state, happening)

    def enter(self) -> None:
        """Begin a request. Call `leave` exactly once for each call."""
        self.inflight += 1

    def leave(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self.idle(self)

    def can_answer(self) -> bool:
        """Whether a request would be answered, by the runner or after waking."""
        if self.is_sleeping:
            return True
        return self.state == "ready" and self.runner is not None and self.runner.ready()

    def mark_loaded(self, runner: Runner) -> None:
        self.runner, self.error, self.facts = runner, None, runner.facts
        self.is_sleeping, self.note = False, ""
        self.transition("loaded")

    def mark_failed(self, error: ShoalError) -> None:
        self.error = error
        self.transition("load_failed")

    def mark_broken(self, runner: Runner, error: ShoalError) -> None:
        """Record that the runner stopped for good. It is kept until the next operation on the model closes it."""
        if self.runner is runner and self.state == "ready":
            self.error = error
            self.transition("broke")

    def ready_runner(self) -> Runner:
        """Return the runner of a ready model. Raises ModelFailed with the reason, else ModelNotReady."""
        if self.runner is None or self.state != "ready":
            raise self.card().refusal()
        return self.runner

    def card(self) -> ModelCard:
        error = self.error.message if self.error is not None else None
        return ModelCard(
            self.name,
            self.aliases,
            self.state,
            self.created,
            self.runner.facts if self.runner is not None else self.facts,
            error,
            self.default_for,
            self.note,
            self.is_sleeping,
            self.state == "failed" and self.runner is not None,
        )


class Registry:
    """Models by name and alias, in the order in which they were first named. A name identifies one model. Errors about
    an unloaded model say that it is unloaded. `pending_sources`: servers named at startup whose models are unknown, or,
    for those in `answered_sources`, still loading, with the reason. `awaited_servers`: servers named at startup whose
    first answer requests wait for.

    A model that is loaded again keeps its place in the order: otherwise requests without a name would get another
    model, with another vector space. A model that a client requested and that never loaded has no place to keep.
    """

    def __init__(self) -> None:
        self.pending_sources: dict[str, str] = {}
        self.answered_sources: set[str] = set()
        self.awaited_servers = AwaitedServers()
        self._models: dict[str, Model] = {}
        self._names: dict[str, Model] = {}
        self._positions: dict[str, int] = {}
        self._saved_positions: dict[str, int] = {}
        self._count = count()
        self._unloaded: dict[str, str] = {}
        self._removal_callbacks: list[Callable[[str], None]] = []

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def subscribe(self, removed: Callable[[str], None]) -> None:
        """Call `removed` with the name of each model that is removed from now on."""
        self._removal_callbacks.append(removed)

    def add(self, model: Model) -> None:
        """Serve a model. Raises AddressError when one of its names is taken."""
        for name in (model.name, *model.aliases):
            if name in self._names:
                raise AddressError(f"the name {name!r} is used by two models: rename one of them with NAME=ADDRESS")
        place = self._positions[model.name] = (
            self._saved_positions[model.name] if model.name in self._saved_positions else next(self._count)
        )
        behind = [each for each in self if self._positions[each.name] > place]
        self._models[model.name] = model
        for each in behind:
            self._models[each.name] = self._models.pop(each.name)
        for name in (model.name, *model.aliases):
            self._names[name] = model
            self._unloaded.pop(name, None)

    def remember_unloaded(self, model: Model) -> None:
        """Remember the names of a model that was unloaded on request and can be loaded again."""
        self._unloaded |= dict.fromkeys((model.name, *model.aliases), model.name)
        for name in list(self._unloaded)[:-_MOST_UNLOADED]:
            del self._unloaded[name]

    @property
    def unloaded(self) -> Mapping[str, str]:
        """Names and aliases of unloaded models, each with the name of its model."""
        return self._unloaded

    def unloaded_names(self) -> set[str]:
        """Return the models that were unloaded and not deleted since."""
        return set(self._unloaded.values())

    def was_unloaded(self, name: str) -> bool:
        """Whether a model of this name was unloaded and not deleted since."""
        return name in self._unloaded

    def forget(self, name: str) -> None:
        """Forget the names of a deleted model."""
        self._unloaded = {each: of for each, of in self._unloaded.items() if of != name}

    def remove(self, model: Model) -> None:
        self._models.pop(model.name, None)
        place = self._positions.pop(model.name, None)
        if place is not None and (model.required or model.facts is not None):
            self._saved_positions[model.name] = place
        for name in (model.name, *model.aliases):
            self._names.pop(name, None)
        for removed in self._removal_callbacks:
            removed(model.name)

    def get(self, name: str) -> Model | None:
        """Return the model with exactly this name or alias, or None."""
        return self._names.get(name)

    def find(self, name: str, task: TaskKind = "embed") -> Model:
        """Return the model with this name or alias; "" selects the task's default. Raises ModelNotFound, or
        ModelNotReady while a server that may have it is unavailable."""
        model = self._names.get(name) if name else self._default(task)
        if model is not None:
            return model
        if self.pending_sources.keys() - self.answered_sources:
            raise ModelNotReady(self._not_ready_message(name, task), param="model", retry_after=2.0)
        raise ModelNotFound(self._not_found_message(name, task), param="model")

    def _default(self, task: TaskKind) -> Model | None:
        """Return the configured default of the task, else the first model that supports it or whose tasks are unknown.
        A reranker can classify, but a model with labels is preferred."""
        for model in self._models.values():
            if task in model.default_for:
                return model
        reranker: Model | None = None
        unknown: Model | None = None
        for model in self._models.values():
            facts = model.runner.facts if model.runner is not None else model.facts
            if facts is not None and task in facts.tasks:
                if task != "classify" or "rerank" not in facts.tasks:
                    return model
                reranker = reranker or model
            if facts is None:
                # The embedding default must not change once facts are known, or vectors of two models would mix.
                if task == "embed":
                    return model
                unknown = unknown or model
        if found := reranker or unknown:
            return found
        # Any embedder can rerank by its vectors; a trained reranker is preferred.
        return self._default("embed") if task == "rerank" else None

    def _not_ready_message(self, name: str, task: TaskKind) -> str:
        meant = f"the model {name[:LONGEST_SHOWN]!r}" if name else f"a model that can {task}"
        places = "; ".join(
            f"{place}: {reason}" for place, reason in self.pending_sources.items() if place not in self.answered_sources
        )
        return f"{meant} may be on a server that is not ready yet ({places}): try again soon"

    def _not_found_message(self, name: str, task: TaskKind) -> str:
        if not name:
            lacking = f"none of the served models can {task}" if self._models else "no model is served"
            if self._unloaded:
                return f"{lacking}; {_join_names(self._unloaded.values())} can be loaded again"
            return f"{lacking}: start one with `shoal serve ADDRESS`"
        if unloaded := self._unloaded.get(name):
            return f"the model {unloaded!r} is unloaded: load it again (`shoal load {unloaded}`)"
        return f"the model {name[:LONGEST_SHOWN]!r} does not exist: {self._suggest_models(name)}"

    def _suggest_models(self, name: str) -> str:
        # A client's name may be as long as a body; comparing megabytes would block the event loop.
        near = get_close_matches(name[:LONGEST_SHOWN], self._names, n=1, cutoff=0.5)
        if near:
            return f"did you mean {near[0]!r}?"
        # List the names instead of a route to query: the Python API has no server.
        names = _join_names(self._models)
        return f"available models: {names}" if names else "no model is served"


def _join_names(names: Iterable[str]) -> str:
    quoted = [repr(each) for each in dict.fromkeys(names)]
    return ", ".join(quoted[:_MOST_NAMED] + ["..."] * (len(quoted) > _MOST_NAMED))
