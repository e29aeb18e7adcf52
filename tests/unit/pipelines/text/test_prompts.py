from __future__ import annotations

import pytest

from shoal.errors import InvalidValue
from shoal.pipelines.text.prompts import get_prompt, resolve_prompt
from tests.unit.pipelines.tiny_tokenizers import spec

E5 = {"query": "query: ", "passage": "passage: "}


@pytest.mark.parametrize(
    ("prompts", "default", "prompt_name", "input_type", "expected"),
    [
        ({}, None, None, None, ""),
        (E5, None, None, None, ""),
        (E5, "query", None, None, "query: "),
        (E5, "gone", None, None, ""),
        (E5, None, "passage", None, "passage: "),
        (E5, "query", "passage", None, "passage: "),
        (E5, None, None, "query", "query: "),
        (E5, None, None, "document", "passage: "),
        ({"corpus": "c: ", "passage": "p: "}, None, None, "document", "p: "),
        ({"corpus": "c: "}, None, None, "document", "c: "),
        ({"document": "", "passage": "p: "}, None, None, "document", ""),
        (E5, None, "query", "document", "query: "),
        ({"task": "t: "}, "task", None, "query", ""),
        ({"task": "t: "}, "task", None, "document", ""),
    ],
)
def test_the_prompt_of_a_task(
    prompts: dict[str, str], default: str | None, prompt_name: str | None, input_type: str | None, expected: str
) -> None:
    """A name wins over a role, a role over the default; a role without a prompt adds nothing."""
    model = spec(prompts=prompts, default_prompt_name=default)
    assert resolve_prompt(model, prompt_name, input_type) == expected


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The error lists the model's prompts and names prompt_name."""
    with pytest.raises(InvalidValue, match="'nope'; it has: passage, query") as caught:
        get_prompt(spec(prompts=E5), "nope")
    assert caught.value.param == "prompt_name"


def test_a_model_without_prompts() -> None:
    """The error states the next step, since there are no prompts to list."""
    with pytest.raises(InvalidValue, match="has no prompts, so there is no prompt named 'query': omit it"):
        resolve_prompt(spec(), "query", None)


def test_an_unknown_role_is_refused_even_beside_a_name() -> None:
    """input_type has two values; any other value is refused."""
    for name in (None, "query"):
        with pytest.raises(InvalidValue, match="query, document") as caught:
            resolve_prompt(spec(prompts=E5), name, "clustering")
        assert caught.value.param == "input_type"
