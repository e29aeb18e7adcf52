"""A fetcher without a network, and a server that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from shoal.http.fetching.fetcher import Fetcher
from shoal.surfaces import ImageReader

ONE, TWO = "https://pictures.example/one.png", "http://pictures.example/two.png"


class Album:
    """Answers every URL with the URL's own bytes, and records the fetches."""

    def __init__(self) -> None:
        self.fetched: list[tuple[str, dict[str, str]]] = []
        self.clients: set[str] = set()

    async def get(self, url: str, headers: Mapping[str, str], *, deadline: float, client: str) -> bytes:
        assert deadline > 0
        self.clients.add(client)
        self.fetched.append((url, dict(headers)))
        return url.encode()

    def image_reader(self, **options: Any) -> ImageReader:
        return ImageReader(cast(Fetcher, self), **options)
