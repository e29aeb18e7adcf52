"""Read the images of a request: inline, or fetched from URLs that the operator allows.

All fetches of one request share one size limit, since a short list of URLs may amount to gigabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from shoal.core.concurrency import run_concurrently
from shoal.errors import InvalidValue, RequestError, TooManyInputs
from shoal.http.fetching.allowed import FetchPolicy
from shoal.http.fetching.fetcher import MAX_BYTES, Fetcher
from shoal.http.fetching.inline import Link, parse_image
from shoal.types import Image

INLINE_CHARACTERS: Final = 65_536
"""Characters of base64 decoded on the event loop without a pause; a longer text is decoded in a thread."""

MAX_CONCURRENT_FETCHES: Final = 8
"""Maximum concurrent fetches of one request."""

_NO_HEADERS: Final[Mapping[str, str]] = {}


class ImageReader:
    """Reads images. Without a `fetcher`, URLs are rejected. `max_bytes` limits each image's file, and the total
    that one request fetches."""

    def __init__(self, fetcher: Fetcher | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._fetcher = fetcher
        self._max_bytes = max_bytes

    async def read(
        self, texts: Sequence[str], *, deadline: float, headers: Mapping[str, str] = _NO_HEADERS, client: str = ""
    ) -> list[Image]:
        """Return one image per text, in order. A text is an http(s) URL, a data URI or the base64 of a file.

        `headers` go only to hosts that the operator listed. `deadline` is a time of `time.monotonic()`, `client` the
        identity for fair sharing. The model, and not this method, checks that a file is an image.

        Raises InvalidValue and EmptyInput, which name the input if there are several; TooManyInputs if all fetches
        together are too large; DeadlineExceeded, Overloaded and Unavailable. An error cancels the running fetches.
        """
        fetch = partial(self._fetcher.get, deadline=deadline, client=client) if self._fetcher is not None else None
        reading = _ImageFetches(fetch, self._max_bytes, headers)
        found: list[Image | None] = [None] * len(texts)
        links: list[tuple[int, Link]] = []
        left = INLINE_CHARACTERS
        for place, text in enumerate(texts):
            left -= len(text)
            if left < 0:
                await asyncio.sleep(0)  # hundreds of short texts take as long as a long one
                left = INLINE_CHARACTERS
            try:
                parsed = await self._parse(text)
            except RequestError as error:
                raise (error.at_input(place) if len(texts) > 1 else error) from None
            if isinstance(parsed, Link):
                links.append((place, parsed))
            else:
                found[place] = Image(parsed)
        for place, data in zip([place for place, _ in links], await reading.fetch_all(links, len(texts)), strict=True):
            found[place] = Image(data)
        return [image for image in found if image is not None]

    async def read_one(self, text: str, *, deadline: float, headers: Mapping[str, str] = _NO_HEADERS) -> Image:
        """Read the image of one text, like `read`."""
        return (await self.read([text], deadline=deadline, headers=headers))[0]

    def read_upload(self, data: bytes) -> Image:
        """Return the image of an uploaded file. Raises InvalidValue if it is too large."""
        if len(data) > self._max_bytes:
            raise InvalidValue(
                f"the image has {len(data)} bytes, more than the limit of {self._max_bytes}: send a smaller one"
            )
        return Image(bytes(data))

    async def _parse(self, text: str) -> bytes | Link:
        if len(text) <= INLINE_CHARACTERS:
            return parse_image(text, max_bytes=self._max_bytes)
        return await asyncio.to_thread(parse_image, text, max_bytes=self._max_bytes)


_Fetch: TypeAlias = Callable[[str, Mapping[str, str]], Awaitable[bytes]]


class _ImageFetches:
    """The fetches of one request."""

    def __init__(self, fetch: _Fetch | None, max_bytes: int, headers: Mapping[str, str]) -> None:
        self._fetch = fetch
        self._remaining_bytes = max_bytes
        self._max_bytes = max_bytes
        self._headers = headers
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)

    async def fetch_all(self, links: Sequence[tuple[int, Link]], inputs: int) -> list[bytes]:
        if not links:
            return []
        return await run_concurrently(*(self._fetch_one(place, link, inputs) for place, link in links))

    async def _fetch_one(self, place: int, link: Link, inputs: int) -> bytes:
        try:
            if self._fetch is None:
                FetchPolicy().check_url(link.url)
                raise InvalidValue("this server does not fetch URLs: send the image itself")
            async with self._slots:
                data = await self._fetch(link.url, self._headers)
        except RequestError as error:
            raise (error.at_input(place) if inputs > 1 else error) from None
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise TooManyInputs(
                f"the images of this request have more than {self._max_bytes} bytes in total: send fewer at once"
            )
        return data
