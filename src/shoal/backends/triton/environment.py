"""A Python for the models of Triton's python backend: an interpreter with a shared libpython, and its libraries.

The backend runs every model in its own process, a "stub" that embeds Python. A stub needs `libpython3.X.so.1.0` of
exactly the version that it was built for, and a numpy below 2, which it was built against. So models get their own
virtual environment, separate from Shoal's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from shoal.backends.triton.build_folder import Progress, build_once, check_stop
from shoal.decoding import json_decoder
from shoal.downloads.pip import Pip
from shoal.errors import SetupError, SourceError

REQUIREMENTS = ("numpy>=1.26,<2", "onnxruntime>=1.20,<2", "tokenizers>=0.20,<1")
"""Imports of Shoal's Python models. Without dependencies, which serve the Hub and training, not inference."""

VERSIONS = ("3.12", "3.11", "3.10")
"""Pythons with both a stub in the wheel and wheels of a numpy below 2, best first."""

_TIMEOUT_S = 30.0
_QUERY = """\
import json, sys, sysconfig as s
names = "LIBDIR", "INSTSONAME", "MULTIARCH", "LIBPL"
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "executable": getattr(sys, "_base_executable", ""),
"prefix": sys.base_prefix, **{n.lower(): s.get_config_var(n) or "" for n in names}}))
"""


class InterpreterInfo(msgspec.Struct, frozen=True):
    """What an interpreter reports about itself; paths are absolute, empty if unknown."""

    version: str
    executable: str
    prefix: str = ""
    libdir: str = ""
    instsoname: str = ""
    multiarch: str = ""
    libpl: str = ""


_INTERPRETER_INFO = json_decoder(InterpreterInfo)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that stubs can embed. `libpython` is the file that the loader must find as libpython3.X.so.1.0."""

    executable: str
    version: str
    libpython: Path


@dataclass(frozen=True, slots=True)
class Environment:
    """Folders of an environment. `programs` comes first on the server's PATH, `libraries` on its LD_LIBRARY_PATH."""

    programs: Path
    libraries: Path


def query_interpreter(executable: str) -> InterpreterInfo | None:
    """Return what an interpreter reports; None if it does not run (a pyenv shim of an unselected version)."""
    try:
        result = subprocess.run([executable, "-I", "-c", _QUERY], capture_output=True, timeout=_TIMEOUT_S, check=True)
        return _INTERPRETER_INFO.decode(result.stdout)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None


def find_candidates() -> list[str]:
    """Return interpreters of this machine: the one that runs Shoal first, then those on PATH and in /usr/bin."""
    names = [f"python{version}" for version in VERSIONS]
    found = [shutil.which(name) for name in names] + [shutil.which(name, path="/usr/bin") for name in names]
    return list(dict.fromkeys([sys.executable, *filter(None, found)]))


def find_interpreter(
    executables: Iterable[str],
    *,
    query: Callable[[str], InterpreterInfo | None] = query_interpreter,
    located: Callable[[InterpreterInfo], Path | None] | None = None,
) -> Interpreter:
    """Return the first that a stub can embed. Raises SetupError that lists the candidates and what to install."""
    misses: list[str] = []
    for executable in executables:
        answers = query(executable)
        if answers is None:
            continue
        if answers.version not in VERSIONS:
            misses.append(f"{executable} is Python {answers.version}")
            continue
        libpython = (located or find_libpython)(answers)
        if libpython is not None:
            return Interpreter(answers.executable or executable, answers.version, libpython)
        misses.append(f"{executable} has no {_soname(answers.version)}")
    best = sys.version_info[:2]
    version = f"3.{best[1]}" if f"3.{best[1]}" in VERSIONS else VERSIONS[0]
    raise SetupError(
        "models of Triton's python backend need a shared libpython of Python 3.10, 3.11 or 3.12, but none was found"
        f" ({'; '.join(misses) or 'no such Python on PATH'}). On Debian and Ubuntu: apt-get install libpython{version};"
        f" with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}; Pythons of uv and conda have one"
    )


def find_libpython(
    answers: InterpreterInfo,
    *,
    is_file: Callable[[Path], bool] = Path.is_file,
    cached: Callable[[str], Iterable[str]] | None = None,
) -> Path | None:
    """Return the shared library of an interpreter: where it reports it, beside it, else from the loader's cache."""
    folders = [answers.libdir, f"{answers.libdir}/{answers.multiarch}", f"{answers.prefix}/lib", answers.libpl]
    names = [name for name in (_soname(answers.version), answers.instsoname) if ".so" in name]
    for folder in dict.fromkeys(filter(None, folders)):
        for name in dict.fromkeys(names):
            if is_file(path := Path(folder, name)):
                return path
    known = (cached or _loader_cache)(_soname(answers.version))
    return next((Path(path) for path in known if is_file(Path(path))), None)


def _soname(version: str) -> str:
    return f"libpython{version}.so.1.0"


def _loader_cache(name: str) -> list[str]:
    """Return the paths of a library in ldconfig's cache, which lists `NAME (FLAGS) => PATH`."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        output = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.strip().partition(" => ") for line in output.splitlines())
    return [path for before, _, path in lines if before.split(" ")[0] == name]


def build(root: Path, python: Interpreter, *, offline: bool, progress: Progress, stop: threading.Event) -> Environment:
    """Return the environment for models, below `root`; made with pip if it is missing or its Python was removed.

    Raises SourceError and Cancelled.
    """
    identity = "\n".join((*REQUIREMENTS, python.executable, str(python.libpython)))
    folder = root / f"py{python.version}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"

    def make(made: Path) -> None:
        if offline:
            raise SourceError(
                f"the Python libraries for Triton's models are not in {root}, and --offline forbids downloading them:"
                " run `shoal triton up` once with network access"
            )
        _run_command([python.executable, "-m", "venv", "--without-pip", str(made)], "creating a virtual environment")
        inside = str(made / "bin" / "python")
        work = Path(tempfile.mkdtemp(dir=made.parent))
        what = "Python libraries for Triton"
        pip = Pip(label=what, work=work, check=partial(check_stop, stop), report=partial(progress.report_fetch, what))
        pip.run("install", *REQUIREMENTS, before=("--python", inside))
        _run_command(
            [inside, "-I", "-c", "import numpy, onnxruntime, tokenizers"], "importing onnxruntime and tokenizers"
        )
        (made / "libpython").mkdir()
        (made / "libpython" / _soname(python.version)).symlink_to(python.libpython)

    def usable(path: Path) -> bool:
        return (path / "bin" / "python").is_file() and (path / "libpython" / _soname(python.version)).is_file()

    build_once(folder, make, usable=usable, stop=stop)
    return Environment(folder / "bin", folder / "libpython")


def _run_command(command: Sequence[str], what: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=4 * _TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()
        raise SourceError(f"{what} for Triton's models failed: {lines[-1] if lines else error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"{what} for Triton's models failed: {error}") from error


def server_environment(environment: Environment | None, base: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables of a server: this process's without Shoal's settings, which may hold keys, and
    without Vertex AI's, which make it open another port."""
    kept = {
        name: value for name, value in (base or dict(os.environ)).items() if not name.startswith(("SHOAL_", "AIP_"))
    }
    if environment is None:
        return kept
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):  # they select another numpy
        kept.pop(name, None)
    kept["PYTHONNOUSERSITE"] = "1"
    kept["PATH"] = os.pathsep.join(filter(None, (str(environment.programs), kept.get("PATH", os.defpath))))
    kept["LD_LIBRARY_PATH"] = os.pathsep.join(
        filter(None, (str(environment.libraries), kept.get("LD_LIBRARY_PATH", "")))
    )
    return kept
