"""The reference pages agree with the tables in the code, and the texts that docs/troubleshooting.md quotes exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
import yaml  # type: ignore[import-untyped]

from shoal.cli import COMMANDS
from shoal.config.presets import PRESETS
from shoal.http.status_codes import TABLE
from tests.unit.docs.blocks import ROOT

DOCS = ROOT / "docs"
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
LOG_ONLY = {"cancelled", "invalid"}
"""Kinds that no client sees: it has left, or a more exact kind is raised."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a source file; a formatted value of an f-string becomes a zero byte."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)  # type: ignore[misc]


@cache
def printed(folder: str = "src/shoal") -> str:
    """Every text of a folder's code, one after the other."""
    return "\n".join(text for path in (ROOT / folder).rglob("*.py") for text in texts(ast.parse(path.read_text())))


def quoted() -> list[str]:
    """The first cells of the tables of docs/troubleshooting.md that are texts of Shoal, with ... for what varies."""
    cells = re.findall(r"^\| (`+) ?(.+?) ?\1 \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [text for _, text in cells]


@pytest.mark.parametrize("text", quoted())
def test_shoal_prints_the_text(text: str) -> None:
    """A text of the source contains its parts, in order."""
    parts = [re.escape(part.strip()) for part in text.split("...") if part.strip()]
    assert re.search("[^\n]*".join(parts), printed()), f"src/shoal does not print {text!r}"


def test_there_are_texts() -> None:
    assert len(quoted()) > 25


def error_rows() -> dict[str, list[str]]:
    """The cells (openai, tei, embedding) of each kind in the table of docs/api.md."""
    section = (DOCS / "api.md").read_text().partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| (`[a-z_]+`.*?) \| (\d{3}.*?) \| (\d{3}.*?) \| (\d{3}) \|$", section, re.MULTILINE)
    return {kind: cells for first, *cells in rows for kind in re.findall(r"`([a-z_]+)`", first) if kind in TABLE}


@pytest.mark.parametrize("kind", sorted(TABLE.keys() - LOG_ONLY - {"upstream"}))
def test_the_codes_of_an_error(kind: str) -> None:
    """docs/api.md has the statuses, type and code of `http/status_codes.py`."""
    openai, tei, own = error_rows()[kind]
    row = TABLE[kind]
    codes = [f"`{text}`" for text in (row.openai.type, row.openai.code) if text]
    assert openai == " ".join([str(row.openai.status), *codes])
    assert tei.startswith(str(row.tei.status))
    assert row.tei.error_type is None or f"`{row.tei.error_type}`" in tei
    assert own == str(row.embedding)


def test_every_metric_has_a_row() -> None:
    """docs/metrics.md names every metric of the source, and no other."""
    known = set(re.findall(r"^(shoal_[a-z_]+)$", printed("src/shoal/observability"), re.MULTILINE))
    page = (DOCS / "metrics.md").read_text().partition("\n## What to watch")[0]
    assert set(re.findall(r"`(shoal_[a-z_]+)`", page)) == known


def test_every_command_has_a_row() -> None:
    page = (DOCS / "commands.md").read_text()
    assert [name for name in COMMANDS if not re.search(rf"`(?:shoal )?{name}\b", page)] == []


def test_every_preset_has_a_row() -> None:
    page = (DOCS / "presets.md").read_text()
    for name, preset in PRESETS.items():
        assert re.search(rf"^\| \[{name}\]\([\w/-]+\.md\) \| .+ \| {preset.defaults['port']} \|$", page, re.MULTILINE)


def pages(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(value) if isinstance(value, list) else [str(value)]


def test_every_page_is_in_the_navigation() -> None:
    """Once, and nothing else is."""
    listed = list(pages(NAV))
    assert len(listed) == len(set(listed))
    assert [page for page in listed if not (ROOT / page).is_file()] == []
    assert {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")} <= set(listed)
