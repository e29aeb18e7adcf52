"""The settings table: complete, consistent, and each name once."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest

from shoal.config.schema import Setting, convert
from shoal.config.settings import BY_NAME, MODEL_KEYS, SETTINGS, ModelTable, Settings
from shoal.errors import ConfigError
from shoal.types import TaskKind


def test_every_field_is_a_row() -> None:
    """A field without a description would have no row, and thus no flag."""
    assert tuple(row.name for row in SETTINGS) == Settings.__struct_fields__


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_every_row_is_documented_and_its_default_is_legal(row: Setting) -> None:
    """Help ends in a full stop, a section groups it, and the default passes the setting's own check."""
    assert row.help.endswith(".")
    assert row.section
    if row.default is not None:
        assert convert(row, row.default, "default") == row.default


def test_names_follow_one_rule() -> None:
    """Flag and variable are derived from the name."""
    row = next(row for row in SETTINGS if row.name == "max_batch_size")
    assert (row.flag, row.env) == ("--max-batch-size", "SHOAL_MAX_BATCH_SIZE")


def test_secrets_are_marked() -> None:
    """Keys and tokens are masked."""
    assert {row.name for row in SETTINGS if row.secret} == {
        "api_key",
        "admin_key",
        "hf_token",
        "triton_metadata",
        "upstream_api_key",
    }


def test_a_model_may_not_change_the_server() -> None:
    """Tables of models contain only settings of one model."""
    assert not {"port", "api_key", "home", "drain_timeout_s", "triton_url", "triton_repository"} & set(MODEL_KEYS)
    assert {"backends", "aliases", "default_for", "precision", "max_batch_size", "truncate"} <= set(MODEL_KEYS)
    assert {"backend", "triton_platform", "triton_instances", "triton_text_in"} <= set(MODEL_KEYS)


@pytest.mark.parametrize("row", MODEL_KEYS.values(), ids=lambda row: row.name)
def test_every_key_of_a_model_s_table_is_documented_and_checked(row: Setting) -> None:
    """Help ends in a full stop, and a value of a wrong type is refused."""
    assert row.help.endswith(("?", ".", "..."))
    shown = "" if row.secret else ", got"
    with pytest.raises(ConfigError, match=f"^key: must be {re.escape(row.wording)}{shown}"):
        convert(row, [[]], "key")


@pytest.mark.parametrize(
    ("key", "value", "wording"),
    [
        ("prompts", {"query": 3}, "a table of text"),
        ("input_names", {"ids": "x"}, "a table of text by adapter_ids, attention_mask, input_ids, pair, "),
        ("output_names", {"pooled": ""}, "a table of text by embedding, logits, pooled, sentence_embedding, "),
        ("dimension", 0, "a whole number of at least 1"),
        ("max_tokens", "", "a whole number of at least 1"),
        ("pooling", "median", "one of cls, lasttoken, max, mean, mean_sqrt_len_tokens, weightedmean"),
        ("normalize", "perhaps", "true or false"),
        ("tokenizer", "", "text"),
    ],
)
def test_model_key_errors_state_the_valid_values(key: str, value: object, wording: str) -> None:
    """Tables list their valid keys; optional keys have the same wording."""
    with pytest.raises(ConfigError) as caught:
        convert(MODEL_KEYS[key], value, key)
    assert f"{key}: must be {wording}" in caught.value.message


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("triton_url", ["", "localhost:8001", "tritons://t.example", "[::1]:8001"], ["http://a", "a/b", "a b", "a#m"]),
        ("triton_metadata", [["x-key: a b"], ["authorization:Bearer x"]], [["X: y"], ["nothing"], ["a: \n"]]),
        ("triton_instances", ["1", 4], ["0", -1]),
        ("keep_alive_s", ["0", 1.5], ["-1", "nan"]),
    ],
)
def test_bounds_of_triton_options(name: str, good: list[object], bad: list[object]) -> None:
    """An address without a path, metadata that gRPC accepts, at least one instance."""
    row = BY_NAME[name]
    for value in good:
        convert(row, value, "here")
    for value in bad:
        with pytest.raises(ConfigError, match=r"^here: must be "):
            convert(row, value, "here")


def test_tasks_are_those_of_the_wire() -> None:
    """The table repeats the tasks so that it need not import numpy; they are the same."""
    spelled = get_type_hints(ModelTable)["default_for"]
    assert get_args(get_args(spelled)[0]) == get_args(TaskKind)
