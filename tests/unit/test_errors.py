from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from shoal import errors
from shoal.errors import (
    BackendError,
    CapacityError,
    MethodNotAllowed,
    MissingExtra,
    ModelFileError,
    RequestError,
    SetupError,
    ShoalError,
    SourceAway,
    UpstreamRefused,
)

CLASSES: list[type[ShoalError]] = [
    value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, ShoalError)
]
LEAVES = [one for one in CLASSES if not one.__subclasses__()]
ARGUMENTS: dict[type[ShoalError], dict[str, Any]] = {
    MethodNotAllowed: {"message": "m", "allow": "GET"},
    ModelFileError: {"message": "m", "file": "config.json"},
    MissingExtra: {"what": "m", "extra": "local"},
    UpstreamRefused: {"message": "m", "status": 400},
}


def documented_tree() -> dict[str, str]:
    """Return class to parent, read from the tree in the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z][A-Za-z]+)(\s{2,}|$)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path[depth:] = [match[2]]
        if depth:
            parents[match[2]] = path[depth - 1]
    return parents


def test_the_documented_tree_matches_the_classes() -> None:
    """The tree has every class under its parent, and nothing else."""
    real = {one.__name__: one.__mro__[1].__name__ for one in CLASSES if one is not ShoalError}
    assert documented_tree() == real


def test_each_leaf_has_its_own_kind() -> None:
    """Surfaces decide by `kind`, so two errors may share one only on purpose."""
    shared = {one: [each.__name__ for each in LEAVES if each.kind == one] for one in {each.kind for each in LEAVES}}
    assert {kind: names for kind, names in shared.items() if len(names) > 1} == {}
    assert all(re.fullmatch(r"[a-z_]+", one.kind) for one in CLASSES)


@pytest.mark.parametrize("one", LEAVES, ids=lambda one: one.__name__)
def test_errors_without_fault_are_retryable(one: type[ShoalError]) -> None:
    """Capacity, transport and unavailable-source errors are retryable; errors of the caller or operator, and bugs, are
    not.
    """
    away = one.kind == "transport" or one is SourceAway
    if one.kind != "model_failed":
        assert one.retryable == (issubclass(one, CapacityError) or away)
    assert not (one.retryable and not away and issubclass(one, RequestError | SetupError))


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.__name__)
def test_messages_are_kept(one: type[ShoalError]) -> None:
    """`message` is the exception's text, and `repr` shows class and message."""
    error = one(**ARGUMENTS.get(one, {"message": "m"}))
    assert str(error) == error.message
    assert "m" in error.message
    assert repr(error) == f"{one.__name__}({error.message!r})"
    assert (error.param, error.retry_after) == (None, None)


def test_field_and_time_are_carried() -> None:
    """Surfaces need the field at fault and the retry time."""
    error = CapacityError("m", param="input", retry_after=1.5)
    assert (error.param, error.retry_after) == ("input", 1.5)


def test_additional_error_fields() -> None:
    """The header value, the position in a file, and the pip command."""
    assert MethodNotAllowed("m", allow="GET, POST").allow == "GET, POST"
    placed = ModelFileError("is no number", file="config.json", key="hidden_size")
    assert (placed.message, placed.file, placed.key) == (
        "config.json: hidden_size: is no number",
        "config.json",
        "hidden_size",
    )
    assert ModelFileError("is missing", file="config.json").message == "config.json: is missing"
    extra = MissingExtra("a local model", "local")
    assert extra.extra == "local"
    assert re.search(r"pip install .*\[local\]'", extra.message)


def test_backend_errors_are_not_the_callers() -> None:
    """The families do not overlap."""
    families = (RequestError, CapacityError, BackendError, SetupError)
    assert all(sum(issubclass(one, family) for family in families) <= 1 for one in CLASSES)


@pytest.mark.parametrize("kind", LEAVES)
def test_an_error_of_an_input_is_the_same_error(kind: type[ShoalError]) -> None:
    """For every constructor; the original error stays unchanged."""
    error = kind(**ARGUMENTS.get(kind, {"message": "m"}))
    named = error.at_input(3)
    assert type(named) is kind
    assert named.message == str(named) == f"input 3: {error.message}"
    others = {name: value for name, value in vars(error).items() if name != "message"}
    assert others == {name: value for name, value in vars(named).items() if name != "message"}
    assert not error.message.startswith("input")
