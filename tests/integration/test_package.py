"""The journey of a stranger with a wheel: build, install into an empty environment, serve.

The wheel is made from the source archive, so that both are complete. With the variable DIST, the files of that folder
are tested instead: the release does so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from shoal import __version__
from shoal.web import DIST as PAGES
from tests.integration.server_kit import LISTENING, Server, environment, wait_until
from tests.unit.models.checkpoints import checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = Path(sys.executable).with_name("uv")
BUILT = os.environ.get("DIST")

pytestmark = pytest.mark.timeout(600)  # on a new machine, packages are downloaded


def run(*command: str | Path, folder: Path | None = None) -> str:
    """Run a program without this environment's Shoal, and return its output."""
    env = {name: value for name, value in environment().items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target: str, source: Path, into: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into, folder=source)
    (found,) = into.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel."""
    if BUILT:
        return Path(BUILT).resolve()
    if not (PAGES / "index.html").exists():
        pytest.skip("needs the built pages: make web")
    into, unpacked = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build("sdist", ROOT, into)) as archive:
        archive.extractall(unpacked, filter="data")
    build("wheel", unpacked / f"shoal-{__version__}", into)
    return into


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"shoal-{__version__}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with this wheel, its extra `local` and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", folder)
    python, wanted = folder / "bin" / "python", f"{wheel}[local]"
    pinned = ("--constraint", ROOT / "requirements" / "serve.txt")
    if UV.exists() and "index-url" not in run(python, "-m", "pip", "config", "list"):  # uv does not read pip's settings
        run(UV, "pip", "install", "--python", python, *pinned, wanted)
    else:
        run(python, "-m", "pip", "install", wanted)
    return python.parent


@pytest.fixture(scope="module")
def server(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    log = folder / "log"
    command = [str(installed / "shoal"), "serve", f"tiny=file:{checkpoint(folder / 'model')}", "--port", "0"]
    env = environment({"SHOAL_HOME": str(folder / "home")})
    env.pop("PYTHONPATH", None)
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
        match = LISTENING.search(log.read_text())
        assert match
        started = Server(process, int(match[1]), log)
        wait_until(started.ready, process, log)
        yield started
    finally:
        process.kill()
        process.wait()


def test_an_installed_wheel_serves(server: Server) -> None:
    """A model is converted, loaded and asked by an installation that has nothing of the clone."""
    status, _, body = server.request("POST", "/v1/embeddings", {"model": "tiny", "input": ["one", "two"]})
    assert status == 200, body
    assert len(json.loads(body)["data"]) == 2


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_the_wheel_has_the_pages(server: Server, page: str) -> None:
    """The pages are part of the package."""
    status, headers, _ = server.request("GET", page)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")


def test_the_command_tells_the_version(installed: Path) -> None:
    """`shoal --version` of the installation is this version, with the engine of the extra."""
    told = run(installed / "shoal", "--version")
    assert told.splitlines()[0] == f"shoal {__version__}"
    assert "openvino not installed" not in told


def test_the_command_runs_without_an_installation(wheel: Path, tmp_path: Path) -> None:
    """`uvx --from WHEEL shoal`: without extras, every command starts."""
    if not UV.exists():
        pytest.skip("needs uv: make setup")
    pinned = ("--python", sys.executable, "--constraints", ROOT / "requirements" / "serve.txt")
    told = run(UV, "tool", "run", *pinned, "--from", wheel, "shoal", "--version", folder=tmp_path)
    assert told.splitlines()[0] == f"shoal {__version__}"


def test_the_metadata_is_that_of_the_project(metadata: Message) -> None:
    """Version, extras and Python are those of pyproject.toml, and the license is named."""
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_every_extra_is_documented() -> None:
    """The table of docs/commands.md has a row for each."""
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"\n| `{extra}` |" not in text] == []


def test_the_wheel_has_no_more_than_the_package(wheel: Path) -> None:
    """No tests, no sources of the pages, no bytecode; types are marked."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"shoal", f"shoal-{__version__}.dist-info"}
    assert "shoal/py.typed" in names
    assert not [name for name in names if name.endswith((".pyc", ".map", ".ts", ".tsx"))]
