"""The layout that docs/design.md describes, checked against the imports and names in src/shoal."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import shoal
from shoal.backends import BACKENDS, FILE_BACKENDS
from shoal.config.settings import Settings
from shoal.models.address import LOCAL_SCHEMES
from shoal.surfaces.shared.wire_models import Backend

SOURCE = Path(shoal.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)

LEAVES = {
    "_version",
    "c_library",
    "decoding",
    "durations",
    "errors",
    "machine_limits",
    "names",
    "parent_process",
    "run_once",
    "sampling_fields",
    "specs",
    "types",
}
SEAMS = LEAVES | {"core.protocols"}
# A top-level package or module -> its allowed imports beside itself. `None`: everything.
MAY_IMPORT: dict[str, set[str] | None] = {
    "__init__": {"_version", "errors", "python", "types"},
    "__main__": {"cli"},
    "_version": set(),
    "c_library": set(),
    "decoding": set(),
    "durations": {"errors"},
    "errors": set(),
    "machine_limits": set(),
    "names": set(),
    "parent_process": set(),
    "run_once": set(),
    "sampling_fields": set(),
    "specs": {"types"},
    "types": {"decoding"},
    "config": {"decoding", "durations", "errors", "names", "sampling_fields"},
    "downloads": {"errors"},
    "kserve": LEAVES | {"protobuf"},
    "protobuf": set(),
    "server": {"c_library", "errors", "http.exchange"},
    "core": LEAVES,
    "pipelines": SEAMS,
    "batches": LEAVES | {"downloads"},
    "cache": LEAVES | {"config", "core", "downloads"},
    "observability": SEAMS | {"core.observers", "core.recording"},
    "models": SEAMS | {"downloads"},
    # One backend reaches Shoal's own processes on other machines.
    "backends": LEAVES | {"config", "core", "downloads", "kserve", "models", "pipelines", "protobuf"} | {"workers"},
    "http": LEAVES | {"core"},
    "surfaces": LEAVES | {"batches", "core", "http", "kserve"},
    "web": LEAVES | {"core", "http"},
    "workers": LEAVES | {"core", "http"},
    "bench": LEAVES,
    # Runs over a gateway that is given to it.
    "bulk": LEAVES | {"core"},
    # Tools of assistants, over the Python API.
    "mcp": LEAVES | {"python"},
    "cli": LEAVES
    | {"app", "bench", "bulk", "config", "core", "mcp", "models", "observability", "python", "ray", "server", "workers"}
    | {"backends.parse_address", "backends.parse_served"}
    # `shoal pull` prepares local models; `shoal triton` runs a process, and no engine.
    | {"backends.local.open", "backends.triton.open"}
    # `shoal doctor` reports what the engines would do with this processor and memory.
    | {"backends.local.compile", "backends.local.options"}
    | {"backends.triton.server", "backends.triton.run_state", "backends.triton.supervise"}
    # `shoal bench chat --triton` sends load to Triton directly, without an engine.
    | {"backends.triton.client", "backends.triton.response", "kserve"},
    # The Python API for models in this process: the composition root without a server. Its conversations have OpenAI's
    # fields, checked by that dialect.
    "python": LEAVES
    | {"app", "backends.parse_served", "config", "core", "models"}
    | {"http.json", "surfaces.openai", "surfaces.shared"},
    "asgi": LEAVES | {"app", "config", "server"},
    # What Ray runs: the composition root in its processes, at the other end of a backend.
    "ray": LEAVES
    | {"app", "asgi", "bulk", "config", "core", "models", "python", "server", "workers"}
    | {"backends.parse_served", "backends.ray.cluster"},
    # The composition root.
    "app": None,
}
# Written into model repositories and run by Triton, never imported here.
PROGRAMS = SOURCE / "backends" / "triton" / "programs"
LEAF_LIBRARIES = {"msgspec", "numpy"}
BANNED = re.compile(r"handlers?|managers?|helpers?|services?|predictors?|executors?|utils?|commons?")
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def name_of(path: Path) -> str:
    """Return `core.planner` for src/shoal/core/scheduling/planner.py; a package has the name of its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return every module that a file imports at any level; `from shoal.core import x` is `shoal.core.x`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def internal(path: Path) -> set[str]:
    """Return the names, below `shoal.`, of the Shoal modules that a file imports."""
    return {name.removeprefix("shoal.") for name in imports(path) if name.startswith("shoal.")}


def is_allowed(name: str, own: str, may: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in may | {own})


def files_of(*packages: str) -> list[Path]:
    """Return the files of top-level packages or modules."""
    return [path for path in FILES if name_of(path).partition(".")[0] in packages]


def files_outside(packages: Collection[str]) -> list[Path]:
    return [path for path in FILES if name_of(path).partition(".")[0] not in packages]


def check(paths: Iterable[Path], violations: Callable[[Path], Iterable[object]], advice: str) -> None:
    """Fail with all violations in all files; each is an import, a name or a line."""
    found = [f"{name_of(path)}: {each}" for path in paths for each in violations(path)]
    assert not found, "\n".join([advice, *found])


def test_imports_follow_the_layers() -> None:
    """A module imports only its own package and what its layer allows, at the top of the file or inside a function."""

    def wrong(path: Path) -> set[str]:
        own = name_of(path).partition(".")[0]
        may = MAY_IMPORT[own]
        return {name for name in internal(path) if may is not None and not is_allowed(name, own, may | {"__version__"})}

    check(FILES, wrong, "MAY_IMPORT forbids these imports")


def dialect_of(name: str) -> str:
    """Return `openai` for surfaces.openai.chat; "" outside dialects and for their shared modules."""
    package, _, rest = name.partition(".")
    dialect = rest.partition(".")[0]
    return dialect if package == "surfaces" and dialect != "shared" else ""


DIALECTS = {dialect_of(name_of(path)) for path in FILES} - {""}


def foreign_dialects(name: str, imported: set[str]) -> set[str]:
    """Return the imports of other dialects' modules by the module `name`."""
    return {each for each in imported if dialect_of(each) in DIALECTS - {dialect_of(name)}}


def test_no_dialect_imports_another() -> None:
    """Each dialect can be read, changed and removed alone; shared code is in surfaces/shared or http. Only
    surfaces/__init__ imports them all.
    """
    dialects = [path for path in files_of("surfaces") if name_of(path) != "surfaces"]
    check(dialects, lambda path: foreign_dialects(name_of(path), internal(path)), "these imports are of other dialects")


def test_every_top_level_name_has_a_rule() -> None:
    """A new package needs a rule before it is used, and no rule outlives its package."""
    packages = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "name", sorted({"c_library", "decoding", "errors", "names", "parent_process", "run_once", "types"})
)
def test_leaves_import_little(name: str) -> None:
    """They import only the standard library, msgspec and numpy (types also decoding), so that everything may import
    them.
    """
    tops = {each.partition(".")[0] for each in imports(SOURCE / f"{name}.py")}
    assert tops <= LEAF_LIBRARIES | sys.stdlib_module_names | ({"shoal"} if name == "types" else set())


def generic_names(path: Path) -> list[str]:
    """Return names of the module, its packages and its classes that have a banned word."""
    names = [path.stem, *path.relative_to(SOURCE).parts[:-1], *re.findall(r"^ *class (\w+)", path.read_text(), re.M)]
    return [name for name in names if any(BANNED.fullmatch(word.lower()) for word in WORD.findall(name))]


def test_names_are_specific() -> None:
    """No module or class has a generic name that only says that it does something."""
    check(FILES, generic_names, "these names are too general")


def environment_reads(path: Path) -> Iterator[int]:
    """Yield the lines that read the environment when the module is imported."""
    text = path.read_text()
    if not {"environ", "getenv"} & set(re.findall(r"\w+", text)):
        return
    for node in _run_on_import(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            yield node.lineno


def test_nothing_reads_the_environment_on_import() -> None:
    """Settings are read at startup; a module that reads them on import cannot be configured or tested."""
    check((path for path in FILES if path.parent != PROGRAMS), environment_reads, "these lines read the environment")


FOLDERS = {path.name for path in (SOURCE / "backends").iterdir() if path.is_dir()} - {"base", "__pycache__"}


def test_nothing_names_a_backend() -> None:
    """Code outside `backends` uses the table; only commands for files and for Triton itself name a backend, within the
    limits of their layer, and what Ray runs.
    """

    def named(path: Path) -> list[str]:
        return [name for name in internal(path) if name.startswith("backends.") and name.split(".")[1] in FOLDERS]

    allowed = ("backends", "cli.", "ray.")
    others = [path for path in FILES if not name_of(path).startswith(allowed)]
    check(others, named, "only the table of backends may import these")


PARTS = {"genai": "local"}
"""Folders that belong to a backend of another name: genai is the engine of local language models."""


def backend_of(name: str) -> str:
    """Return `triton` for backends.triton.open.host; "" for base and for modules outside backends."""
    package, _, rest = name.partition(".")
    folder = rest.partition(".")[0]
    return PARTS.get(folder, folder) if package == "backends" and folder in FOLDERS else ""


def foreign_backends(name: str, imported: set[str]) -> set[str]:
    """Return the imports of other backends' modules by the module `name`; every backend is foreign to base."""
    return {each for each in imported if backend_of(each) not in ("", backend_of(name))}


def test_no_backend_imports_another() -> None:
    """Each backend can be read, changed and removed alone; shared code is in backends/base, models or pipelines. The
    table imports a backend only when it is used.
    """
    foreign = "these imports are of other backends"
    check(files_of("backends"), lambda path: foreign_backends(name_of(path), internal(path)), foreign)


MAY_NAME_BACKENDS = {"backends", "bench", "cli", "config", "ray"}
"""Packages whose users write names of backends: commands, settings, the presets that stand for other servers, and what
Ray runs."""

CHOICE = "surfaces.shared.wire_models"
"""The module with the type of a request's choice between the backends for files."""

NAMES = {*BACKENDS, *(scheme for schemes in BACKENDS.values() for scheme in schemes)} - set(LOCAL_SCHEMES)


def named_backends(path: Path, dialects: set[str]) -> Iterator[str]:
    """Return the backends and schemes named by strings of a file. A dialect's name, and "local", count only in a
    comparison with a `backend` or `scheme`: they have other meanings.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr in {"backend", "scheme"} for side in sides):
                texts = [each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)]
                yield from (str(text) for text in texts if text in NAMES)
        elif isinstance(node, ast.Constant) and node.value in NAMES - dialects - {"local"}:
            yield str(node.value)


def test_no_text_names_a_backend() -> None:
    """Code checks a fact of a backend or a model, not its name, so a new backend needs no change here."""
    others = [path for path in files_outside(MAY_NAME_BACKENDS) if name_of(path) != CHOICE]
    check(others, lambda path: named_backends(path, DIALECTS), "check a fact of the backend, not its name")


def test_backend_choices_match_the_table() -> None:
    """The types of the setting and of the request field list the backends for files."""
    setting = get_args(get_type_hints(Settings)["backend"])
    assert set(setting) - {"auto"} == set(FILE_BACKENDS)
    assert set(get_args(get_args(Backend)[0])) == set(FILE_BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_package_and_the_addresses_of_a_backend_import_little(name: str) -> None:
    """They are imported before any part of the backend is used: no engine, no client, and no other backend."""
    for file in ("__init__.py", "address.py"):
        tree = ast.parse((SOURCE / "backends" / name / file).read_text())
        imported_modules = {each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)}
        imported_modules |= {alias.name for each in tree.body if isinstance(each, ast.Import) for alias in each.names}
        heavy = {each for each in imported_modules if each.startswith("shoal.backends.") and ".base." not in each}
        assert not heavy, f"{name}/{file} imports {', '.join(heavy)}"
        libraries = {each.partition(".")[0] for each in imported_modules} - {"shoal"}
        assert libraries <= sys.stdlib_module_names, f"{name}/{file} imports {', '.join(libraries)}"


def foreign_assignments(path: Path) -> Iterator[str]:
    """Return the assignments to attributes of objects other than `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self":
            yield ast.unparse(node)


def test_nothing_is_attached_after_construction() -> None:
    """An object gets its dependencies by its constructor, or by one of its own methods."""
    check(files_of("app"), foreign_assignments, "these attributes are assigned from outside")


def typed_decoding(path: Path) -> Iterator[int]:
    """Return the lines on which msgspec describes a type: `Decoder(...)`, `convert(...)`, `decode(..., type=...)`."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "msgspec" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgspec."):
            name = ast.unparse(node.func).rpartition(".")[2]
            typed = any(each.arg == "type" for each in node.keywords)
            if name in {"Decoder", "convert"} or (name == "decode" and typed):
                yield node.lineno


# Imported by one thread before a model loads (surfaces), or used by one thread only (cli, bench).
ONE_THREAD = {"http", "surfaces", "cli", "bench", "decoding"}


def test_types_are_described_under_a_lock() -> None:
    """Code that load threads may run gets its decoders from `shoal.decoding`: msgspec's first decode of a type is not
    thread-safe.
    """
    check(files_outside(ONE_THREAD), typed_decoding, "use shoal.decoding in these lines")


def async_starts(path: Path) -> Iterator[int]:
    """Yield the lines that start a process through the event loop."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "subprocess_" in text else ():
        if isinstance(node, ast.Attribute) and node.attr.startswith(("create_subprocess_", "subprocess_")):
            yield node.lineno


def test_no_process_starts_through_the_loop() -> None:
    """uvloop forks, and gRPC crashes what is forked: see `shoal.backends.base.child_process`."""
    check(FILES, async_starts, "use ChildProcess in these lines")


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes under `node` outside function bodies."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _run_on_import(child)


def test_the_rules_detect_violations(tmp_path: Path) -> None:
    """The checks above detect an import inside a function."""
    file = tmp_path / "one.py"
    file.write_text("def f():\n    from shoal.backends import fake\n")
    assert internal(file) == {"backends.fake"}
    assert not is_allowed("backends.fake", "surfaces", LEAVES | {"core"})
    assert is_allowed("core.gateway", "surfaces", LEAVES | {"core"})
    assert foreign_dialects("surfaces.tei.embed", {"surfaces.openai.errors.x"})
    assert foreign_dialects("surfaces.shared.listing", {"surfaces.openai.errors.x"})
    assert not foreign_dialects("surfaces.tei.embed", {"surfaces.shared.listing.x", "surfaces.tei.wire", "http.errors"})
    assert foreign_backends("backends.tei.open", {"backends.openai.open.served_name", "backends.base.address"})
    assert foreign_backends("backends.base.address", {"backends.tei.open"})
    assert not foreign_backends("backends.local", {"backends.genai.open", "backends.parse_address"})
    assert BANNED.fullmatch(WORD.findall("RequestHandler")[1].lower())
    file.write_text('def f(facts, at):\n    return facts.backend == "openai" or at in {"fake"} or at == "openai"\n')
    assert sorted(named_backends(file, {"openai"})) == ["fake", "openai"]
    file.write_text("def f(self, registry, g):\n    self.a = 1\n    registry.gone = g\n")
    assert list(foreign_assignments(file)) == ["registry.gone"]
    file.write_text("import asyncio\nasyncio.create_subprocess_exec('true')\n")
    assert list(async_starts(file)) == [2]
    with pytest.raises(AssertionError, match=r"use ChildProcess\s+__init__: 2\s+__main__: 2"):
        check([SOURCE / "__init__.py", SOURCE / "__main__.py"], lambda _: async_starts(file), "use ChildProcess")
    file.write_text("import os\nA = os.environ\ndef f():\n    return os.environ\n")
    assert list(environment_reads(file)) == [2]
    file.write_text(
        "import msgspec\n"
        "def f(data):\n"
        "    msgspec.json.Decoder(int)\n"
        "    msgspec.convert(data, int)\n"
        "    msgspec.msgpack.decode(data, type=int)\n"
        "    msgspec.json.decode(data)\n"
    )
    assert list(typed_decoding(file)) == [3, 4, 5]
