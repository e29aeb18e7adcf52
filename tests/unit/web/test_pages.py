"""The built pages as the surface serves them: types, caching, policy, and the page without a build."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.core.protocols import Operation, Surface
from shoal.errors import MethodNotAllowed, RouteNotFound
from shoal.http.request import Reply, Request
from shoal.web import Pages, read_files

HTML = b"<!doctype html><html><head><title>x</title></head></html>"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_bytes(HTML.replace(b"x", b"start"))
    (tmp_path / "docs.html").write_bytes(HTML.replace(b"x", b"docs"))
    (tmp_path / "assets" / "index-abc.js").write_bytes(b"export {}")
    (tmp_path / "assets" / "shoal-abc.svg").write_bytes(b"<svg/>")
    (tmp_path / "sources.sha256").write_text("not for readers")
    return tmp_path


def request(path: str, parameter: str = "", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = Request({"method": "GET", "path": path, "headers": raw}, 0.0)
    request.parameter = parameter
    return request


async def get(dist: Path, path: str, **headers: str) -> Reply:
    """Return the reply of the operation that owns the path, matched as the application does."""
    surface: Surface = Pages(dist)
    operations: dict[str, Operation] = {each.path.rstrip("/"): each for each in surface.routes(cast(Any, None))}
    if path.startswith("/assets/"):
        answer = await operations["/assets/{name:path}"].endpoint(request(path, path[8:], **headers))
    else:
        answer = await operations[path.rstrip("/")].endpoint(request(path, **headers))
    return cast(Reply, answer)


def header(reply: Reply, name: bytes) -> bytes:
    return dict(reply.headers).get(name, b"")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/", b"start"), ("/docs", b"docs"), ("/docs/", b"docs"), ("/explorer", b"docs"), ("/explorer/", b"docs")],
)
async def test_pages_are_html_under_a_strict_policy(dist: Path, path: str, expected: bytes) -> None:
    """Each page is HTML that loads only from its own origin, and is revalidated on every request."""
    reply = await get(dist, path)
    assert reply.status == 200
    assert expected in cast(bytes, reply.body)
    assert header(reply, b"content-type") == b"text/html; charset=utf-8"
    assert header(reply, b"cache-control") == b"no-cache"
    policy = header(reply, b"content-security-policy")
    assert b"default-src 'none'" in policy
    assert b"unsafe" not in policy


async def test_links_work_one_level_down(dist: Path) -> None:
    """Relative links of a page under a trailing slash start one level up; other addresses need no base."""
    assert b'<head><base href="../">' in cast(bytes, (await get(dist, "/explorer/")).body)
    for path in ("/", "/docs", "/explorer"):
        assert b"<base" not in cast(bytes, (await get(dist, path)).body)


@pytest.mark.parametrize(
    ("name", "kind"), [("index-abc.js", b"text/javascript; charset=utf-8"), ("shoal-abc.svg", b"image/svg+xml")]
)
async def test_assets_have_their_type_and_stay_cached(dist: Path, name: str, kind: bytes) -> None:
    """An asset has a hash in its name, so browsers may cache it forever."""
    reply = await get(dist, f"/assets/{name}")
    assert header(reply, b"content-type") == kind
    assert header(reply, b"cache-control") == b"public, max-age=31536000, immutable"


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
async def test_an_unchanged_file_is_not_sent_again(dist: Path, form: str) -> None:
    """If-None-Match with the file's tag, in any form, gets 304 without a body."""
    tag = header(await get(dist, "/"), b"etag").decode()
    reply = await get(dist, "/", if_none_match=form.format(tag))
    assert (reply.status, reply.body) == (304, b"")
    assert header(reply, b"etag") == tag.encode()


async def test_a_changed_file_is_sent(dist: Path) -> None:
    """A tag of another version gets the file."""
    assert (await get(dist, "/", if_none_match='"older"')).status == 200


@pytest.mark.parametrize(
    "name", ["../index.html", "..%2Findex.html", "/etc/passwd", "", "index-abc.js/", "../../__init__.py"]
)
async def test_only_known_assets_are_served(dist: Path, name: str) -> None:
    """Names are looked up among the files read at startup; a request never opens a path."""
    with pytest.raises(RouteNotFound):
        await get(dist, f"/assets/{name}")


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/docs", 404), ("/explorer/", 404)])
async def test_without_a_build_pages_show_the_command(tmp_path: Path, path: str, status: int) -> None:
    """Without build output the page shows the command, and the address of the API description. Ollama's clients take
    `/` to say that the server runs."""
    reply = await get(tmp_path / "none", path)
    assert reply.status == status
    assert b"make web" in cast(bytes, reply.body)
    assert b"openapi.json" in cast(bytes, reply.body)


async def test_pages_built_later_are_found(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A server that started without pages serves them after a build."""
    late = tmp_path_factory.mktemp("late") / "dist"
    (page, *_) = Pages(late).routes(cast(Any, None))
    assert b"make web" in cast(bytes, (await page.endpoint(request("/"))).body)
    await asyncio.to_thread(dist.rename, late)
    assert b"make web" not in cast(bytes, (await page.endpoint(request("/"))).body)


def test_only_web_files_are_read(dist: Path) -> None:
    """Other files of the build are not served."""
    pages = {"index.html", "docs.html", "index-below.html", "docs-below.html"}
    assert set(read_files(dist)) == pages | {"assets/index-abc.js", "assets/shoal-abc.svg"}


def test_every_route_is_public() -> None:
    """Pages must load without a key so that they can ask for one."""
    assert {each.access for each in Pages().routes(cast(Any, None))} == {"public"}


def test_errors_are_plain_text() -> None:
    """No client parses a page's errors."""
    status, headers, body = Pages().render_error(MethodNotAllowed("Use GET.", allow="GET"))
    assert (status, headers["allow"], body) == (405, "GET", b"Use GET.\n")
    assert headers["content-type"].startswith("text/plain")
