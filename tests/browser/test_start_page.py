"""The start page in a real browser."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import KEY, Visitor

pytestmark = pytest.mark.browser


def test_the_models_and_their_state_are_shown(server: str, visitor: Visitor) -> None:
    """The served model is listed as ready, with its facts."""
    model = visitor(server).open("/").get_by_role("listitem")
    expect(model).to_have_count(1)
    expect(model).to_contain_text("fake")
    expect(model.locator(".state")).to_have_text("ready")
    expect(model).to_contain_text("32 dimensions")


def test_two_texts_are_compared(server: str, visitor: Visitor) -> None:
    """Equal texts have cosine 1, other texts less; dimensions and batch size are shown."""
    page = visitor(server).open("/")
    page.get_by_label("First text").fill("the same")
    page.get_by_label("Second text").fill("the same")
    page.get_by_role("button", name="Compare").click()
    cosine = page.locator(".cosine")
    expect(cosine).to_have_text("1.0000")
    expect(page.locator(".facts")).to_contain_text(re.compile(r"32 dimensions · \d+ tokens · .* ms · batch of \d+"))
    page.get_by_label("Second text").fill("something else")
    page.get_by_role("button", name="Compare").click()
    expect(cosine).not_to_have_text("1.0000")
    assert -1 <= float(cosine.inner_text()) < 1


def test_everything_works_from_the_keyboard(server: str, visitor: Visitor) -> None:
    """From the first text, Tab moves to the second and to the button, and Enter compares."""
    page = visitor(server).open("/")
    page.get_by_label("First text").focus()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Second text")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Compare")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".cosine")).to_be_visible()


def test_a_server_error_is_shown(server: str, visitor: Visitor) -> None:
    """The server rejects an empty text, and its message replaces the result."""
    page = visitor(server, tolerated="400").open("/")
    page.get_by_label("First text").fill("")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("output .problem")).to_contain_text("empty")


def test_the_examples_can_be_copied(server: str, visitor: Visitor) -> None:
    """Copy puts a curl command for this server and its model on the clipboard; embeddings and chat have one each."""
    page = visitor(server).open("/")
    for example, path in (("curl", "/v1/embeddings"), ("curl, chat", "/v1/chat/completions")):
        button = page.get_by_role("button", name=f"Copy the {example} example")
        button.click()
        expect(button).to_have_text("Copied")
        words = shlex.split(page.evaluate("navigator.clipboard.readText()").replace("\\\n", " "))
        assert words[:2] == ["curl", f"{server}{path}"]
        assert json.loads(words[-1])["model"] == "fake"
    expect(page.get_by_text(f'base_url="{server}/v1"')).to_have_count(2)


def test_a_key_is_requested_and_stored_in_the_tab(locked_server: str, visitor: Visitor) -> None:
    """Without the key only its input is shown; a wrong key is rejected; the right one is stored for this tab only."""
    visit = visitor(locked_server, tolerated="401")
    page = visit.open("/")
    entry = page.get_by_label("This server requires an API key")
    expect(entry).to_be_visible()
    expect(page.get_by_role("heading", name="Models")).to_have_count(0)
    entry.fill("wrong")
    page.keyboard.press("Enter")
    expect(entry).to_be_visible()
    entry.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("listitem")).to_contain_text("fake")
    expect(page.get_by_text("$SHOAL_API_KEY").first).to_be_visible()
    assert KEY not in page.locator("main").inner_text()
    page.reload()
    expect(page.get_by_role("listitem")).to_contain_text("fake")
    storage = page.evaluate("[JSON.stringify(localStorage), document.cookie, sessionStorage.getItem('shoal-key')]")
    assert storage == ["{}", "", KEY]


def test_dark_follows_the_system(server: str, visitor: Visitor) -> None:
    """The page follows the system's dark mode."""
    page = visitor(server, colour="dark").open("/")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 23, 28)"


def test_the_policy_forbids_inline_scripts(server: str, visitor: Visitor) -> None:
    """An injected script does not run."""
    visit = visitor(server, tolerated="Content Security Policy")
    page = visit.open("/")
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.ran") is None
