"""README.md and docs/tutorial.md, followed from the first line to the last, with the real default model."""

from __future__ import annotations

import pytest

from tests.integration.documentation_kit import NewReader, environ, reader

__all__ = ["environ", "reader"]  # pytest finds fixtures by name in this module

pytestmark = pytest.mark.timeout(900)


def test_the_readme(reader: NewReader) -> None:
    """README.md: the server, one request by curl and by the openai package, and `shoal.open`."""
    printed = reader().read("README.md")
    assert '"embedding"' in printed
    assert "2 384 13" in printed


def test_the_tutorial(reader: NewReader) -> None:
    """docs/tutorial.md: embed, measure, rerank, configure, load, compare images, chat."""
    shorter = {"--duration 3": "--duration 1 --clients 4"}
    printed = reader(places=shorter).read("docs/tutorial.md")
    for expected in (
        "x-shoal-space: ",
        "relevance_score",
        "text-embedding-3-small",
        '"object":"chat.completion.chunk"',
    ):
        assert expected in printed
