"""Served names as folders: no two share a folder, and none points outside the repository."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.triton.naming import check_served_name, served_name, triton_name
from shoal.errors import InvalidValue
from shoal.names import NAME, RESERVED

NAMES = st.from_regex(NAME, fullmatch=True)
BAD = ["", "..", ".", "a/../../b", "/abs", "a/b/c", "a\0b", "x" * 300, "é", "a~b", "a+b", ".hidden", "a/", "a\n", "a b"]


@given(NAMES)
def test_a_served_name_comes_back_from_its_folder(name: str) -> None:
    """The mapping loses nothing, and the folder is one path component that needs no URL quoting."""
    folder = triton_name(name)
    assert served_name(folder) == name
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", folder)
    assert quote(folder) == folder
    assert not folder.startswith(".")


@given(NAMES, NAMES)
def test_parts_share_no_folder_with_any_model(name: str, other: str) -> None:
    """No served name maps to a part's folder."""
    for part in ("encoder", "tokenizer"):
        assert served_name(triton_name(name, part)) is None
        assert triton_name(name, part) != triton_name(other)
    assert triton_name(name, "encoder") != triton_name(name, "tokenizer")


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_has_no_folder(name: str) -> None:
    """Nothing is written or deleted for it."""
    with pytest.raises(InvalidValue, match="cannot name a model: use ASCII letters"):
        triton_name(name)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names_are_folders_like_any_other(name: str) -> None:
    """The API rejects them; others may write them into a repository."""
    assert check_served_name(name) == name


@pytest.mark.parametrize("folder", ["model~~encoder", "a~b~c", "my model", ".hidden", "~", "größe"])
def test_other_folders_have_no_served_name(folder: str) -> None:
    assert served_name(folder) is None
