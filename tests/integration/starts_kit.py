"""Starts a server with four models that load concurrently, and counts starts that succeed, die or hang."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal, NamedTuple

from tests.integration.server_kit import LISTENING, environment
from tests.unit.models.checkpoints import checkpoint
from tests.unit.models.classifiers import classifier
from tests.unit.models.head_checkpoints import splade

PATIENCE_S = 300.0
"""A start takes seconds, or minutes on a busy machine; a deadlock never ends."""

Ending = Literal["ready", "died", "hung", "hung on the way down"]


class Start(NamedTuple):
    ending: Ending
    seconds: float
    log: str


def tiny_models(folder: Path) -> list[str]:
    """Addresses of three tiny models of different kinds: they share no graph code, and each loads in milliseconds."""
    return [
        f"embedder=file:{checkpoint(folder / 'embedder')}",
        f"classifier=file:{classifier(folder / 'classifier', 'roberta')}",
        f"splade=file:{splade(folder / 'splade')}",
    ]


def start(addresses: list[str], home: Path) -> Start:
    """Start a server, wait until all of its models are ready, and stop it. The log of one that hangs ends with the
    stacks of its threads."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "serve", *addresses, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment({"SHOAL_HOME": str(home), "PYTHONFAULTHANDLER": "1"}),
        )
        try:
            ending = _watch(process, log.fileno(), start_s)
            if process.returncode is None:
                process.send_signal(signal.SIGABRT)
                process.wait(10)
        finally:
            process.kill()
            process.wait()
        elapsed = time.monotonic() - start_s
        log.seek(0)
        return Start(ending, elapsed, log.read().decode(errors="replace"))


def _watch(process: subprocess.Popen[bytes], log: int, started: float) -> Ending:
    while not _ready(log):
        if process.poll() is not None:
            return "died"
        if time.monotonic() - started > PATIENCE_S:
            return "hung"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    try:
        return "ready" if process.wait(PATIENCE_S) == 0 else "died"
    except subprocess.TimeoutExpired:
        return "hung on the way down"


def _ready(log: int) -> bool:
    match = re.search(LISTENING, Path(f"/proc/self/fd/{log}").read_text())
    if match is None:
        return False
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{match[1]}/health/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
