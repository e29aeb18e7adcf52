"""Take screenshots of every tab of a running Shoal's page, in light and dark, from phones to wide screens.

    python web/screenshots.py http://127.0.0.1:8080 build/screenshots [--width 1440] [--color light] [--tab chat]

Needs playwright (the `dev` group) and Chromium. Each tab does its work first: it asks, embeds, ranks or compares.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (360, 768, 1440)
HEIGHT = 900
COLORS = 128
QUESTION = """Explain **batching** in one list:

1. It joins requests
2. It shares the `engine`

```python
print("A shoal swims together")
```"""


def chat(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def embed(page: Page) -> None:
    page.get_by_role("button", name="Embed", exact=True).click()
    expect(page.get_by_role("heading", name="Nearest pairs")).to_be_visible()


def rerank(page: Page) -> None:
    page.get_by_role("button", name="Rerank", exact=True).click()
    expect(page.get_by_role("region", name="Ranking")).to_be_visible()


def classify(page: Page) -> None:
    page.get_by_role("button", name="Classify", exact=True).click()
    expect(page.get_by_label("Labels of text 1")).to_be_visible()


def images(page: Page) -> None:
    picture = {"name": "shoal.png", "mimeType": "image/png", "buffer": page.locator(".brand img").screenshot()}
    page.get_by_label("Choose pictures").set_input_files(picture)
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_label("Ranking for picture 1")).to_be_visible()


def models(page: Page) -> None:
    expect(page.locator(".models .state").first).to_be_visible()


def live(page: Page) -> None:
    expect(page.get_by_role("heading", name="Replicas")).to_be_visible()
    body = '{"inputs": ["a shoal", "of fish"]}'
    texts = f"{{method: 'POST', headers: {{'content-type': 'application/json'}}, body: '{body}'}}"
    for _ in range(40):
        page.evaluate(f"fetch('embed', {texts}).then((reply) => reply.ok)")
        page.wait_for_timeout(200)


JOURNEYS: dict[str, Callable[[Page], None]] = {
    "chat": chat,
    "embed": embed,
    "rerank": rerank,
    "classify": classify,
    "images": images,
    "models": models,
    "live": live,
}


def save(screenshot: bytes, path: Path) -> None:
    """Write the screenshot with as many colors as a page has, in a third of the bytes."""
    Image.open(BytesIO(screenshot)).convert("RGB").quantize(COLORS).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("origin")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, action="append")
    parser.add_argument("--color", choices=("light", "dark"), action="append")
    parser.add_argument("--tab", choices=tuple(JOURNEYS), action="append")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for width in options.width or WIDTHS:
            for color in options.color or ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=color)
                for tab in options.tab or JOURNEYS:
                    page.goto(f"{options.origin}/#{tab}")
                    JOURNEYS[tab](page)
                    save(page.screenshot(full_page=True), options.folder / f"{tab}-{width}-{color}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
