"""The site that `make docs` built: complete, searchable, and alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visitor, browser, visitor

__all__ = ["browser", "visitor"]  # pytest finds fixtures by name in this module

SITE = Path(__file__).parents[2] / "build" / "site"
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\" >]+")
PICTURE = re.compile(r"<img\b[^>]*\bsrc=\"([^\":]+)\"")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def origin() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_no_page_loads_anything_from_another_host() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 35
    assert [found for page in pages for found in ELSEWHERE.findall(page.read_text())] == []


def test_pictures_exist() -> None:
    """Links are checked by the build, pictures are not."""
    shown = [(page, found) for page in SITE.rglob("*.html") for found in PICTURE.findall(page.read_text())]
    assert len(shown) > 1
    assert [name for page, name in shown if not (page.parent / name).is_file()] == []


def test_a_reader_finds_a_page(origin: str, visitor: Visitor) -> None:
    """From the start page by search, without an error or a request to another host."""
    page = visitor(origin).open("/index.html")
    expect(page.locator("h1")).to_have_text(re.compile("Shoal"))
    page.get_by_role("button", name="Search").first.click()
    page.keyboard.type("x-shoal-batch-size")
    page.get_by_text(re.compile(r"^\d+ results$")).wait_for()
    page.keyboard.press("Enter")  # opens the first one
    page.wait_for_url(re.compile(r"/(docs|bench)/.*\.html"))


def test_every_part_is_in_the_navigation(origin: str, visitor: Visitor) -> None:
    page = visitor(origin).open("/docs/index.html")
    for part in ("Learn", "Operate", "Migrate", "Reference", "Explanation"):
        expect(page.locator("nav").get_by_text(part, exact=True).first).to_be_attached()
