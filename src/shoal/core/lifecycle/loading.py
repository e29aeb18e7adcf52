"""The seam between the life of models and what loads them: plans in, runners and files out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.protocols import Runner
from shoal.types import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a caller may choose about one load; "" and None: as the settings say.

    `backend`: "local" or "triton". `text_in`: on Triton, also write a tokenizer and an ensemble that takes texts.
    """

    backend: str = ""
    text_in: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved load.

    `name` is what the model is served as, `source` its address as text. `timeout_s` bounds the whole load, waiting for
    room included (0: no bound). `max_streams` generations may be in flight, and `max_queued_streams` wait. `size`:
    bytes that it will hold when loaded, as far as known (0: not known). `options` are those that it was asked with;
    Lifecycle fills them in. `resolved` False: a name alone was given, and `source` is a guess until `Loader.fetch` has
    looked for it. `payload` is the loader's own.
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
    """What `Loader.fetch` did. `changed`: something was downloaded or made; False: all was there. `size`: bytes that
    the model will hold when loaded (0: still not known, the plan's stands). `source`: where a name alone turned out to
    lead ("": where the plan says)."""

    changed: bool = True
    size: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model that can be loaded: it lies on disk or in a Triton repository.

    `size` in bytes, `created` in Unix seconds, 0 where not known. `digest`: of its files, "" where not known. `managed`
    False: Shoal did not make it and will not delete it. `reason`: why it cannot be loaded as it is, "" when nothing is
    known against it.
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
    """Where a load stands, in words, with bytes done and in all where they are known, or else the `fraction` (0..1).

    To be called on the event loop only; from a thread through `loop.call_soon_threadsafe`. The words are shown to
    users as they are, in the refusal of requests and in lists: "downloading model.onnx", "waiting for Triton at
    host:port: connection refused". A report of `open` may be kept and called while the runner lives: it then sets what
    is said of the loaded model ("" takes it back).
    """

    def __call__(
        self, stage: str, done: float | None = None, total: float | None = None, *, fraction: float | None = None
    ) -> None: ...


class Loader(Protocol):
    """What can load models; every method raises ShoalErrors only.

    Per served name, at most one of `fetch`, `open`, `close` and `remove` runs at a time. When `fetch` or `open` is
    cancelled or fails, it returns only once nothing of it goes on, and leaves nothing half-made: what it opened is
    closed and what it wrote is whole or gone.

    - `resolve` turns what a caller named (a served name, a model's id, an address) into a plan. Cheap: it looks things
      up in memory and may look into its own folders, but asks no other machine. Raises InvalidValue for a name that
      breaks the grammar (also when it is asked only to unload or delete it), and for options that cannot be.
    - `fetch` gets the files: download, convert, verify. A second time it finds everything there.
    - `open` answers a runner that can take requests; it fetches first what is missing. It may wait for a server that
      is not there yet, and says so through `report`.
    - `close` takes the model out: closes the runner, and on a server unloads it there and waits until it is
      unavailable. The runner is closed also when this raises.
    - `remove` deletes the files: store entry, repository entry. False: there were none. Raises Forbidden for what Shoal
      did not make.
    - `entries` lists what lies on disk and in Triton's repository; a place that cannot be reached now is left out.
    """

    def resolve(self, name: str, options: LoadOptions) -> Plan: ...

    async def fetch(self, plan: Plan, report: ProgressReporter) -> FetchResult: ...

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner: ...

    async def close(self, plan: Plan, runner: Runner) -> None: ...

    async def remove(self, name: str) -> bool: ...

    async def entries(self) -> Sequence[Entry]: ...
