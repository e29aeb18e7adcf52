"""A fetcher that reads nothing from the network, and how a test serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shoal.http.fetching.fetcher import Fetcher
from shoal.surfaces import ImageReader

ONE, TWO = "https://pictures.example/one.png", "http://pictures.example/two.png"


class Album:
    """Answers every URL with its own bytes, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def get(self, url: str, headers: Mapping[str, str], *, deadline: float) -> bytes:
        assert deadline > 0
        self.asked.append((url, dict(headers)))
        return url.encode()

    def pictures(self, **options: Any) -> ImageReader:
        return ImageReader(cast(Fetcher, self), **options)
