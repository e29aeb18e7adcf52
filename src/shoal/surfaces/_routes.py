"""The table of routes: which operation answers a method on a path, and whose dialect its errors are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.core.protocols import Operation, Surface
from shoal.errors import MethodNotAllowed, RouteNotFound, ShoalError

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class Route(NamedTuple):
    surface: Surface
    operation: Operation
    parameter: str = ""


class Miss(NamedTuple):
    """No operation; `error` is to be told in the dialect of `surface`."""

    surface: Surface
    error: ShoalError


class Routes:
    """Exact paths by one dictionary look-up, then prefixes with a trailing parameter, longest first.

    A trailing slash changes nothing, because clients exist that do not follow redirects. GET also answers HEAD.
    Of a path that nobody knows, the surface with the longest path above it owns the error, else the first surface.
    """

    def __init__(self, surfaces: Sequence[Surface], gateway: Gateway) -> None:
        self._surfaces = tuple(surfaces)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        self.all: list[Route] = []
        for surface in self._surfaces:
            for operation in surface.routes(gateway):
                self._add(Route(surface, operation))
        self._ordered = sorted(self._prefixes.items(), key=lambda each: -len(each[0]))

    def _add(self, route: Route) -> None:
        path = route.operation.path
        head, brace, tail = path.partition("{")
        if brace and (not tail.endswith(":path}") or not head.endswith("/")):
            raise ValueError(f"{path}: a path may hold one trailing '/{{name:path}}' and no other parameter")
        paths = [head] if brace else list(dict.fromkeys((path, path.rstrip("/") or "/", path.rstrip("/") + "/")))
        table = self._prefixes if brace else self._exact
        for each in paths:
            methods = table.setdefault(each, {})
            if route.operation.method in methods:
                raise ValueError(f"{route.operation.method} {each} is taken twice")
            methods[route.operation.method] = route
        self.all.append(route)

    def find(self, method: str, path: str) -> Route | Miss:
        wanted = "GET" if method == "HEAD" else method
        methods = self._exact.get(path)
        if methods is not None:
            return methods.get(wanted) or self._wrong_method(method, path, methods)
        for prefix, under in self._ordered:
            if path.startswith(prefix):
                route = under.get(wanted)
                if route is None:
                    return self._wrong_method(method, path, under)
                return Route(route.surface, route.operation, path[len(prefix) :].rstrip("/"))
        return Miss(self._owner(path), RouteNotFound(f"Unknown request URL: {method} {path}. /docs lists the routes."))

    def allowed(self, path: str) -> str:
        """The methods of a path as an Allow header has them; empty for an unknown path."""
        methods = self._exact.get(path) or next((under for at, under in self._ordered if path.startswith(at)), {})
        return _allow(methods)

    def _wrong_method(self, method: str, path: str, methods: dict[str, Route]) -> Miss:
        allow = _allow(methods)
        error = MethodNotAllowed(f"Not allowed to {method} on {path}; use {allow}.", allow=allow)
        return Miss(next(iter(methods.values())).surface, error)

    def _owner(self, path: str) -> Surface:
        while path.rstrip("/"):
            path = path.rstrip("/").rpartition("/")[0]
            methods = self._exact.get(path)
            if methods and path != "/":
                return next(iter(methods.values())).surface
        return self._surfaces[0]


def _allow(methods: dict[str, Route]) -> str:
    names = set(methods)
    if "GET" in names:
        names.add("HEAD")
    return ", ".join(sorted(names))
