"""Served names as folders: no two share one, and nothing leads out of the repository."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.triton.naming import check_served, served_name, triton_name
from shoal.errors import AddressError, InvalidValue
from shoal.models.address import RESERVED_NAMES, check_name

NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,95})?", fullmatch=True)
BAD = ["", "..", ".", "a/../../b", "/abs", "a/b/c", "a\0b", "x" * 300, "é", "a~b", "a+b", ".hidden", "a/", "a\n", "a b"]


@given(NAMES)
def test_a_served_name_comes_back_from_its_folder(name: str) -> None:
    """The way there loses nothing, and the folder is one path component that URLs carry as it is."""
    folder = triton_name(name)
    assert served_name(folder) == name
    assert re.fullmatch(r"[A-Za-z0-9._~-]+", folder)
    assert quote(folder) == folder
    assert not folder.startswith(".")


@given(NAMES, NAMES)
def test_parts_share_no_folder_with_any_model(name: str, other: str) -> None:
    """A part's folder is no served name's, whatever that is called."""
    for part in ("encoder", "tokenizer"):
        assert served_name(triton_name(name, part)) is None
        assert triton_name(name, part) != triton_name(other)
    assert triton_name(name, "encoder") != triton_name(name, "tokenizer")


@given(st.text(max_size=12) | st.sampled_from(BAD) | NAMES)
def test_the_rule_is_that_of_addresses(name: str) -> None:
    """What may be a served name anywhere may be one here, and nothing else."""
    try:
        wanted = check_name(name)
    except AddressError:
        wanted = name if name in RESERVED_NAMES else ""
    if wanted:
        assert check_served(name) == name
    else:
        with pytest.raises(InvalidValue, match="cannot name a model"):
            triton_name(name)


@pytest.mark.parametrize("folder", ["model~~encoder", "a~b~c", "my model", ".hidden", "~", "größe"])
def test_other_folders_have_no_served_name(folder: str) -> None:
    """Folders that no served name leads to."""
    assert served_name(folder) is None
