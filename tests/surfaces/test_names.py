"""Model names from clients: valid, or a 4xx in the dialect before anything is loaded."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import AddressError, InvalidValue
from shoal.models.address import check_name
from shoal.surfaces.shared.model_jobs import check_model_name, check_source
from tests.surfaces.life_kit import living
from tests.surfaces.surface_kit import Answer

BAD = ["", ".", "..", "a/../../b", "/etc/passwd", "a//b", "a/", "/", "a\0b", "a" * 300, "ä", "naïve/model", ".hidden"]
BAD += ["a/b/c", "a\\b", "~/x", "a b", "a\n", "load", "unload", "sse", "a/..", "../a", "C:\\x", "-/\u202e"]


@pytest.mark.parametrize("name", BAD)
def test_bad_names(name: str) -> None:
    """They are invalid as a name and as a source."""
    with pytest.raises(InvalidValue):
        check_model_name(name)
    with pytest.raises(InvalidValue):
        check_source(name)


@pytest.mark.parametrize(
    "source", ["org/name@main", "org/name@refs/pr/1", "hf:org/name", "pypi:a==1.0", "fake:delay_ms=5#x"]
)
def test_sources_are_not_names(source: str) -> None:
    """A source is valid when loading a model, but not as its name."""
    assert check_source(source) == source
    with pytest.raises(InvalidValue):
        check_model_name(source)


@pytest.mark.parametrize(
    "source", ["hf:../x", "hf:a/../../b", "org/name@../x", "hf:a\0", "hf:ä", "hf:" + "a" * 600, "hf:a\\b"]
)
def test_invalid_sources(source: str) -> None:
    """No `..`, no control or non-ASCII characters, and a limited length."""
    with pytest.raises(InvalidValue):
        check_source(source)


names = st.text(max_size=20) | st.sampled_from(BAD) | st.from_regex(r"[a-zA-Z0-9._/-]{1,12}", fullmatch=True)


@given(name=names)
def test_the_same_names_as_on_the_command_line(name: str) -> None:
    """One grammar and one set of reserved words, on every path."""
    try:
        check_name(name)
    except AddressError:
        with pytest.raises(InvalidValue):
            check_model_name(name)
    else:
        assert check_model_name(name) == name
        assert check_source(name) == name


async def call_everywhere(name: str) -> tuple[list[Answer], list[Any]]:
    """Return the answers of every route that changes a model, and the loader's calls."""
    encoded = quote(name, safe="")
    async with living() as life:
        calls = [
            life.manage("POST", "/load_sentence_transformer_model", {"model_name": name}),
            life.manage("POST", "/unload_model", {"model_name": name}),
            life.manage("POST", "/delete_model", {"model_name": name}),
            life.manage("POST", "/models", {"model": name}),
            life.manage("POST", "/models/load", {"model": name}),
            life.manage("POST", "/models/unload", {"model": name}),
            life.manage("DELETE", f"/models?model={encoded}"),
            life.manage("POST", "/v1/models", {"model": name}),
            *(
                # As servers pass a path: decoded and without the query.
                life.at(method, f"/v1/models/{name}{suffix}")
                for method, suffix in (("POST", "/load"), ("POST", "/unload"), ("DELETE", ""))
                if not name.endswith("/") or suffix
            ),
        ]
        return [await call for call in calls], life.loader.touched


def refused(name: str) -> bool:
    try:
        check_name(name)
    except AddressError:
        return True
    return False


@given(name=(st.text(max_size=12) | st.sampled_from(BAD)).filter(refused).filter(lambda name: ":" not in name))
@example(name="a" * 300)
@example(name="a/../../b")
def test_bad_names_everywhere(name: str) -> None:
    """Every route rejects them in its own format, and the loader is not called."""
    answers, touched = asyncio.run(call_everywhere(name))
    for answer in answers:
        assert 400 <= answer.status < 500, (answer.status, answer.body)
        assert set(answer.json()) in ({"detail"}, {"error"})
    assert touched == []
