"""The table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from shoal.core.gateway import Gateway
from shoal.core.protocols import Operation
from shoal.core.registry import Registry
from shoal.errors import MethodNotAllowed, RouteNotFound, ShoalError
from shoal.http.routes import Miss, Route, Routes


async def no_operation(request: Any) -> None:
    return None


class NamedSurface:
    """A surface with the given routes."""

    error = None

    def __init__(self, name: str, *routes: tuple[Literal["GET", "POST", "DELETE"], str]) -> None:
        self.name = name
        self._routes = routes

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            Operation(method=method, path=path, endpoint=no_operation, summary=f"{method} {path}")
            for method, path in self._routes
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return 500, {}, b""


def table(*surfaces: NamedSurface) -> Routes:
    return Routes(surfaces, Gateway(Registry()))


ONE = NamedSurface("one", ("GET", "/a"), ("POST", "/a"), ("GET", "/a/{id:path}"), ("GET", "/"))
THREE = NamedSurface(
    "three",
    ("GET", "/m"),
    ("GET", "/m/{id:path}"),
    ("DELETE", "/m/{id:path}"),
    ("POST", "/m/{id:path}/load"),
    ("POST", "/m/{id:path}/unload"),
)
TWO = NamedSurface("two", ("POST", "/b"), ("GET", "/a/b/{id:path}"))


@pytest.mark.parametrize(
    ("method", "path", "summary", "parameter"),
    [
        ("GET", "/a", "GET /a", ""),
        ("GET", "/a/", "GET /a", ""),
        ("HEAD", "/a", "GET /a", ""),
        ("POST", "/a", "POST /a", ""),
        ("GET", "/", "GET /", ""),
        ("GET", "/a/x", "GET /a/{id:path}", "x"),
        ("GET", "/a/x/y/", "GET /a/{id:path}", "x/y"),
        ("GET", "/a/b/x", "GET /a/b/{id:path}", "x"),
        ("HEAD", "/a/x", "GET /a/{id:path}", "x"),
    ],
)
def test_matching_routes(method: str, path: str, summary: str, parameter: str) -> None:
    """Exact paths win over parameters, longer prefixes over shorter ones; GET answers HEAD."""
    match = table(ONE, TWO).find(method, path)
    assert isinstance(match, Route)
    assert (match.operation.summary, match.parameter) == (summary, parameter)


@pytest.mark.parametrize(
    ("method", "path", "owner", "allow"),
    [
        ("DELETE", "/a", "one", "GET, HEAD, POST"),
        ("GET", "/b", "two", "POST"),
        ("HEAD", "/b/", "two", "POST"),
        ("POST", "/a/x", "one", "GET, HEAD"),
        ("GET", "/b/c/d", "two", None),
        ("GET", "/c", "one", None),
        ("GET", "/bb", "one", None),
        ("GET", "", "one", None),
    ],
)
def test_unmatched_paths(method: str, path: str, owner: str, allow: str | None) -> None:
    """A miss names the surface that renders the error; a wrong method lists the allowed ones."""
    match = table(ONE, TWO).find(method, path)
    assert isinstance(match, Miss)
    assert match.surface.name == owner
    if allow is None:
        assert isinstance(match.error, RouteNotFound)
    else:
        assert isinstance(match.error, MethodNotAllowed)
        assert match.error.allow == allow


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/b", "/v1/b"),
        ("/v1//b/", "/v1/b/"),
        ("/v1/v1/b", "/v1/b"),
        ("/v1//v1/b", "/v1/b"),
        ("//v1/m/x", "/v1/m/x"),
        ("//v1/c", None),
        ("/v1/v1", None),
    ],
)
def test_base_urls_with_too_much(path: str, meant: str | None) -> None:
    """The error names the path without repeated slashes or versions, if there is a route for it."""
    match = table(ONE, NamedSurface("four", ("POST", "/v1/b"), ("GET", "/v1/m/{id:path}"))).find("POST", path)
    assert isinstance(match, Miss)
    assert isinstance(match.error, RouteNotFound)
    remedy = f"Send it to {meant}: check the client's base URL." if meant else "See /docs for the routes."
    assert match.error.message == f"Unknown request URL: POST {path}. {remedy}"


def test_two_claims_of_one_route() -> None:
    """Two surfaces cannot own the same method of a path, with or without a trailing slash."""
    with pytest.raises(ValueError, match="registered twice"):
        table(ONE, NamedSurface("three", ("GET", "/a/")))


@pytest.mark.parametrize("path", ["/a/{id}", "/a/{id:path}/B", "/a/{id:path}/b/c", "/a{id:path}", "/a/{i d:path}"])
def test_invalid_path_patterns_are_refused(path: str) -> None:
    """A parameter is one segment, the whole tail, or the tail without its last word."""
    with pytest.raises(ValueError, match="a path may contain one"):
        table(NamedSurface("four", ("GET", path)))


@pytest.mark.parametrize(
    ("method", "path", "summary", "parameter"),
    [
        ("POST", "/m/x/load", "POST /m/{id:path}/load", "x"),
        ("POST", "/m/org/name/load/", "POST /m/{id:path}/load", "org/name"),
        ("POST", "/m/x/unload", "POST /m/{id:path}/unload", "x"),
        ("POST", "/m/org/load/load", "POST /m/{id:path}/load", "org/load"),
        ("GET", "/m/org/load", "GET /m/{id:path}", "org/load"),
        ("HEAD", "/m/org/load", "GET /m/{id:path}", "org/load"),
        ("DELETE", "/m/org/unload", "DELETE /m/{id:path}", "org/unload"),
        ("GET", "/m/load", "GET /m/{id:path}", "load"),
    ],
)
def test_suffixes(method: str, path: str, summary: str, parameter: str) -> None:
    """A word after the parameter is a separate route; for methods that it lacks, it is part of the name."""
    match = table(THREE).find(method, path)
    assert isinstance(match, Route)
    assert (match.operation.summary, match.parameter) == (summary, parameter)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/m/x/load", "DELETE, GET, HEAD, POST"),
        ("POST", "/m/x", "DELETE, GET, HEAD"),
        ("POST", "/m/load", "DELETE, GET, HEAD"),
        ("POST", "/m//load", "DELETE, GET, HEAD"),
        ("POST", "/m/xload", "DELETE, GET, HEAD"),
        ("POST", "/m", "GET, HEAD"),
    ],
)
def test_unmatched_suffixes(method: str, path: str, allow: str) -> None:
    """The name must not be empty; the methods are those of both readings."""
    routes = table(THREE)
    match = routes.find(method, path)
    assert isinstance(match, Miss)
    assert isinstance(match.error, MethodNotAllowed)
    assert match.error.allow == allow == routes.allowed_methods(path)


def test_a_suffix_alone() -> None:
    """Without a route for the parameter alone, other paths are unknown."""
    routes = table(NamedSurface("five", ("POST", "/m/{id:path}/load")))
    assert isinstance(routes.find("POST", "/m/x/load"), Route)
    missed = routes.find("POST", "/m/x")
    assert isinstance(missed, Miss)
    assert isinstance(missed.error, RouteNotFound)
    assert routes.allowed_methods("/m/x") == ""
