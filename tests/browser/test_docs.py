"""Swagger UI in a real browser that can reach only the server."""

from __future__ import annotations

import json
import urllib.request

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import KEY, Visitor

pytestmark = pytest.mark.browser

EMBEDDINGS = "#operations-openai-post_v1_embeddings"


def execute(page: Page) -> None:
    """Expand the embeddings operation and send its example unchanged.

    Expanding changes the fragment of the address. On a busy machine the browser once never reported that as a finished
    navigation, so the click does not wait for it: the next one waits for the button it needs.
    """
    page.locator(f"{EMBEDDINGS} button.opblock-summary-control").click(no_wait_after=True)
    page.locator(EMBEDDINGS).get_by_role("button", name="Execute").click()


@pytest.mark.parametrize("path", ["/docs", "/explorer/"])
def test_every_operation_is_shown(server: str, visitor: Visitor, path: str) -> None:
    """Each operation of openapi.json has a row, without errors in the document or requests to other hosts."""
    with urllib.request.urlopen(f"{server}/openapi.json") as reply:
        document = json.load(reply)
    page = visitor(server).open(path)
    rows = page.locator(".opblock")
    expect(rows).to_have_count(sum(map(len, document["paths"].values())))
    expect(page.locator(".errors-wrapper")).to_have_count(0)


def test_an_example_runs_against_the_server(server: str, visitor: Visitor) -> None:
    """Try it out: the unchanged example returns 200 with vectors and the batch headers."""
    page = visitor(server).open("/explorer/")
    execute(page)
    live = page.locator(f"{EMBEDDINGS} .live-responses-table tbody")
    expect(live.locator(".response-col_status").first).to_have_text("200")
    expect(live).to_contain_text('"embedding"')
    expect(live).to_contain_text("x-shoal-batch-size")


def test_the_key_of_the_start_page_is_used(locked_server: str, visitor: Visitor) -> None:
    """A key entered on `/` authorizes the docs in the same tab."""
    visit = visitor(locked_server, tolerated="401")
    page = visit.open("/")
    page.get_by_label("This server requires an API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="API", exact=True).click()
    page.wait_for_url("**/docs")
    execute(page)
    expect(page.locator(f"{EMBEDDINGS} .live-responses-table .response-col_status").last).to_have_text("200")


def test_dark_follows_the_system(server: str, visitor: Visitor) -> None:
    """Swagger UI follows the system's dark mode."""
    page = visitor(server, colour="dark").open("/docs")
    expect(page.locator("html.dark-mode")).to_have_count(1)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(14, 23, 28)"
