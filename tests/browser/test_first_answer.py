"""From two commands and one click to the first answer in the page, with nothing stored before."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import NO_HUB, Visitor, serve
from tests.integration.server_kit import environment

pytestmark = pytest.mark.browser


@pytest.mark.timeout(600)
def test_two_commands_and_a_click_give_the_first_answer(
    visitor: Visitor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal pull`, `shoal serve`, Embed: the default model is fetched, verified, served, and compares the samples."""
    home = tmp_path / "home"
    begun = time.monotonic()
    pull = [sys.executable, "-m", "shoal", "pull"]
    env = environment({"SHOAL_HOME": str(home), **NO_HUB})
    done = subprocess.run(pull, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pulled = time.monotonic()
    with serve(tmp_path, home=home) as origin:
        served = time.monotonic()
        page = visitor(origin).open("/")
        page.get_by_role("button", name="Embed", exact=True).click()
        expect(page.locator(".pairs li").first).to_contain_text("fish")
        answered = time.monotonic()
    with capsys.disabled():
        sys.stdout.write(
            f"\nfirst answer after {answered - begun:.1f} s: pull {pulled - begun:.1f} s, "
            f"serve {served - pulled:.1f} s, page and click {answered - served:.1f} s\n"
        )
