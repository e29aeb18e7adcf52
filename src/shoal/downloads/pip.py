"""Runs pip as a process, reports its progress and explains its failures."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.downloads.disk import full_disk_advice
from shoal.errors import NotAtSource, SourceAway, SourceError

_SIZE = re.compile(r"Downloading \S+ \(([0-9.]+) ([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_UNREACHABLE = (
    r"NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|Max retries|ProxyError|SSLError|Connection"
)

NO_PIP = "pip is not installed; run `python -m ensurepip --upgrade`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Messages for failures whose next step depends on what is fetched; the defaults suit Shoal's own dependencies.

    `hint` is appended to the message of an unknown failure.
    """

    no_wheel: str = "the package index has no wheel for this platform; check the package index that pip uses"
    other_hash: str = (
        "the download does not match the SHA-256 that Shoal expects; check the package index that pip uses"
    )
    no_pip: str = NO_PIP
    hint: str = ""
    is_user_choice: bool = False
    """Whether a user chose the package, so that a missing one is the user's error."""

    def error(self, output: str, what: str) -> SourceError:
        """Convert pip's output to an error that names the next step."""
        away = "the package index cannot be reached; check the network, the proxy and pip's configuration"
        for pattern, text, kind in (
            (r"No space left|Disk quota", full_disk_advice(), SourceError),
            (_UNREACHABLE, away, SourceAway),
            (
                r"HTTP error 40[13]|40[13] Client Error",
                "the package index refused the request; check pip's configuration and credentials",
                SourceError,
            ),
            (r"DO NOT MATCH THE HASHES", self.other_hash, SourceError),
            (
                r"no such option: --python",
                "this pip is older than 22.3; run `python -m pip install --upgrade pip`",
                SourceError,
            ),
            (
                r"No matching distribution|Could not find a version",
                self.no_wheel,
                NotAtSource if self.is_user_choice else SourceError,
            ),
            (r"No module named pip", self.no_pip, SourceError),
        ):
            if re.search(pattern, output):
                return kind(f"{what}: {text}")
        lines = [line for line in output.splitlines() if line.strip()]
        return SourceError(f"{what}: pip failed: {lines[-1].strip() if lines else 'no output'}{self.hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pip:
    """One run of pip. `label` names it in messages; `work` is an empty folder for its log and temporary files.

    `check` is called repeatedly and raises if the work was canceled. `report` receives the bytes so far and the total
    (None while unknown). `environment` is added to this process's environment.
    """

    label: str
    work: Path
    check: Callable[[], None]
    report: Callable[[int, int | None], None]
    environment: tuple[tuple[str, str], ...] = ()
    advice: Advice = Advice()

    def run(self, *arguments: str, before: Sequence[str] = ()) -> None:
        """Run `pip BEFORE... ARGUMENTS...`, with wheels only and without dependencies.

        Raises SourceError, OSError and the errors of `check`.
        """
        if importlib.util.find_spec("pip") is None:
            raise SourceError(f"{self.label}: {self.advice.no_pip}")
        command = [sys.executable, "-m", "pip", *before, *arguments, "--no-deps", "--only-binary=:all:"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        log = self.work / "pip.log"
        environment = {**os.environ, "TMPDIR": str(self.work), **dict(self.environment)}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
            most = 0
            try:
                while process.poll() is None:
                    self.check()
                    most = self._count_bytes(log, most)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.1)
            finally:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise self.advice.error(log.read_text(errors="replace"), self.label)

    def _count_bytes(self, log: Path, most_bytes: int) -> int:
        """Report and return the most bytes downloaded so far, out of the total that pip's log has announced."""
        announced = _SIZE.findall(log.read_text(errors="replace"))
        total = sum(int(float(size) * _UNITS[unit]) for size, unit in announced) or None
        done = 0
        for root, _, names in os.walk(self.work):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # pip moves files while they are counted
                    done += os.stat(os.path.join(root, name)).st_size
        most_bytes = max(most_bytes, done)  # installed files leave the folder
        self.report(min(most_bytes, total) if total else most_bytes, total)
        return most_bytes
