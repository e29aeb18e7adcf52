from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from shoal.core.generation.sampling import (
    NEUTRAL,
    UNSET,
    check_unsupported_fields,
    merge_sampling,
    parse_sampling_defaults,
)
from shoal.errors import Unsupported
from shoal.types import Guide, Sampling

ABLE = {"max_tokens", "temperature", "stop"}


def test_a_request_goes_before_the_models_defaults() -> None:
    """Each field of the request takes precedence; a field that the model does not support has no default either."""
    defaults = Sampling(temperature=0.1, max_tokens=7, top_k=3)
    found = merge_sampling(Sampling(temperature=0.9), defaults, ABLE, (), {})
    assert found == Sampling(temperature=0.9, max_tokens=7)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_k": 3}, "top_k"),
        ({"seed": 0}, "seed"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"guide": Guide(kind="json_object")}, "response_format"),
        ({"include_stop": True}, "include_stop_str_in_output"),
        ({"repetition_penalty": 1.5}, "repeat_penalty"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name_on_the_wire(fields: dict[str, Any], name: str) -> None:
    """Unsupported fields can be ignored by either of their names."""
    names = {"repetition_penalty": "repeat_penalty"}
    with pytest.raises(Unsupported, match=name) as caught:
        merge_sampling(Sampling(**fields), UNSET, ABLE, (), names)
    assert caught.value.param == name
    for ignored in (name, next(iter(fields))):
        assert merge_sampling(Sampling(**fields), UNSET, ABLE, {ignored}, names) == UNSET


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_are_never_refused(name: str) -> None:
    """Client libraries send neutral values by default."""
    assert merge_sampling(Sampling(**{name: NEUTRAL[name]}), UNSET, (), (), {}) == UNSET


def test_defaults_are_checked_when_they_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown names and wrong types raise; unsupported fields are dropped and logged."""
    with caplog.at_level(logging.WARNING):
        assert parse_sampling_defaults({"temperature": 0.5, "top_k": 2}, ABLE, "m") == Sampling(temperature=0.5)
    assert "top_k" in caplog.text
    with pytest.raises(KeyError, match="warmth"):
        parse_sampling_defaults({"warmth": 1}, ABLE, "m")
    with pytest.raises(msgspec.ValidationError):
        parse_sampling_defaults({"temperature": "hot"}, ABLE, "m")


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"mirostat": b"2"}, "no model here supports 'mirostat'"),
        ({"do_sample": b"1"}, "no model here supports 'do_sample'"),  # 1 is not true
        ({"samplers": b'["a"]' * 100}, "no model here supports 'samplers'"),
        ({"mirostat": b"1e400"}, "no model here supports 'mirostat'"),
        ({"mirostat": b'"\xff"'}, "no model here supports 'mirostat'"),
        ({"mirostat": b"0", "do_sample": b"true", "tfs_z": b"1.0", "typical_p": b"null", "unknown": b"7"}, ""),
    ],
)
def test_fields_of_other_servers(extras: dict[str, bytes], message: str) -> None:
    """One that would change the answer is refused, or ignored where the operator says so; neutral ones pass."""
    fields = {name: msgspec.Raw(value) for name, value in extras.items()}
    ignored: list[str] = []
    check_unsupported_fields(fields, list(extras), ignored=ignored)
    assert ignored == (list(extras) if message else [])
    if message:
        with pytest.raises(Unsupported, match=message):
            check_unsupported_fields(fields, (), ignored=[])
    else:
        check_unsupported_fields(fields, (), ignored=[])
