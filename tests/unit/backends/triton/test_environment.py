"""Interpreters that a stub can embed, their libpython, and a server's environment variables."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from shoal.backends.triton import environment
from shoal.backends.triton.build_folder import SilentProgress
from shoal.backends.triton.environment import (
    Environment,
    Interpreter,
    InterpreterInfo,
    build,
    find_candidates,
    find_interpreter,
    find_libpython,
    query_interpreter,
    server_environment,
)
from shoal.errors import SetupError, SourceError

DEBIAN = InterpreterInfo(
    "3.11", "/usr/bin/python3.11", "/usr", "/usr/lib", "", "x86_64-linux-gnu", "/usr/lib/python3.11/config"
)
PYENV = InterpreterInfo("3.12", "/opt/py/bin/python3.12", "/opt/py", "/opt/py/lib", "libpython3.12.so.1.0")
MULTIARCH = Path("/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0")


def nothing(name: str) -> list[str]:
    return []


def test_this_interpreter_answers() -> None:
    """It reports its version and its library folders."""
    answers = query_interpreter(sys.executable)
    assert answers is not None
    assert answers.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert Path(answers.executable).exists()
    assert answers.libdir


def test_a_program_that_is_no_python(tmp_path: Path) -> None:
    """A failing one (a shim of an unselected version) and a missing one are skipped."""
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert query_interpreter(str(shim)) is None
    assert query_interpreter(str(tmp_path / "none")) is None


def test_shoal_s_own_interpreter_is_tried_first() -> None:
    """Then the others of this machine, each once."""
    found = find_candidates()
    assert found[0] == sys.executable
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("answers", "there"),
    [(DEBIAN, MULTIARCH), (PYENV, Path("/opt/py/lib/libpython3.12.so.1.0"))],
    ids=["Debian", "pyenv"],
)
def test_libpython_from_the_interpreters_configuration(answers: InterpreterInfo, there: Path) -> None:
    """In LIBDIR, or in the machine's subfolder as on Debian."""
    assert find_libpython(answers, is_file=lambda path: path == there, cached=nothing) == there


def test_libpython_in_the_loader_s_cache() -> None:
    """It comes last, and only existing files count."""
    there = Path("/elsewhere/libpython3.11.so.1.0")
    known = {"libpython3.11.so.1.0": ["/gone/libpython3.11.so.1.0", str(there)]}
    assert find_libpython(DEBIAN, is_file=lambda path: path == there, cached=known.__getitem__) == there
    assert find_libpython(DEBIAN, is_file=lambda path: False, cached=known.__getitem__) is None


def test_the_loader_s_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of `ldconfig -p` with exactly that name; none on a machine without ldconfig."""
    program = tmp_path / "ldconfig"
    program.write_text(
        "#!/bin/sh\necho '2 libs found'\necho '\tlibpython3.11.so.1.0 (libc6,x86-64) => /a/libpython3.11.so.1.0'\n"
        "echo '\tlibpython3.11.so (libc6,x86-64) => /a/libpython3.11.so'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._loader_cache("libpython3.11.so.1.0") == ["/a/libpython3.11.so.1.0"]
    program.write_text("#!/bin/sh\nexit 1\n")
    assert environment._loader_cache("libpython3.11.so.1.0") == []


def test_the_first_that_fits_is_taken() -> None:
    """Versions without a stub, programs that do not run and Pythons without a shared library are skipped."""
    known = {
        "new": InterpreterInfo("3.14", "/new"),
        "static": InterpreterInfo("3.11", "/static"),
        "good": PYENV,
        "later": DEBIAN,
    }
    there = {"3.12": Path("/opt/py/lib/libpython3.12.so.1.0"), "/usr/bin/python3.11": MULTIARCH}
    found = find_interpreter(["gone", *known], query=known.get, located=lambda answers: there.get(answers.version))
    assert found == Interpreter("/opt/py/bin/python3.12", "3.12", there["3.12"])


def test_the_error_without_libpython_says_what_to_install() -> None:
    """It lists the candidates, and the commands for Debian, pyenv and uv."""
    known = {"new": InterpreterInfo("3.14", "/new"), "static": InterpreterInfo("3.11", "/static")}
    with pytest.raises(SetupError) as caught:
        find_interpreter(known, query=known.get, located=lambda answers: None)
    message = caught.value.message
    assert "new is Python 3.14; static has no libpython3.11.so.1.0" in message
    assert "apt-get install libpython3." in message
    assert "PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3." in message
    with pytest.raises(SetupError, match="no such Python on PATH"):
        find_interpreter([], query=known.get, located=lambda answers: None)


def test_offline_builds_nothing(tmp_path: Path) -> None:
    """The error says how to download it."""
    python = Interpreter(sys.executable, "3.11", MULTIARCH)
    with pytest.raises(SourceError, match="once with network access"):
        build(tmp_path / "root", python, offline=True, progress=SilentProgress(), stop=threading.Event())
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]


def test_a_venv_that_cannot_be_made(tmp_path: Path) -> None:
    """The error has the interpreter's own message."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'No module named venv' >&2\nexit 1\n")
    broken.chmod(0o755)
    for executable, message in ((broken, "No module named venv"), (tmp_path / "gone", "No such file")):
        python = Interpreter(str(executable), "3.11", MULTIARCH)
        with pytest.raises(SourceError, match=message):
            build(tmp_path / "root", python, offline=False, progress=SilentProgress(), stop=threading.Event())


class Recorded(SilentProgress):
    def __init__(self) -> None:
        self.stages: set[str] = set()

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self.stages.add(what)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip find only wheels of this folder: empty ones with the libraries' names and versions."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, version in (("numpy", "1.26.4"), ("numpy", "2.0.0"), ("onnxruntime", "1.20.0"), ("tokenizers", "0.20.0")):
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"version = {version!r}")
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_pip_installs_into_the_environment(index: Path, tmp_path: Path) -> None:
    """The libraries are there and not in Shoal's own environment, in versions for the stub; no log remains."""
    libpython = tmp_path / "libpython"
    libpython.touch()
    python = Interpreter(sys.executable, "3.11", libpython)
    seen = Recorded()
    made = build(tmp_path / "root", python, offline=False, progress=seen, stop=threading.Event())
    [numpy] = made.programs.parent.glob("lib/python3*/site-packages/numpy.py")
    assert numpy.read_text() == "version = '1.26.4'"
    assert (made.libraries / "libpython3.11.so.1.0").resolve() == libpython
    assert seen.stages == {"Python libraries for Triton"}
    assert not list((tmp_path / "root").rglob("pip.log"))


def test_libraries_that_the_index_lacks(index: Path, tmp_path: Path) -> None:
    """The error says what needs them and where to look, and no partial environment remains."""
    for wheel in index.glob("tokenizers*"):
        wheel.unlink()
    libpython = tmp_path / "libpython"
    libpython.touch()
    python = Interpreter(sys.executable, "3.11", libpython)
    with pytest.raises(SourceError, match=r"^Python libraries for Triton: the package index has no wheel"):
        build(tmp_path / "root", python, offline=False, progress=SilentProgress(), stop=threading.Event())
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]


def test_what_is_there_is_used_and_what_lost_its_python_is_not(tmp_path: Path) -> None:
    """An environment is usable while its interpreter and libpython exist; offline, a broken one is an error."""
    libpython = tmp_path / "libpython3.11.so.1.0"
    libpython.touch()
    python = Interpreter(sys.executable, "3.11", libpython)
    content = "\n".join((*environment.REQUIREMENTS, python.executable, str(libpython)))
    folder = tmp_path / "root" / f"py3.11-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "libpython").mkdir()
    (folder / "libpython" / "libpython3.11.so.1.0").symlink_to(libpython)
    stop = threading.Event()
    made = build(tmp_path / "root", python, offline=True, progress=SilentProgress(), stop=stop)
    assert made == Environment(folder / "bin", folder / "libpython")
    libpython.unlink()
    with pytest.raises(SourceError):
        build(tmp_path / "root", python, offline=True, progress=SilentProgress(), stop=stop)


def test_a_server_sees_its_python_first_and_no_setting_of_shoal() -> None:
    """Keys are not passed on, nor variables that select another numpy."""
    base = {"PATH": "/bin", "SHOAL_API_KEY": "secret", "PYTHONPATH": "/mine", "LD_LIBRARY_PATH": "/lib", "HOME": "/h"}
    made = server_environment(Environment(Path("/e/bin"), Path("/e/libpython")), base)
    assert made == {
        "PATH": os.pathsep.join(("/e/bin", "/bin")),
        "LD_LIBRARY_PATH": os.pathsep.join(("/e/libpython", "/lib")),
        "HOME": "/h",
        "PYTHONNOUSERSITE": "1",
    }
    assert server_environment(None, base) == {name: value for name, value in base.items() if name != "SHOAL_API_KEY"}
