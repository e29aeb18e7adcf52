"""What every source is given, and what it gives back."""

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
    """How far the network may be used. `hub` None: the hub client's own default, which HF_ENDPOINT moves.

    `pip`: environment that pip gets on top of this process's (an index of one's own, for instance). `pickles`: weights
    that are pickles in every form of them are fetched too, for somebody who turns them into safetensors.
    """

    offline: bool = False
    hf_token: str | None = field(default=None, repr=False)
    hub: str | None = None
    pip: tuple[tuple[str, str], ...] = ()
    pickles: bool = False


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's files: `folder` holds them; `address` is what gave them, with the exact revision (commit, version,
    fingerprint); `hashes` the SHA-256 of files that were hashed on the way, by path in the folder. `published`: those
    of the weights at the source, where they are no longer the ones in the folder."""

    folder: Path
    address: Address
    hashes: dict[str, str] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FetchJob:
    """One fetch. `only` limits the files to those names, `weights` False to what is not weights; `patience`: seconds
    for a source to answer at all."""

    address: Address
    into: Path
    access: Access
    progress: Progress
    stop: Stop
    only: frozenset[str] | None = None
    patience: float = 10.0
    weights: bool = True

    def choose(self, names: Collection[str], folders: Iterable[str]) -> list[str]:
        """Those of a source's files that this job fetches. Raises SourceError when they make no model."""
        try:
            chosen = choose_files(names, folders, weights=self.weights, pickles=self.access.pickles)
        except SourceError as error:
            raise SourceError(f"{self.address}: {error.message}") from None
        if self.weights and (left := find_pickled_heads(names, chosen)):
            self.progress.report_note(
                f"{self.address}: {' and '.join(left)} are left out: pickles, which only the 'convert' extra reads"
            )
        return chosen if self.only is None else [name for name in chosen if name in self.only]


def disk_error(error: OSError, what: str) -> SourceError:
    """The next step for an error of this machine's file system while `what` was written; removing models makes room."""
    return disk.disk_error(error, what, "free some space (`shoal rm`)")
