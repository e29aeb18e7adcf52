"""The built pages, served from memory: `/`, `/docs`, `/explorer/` and their assets. The sources are in web/."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.protocols import Operation
from shoal.errors import RouteNotFound, ShoalError
from shoal.http import status_codes
from shoal.http.request import TEXT, Headers, Reply, Request

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

DIST = Path(__file__).parent / "dist"

TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}

# Everything comes from this origin. Swagger UI's stylesheet draws its icons from data: URLs.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Headers = [
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"no-referrer"),
]
BELOW_SUFFIX = "-below.html"
ONE_YEAR = b"public, max-age=31536000, immutable"

NOT_BUILT = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Shoal</title>
<h1>Shoal is running</h1>
<p>The web pages are not built. In the checkout, run <code>make web</code>, then reload this page.</p>
<p>The API works without them; see <a href="./openapi.json">openapi.json</a>.</p>
</html>
"""


@dataclass(frozen=True, slots=True)
class File:
    """One file, ready to send. An asset's name includes a hash of its content, so it never changes."""

    body: bytes
    headers: Headers
    etag: bytes

    @classmethod
    def create(cls, name: str, body: bytes) -> File:
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'.encode()
        kept = ONE_YEAR if name.startswith("assets/") else b"no-cache"
        kind = TYPES.get(Path(name).suffix, b"application/octet-stream")
        return cls(body, [(b"content-type", kind), (b"cache-control", kept), (b"etag", etag), *SECURITY_HEADERS], etag)

    def to_reply(self, request: Request) -> Reply:
        etags = request.headers.get(b"if-none-match", b"")
        if etags == b"*" or self.etag in (each.strip().removeprefix(b"W/") for each in etags.split(b",")):
            return Reply(304, self.headers[1:])
        return Reply(200, list(self.headers), self.body)


def read_files(dist: Path) -> dict[str, File]:
    """Return every page and asset under `dist` by relative name; empty if the pages are not built.

    Each page is included twice: the second is for its path with a trailing slash, where relative links start one level
    up.
    """
    files: dict[str, File] = {}
    for path in sorted(dist.rglob("*")):
        if path.suffix in TYPES:
            name, body = path.relative_to(dist).as_posix(), path.read_bytes()
            files[name] = File.create(name, body)
            if path.suffix == ".html":
                below = path.stem + BELOW_SUFFIX
                files[below] = File.create(below, body.replace(b"<head>", b'<head><base href="../">', 1))
    return files


class Pages:
    """The web pages. They require no key, because they contain only what the sources do.

    Files are read with the first request for a page, which most servers never get.
    """

    name = "pages"
    error = None

    def __init__(self, dist: Path = DIST) -> None:
        self._dist = dist
        self._files: dict[str, File] = {}

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        async def asset(request: Request) -> Reply:
            file = await self._find_file(f"assets/{request.parameter}")
            if file is None:
                raise RouteNotFound(f"No file {request.path}. Reload the page: it may belong to another version.")
            return file.to_reply(request)

        return [
            self._page_operation("/", "index", "Start page"),
            self._page_operation("/docs", "docs", "Swagger UI"),
            self._page_operation("/explorer/", "docs", "Swagger UI"),
            Operation(
                method="GET",
                path="/assets/{name:path}",
                endpoint=asset,
                summary="Script, style or image of a page",
                access="public",
                errors={404: str},
            ),
        ]

    def _page_operation(self, path: str, name: str, summary: str) -> Operation:
        async def endpoint(request: Request) -> Reply:
            below = request.path != "/" and request.path.endswith("/")
            file = await self._find_file(f"{name}{BELOW_SUFFIX if below else '.html'}")
            if file is None:  # Ollama's clients ask for / to see whether the server runs
                status = 200 if request.path == "/" else 404
                return Reply(status, [(b"content-type", TYPES[".html"]), *SECURITY_HEADERS], NOT_BUILT)
            return file.to_reply(request)

        return Operation(
            method="GET",
            path=path,
            endpoint=endpoint,
            summary=summary,
            access="public",
            response=str,
            media_type="text/html",
        )

    async def _find_file(self, name: str) -> File | None:
        if not self._files:
            self._files = await asyncio.to_thread(read_files, self._dist)
        return self._files.get(name)

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.find_row(error).openai.status
        kind = {TEXT[0].decode(): TEXT[1].decode()}
        return status, kind | status_codes.headers(error, status), f"{error.message}\n".encode()
