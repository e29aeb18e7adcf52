"""The lock files of `make setup` and CI: each has what pyproject.toml asks for, with hashes, and names no index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME = ("local", "ort", "llm")
LOCKS = {
    "serve": (RUNTIME, "build"),
    "dev": (RUNTIME, "dev"),
    "lowest": (RUNTIME, "dev"),
    "parity": (RUNTIME, "parity"),
    "convert": ((*RUNTIME, "convert-images"), "convert"),
    "clients": ((), "clients"),
    "clients-old": ((), "clients-old"),
    "node": (None, "node"),
    "uv": (None, "uv"),
}
"""Of each lock file: the extras of Shoal (None: Shoal itself is not in it), and the dependency group."""

UNLOCKED = {"torch", "torchvision"}
RENEW = "run `make lock`"


def grouped(name: str) -> Iterator[str]:
    for entry in PROJECT["dependency-groups"][name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from grouped(entry["include-group"])


def wanted(name: str) -> list[Requirement]:
    extras, group = LOCKS[name]
    lines = list(grouped(group))
    if extras is not None:
        lines += PROJECT["project"]["dependencies"]
    for extra in extras or ():
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [one for one in map(Requirement, lines) if canonicalize_name(one.name) not in UNLOCKED]


def entries(name: str) -> list[str]:
    """One text each: its version, hashes, and the comments on who needs it."""
    return re.findall(r"^[a-z0-9].*\n(?: .*\n)*", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE)


def pinned(name: str) -> dict[str, list[Version]]:
    """A package has several versions where Pythons or systems need different ones."""
    found: dict[str, list[Version]] = {}
    for entry in entries(name):
        package, version = re.match(r"([a-z0-9.-]+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        found.setdefault(canonicalize_name(package), []).append(Version(version))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_what_the_project_asks_for_is_locked(name: str) -> None:
    """Every requirement has its version there, and all versions of it are allowed."""
    locked = pinned(name)
    for requirement in wanted(name):
        versions = locked.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement} is not in requirements/{name}.txt: {RENEW}"
        for version in versions:
            allowed = requirement.specifier.contains(version, prereleases=True)
            assert allowed, f"requirements/{name}.txt has {version}, not {requirement}: {RENEW}"


@pytest.mark.parametrize("name", LOCKS)
def test_nothing_else_is_locked(name: str) -> None:
    """What is there for Shoal's own sake is still asked for."""
    required = {canonicalize_name(requirement.name) for requirement in wanted(name)}
    for entry in entries(name):
        package = canonicalize_name(entry.split("==")[0])
        if "pyproject.toml" in entry:
            assert package in required, f"{package} is in requirements/{name}.txt, but nothing asks for it: {RENEW}"


@pytest.mark.parametrize("name", LOCKS)
def test_files_are_named_by_hashes_alone(name: str) -> None:
    """Each has one, and there is no address of an index or of a file."""
    assert all("--hash=sha256:" in entry for entry in entries(name))
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    assert not re.search("^-", text, re.MULTILINE)  # an option of pip, such as --index-url


def test_lock_files_are_those_of_the_makefile() -> None:
    """None is forgotten here, and none is left over there."""
    assert {path.stem for path in (ROOT / "requirements").glob("*.txt")} == LOCKS.keys()


@pytest.mark.parametrize("extra", ["", *RUNTIME])
def test_the_lowest_versions_are_the_floors(extra: str) -> None:
    """`make test-lowest` runs what pyproject.toml allows at least, not something newer."""
    listed = PROJECT["project"]["optional-dependencies"][extra] if extra else PROJECT["project"]["dependencies"]
    locked = pinned("lowest")
    for requirement in map(Requirement, listed):
        (version,) = locked[canonicalize_name(requirement.name)]
        (floor,) = (Version(each.version) for each in requirement.specifier if each.operator == ">=")
        assert version.release[: len(floor.release)] == floor.release, (
            f"{requirement}, but lowest is {version}: {RENEW}"
        )


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_gets_one_version_of_each(python: str) -> None:
    """Where a package has several versions, their conditions leave one for each Python on Linux."""
    for name in LOCKS:
        chosen: set[str] = set()
        for entry in entries(name):
            requirement = Requirement(entry.splitlines()[0].rstrip(" \\"))
            environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert requirement.name not in chosen, f"{requirement.name} twice in {name}.txt"
                chosen.add(requirement.name)
        missing = {canonicalize_name(one.name) for one in wanted(name)} - {canonicalize_name(one) for one in chosen}
        assert not missing
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
