"""The fenced blocks of README.md and docs/, with what says how each is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\s*\Z")
_PAGE_REASON = re.compile(r"<!-- no block of this page is run: (?P<reason>[^>]+?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `reason`: why no test runs it, by a comment before it or at the top of its page."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    everywhere = _PAGE_REASON.search(text)
    found = []
    for match in _BLOCK.finditer(text):
        before = _REASON.search(text, 0, match.start()) or everywhere
        indent = match["indent"]
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, match.start()) + 1,
                language=match["language"],
                text=re.sub(f"^{indent}", "", match["text"], flags=re.MULTILINE),
                reason=before["reason"] if before else "",
            )
        )
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
