"""The interface between the model lifecycle and model loaders: plans in, runners and files out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.protocols import Runner
from shoal.types import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a single load; "" and None use the settings.

    `backend`: "local" or "triton". `text_in`: on Triton, also write a tokenizer and an ensemble that accepts text.
    """

    backend: str = ""
    text_in: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved load.

    `name` is the name to serve the model as, `source` its address as text. `timeout_s` limits the whole load, including
    the wait for memory (0: no limit). Up to `max_streams` generations may be in flight, and `max_queued_streams` may
    wait. `size`: estimated bytes when loaded (0: unknown). `options` are those of the caller; Lifecycle sets them.
    `resolved` False: only a name was given, and `source` is a guess until `Loader.fetch` has looked it up. `payload`
    belongs to the loader.
    """

    name: str
    source: str
    backend: str
    aliases: tuple[str, ...] = ()
    default_for: tuple[TaskKind, ...] = ()
    timeout_s: float = 600.0
    max_streams: int = 256
    max_queued_streams: int = 1024
    size: int = 0
    options: LoadOptions = field(default_factory=LoadOptions)
    resolved: bool = True
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """The result of `Loader.fetch`. `changed`: whether anything was downloaded or created. `size`: bytes when loaded
    (0: still unknown, the plan's value stands). `source`: the source that a bare name resolved to ("": the plan's)."""

    changed: bool = True
    size: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model that can be loaded, on disk or in a Triton repository.

    `size` in bytes, `created` in Unix seconds, 0 if unknown. `digest`: of its files, "" if unknown. `managed` False:
    Shoal did not create it and will not delete it. `reason`: why it cannot be loaded as it is, "" if there is no known
    reason.
    """

    name: str
    source: str
    backend: str
    size: int = 0
    managed: bool = True
    reason: str = ""
    created: int = 0
    digest: str = ""


class ProgressReporter(Protocol):
    """Reports the stage of a load, with bytes done and total if known, or else the `fraction` (0..1).

    Call it on the event loop only; from a thread use `loop.call_soon_threadsafe`. Users see the stage verbatim in lists
    and in rejected requests: "downloading model.onnx", "waiting for Triton at host:port: connection refused". The
    reporter passed to `open` may be kept and called while the runner lives: it then sets the loaded model's note (""
    clears it).
    """

    def __call__(
        self, stage: str, done: float | None = None, total: float | None = None, *, fraction: float | None = None
    ) -> None: ...


def is_blocked(stage: str) -> bool:
    """Whether a stage names a reason why a server cannot be used yet: "waiting for PLACE: REASON". Without a reason the
    wait is a matter of moments."""
    return stage.startswith("waiting") and ": " in stage


class Loader(Protocol):
    """Loads models. Every method raises only ShoalErrors.

    Per served name, at most one of `fetch`, `open`, `close` and `remove` runs at a time. When `fetch` or `open` is
    cancelled or fails, it returns only after all its work has stopped, and leaves nothing half-done: everything it
    opened is closed and every file it wrote is complete or gone.

    - `resolve` turns a served name, a model id or an address into a plan. It is cheap: it reads memory and its own
      folders, but contacts no other machine. Raises InvalidValue for a malformed name (also before an unload or delete)
      and for impossible options.
    - `fetch` gets the files: download, convert, verify. A second call finds everything in place.
    - `open` returns a runner that can take requests, fetching missing files first. It may wait for a server that is not
      up yet, and says so through `report`.
    - `check_unload` raises Forbidden for a model that clients may not unload. It is cheap.
    - `close` removes the model: closes the runner, and on a server also unloads the model and waits until it is
      unavailable. The runner is closed even if this raises.
    - `remove` deletes the files: the store entry and the repository entry. Returns False if there were none. Raises
      Forbidden for models that Shoal did not create.
    - `entries` lists the models on disk and in Triton's repository; an unreachable location is left out.
    """

    def resolve(self, name: str, options: LoadOptions) -> Plan: ...

    async def fetch(self, plan: Plan, report: ProgressReporter) -> FetchResult: ...

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner: ...

    def check_unload(self, plan: Plan, runner: Runner) -> None: ...

    async def close(self, plan: Plan, runner: Runner) -> None: ...

    async def remove(self, name: str) -> bool: ...

    async def entries(self) -> Sequence[Entry]: ...
