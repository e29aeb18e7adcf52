"""Virtual environments of the peers, one each, beside Shoal's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from .table import Environment

STAMP = ".installed"
PYTHON_BIN = Path(sys.executable).parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Unavailable(Exception):
    """This peer cannot be measured here; the message says why."""


def install(folder: Path, environment: Environment, limit_s: float = 1800.0) -> dict[str, str]:
    """Make the environment unless it is there, and return every installed version.

    Raises Unavailable when a package cannot be installed.
    """
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    wanted = json.dumps([*environment.packages, environment.as_of])
    if not stamp.exists() or stamp.read_text() != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(folder)], limit_s)
        run(choose_installer(python, environment), limit_s)
        stamp.write_text(wanted)
    listed = run([str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"], limit_s)
    return {package["name"]: package["version"] for package in json.loads(listed)}


def choose_installer(python: Path, environment: Environment) -> list[str]:
    """uv, which can leave out newer releases; pip where an index is set that only pip knows."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    if "index-url" in configured.stdout:
        return [str(python), "-m", "pip", "install", "--quiet", *environment.packages]
    cutoff = ["--exclude-newer", environment.as_of]
    return [str(PYTHON_BIN / "uv"), "pip", "install", "--python", str(python), *cutoff, *environment.packages]


def run(command: list[str], limit_s: float) -> str:
    """A command's output. Raises Unavailable with its last lines when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{Path(command[0]).name}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(
            f"{Path(command[0]).name} returned {done.returncode}: {last_lines(done.stdout + done.stderr)}"
        )
    return done.stdout


def last_lines(text: str, lines: int = 3, characters: int = 400) -> str:
    """The end of a log, on one line, without colors."""
    found = [" ".join(line.split()) for line in ANSI.sub("", text).splitlines() if line.strip()]
    return " | ".join(found[-lines:])[-characters:]
