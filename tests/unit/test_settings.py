"""The table itself: complete, consistent and named once."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from shoal.settings import MODEL_KEYS, SETTINGS, ModelTable, Setting, Settings, convert
from shoal.types import TaskKind


def test_every_field_is_a_row() -> None:
    """A field without a description would have no row, and so no flag."""
    assert tuple(row.name for row in SETTINGS) == Settings.__struct_fields__


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_every_row_is_documented_and_its_default_is_legal(row: Setting) -> None:
    """Help ends in a full stop, a section groups it, and the default passes the setting's own check."""
    assert row.help.endswith(".")
    assert row.section
    if row.default is not None:
        assert convert(row, row.default, "default") == row.default


def test_names_follow_one_rule() -> None:
    """Flag and variable are made from the name."""
    row = next(row for row in SETTINGS if row.name == "max_batch_size")
    assert (row.flag, row.env) == ("--max-batch-size", "SHOAL_MAX_BATCH_SIZE")


def test_secrets_are_marked() -> None:
    """Whatever is a key or a token is masked."""
    assert {row.name for row in SETTINGS if row.secret} == {"api_key", "admin_key", "hf_token"}


def test_a_model_may_not_change_the_server() -> None:
    """Tables of models hold what belongs to one model alone."""
    assert not {"port", "api_key", "home", "drain_timeout_s"} & set(MODEL_KEYS)
    assert {"backends", "aliases", "default_for", "precision", "max_batch_size", "truncate"} <= set(MODEL_KEYS)


def test_tasks_are_those_of_the_wire() -> None:
    """The table spells the tasks out so that it need not import numpy; they are the same."""
    spelled = get_type_hints(ModelTable)["default_for"]
    assert get_args(get_args(spelled)[0]) == get_args(TaskKind)
