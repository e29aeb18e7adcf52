"""A running Shoal, and a headless Chromium that may connect only to it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from shoal.web import DIST
from tests.integration.server_kit import environment

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# No sandbox, because tests also run as root in containers; the rest keeps the browser from calling home.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LISTENING = re.compile(r"listening on (http://[^\s,\"]+)")
READY = re.compile(r"shoal: \S+ on http")  # the banner, after every model is ready or has failed
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # a closed port: the default model comes from the package index
PATIENCE_S = 120.0
KEY = "sesame"
expect.set_options(timeout=30_000)  # milliseconds; the page polls every 5 s


@dataclass
class Visit:
    """A page and its unexpected errors; messages that contain a text of `tolerated` are ignored."""

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._request)

    def open(self, path: str) -> Page:
        self.page.goto(f"{self.origin}{path}")
        return self.page

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not any(part in message.text for part in self.tolerated):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:", "blob:")):
            self.faults.append(f"request to elsewhere: {request.url}")


Visitor: TypeAlias = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, closed after each module, because its event loop would conflict with asynchronous tests."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    if not (DIST / "index.html").exists():
        pytest.skip("the pages were not built: make web")
    with sync_playwright() as playwright:
        # Playwright gives each launch a new, empty profile of its own and removes it at the end.
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a Shoal with the fake model, without keys."""
    with serve(tmp_path_factory.mktemp("server"), "fake:") as origin:
        yield origin


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, with the key KEY, which may not change models."""
    with serve(tmp_path_factory.mktemp("locked"), "fake:", "--api-key", KEY, "--admin-key", "other") as origin:
        yield origin


@contextmanager
def serve(folder: Path, *arguments: str, home: Path | None = None, port: int = 0) -> Iterator[str]:
    """Run `shoal serve` with these arguments and yield its origin once its models are ready. `home`: its models, by
    default none: the page also lists those that the user of this machine has."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "serve", *arguments, "--port", str(port)],
            cwd=folder,
            env=environment({"SHOAL_HOME": str(home or folder / "home"), **NO_HUB}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _origin(process, log)
    finally:
        process.kill()
        process.wait()


def _origin(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text()
        if (found := LISTENING.search(text)) and READY.search(text):
            return found[1]
        time.sleep(0.05)
    pytest.fail(f"shoal serve did not come up:\n{log.read_text()}")


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """`visitor(origin, colour="dark")` opens an empty browser profile; after the test it fails on unexpected errors."""
    visits: list[Visit] = []

    def arrive(origin: str, *, colour: str = "light", tolerated: str = "", width: int = 1200) -> Visit:
        context = browser.new_context(
            color_scheme="dark" if colour == "dark" else "light",
            permissions=["clipboard-read", "clipboard-write"],
            viewport={"width": width, "height": 900},
        )
        context.set_default_timeout(30_000)
        visit = Visit(context.new_page(), origin, tolerated=[tolerated] if tolerated else [])
        visit.watch()
        visits.append(visit)
        return visit

    yield arrive
    for visit in visits:
        visit.page.context.close()
    assert [fault for visit in visits for fault in visit.faults] == []
