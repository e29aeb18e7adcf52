"""The page when something is missing: the key, the rights, the models, the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import KEY, Visitor, serve
from tests.browser.page_kit import ask
from tests.integration.llm_kit import free_port

pytestmark = pytest.mark.browser

LISTS = re.compile(r"/models$")


def test_a_key_is_requested_and_stored_in_the_tab(locked_server: str, visitor: Visitor) -> None:
    """Without the key only its input is shown; a wrong key is refused; the right one is stored for this tab only."""
    page = visitor(locked_server, tolerated="401").open("/")
    entry = page.get_by_label("This server requires an API key")
    expect(entry).to_be_visible()
    expect(page.get_by_role("textbox")).to_have_count(1)
    entry.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not accept this key.")
    entry.fill("k\u0119y")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("No request can carry a character of this key")
    entry.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")
    page.get_by_text("Copy as curl").click()
    expect(page.get_by_text("$SHOAL_API_KEY")).to_be_visible()
    assert KEY not in page.locator("main").inner_text()
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    stored = page.evaluate("[JSON.stringify(localStorage), document.cookie, sessionStorage.getItem('shoal-key')]")
    assert KEY not in stored[0]
    assert stored[1:] == ["", KEY]


def test_without_an_admin_key_models_are_only_listed(locked_server: str, visitor: Visitor) -> None:
    """A key that may not change models sees them, the reason, and no buttons; the live figures are open to it."""
    visit = visitor(locked_server, tolerated="401")
    page = visit.open("/")
    page.get_by_label("This server requires an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")
    visit.tolerated.append("403")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(locked_server)))
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_text("You cannot change models here")).to_contain_text("use an admin key")
    expect(page.locator(".models > li").first).to_contain_text("ready")
    expect(page.get_by_role("button", name="Unload")).to_have_count(0)
    expect(page.get_by_label("Pull a model")).to_have_count(0)
    for _ in range(2):
        page.wait_for_event("requestfinished", lambda request: request.url == f"{locked_server}/models")
    assert asked.count("/jobs") == 1  # the browser logs each refusal as an error
    page.get_by_role("link", name="Live").click()
    expect(page.locator(".facts-table tbody tr")).to_have_count(1)


def test_the_reason_of_a_refusal_is_shown(server: str, visitor: Visitor) -> None:
    """The server's own words are shown, in the form of every dialect; the status only if there are none."""
    page = visitor(server, tolerated="400").open("/#rerank")
    page.get_by_label("Query").fill("")
    alert = page.get_by_role("alert")
    rerank = page.get_by_role("button", name="Rerank", exact=True)
    rerank.click()
    expect(alert).to_contain_text("'query' is empty")
    reply: dict[str, Any] = {}
    page.route("**/v1/rerank", lambda route: route.fulfill(status=400, **reply))
    for fields, reason in REFUSALS:
        reply.clear()
        reply.update(fields)
        rerank.click()
        expect(alert).to_have_text(reason)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"json": {"error": {"message": "one"}}}, "one"),
    ({"json": {"detail": []}}, "HTTP 400"),
    ({"json": {"error": "two"}}, "two"),
    ({"body": "null", "content_type": "application/json"}, "HTTP 400"),
    ({"json": {"detail": [{"loc": ["body"], "msg": "three"}]}}, "three"),
    ({"body": "", "content_type": "text/plain"}, "HTTP 400"),
    ({"json": {"message": "four"}}, "four"),
    ({"body": "<p>", "content_type": "text/html"}, "HTTP 400"),
    ({"body": "five", "content_type": "text/plain"}, "five"),
]


def test_the_page_outlives_its_server(visitor: Visitor, tmp_path: Path) -> None:
    """A server that ends within an answer: the answer says so and stays; when the server is back, so is the page."""
    port = free_port()
    with serve(tmp_path, "slow=fake:token_ms=200", port=port) as origin:
        page = visitor(origin, tolerated="ERR_").open("/")
        answer = ask(page, " ".join(f"word{i}" for i in range(100)))
        expect(answer).to_contain_text("word1")
    expect(answer.get_by_role("alert")).to_contain_text("Cannot reach the server")
    expect(answer).to_contain_text("word1")
    banner = page.locator("main > .problem")
    expect(banner).to_contain_text("Cannot reach the server")
    with serve(tmp_path, "slow=fake:token_ms=0", port=port):
        expect(banner).to_have_count(0)
        page.get_by_role("button", name="Regenerate").click()
        expect(answer).to_contain_text("word99")


def test_a_server_without_models_leads_to_them(visitor: Visitor, tmp_path: Path) -> None:
    """Models opens first; the other tabs say what is missing and the command that serves it."""
    with serve(tmp_path, "--no-default-model", home=tmp_path / "home") as origin:
        page = visitor(origin).open("/")
        expect(page.get_by_role("heading", level=1)).to_have_text("Models")
        expect(page.get_by_text("No models yet")).to_be_visible()
        for tab in ("Chat", "Embed", "Rerank", "Classify", "Images"):
            page.get_by_role("link", name=tab, exact=True).click()
            expect(page.locator(".empty pre")).to_contain_text("shoal serve")


def test_the_first_tab_waits_for_the_model(server: str, visitor: Visitor) -> None:
    """While the only model loads, the page says so; then it opens on the tab of that model."""

    def load(route: Route) -> None:
        body = route.fetch().json()
        body["data"][0]["status"]["value"] = "loading"
        route.fulfill(json=body)

    page = visitor(server).page
    page.route("**/v1/models", load)
    page.goto(server)
    expect(page.get_by_text("The model is loading")).to_be_visible()
    page.unroute("**/v1/models", load)
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")


def test_polls_do_not_overlap(server: str, visitor: Visitor) -> None:
    """No list is requested while the same list is on its way; after its end the page requests it again."""
    page = visitor(server).page
    page.clock.install()
    page.goto(f"{server}/#models")
    expect(page.locator(".models > li")).to_have_count(1)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route(LISTS, hold)
    wait_until(page, lambda: len(held) >= 2)
    page.clock.run_for(20_000)
    page.wait_for_timeout(200)
    assert sorted(route.request.url for route in held) == [f"{server}/models", f"{server}/v1/models"]
    for route in held[:]:
        route.continue_()
    wait_until(page, lambda: len(held) >= 4)
    page.unroute(LISTS, hold)


def test_an_old_list_does_not_replace_a_newer_one(server: str, visitor: Visitor) -> None:
    """A list that was requested earlier, and arrives later, is dropped."""
    page = visitor(server).open("/#models")
    expect(page.locator(".models > li")).to_have_count(1)
    held: list[Route] = []
    page.route(f"{server}/models", lambda route: route.fallback() if held else held.append(route))
    wait_until(page, lambda: bool(held))
    page.route("**/api/generate", lambda route: route.fulfill(json={}))
    with page.expect_response(f"{server}/models"):
        page.get_by_role("button", name="Sleep fake").click()
    page.wait_for_timeout(100)
    held[0].fulfill(json={"data": []})
    page.wait_for_timeout(200)
    assert page.get_by_text("No models yet").count() == 0


def wait_until(page: Page, is_done: Callable[[], bool]) -> None:
    """Let the page run until the condition holds, for ten seconds at most."""
    for _ in range(200):
        if is_done():
            return
        page.wait_for_timeout(50)
    pytest.fail("the page sent no such request")


def test_dark_follows_the_system(server: str, visitor: Visitor) -> None:
    """The page follows the system's dark mode."""
    page = visitor(server, colour="dark").open("/")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 23, 28)"


def test_under_a_preset_the_page_reads_its_lists(visitor: Visitor, tmp_path: Path) -> None:
    """Under `--as infinity`, lists of models have another form: the tabs find their models in it."""
    with serve(tmp_path, "--as", "infinity", "fake:", "labels=fake:labels=3", home=tmp_path / "home") as origin:
        page = visitor(origin).open("/#classify")
        page.get_by_role("button", name="Classify", exact=True).click()
        expect(page.get_by_label("Labels of text 1")).to_be_visible()
        page.get_by_role("link", name="Models").click()
        expect(page.locator(".models .state")).to_have_text(["ready", "ready"])
