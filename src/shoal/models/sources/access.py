"""Inputs and outputs shared by all sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.downloads import disk
from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.progress import Progress, Stop
from shoal.models.rerankers import recognize_name
from shoal.models.sources.select import choose_files, has_tensors


@dataclass(frozen=True, slots=True)
class Access:
    """Network access settings. `hub` None: the hub client's own default, which HF_ENDPOINT overrides.

    `pip`: extra environment variables for pip (a private index, for instance).
    """

    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)
    hub: str | None = None
    pip: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's fetched files. `folder` holds them. `address` is the source with the exact revision (commit, version,
    fingerprint). `hashes`: SHA-256 of files hashed while fetching, by path in the folder. `published_hashes`: hashes of
    the weights at the source, if they differ from those in the folder."""

    folder: Path
    address: Address
    hashes: dict[str, str] = field(default_factory=dict)
    published_hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchJob:
    """One fetch. `only_files` limits the files to those names; `weights` False excludes weights. `patience`: seconds to
    wait for a source's first answer."""

    address: Address
    into: Path
    access: Access
    progress: Progress
    stop: Stop
    only_files: frozenset[str] | None = None
    patience: float = 10.0
    weights: bool = True

    def find_reranker(self, names: Collection[str], recognized: str = "") -> str:
        """Return the form in which to read the files `names` as a reranker, or "". A form that is only `recognized`
        yields to a modules.json, to a quantization that was asked for, and to graphs without the weights."""
        named = recognize_name(self.address.target) if self.address.scheme == "hf" else ""
        plain = "modules.json" not in names and not self.address.form and has_tensors(names)
        return self.address.reranker or ((named or recognized) if plain else "")

    def choose(self, names: Collection[str], folders: Iterable[str], recognized: str = "") -> list[str]:
        """Choose the files to fetch from a source. Raises SourceError if they do not make up a model."""
        reranker = bool(self.find_reranker(names, recognized))
        try:
            chosen = choose_files(names, folders, weights=self.weights, form=self.address.form, reranker=reranker)
        except SourceError as error:
            raise SourceError(f"{self.address}: {error.message}") from None
        return chosen if self.only_files is None else [name for name in chosen if name in self.only_files]


def disk_error(error: OSError, what: str) -> SourceError:
    """Convert a file system error while writing `what` to a SourceError with the next step; removing models frees
    space."""
    return disk.disk_error(error, what, "free some space (`shoal rm`)")
