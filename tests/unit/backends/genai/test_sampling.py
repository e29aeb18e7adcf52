"""Conversion of sampling fields to the library's GenerationConfig."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.genai import compact_schema
from shoal.backends.genai.sampling import ALL_TOKENS, LONGEST_GUIDE, PARAMETERS, configure, structure_arguments
from shoal.errors import InvalidValue
from shoal.types import Guide, Sampling


def rules(**own: Any) -> SimpleNamespace:
    """Return the library's defaults with a model's own settings."""
    plain: dict[str, Any] = {
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": ALL_TOKENS,
        "min_p": 0.0,
        "logprobs": 0,
        "stop_token_ids": {2},
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    return SimpleNamespace(**(plain | own))


def configured(own: dict[str, Any] | None = None, space: int = 100, **fields: Any) -> Any:
    return configure(rules(**(own or {})), Sampling(**fields), space)


def test_every_parameter_is_a_field() -> None:
    """Every supported parameter exists."""
    assert set(Sampling.__struct_fields__) >= PARAMETERS


def test_the_models_defaults_apply_without_fields() -> None:
    """The model's settings stay, with one answer up to the limit."""
    made = configured({"do_sample": True, "temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1})
    assert (made.do_sample, made.temperature, made.top_k, made.repetition_penalty) == (True, 0.6, 50, 1.1)
    assert (made.num_beams, made.num_return_sequences, made.max_new_tokens, made.min_new_tokens) == (1, 1, 100, 0)
    assert (made.stop_token_ids, made.logprobs, made.ignore_eos) == ({2}, 0, False)


@pytest.mark.parametrize(
    ("own", "fields", "drawn"),
    [
        ({}, {}, False),
        ({}, {"temperature": 0.7}, True),
        ({}, {"temperature": 0.0}, False),
        ({}, {"temperature": 1e-9}, False),
        ({"do_sample": True}, {"temperature": 0.0}, False),
        ({"do_sample": True}, {}, True),
        ({}, {"top_p": 0.5}, True),
        ({}, {"top_k": 5}, True),
        ({}, {"min_p": 0.1}, True),
        ({}, {"temperature": 0.0, "top_p": 0.5}, False),
        ({}, {"temperature": 1.0, "top_p": 0.0}, False),
        ({}, {"seed": 3}, False),
    ],
)
def test_drawn_or_the_likeliest(own: dict[str, Any], fields: dict[str, Any], drawn: bool) -> None:
    """The temperature decides on sampling, else top_p, top_k or min_p, else the model's default."""
    assert configured(own, **fields).do_sample is drawn


@pytest.mark.parametrize(("top_k", "expected"), [(-1, ALL_TOKENS), (0, ALL_TOKENS), (1, 1), (40, 40)])
def test_top_k(top_k: int, expected: int) -> None:
    """None and values below one keep every token, and override the model's own."""
    assert configured({"top_k": 50}, top_k=top_k).top_k == expected


def test_stop_tokens_join_the_models_own() -> None:
    """The model's own stop tokens stay."""
    assert configured(stop_token_ids=[7, 9]).stop_token_ids == {2, 7, 9}


@given(upper=st.none() | st.integers(1, 10**6), lower=st.none() | st.integers(0, 10**6), space=st.integers(1, 10**5))
def test_lengths_fit_into_the_limit(upper: int | None, lower: int | None, space: int) -> None:
    """The maximum is between 1 and the limit, and the minimum is not above the maximum."""
    made = configured(space=space, max_tokens=upper, min_tokens=lower)
    assert 1 <= made.max_new_tokens <= space
    assert made.min_new_tokens <= made.max_new_tokens
    assert upper is None or made.max_new_tokens == min(upper, space)


@given(seed=st.none() | st.integers(-(2**70), 2**70))
def test_seeds_are_of_32_bits(seed: int | None) -> None:
    """Any number is a valid seed, and equal numbers are equal seeds."""
    first, second = configured(seed=seed).rng_seed, configured(seed=seed).rng_seed
    assert 0 <= first < 2**32
    assert seed is None or first == second


def test_log_probabilities() -> None:
    """Only the chosen token has a log probability."""
    assert configured(logprobs=0).logprobs == 1


def test_forms_by_their_kind() -> None:
    """Each kind uses the library's argument for it."""
    assert structure_arguments(Guide(kind="json_object")) == {"grammar": compact_schema.OBJECT}
    with pytest.raises(InvalidValue, match="unsupported JSON schema"):
        structure_arguments(Guide(kind="json_schema", value='{"uniqueItems":true}'))
    assert structure_arguments(Guide(kind="json_schema", value="{}"))["grammar"].startswith("root ::= value\n")
    assert structure_arguments(Guide(kind="regex", value="a+")) == {"regex": "a+"}
    assert structure_arguments(Guide(kind="grammar", value="root ::= [a]")) == {"grammar": "root ::= [a]"}
    assert structure_arguments(Guide(kind="structural_tag", value="{}")) == {"structural_tags_config": "{}"}


def test_choices_become_literals() -> None:
    """Choices become a grammar of one rule."""
    assert structure_arguments(Guide(kind="choice", value='["yes", "n\\"o"]')) == {
        "grammar": 'root ::= "yes" | "n\\"o"'
    }


@pytest.mark.parametrize("value", ["", "[]", '[""]', "[1]", '{"a": 1}', '"yes"'])
def test_choices_that_are_none(value: str) -> None:
    """Invalid choices are rejected before a grammar is built."""
    with pytest.raises(InvalidValue, match="choices"):
        structure_arguments(Guide(kind="choice", value=value))


def test_a_form_without_end() -> None:
    """Compiling delays every answer, so the length of a guide is limited."""
    with pytest.raises(InvalidValue, match="longer"):
        structure_arguments(Guide(kind="regex", value="a" * (LONGEST_GUIDE + 1)))
