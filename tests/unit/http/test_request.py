"""Options are the settings under the same names; a request reads no more than it is asked for."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.config import Settings
from shoal.errors import InternalError
from shoal.surfaces import Options, Request


def test_options_are_settings() -> None:
    """Every option is a setting of the same name, type of value and default, so neither can drift."""
    settings = Settings()
    options = Options.from_settings(settings)
    for each in fields(Options):
        if each.name not in ("metrics", "pictures", "address_schemes"):
            assert getattr(options, each.name) == getattr(settings, each.name) == each.default, each.name


def test_a_missing_setting_is_noticed() -> None:
    """An option without its setting is a mistake of ours, and loud."""
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
    """Decoded, the last of several; bytes that are no text cannot raise."""
    assert request(query).query_parameter("model") == value


def test_a_scope_without_a_query() -> None:
    """ASGI lets servers leave it out."""
    assert Request({"method": "GET", "path": "/", "headers": []}, 0.0).query_parameter("model") is None


def test_rights_are_closed_where_nobody_judged() -> None:
    """A request that did not come through the front has none."""
    with pytest.raises(InternalError):
        request("").require_access("user")
