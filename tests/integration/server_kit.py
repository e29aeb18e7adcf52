"""A running `shoal serve`, and helpers that wait for other processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeAlias

import pytest

LISTENING = re.compile(r"listening on http://[^:]+:(\d+)")
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running `shoal serve`. Its standard error goes to the file `log`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers in lower case, body), using a new connection. Raises OSError if nothing listens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def ready(self) -> bool:
        try:
            return self.request("GET", "/health/ready")[0] == 200
        except OSError:
            return False

    def refuses(self) -> bool:
        """Return whether it accepts no new connection."""
        try:
            self.request("GET", "/health/live")
        except OSError:
            return True
        return False

    def exit_code(self, within: float = PATIENCE_S) -> int:
        return self.process.wait(timeout=within)


ShoalServer: TypeAlias = Callable[..., Server]
Processes: TypeAlias = Callable[..., tuple[subprocess.Popen[bytes], Path]]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without Shoal's settings, plus `changes`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")} | dict(changes or {})


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll for at most PATIENCE_S; fail with the process's output."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"exit code {process.poll()}; standard error:\n{log.read_text()}")
        time.sleep(0.02)
