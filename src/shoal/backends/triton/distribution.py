"""The tritonserver to run: the one on this machine, else the one inside the `nvidia-pytriton` wheel.

That wheel has tritonserver 2.51.0 with the python backend, the local cache and every library they need: a real Triton
without Docker or a GPU. Shoal does not install it: it unpacks the required files under `$SHOAL_HOME/triton`.
"""

from __future__ import annotations

import platform
import shutil
import stat
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from shoal.backends.triton.build_folder import Progress, build_once, check_stop
from shoal.downloads.pip import Pip
from shoal.downloads.wheels import extract, open_wheel
from shoal.errors import SetupError, SourceError

REQUIREMENT = "nvidia-pytriton==0.7.0"
HASHES = {
    "x86_64": "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
    "aarch64": "f99e07ee56fe065337453956afba17d2673e02ec6a632c3de26ce6e7b32a0898",
}
"""SHA-256 of the wheel by machine: Shoal runs its programs, so it must be the tested file."""

MIN_GLIBC = (2, 35)
IMAGE = Path("/opt/tritonserver")
"""Triton's folder in NVIDIA's container images, which is not on PATH there."""

_ROOT = "pytriton/tritonserver/"
_LIBRARIES = "nvidia_pytriton.libs/"
_NEEDED_FOLDERS = (f"{_ROOT}bin/", f"{_ROOT}backends/", f"{_ROOT}caches/", _LIBRARIES)
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A tritonserver; `backends` and `caches` are the folders it loads from."""

    binary: Path
    backends: Path
    caches: Path

    def platforms(self) -> tuple[str, ...]:
        """Return the backends that are there, by name: "python", "onnxruntime", ..."""
        try:
            found = sorted(folder for folder in self.backends.iterdir() if folder.is_dir())
        except OSError:
            return ()
        return tuple(
            folder.name
            for folder in found
            if (folder / f"libtriton_{folder.name}.so").exists() or (folder / "model.py").exists()
        )


def find_installed(path: str | None = None, image: Path = IMAGE) -> Distribution | None:
    """Return the `tritonserver` on PATH (or on `path`), else the one of an NVIDIA image; None if there is neither."""
    found = shutil.which("tritonserver", path=path) or shutil.which("tritonserver", path=str(image / "bin"))
    if found is None:
        return None
    root = Path(found).resolve().parent.parent
    # A binary copied elsewhere still loads from the image's folder, which is compiled into it.
    home = root if (root / "backends").is_dir() else image
    return Distribution(Path(found), home / "backends", home / "caches")


def check_machine(machine: str = "", libc: tuple[str, str] | None = None) -> str:
    """Return the machine's name in wheels. Raises SetupError if the wheel's tritonserver cannot run on it."""
    machine = machine or platform.machine()
    name, version = libc or platform.libc_ver()
    way_out = "install Triton, so that `tritonserver` is on PATH, or run Shoal in NVIDIA's image"
    if machine not in HASHES or platform.system() != "Linux":
        raise SetupError(
            f"no tritonserver can be downloaded for {platform.system()} on {machine}: {way_out}, or name a remote"
            " server as triton://host:8001"
        )
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        needed = ".".join(map(str, MIN_GLIBC))
        raise SetupError(
            f"the tritonserver that Shoal downloads needs glibc {needed} (Debian 12, Ubuntu 22.04 or newer), but this"
            f" machine has {f'{name} {version}'.strip() or 'another C library'}: {way_out}"
        )
    return machine


def fetch(root: Path, python: str, *, offline: bool, progress: Progress, stop: threading.Event) -> Distribution:
    """Return the wheel's tritonserver with the python backend for `python` ("3.11"), below `root`; fetched if missing.

    Raises SetupError if it cannot run, SourceError if it cannot be fetched, Cancelled.
    """
    machine = check_machine()
    folder = root / f"{REQUIREMENT.replace('==', '-')}-{machine}-py{python}"

    def build(made: Path) -> None:
        if offline:
            raise SourceError(
                f"tritonserver is not in {root}, and --offline forbids downloading it: run `shoal triton up` once with"
                " network access, or copy that folder from a machine that has it"
            )
        work = Path(tempfile.mkdtemp(dir=made.parent))
        requirements = work / "requirements.txt"
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{HASHES[machine]}\n")
        # By default pip chooses by its own platform tag; only the wheel for this machine is allowed.
        tag = f"--platform=manylinux_{MIN_GLIBC[0]}_{MIN_GLIBC[1]}_{machine}"
        arguments = ("download", "--require-hashes", tag, f"--dest={work}", f"--requirement={requirements}")
        report = partial(progress.report_fetch, REQUIREMENT)
        Pip(label=REQUIREMENT, work=work, check=partial(check_stop, stop), report=report).run(*arguments)
        [wheel] = work.glob("*.whl")
        unpack(wheel, made, python, progress, stop)

    build_once(folder, build, usable=lambda path: (path / _ROOT / "bin" / "tritonserver").is_file(), stop=stop)
    server = folder / _ROOT
    return Distribution(server / "bin" / "tritonserver", server / "backends", server / "caches")


def unpack(wheel: Path, into: Path, python: str, progress: Progress, stop: threading.Event) -> None:
    """Write the server, its backends, caches and libraries, with the stub for `python` in its place.

    The layout stays the wheel's: its binaries find their libraries relative to themselves. Raises SourceError for a
    broken wheel or one without a stub for that Python, Cancelled, OSError.
    """
    stub = f"{_ROOT}python_backend_stubs/{python}/{_STUB}"
    with open_wheel(wheel, REQUIREMENT) as archive:
        entries = {entry.filename: entry for entry in archive.infolist() if _is_needed(entry, stub)}
        if stub not in entries:
            raise SourceError(f"{REQUIREMENT} has no python backend for Python {python}; run Shoal with another Python")
        report = partial(progress.report_fetch, "unpacking tritonserver")
        extract(archive, entries, into, check=partial(check_stop, stop), report=report)
    (into / stub).rename(into / _ROOT / "backends" / "python" / _STUB)
    for program in (into / _ROOT / "bin" / "tritonserver", into / _ROOT / "backends" / "python" / _STUB):
        program.chmod(0o755)
    shutil.rmtree(into / _ROOT / "python_backend_stubs")


def _is_needed(entry: zipfile.ZipInfo, stub: str) -> bool:
    """Return whether a file of the wheel is needed. Its libpython 3.13 is not: no numpy below 2 supports 3.13."""
    name = PurePosixPath(entry.filename)
    if entry.is_dir() or stat.S_ISLNK(entry.external_attr >> 16) or name.is_absolute() or ".." in name.parts:
        return False
    return entry.filename == stub or (
        entry.filename.startswith(_NEEDED_FOLDERS) and not name.name.startswith("libpython")
    )
