"""The lock files of `make setup` and CI: each has what pyproject.toml requires, with hashes, and names no index."""

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
    "lowest": (RUNTIME, "dev-base"),
    "parity": (RUNTIME, "parity"),
    "convert": ((*RUNTIME, "convert-images"), "convert"),
    "clients": (("llm",), "clients"),
    "clients-old": ((), "clients-old"),
    "docs": (None, "docs"),
    "node": (None, "node"),
    "release": (None, "release"),
    "uv": (None, "uv"),
}
"""Of each lock file: the extras of Shoal (None: Shoal itself is not in it), and the dependency group."""

UNLOCKED = {"torch", "torchvision"}
RENEW = "run `make lock`"


def group_entries(name: str) -> Iterator[str]:
    for entry in PROJECT["dependency-groups"][name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from group_entries(entry["include-group"])


def requirements_of(name: str) -> list[Requirement]:
    extras, group = LOCKS[name]
    lines = list(group_entries(group))
    if extras is not None:
        lines += PROJECT["project"]["dependencies"]
    for extra in extras or ():
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [one for one in map(Requirement, lines) if canonicalize_name(one.name) not in UNLOCKED]


def entries(name: str) -> list[str]:
    """Yield one text per entry: its version, hashes, and the comments on who needs it."""
    return re.findall(r"^[a-z0-9].*\n(?: .*\n)*", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE)


def pinned_versions(name: str) -> dict[str, list[Version]]:
    """A package has several versions if Pythons or systems need different ones."""
    versions: dict[str, list[Version]] = {}
    for entry in entries(name):
        package, version = re.match(r"([a-z0-9.-]+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        versions.setdefault(canonicalize_name(package), []).append(Version(version))
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_project_dependencies_are_locked(name: str) -> None:
    """Every requirement has an entry, and all of its versions are allowed."""
    locked = pinned_versions(name)
    for requirement in requirements_of(name):
        versions = locked.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement} is not in requirements/{name}.txt: {RENEW}"
        for version in versions:
            allowed = requirement.specifier.contains(version, prereleases=True)
            assert allowed, f"requirements/{name}.txt has {version}, not {requirement}: {RENEW}"


@pytest.mark.parametrize("name", LOCKS)
def test_nothing_else_is_locked(name: str) -> None:
    """Direct requirements in the lock file are still in pyproject.toml."""
    required = {canonicalize_name(requirement.name) for requirement in requirements_of(name)}
    for entry in entries(name):
        package = canonicalize_name(entry.split("==")[0])
        if "pyproject.toml" in entry:
            assert package in required, f"{package} is in requirements/{name}.txt, but nothing asks for it: {RENEW}"


@pytest.mark.parametrize("name", LOCKS)
def test_files_are_identified_by_hashes_only(name: str) -> None:
    """Each entry has a hash, and no address of an index or of a file."""
    assert all("--hash=sha256:" in entry for entry in entries(name))
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    assert not re.search("^-", text, re.MULTILINE)  # a pip option such as --index-url


def test_lock_files_match_the_makefile() -> None:
    """The two lists are equal."""
    assert {path.stem for path in (ROOT / "requirements").glob("*.txt")} == LOCKS.keys()


@pytest.mark.parametrize("extra", ["", *RUNTIME])
def test_the_lowest_versions_match_the_lower_bounds(extra: str) -> None:
    """`make test-lowest` runs the lowest versions that pyproject.toml allows."""
    listed = PROJECT["project"]["optional-dependencies"][extra] if extra else PROJECT["project"]["dependencies"]
    locked = pinned_versions("lowest")
    for requirement in map(Requirement, listed):
        (version,) = locked[canonicalize_name(requirement.name)]
        (floor,) = (Version(each.version) for each in requirement.specifier if each.operator == ">=")
        assert version.release[: len(floor.release)] == floor.release, (
            f"{requirement}, but lowest is {version}: {RENEW}"
        )


@pytest.mark.parametrize("package", ["jinja2", "msgspec", "openvino", "openvino-genai", "pillow"])
def test_packages_of_omitted_tests_have_one_version(package: str) -> None:
    """`make test-lowest` omits tests of these packages (SAME in the Makefile), which would run the same code again."""
    lowest, locked = (pinned_versions(name)[package] for name in ("lowest", "dev"))
    assert lowest == locked, f"{package}: remove its tests from SAME in the Makefile, and its name here"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_gets_one_version_of_each(python: str) -> None:
    """If a package has several versions, their conditions select one for each Python on Linux."""
    for name in LOCKS:
        chosen: set[str] = set()
        for entry in entries(name):
            requirement = Requirement(entry.splitlines()[0].rstrip(" \\"))
            environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert requirement.name not in chosen, f"{requirement.name} twice in {name}.txt"
                chosen.add(requirement.name)
        missing = {canonicalize_name(one.name) for one in requirements_of(name)} - {
            canonicalize_name(one) for one in chosen
        }
        assert not missing
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
