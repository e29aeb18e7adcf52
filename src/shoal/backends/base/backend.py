"""The interface between the composition root and the backends: what a backend implements, and the resources it gets.

Backend classes are imported before they are used, so this module and the backend packages import little. Methods import
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shoal.config.settings import ModelTable, Settings
from shoal.core.lifecycle.loading import Entry, LoadOptions, ProgressReporter
from shoal.models.address import Address, ServedModel

if TYPE_CHECKING:
    from shoal.config import LoadedConfig
    from shoal.core.generation.runner import GenerationRunner
    from shoal.core.protocols import ChatPipeline, Engine, ModelFacts, Pipeline, Runner, TextGenerator
    from shoal.core.scheduling.lane import Lane
    from shoal.models.progress import Progress
    from shoal.models.store import Store, StoredModel
    from shoal.types import Modality

NO_SAMPLING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One model to open: its replicas' addresses and its configuration. `source`: the addresses as one text.
    `name_only`: as in ServedModel. `options`: the load options."""

    name: str
    source: str
    addresses: Sequence[Address] = ()
    settings: Settings
    table: ModelTable = field(default_factory=ModelTable)
    options: LoadOptions = field(default_factory=LoadOptions)
    name_only: str = ""


class Resources(Protocol):
    """Services that the composition root offers to backends. `progress` receives downloads and conversions, from
    threads."""

    @property
    def loaded(self) -> LoadedConfig: ...

    @property
    def store(self) -> Store: ...

    @property
    def progress(self) -> Progress: ...

    def table(self, name: str) -> ModelTable:
        """Return the configuration of a model."""
        ...

    def lane(self, target: Target, pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
        """Create the lane of a text model."""
        ...

    def lanes(
        self, target: Target, parts: Mapping[Modality, tuple[Pipeline, Sequence[Engine]]], facts: ModelFacts
    ) -> dict[Modality, Lane]:
        """Create a lane for each modality of a model. The lanes share one cache."""
        ...

    def generation(
        self,
        target: Target,
        pipeline: ChatPipeline,
        generators: Sequence[TextGenerator],
        facts: ModelFacts,
        recommended: Mapping[str, Any] = NO_SAMPLING,
    ) -> GenerationRunner:
        """Create the runner of a language model. `recommended`: sampling defaults from the model's own files, which the
        model's table overrides. Raises ConfigError for invalid sampling defaults."""
        ...

    async def source(self, target: Target) -> Address:
        """Return the address of a file-based model. A bare name resolves to the model in the store that has it."""
        ...

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        """Fetch and convert the model's files as needed, and return its entry in the store. Raises SetupError."""
        ...

    def build_deployment(self, target: Target) -> Any:
        """Build the Ray Serve application that runs a model."""
        ...

    def reporter(self, report: ProgressReporter) -> Progress:
        """Forward progress from threads to a report and to `progress`."""
        ...


class Backend:
    """One kind of place where models run.

    `name` is what users call it; it selects the backend for file-based models where `explain_no_files` allows it.
    `remote`: the models are on servers. Shoal waits for these servers, and serves the models they offer if an address
    names none; `offers_every_s`: how often it looks at what they offer. `drops_absent`: a model that is no longer
    offered is unloaded. A backend is closed after all of its runners.
    """

    name: ClassVar[str]
    remote: ClassVar[bool] = False
    offers_every_s: ClassVar[float] = 10.0
    drops_absent: ClassVar[bool] = False

    @classmethod
    def check(cls, address: Address) -> None:
        """Raise AddressError for an address that can never be opened."""

    @classmethod
    def explain_no_files(cls, settings: Settings) -> str:
        """Explain why file-based models cannot run here; "" if they can."""
        return f"{cls.name} does not run file-based models"

    def __init__(self, resources: Resources) -> None:
        self.resources = resources

    async def start(self) -> None:
        """Start what the settings require, before any model is opened. Raises ConfigError for unusable settings."""

    async def aclose(self) -> None:
        """Free everything that belongs to no runner."""

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        """List a server's models by the name to serve them under: the model to serve, or the reason why it cannot be.

        Raises TransportFailed while the server is unreachable, and the server's own errors otherwise.
        """
        raise NotImplementedError

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        """Open a model, as Loader.open does. All `target.addresses` have the same scheme."""
        raise NotImplementedError

    def check_unload(self, name: str, runner: Runner) -> None:
        """Raise Forbidden if clients may not unload a model."""

    def mark_gone(self, runner: Runner) -> None:
        """Take note that a model is no longer on its server, where a new one may have its name: `unload` is next."""

    async def unload(self, name: str, runner: Runner) -> None:
        """Release what a closed runner holds on its servers. Raises the servers' errors."""

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        """Fetch and convert the model's files, as Resources.prepare does, for a backend with file addresses."""
        raise NotImplementedError

    async def has_model(self, target: Target) -> bool:
        """Return whether a file-based model can be opened without its files. Cheap; an unreachable place has no
        models."""
        return False

    async def entries(self) -> list[Entry]:
        """List the file-based models that are stored here. An unreachable place is left out."""
        return []

    async def remove(self, name: str) -> bool:
        """Delete a model's files that are stored here. Returns False if there were none. Raises Forbidden for files
        that Shoal did not write."""
        return False
