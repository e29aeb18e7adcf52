"""CHANGELOG.md has the form of Keep a Changelog, which `make release` reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    """An Unreleased section first, then versions with dates; within each, kinds of changes at most once."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n")
    unreleased, *versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert unreleased.startswith("[Unreleased]\n")
    for version in versions:
        assert re.match(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}\n", version)
    for section in (unreleased, *versions):
        found = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert found == [kind for kind in KINDS if kind in found]
