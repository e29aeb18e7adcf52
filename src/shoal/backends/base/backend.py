"""The seam between the composition root and the places where models run: what each backend is, is told and is offered.

A backend's class is imported before anything of it is used, so this module and the packages of the folders import
little; what needs more is imported by the methods.
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
    """One model to open: the addresses of its replicas, and what the configuration says of it. `source`: its addresses
    as one text. `bare`: as in Served. `options`: those of the load."""

    name: str
    source: str
    addresses: Sequence[Address] = ()
    settings: Settings
    table: ModelTable = field(default_factory=ModelTable)
    options: LoadOptions = field(default_factory=LoadOptions)
    bare: str = ""


class Resources(Protocol):
    """What the composition root offers to backends. `progress` sees downloads and conversions, from threads."""

    @property
    def loaded(self) -> LoadedConfig: ...

    @property
    def store(self) -> Store: ...

    @property
    def progress(self) -> Progress: ...

    def table(self, name: str) -> ModelTable:
        """What the configuration says of a model."""
        ...

    def lane(self, target: Target, pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
        """The lane of a model of texts."""
        ...

    def lanes(
        self, target: Target, parts: Mapping[Modality, tuple[Pipeline, Sequence[Engine]]], facts: ModelFacts
    ) -> dict[Modality, Lane]:
        """A lane for each modality of a model, with one cache for all."""
        ...

    def generation(
        self,
        target: Target,
        pipeline: ChatPipeline,
        generators: Sequence[TextGenerator],
        facts: ModelFacts,
        recommended: Mapping[str, Any] = NO_SAMPLING,
    ) -> GenerationRunner:
        """The runner of a language model. `recommended`: sampling that the model's own files ask for, below the
        table's. Raises ConfigError for sampling defaults that are none."""
        ...

    async def source(self, target: Target) -> Address:
        """The address of a model of files; for a bare name, that of the model in the store which has it."""
        ...

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        """The model's files in the store, fetched and converted if need be. Raises SetupError."""
        ...

    def reporter(self, report: ProgressReporter) -> Progress:
        """Progress from threads to a report, and to `progress`."""
        ...


class Backend:
    """One kind of place where models run.

    `name` is what users call it; models of files may be told to run there by that name if `explain_no_files` allows it.
    `remote`: its models are on servers, which are waited for, and whose own models are served as they come where an
    address names none. It is closed once all of its runners are.
    """

    name: ClassVar[str]
    remote: ClassVar[bool] = False

    @classmethod
    def check(cls, address: Address) -> None:
        """Raise AddressError for an address that can never be opened."""

    @classmethod
    def explain_no_files(cls, settings: Settings) -> str:
        """Why models of files cannot run here; "" if they can."""
        return f"{cls.name} runs no models of files"

    def __init__(self, resources: Resources) -> None:
        self.resources = resources

    async def start(self) -> None:
        """Begin what the settings ask for, before any model. Raises ConfigError for settings that cannot be."""

    async def aclose(self) -> None:
        """Free everything that belongs to no runner."""

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        """The models that a server has, by the name to serve them under: what to serve, or why it cannot be.

        Raises TransportFailed while the server is not there, and what it says otherwise.
        """
        raise NotImplementedError

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        """As Loader.open. `target.addresses` are of one scheme."""
        raise NotImplementedError

    async def unload(self, name: str, runner: Runner) -> None:
        """Give back what a runner that is closed holds on its servers. Raises what they say."""

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        """As Resources.prepare, of a backend whose addresses are files."""
        raise NotImplementedError

    async def has_model(self, target: Target) -> bool:
        """Whether a model of files can be opened without them. Cheap; what cannot be reached now holds nothing."""
        return False

    async def entries(self) -> list[Entry]:
        """The models of files that lie here; a place that cannot be reached now is left out."""
        return []

    async def remove(self, name: str) -> bool:
        """Delete the files of a model that lie here. False: there were none. Raises Forbidden for others' files."""
        return False
