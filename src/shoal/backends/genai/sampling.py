"""Converts a request's sampling to the library's GenerationConfig."""

from __future__ import annotations

import json
import random
from typing import Any

from shoal.backends.genai import compact_schema, grammar_spelling, structural_tags
from shoal.errors import InvalidValue
from shoal.types import Guide, Sampling

PARAMETERS = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop_token_ids",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "ignore_eos",
    }
)
"""Fields of Sampling that the library supports; also `guide`, if it knows the model's vocabulary."""

MIN_TEMPERATURE = 1e-4
"""Temperatures up to this value mean greedy decoding: dividing logits by less gives infinity."""

ALL_TOKENS = 2**64 - 1
"""The library's value for a top_k that keeps every token."""

LONGEST_GUIDE = 200_000
"""Maximum characters of a grammar or schema: its compilation delays every answer of the model."""


def configure(rules: Any, sampling: Sampling, max_answer_tokens: int) -> Any:
    """Apply a request's sampling to `rules`, a fresh copy of the model's own, and return it.

    `max_answer_tokens`: maximum tokens of the answer. Raises InvalidValue.
    """
    rules.num_beams = 1
    rules.num_return_sequences = 1
    rules.stop_strings = set()
    rules.max_new_tokens = min(sampling.max_tokens or max_answer_tokens, max_answer_tokens)
    rules.min_new_tokens = min(sampling.min_tokens or 0, rules.max_new_tokens)
    rules.stop_token_ids = set(rules.stop_token_ids) | set(sampling.stop_token_ids)
    rules.ignore_eos = bool(sampling.ignore_eos)
    _configure_choice(rules, sampling)
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(sampling, penalty)
        if value is not None:
            setattr(rules, penalty, value)
    if sampling.logprobs is not None:
        rules.logprobs = 1  # the library reports only that of the chosen token
    return rules


def _configure_choice(rules: Any, sampling: Sampling) -> None:
    """Select greedy decoding or sampling. A request with top_p, top_k or min_p is sampled, whatever the model's
    default."""
    narrowed = any(value is not None for value in (sampling.top_p, sampling.top_k, sampling.min_p))
    if sampling.temperature is None:
        rules.do_sample = bool(rules.do_sample or narrowed)
    else:
        rules.do_sample = sampling.temperature > MIN_TEMPERATURE
        if rules.do_sample:
            rules.temperature = sampling.temperature
    if sampling.top_p is not None:
        if sampling.top_p <= 0:
            rules.do_sample = False  # only the most likely token is left
        else:
            rules.top_p = min(sampling.top_p, 1.0)
    if sampling.top_k is not None:
        rules.top_k = sampling.top_k if sampling.top_k > 0 else ALL_TOKENS
    if sampling.min_p is not None:
        rules.min_p = sampling.min_p
    # The library's default seed is constant.
    rules.rng_seed = (sampling.seed if sampling.seed is not None else random.getrandbits(32)) % 2**32


def structure_arguments(guide: Guide) -> dict[str, str]:
    """Return the arguments of the library's StructuredOutputConfig. Raises InvalidValue."""
    if len(guide.value) > LONGEST_GUIDE:
        raise InvalidValue(f"the output format is longer than {LONGEST_GUIDE} characters", param="response_format")
    if guide.kind == "json_object":
        return {"grammar": compact_schema.OBJECT}
    if guide.kind == "json_schema":
        return {"grammar": compact_schema.write_grammar(guide.value)}
    if guide.kind == "regex":
        return {"regex": guide.value}
    if guide.kind == "choice":
        return {"grammar": f"root ::= {grammar_spelling.write_choice(_choices(guide.value))}"}
    if guide.kind in ("structural_tag", "calls_or_answer"):
        tags = structural_tags.write_tags(guide.value, any_arguments=guide.kind == "calls_or_answer")
        return {"structural_tags_config": tags}
    return {"grammar": grammar_spelling.check_grammar(guide.value)}


def _choices(value: str) -> list[str]:
    try:
        choices = json.loads(value)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidValue("choices must be a non-empty list of non-empty strings", param="guided_choice")
    return choices
