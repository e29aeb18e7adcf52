"""Inputs and outputs shared by all sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.downloads import disk
from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.progress import Progress, Stop
from shoal.models.sources.select import choose_files, find_pickled_heads


@dataclass(frozen=True, slots=True)
class Access:
    """Network access settings. `hub` None: the hub client's own default, which HF_ENDPOINT overrides.

    `pip`: extra environment variables for pip (a private index, for instance). `pickles`: also fetch weights that exist
    only as pickles, for a caller that converts them to safetensors.
    """

    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)
    hub: str | None = None
    pip: tuple[tuple[str, str], ...] = ()
    pickles: bool = False


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

    def choose(self, names: Collection[str], folders: Iterable[str]) -> list[str]:
        """Choose the files to fetch from a source. Raises SourceError if they do not make up a model."""
        try:
            chosen = choose_files(names, folders, weights=self.weights, pickles=self.access.pickles)
        except SourceError as error:
            raise SourceError(f"{self.address}: {error.message}") from None
        if self.weights and (left := find_pickled_heads(names, chosen)):
            self.progress.report_note(
                f"{self.address}: {' and '.join(left)} are skipped: they are pickles, which only the 'convert' extra "
                "can load"
            )
        return chosen if self.only_files is None else [name for name in chosen if name in self.only_files]


def disk_error(error: OSError, what: str) -> SourceError:
    """Convert a file system error while writing `what` to a SourceError with the next step; removing models frees
    space."""
    return disk.disk_error(error, what, "free some space (`shoal rm`)")
