"""Options are settings of the same names; a request decodes only what is needed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.config import Settings
from shoal.errors import InternalError
from shoal.surfaces import Options, Request


def test_options_are_settings() -> None:
    """Every option is a setting of the same name, type and default, so they cannot diverge."""
    settings = Settings()
    options = Options.from_settings(settings)
    for each in fields(Options):
        if each.name not in ("metrics", "image_reader", "address_schemes", "log"):
            assert getattr(options, each.name) == getattr(settings, each.name) == each.default, each.name


def test_a_missing_setting_raises() -> None:
    """An option without its setting is a bug and raises."""
    with pytest.raises(AttributeError):
        Options.from_settings(object())


def request(query: str) -> Request:
    return Request({"method": "GET", "path": "/", "headers": [], "query_string": query.encode()}, 0.0)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("", None),
        ("other=1", None),
        ("model", ""),
        ("model=", ""),
        ("model=org%2Fname", "org/name"),
        ("model=a+b&wait=false", "a b"),
        ("model=a&model=b", "b"),
        ("model=%C3%A9", "é"),
        ("model=%FF", "\ufffd"),
        ("model=%00", "\0"),
    ],
)
def test_arguments(query: str, value: str | None) -> None:
    """Decoded; the last of several wins; invalid UTF-8 does not raise."""
    assert request(query).query_parameter("model") == value


def test_a_scope_without_a_query() -> None:
    """ASGI servers may omit it."""
    assert Request({"method": "GET", "path": "/", "headers": []}, 0.0).query_parameter("model") is None


def test_rights_are_denied_by_default() -> None:
    """A request that bypassed the application has none."""
    with pytest.raises(InternalError):
        request("").require_access("user")
