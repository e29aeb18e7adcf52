"""The page for everyone: axe-core finds no serious violation, at the widths of phones and desks, in light and dark; and
nothing of it is wider than the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, Page, expect

from tests.browser.conftest import Visitor, serve
from tests.browser.page_kit import ADDRESSES, FLAGS, ask, png, wait_for_end

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
MARKDOWN = "# Title\n\n**bold** text with `code` and [a link](https://example.org)"


def chat(page: Page) -> None:
    page.get_by_text("System prompt, parameters and tools").click()
    ask(page, f"<think>a thought</think> {MARKDOWN}", model="fake")
    wait_for_end(page)
    page.get_by_text("Reasoning").click()


def embed(page: Page) -> None:
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.locator(".pairs li").first).to_be_visible()


def rerank(page: Page) -> None:
    page.get_by_role("button", name="Rerank", exact=True).click()
    expect(page.locator(".ranking li")).to_have_count(4)


def classify(page: Page) -> None:
    page.get_by_label("Pairs of texts").check()
    page.get_by_role("button", name="Classify", exact=True).click()
    expect(page.locator(".ranking")).to_have_count(2)


def images(page: Page) -> None:
    page.get_by_label("Choose pictures").set_input_files(
        FilePayload(name="red.png", mimeType="image/png", buffer=png(200, 0, 0))
    )
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".ranking li")).to_have_count(3)


def models(page: Page) -> None:
    page.get_by_label("Pull a model").fill("org/name")
    page.get_by_role("button", name="Delete tiny", exact=True).click()
    expect(page.get_by_role("button", name="Delete for good tiny", exact=True)).to_be_visible()


def live(page: Page) -> None:
    expect(page.locator(".facts-table tbody tr").first).to_be_visible()


JOURNEYS: dict[str, Callable[[Page], None]] = {
    "chat": chat,
    "embed": embed,
    "rerank": rerank,
    "classify": classify,
    "images": images,
    "models": models,
    "live": live,
}


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        pytest.skip("axe-core is missing: run `npm ci` in web/")
    return AXE.read_text()


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("access")
    with serve(folder, *ADDRESSES, *FLAGS, home=folder / "home") as origin:
        yield origin


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("colour", ["light", "dark"])
def test_axe_finds_nothing_serious(page_server: str, visitor: Visitor, axe: str, colour: str, width: int) -> None:
    """Every tab after its work, with its example open, and the form for the key."""
    page = visitor(page_server, colour=colour, width=width).open("/")
    found = []
    for tab, journey in JOURNEYS.items():
        page.goto(f"{page_server}/#{tab}")
        journey(page)
        page.locator("details.code summary").last.click()
        expect(page.locator("details.code code").last).not_to_be_empty()
        if tab == "embed":
            page.get_by_role("button", name="API key").click()
        found += [f"{tab}: {violation}" for violation in check(page, axe)]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
    assert found == []


def check(page: Page, axe: str) -> list[str]:
    """Return the serious violations of the page as it is."""
    page.evaluate(axe)  # not by a script element, which the page's policy forbids
    result: dict[str, Any] = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
    assert result["passes"]
    return [
        f"{each['id']}: {node['html'][:160]} {node['failureSummary']}"
        for each in result["violations"]
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]
