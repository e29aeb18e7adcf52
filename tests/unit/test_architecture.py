"""The layout that docs/design.md promises, read from the imports and names in src/shoal."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)

LEAVES = {"errors", "types", "specs", "_version"}
# Leaves for who fetches files: `models`, and the backend that fetches a Triton.
FETCHING = {"disk", "pip", "stopping", "wheels"}
SEAMS = LEAVES | {"core.protocols"}
# A package or module of the top level -> what it may import beside itself. `None`: everything.
MAY_IMPORT: dict[str, set[str] | None] = {
    "__init__": {"_version", "api", "errors", "types"},
    "__main__": {"cli"},
    "_version": set(),
    "errors": set(),
    "types": set(),
    "specs": {"types"},
    "settings": {"errors"},
    "names": set(),
    # Files of whoever runs the process: for the command line and for Python, never for a server.
    "pictures": {"errors", "types"},
    "durations": {"errors"},
    "disk": {"errors"},
    "pip": {"disk", "errors"},
    "wheels": {"disk", "errors"},
    "stopping": set(),
    "presets": {"durations", "errors", "names"},
    "config": {"errors", "presets", "settings"},
    "server": {"errors", "http_protocol"},
    "http_protocol": set(),
    "garbage": set(),
    "fetching": {"errors"},
    "core": LEAVES,
    "pipelines": SEAMS,
    "backends": SEAMS | FETCHING | {"names"},
    "observability": SEAMS,
    "models": SEAMS | FETCHING | {"names"},
    "surfaces": LEAVES | {"core", "durations", "fetching", "names"},
    "web": LEAVES | {"core", "surfaces"},
    "bench": LEAVES,
    "cli": LEAVES
    | {"app", "bench", "config", "core", "local", "models", "observability", "pictures", "presets"}
    | {"server", "settings", "triton"}
    # `shoal triton` runs a process, and no engine.
    | {"backends.triton.server", "backends.triton.state", "backends.triton.supervise"}
    # `shoal bench chat --triton` puts load on a Triton itself, with no engine between.
    | {"backends.triton.client", "backends.triton.codec", "backends.triton.protocol_pb2"},
    # Models in this process, for Python: the composition root without a server.
    "api": LEAVES | {"arguments", "background", "config", "core.contrast", "models", "pictures", "settings"},
    "arguments": {"errors", "pictures", "types"},
    "background": LEAVES | {"app", "config", "core"},
    "row_cache": LEAVES | {"_version", "core", "disk", "settings"},
    "asgi": LEAVES | {"app", "config", "server", "settings"},
    # The composition root: `app`, `loader`, `opening`, and `local`, `triton` and `llm` for what it shares with others.
    "local": SEAMS | {"backends", "disk", "models", "pipelines", "settings", "stopping"},
    "towers": SEAMS | {"local", "models", "pipelines", "settings"},
    "triton": SEAMS | {"backends", "core", "llm", "local", "models", "pipelines", "settings"},
    "llm": SEAMS | {"backends", "core", "local", "models", "pipelines", "settings"},
    "tei": SEAMS | {"backends", "core", "llm", "local", "models", "pipelines", "settings"},
    "opening": None,
    "loader": None,
    "app": None,
}
# Written into model repositories and run by Triton, never imported here.
PROGRAMS = SOURCE / "backends" / "triton" / "programs"
LEAF_LIBRARIES = {"msgspec", "numpy"}
BANNED = re.compile(r"handlers?|managers?|helpers?|services?|predictors?|executors?|utils?|commons?")
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def name_of(path: Path) -> str:
    """`core.planner` for src/shoal/core/planner.py; a package has the name of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; `from shoal.core import x` is `shoal.core.x`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def internal(path: Path) -> set[str]:
    """The names, below `shoal.`, of Shoal's own modules that a file imports."""
    return {name.removeprefix("shoal.") for name in imports(path) if name.startswith("shoal.")}


def allowed(name: str, own: str, may: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in may | {own})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    """A module imports its own package and what its layer may know, at the top of the file or inside a function."""
    own = name_of(path).partition(".")[0]
    may = MAY_IMPORT[own]
    if may is not None:
        wrong = {name for name in internal(path) if not allowed(name, own, may | {"__version__"})}
        assert not wrong, f"{name_of(path)} may not import {', '.join(sorted(wrong))}"


def test_every_top_level_name_has_a_rule() -> None:
    """A new package says where it stands before it is used, and no rule outlives its package."""
    found = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES}
    assert found == set(MAY_IMPORT)


@pytest.mark.parametrize("name", sorted({"errors", "types", "names"}))
def test_leaves_import_little(name: str) -> None:
    """errors, types and names know the standard library, msgspec and numpy, so that everything may import them."""
    tops = {each.partition(".")[0] for each in imports(SOURCE / f"{name}.py")}
    assert tops <= LEAF_LIBRARIES | sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_are_words_of_the_domain(path: Path) -> None:
    """No module or class has a name that says only that it does something."""
    classes = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    for name in [path.stem, *path.relative_to(SOURCE).parts[:-1], *classes]:
        for word in WORD.findall(name):
            assert not BANNED.fullmatch(word.lower()), f"{name_of(path)}: {name}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != PROGRAMS], ids=name_of)
def test_nothing_reads_the_environment_on_import(path: Path) -> None:
    """Settings are read when Shoal starts; a module that reads them on import cannot be configured or tested."""
    for node in _run_on_import(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}), f"{path}:{node.lineno}"


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under `node` outside the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _run_on_import(child)


def test_the_rules_notice_a_breach(tmp_path: Path) -> None:
    """The checks above see an import inside a function and know it for what it is."""
    file = tmp_path / "one.py"
    file.write_text("def f():\n    from shoal.backends import fake\n")
    assert internal(file) == {"backends.fake"}
    assert not allowed("backends.fake", "surfaces", LEAVES | {"core"})
    assert allowed("core.gateway", "surfaces", LEAVES | {"core"})
    assert BANNED.fullmatch(WORD.findall("RequestHandler")[1].lower())
