"""The route table: maps a method and path to an operation, and to the surface that renders its errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shoal.core.protocols import Operation, Surface
from shoal.errors import MethodNotAllowed, RouteNotFound, ShoalError

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class Route(NamedTuple):
    surface: Surface
    operation: Operation
    parameter: str = ""


_Methods: TypeAlias = dict[str, Route]
_SUFFIX = re.compile(r"(?:/[a-z_]+)?")
_SLASHES = re.compile(r"/{2,}")
_VERSIONS = re.compile(r"\A(?:/+v1){2,}/")
"""Of a base URL that ends in /v1, joined with a path that starts with it."""


class Miss(NamedTuple):
    """No operation matched; `surface` renders `error`."""

    surface: Surface
    error: ShoalError


class Routes:
    """Finds exact paths by one dictionary lookup, then prefixes with a parameter, longest first.

    `/a/{name:path}` matches everything after the prefix, `/a/{name:path}/suffix` everything before the suffix. A method
    that a suffix lacks is searched without it, so that GET finds a name that ends like a suffix.
    A trailing slash is ignored, because some clients do not follow redirects. HEAD uses the GET operation.
    The error of an unknown path belongs to the surface with the longest path above it, or to the first one with routes
    under that, else to the first surface.
    """

    def __init__(self, surfaces: Sequence[Surface], gateway: Gateway) -> None:
        self.first = surfaces[0]
        self._exact: dict[str, _Methods] = {}
        self._prefixes: dict[str, dict[str, _Methods]] = {}
        self._folders: dict[str, Surface] = {}
        self.all: list[Route] = []
        for surface in surfaces:
            for operation in surface.routes(gateway):
                self._add(Route(surface, operation))
        self._ordered = [
            (prefix, sorted(suffixes.items(), key=lambda each: -len(each[0])))
            for prefix, suffixes in sorted(self._prefixes.items(), key=lambda each: -len(each[0]))
        ]

    def _add(self, route: Route) -> None:
        path = route.operation.path
        above = path.rpartition("/")[0]
        while above:
            self._folders.setdefault(above, route.surface)
            above = above.rpartition("/")[0]
        head, brace, tail = path.partition("{")
        if brace:
            name, colon, suffix = tail.partition(":path}")
            if not (name.isidentifier() and colon and head.endswith("/") and _SUFFIX.fullmatch(suffix)):
                raise ValueError(f"{path}: a path may contain one '/{{name:path}}', optionally followed by '/word'")
            tables = [self._prefixes.setdefault(head, {}).setdefault(suffix, {})]
        else:
            paths = dict.fromkeys((path, path.rstrip("/") or "/", path.rstrip("/") + "/"))
            tables = [self._exact.setdefault(each, {}) for each in paths]
        for methods in tables:
            if route.operation.method in methods:
                raise ValueError(f"{route.operation.method} {path} is registered twice")
            methods[route.operation.method] = route
        self.all.append(route)

    def find(self, method: str, path: str) -> Route | Miss:
        route_method = "GET" if method == "HEAD" else method
        methods = self._exact.get(path)
        if methods is not None:
            return methods.get(route_method) or self._method_not_allowed(method, path, methods)
        under = self._match_prefix(path)
        for found, parameter in under:
            route = found.get(route_method)
            if route is not None:
                return Route(route.surface, route.operation, parameter)
        if under:
            return self._method_not_allowed(method, path, _merge_methods(under))
        fixed = _SLASHES.sub("/", _VERSIONS.sub("/v1/", path))
        meant = fixed != path and (fixed in self._exact or self._match_prefix(fixed))
        remedy = f"Send it to {fixed}: check the client's base URL" if meant else "See /docs for the routes"
        return Miss(self._find_owner(path), RouteNotFound(f"Unknown request URL: {method} {path}. {remedy}."))

    def allowed_methods(self, path: str) -> str:
        """Return the methods of a path as the value of an Allow header; "" for an unknown path."""
        return _format_allow(self._exact.get(path) or _merge_methods(self._match_prefix(path)))

    def _match_prefix(self, path: str) -> list[tuple[_Methods, str]]:
        """Return the parameterized routes that match a path, each with its parameter; those with a suffix first."""
        for prefix, suffixes in self._ordered:
            if path.startswith(prefix):
                rest = path[len(prefix) :].rstrip("/")
                return [
                    (methods, rest.removesuffix(suffix))
                    for suffix, methods in suffixes
                    if rest.endswith(suffix) and (not suffix or len(rest) > len(suffix))
                ]
        return []

    def _method_not_allowed(self, method: str, path: str, methods: _Methods) -> Miss:
        allow = _format_allow(methods)
        error = MethodNotAllowed(f"Not allowed to {method} on {path}; use {allow}.", allow=allow)
        return Miss(next(iter(methods.values())).surface, error)

    def _find_owner(self, path: str) -> Surface:
        while path.rstrip("/"):
            path = path.rstrip("/").rpartition("/")[0]
            methods = self._exact.get(path)
            if methods and path != "/":
                return next(iter(methods.values())).surface
            if path in self._folders:
                return self._folders[path]
        return self.first


def _merge_methods(under: Sequence[tuple[_Methods, str]]) -> _Methods:
    return {method: route for methods, _ in reversed(under) for method, route in methods.items()}


def _format_allow(methods: _Methods) -> str:
    names = set(methods)
    if "GET" in names:
        names.add("HEAD")
    return ", ".join(sorted(names))
