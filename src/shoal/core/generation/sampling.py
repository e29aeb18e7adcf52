"""Which sampling fields a request ends up with: its own, the model's defaults, and what the model can honour."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.decoding import converter
from shoal.errors import Unsupported
from shoal.types import Guide, Sampling

_SAMPLING = converter(Sampling)

logger = logging.getLogger("shoal.core")

FIELDS = Sampling.__struct_fields__
UNSET = Sampling()

WIRE_NAMES = {"include_stop": "include_stop_str_in_output"}
"""What clients of OpenAI's and vLLM's API call a field, where that differs; a guide says that itself."""

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Values that ask for nothing: clients send them without meaning anything by it, so no model refuses them."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    # vLLM
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "repetition_detection": (),
    # llama.cpp, and what others took from it
    "typical_p": (1, 0),
    "typ_p": (1, 0),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "repeat_penalty": (1,),
    "samplers": (),
    "grammar": ("",),
    "json_schema": (),
    # transformers, TGI, text-generation-webui
    "do_sample": (True,),
    "num_beams": (1,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "smoothing_factor": (0,),
    "guidance_scale": (1,),
    "decoder_input_details": (False,),
    "watermark": (False,),
}
"""What other servers know about how tokens are chosen, and no model here does, with the values that ask for nothing.
They change the answer, so they are refused by name; a server behind that speaks OpenAI's API gets them as they came."""

LONGEST_NEUTRAL = 32
"""Bytes of JSON that may be one of the values above; longer JSON, however deep, is not looked at."""

APPLIED_BY_SHOAL = frozenset({"max_tokens", "stop", "include_stop"})
"""Honoured by Shoal itself, whatever the backend can."""

TOKEN_ID_FIELDS = frozenset({"stop_token_ids", "skip_special_tokens"})
"""Honoured by Shoal too where it sees token ids."""


def merge_sampling(
    asked: Sampling,
    defaults: Sampling,
    able: Collection[str],
    ignore: Collection[str],
    names: Mapping[str, str],
    *,
    ignored: list[str] | None = None,
) -> Sampling:
    """The sampling of a request: what it asks for, else the model's defaults, as far as the model is `able`.

    Raises Unsupported for a field that the request sets and the model cannot honour, unless `ignore` has it. Both may
    go by the name of the field or by what clients call it, of whom `names` tells what they call otherwise. Fields that
    were ignored are appended to `ignored`, by what the client calls them.
    """
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(asked, name)
        given = value != getattr(UNSET, name)
        if name in able:
            values[name] = value if given else getattr(defaults, name)
        elif given and value != NEUTRAL.get(name, _NOTHING):
            wire = value.field if isinstance(value, Guide) else {**WIRE_NAMES, **names}.get(name, name)
            if name not in ignore and wire not in ignore:
                raise Unsupported(
                    f"this model cannot honour {wire!r}: leave it out (the operator can have it ignored with "
                    "ignore_parameters)",
                    param=wire,
                )
            if ignored is not None:
                ignored.append(wire)
    return Sampling(**values)


def check_unsupported_fields(extras: Mapping[str, msgspec.Raw], ignore: Collection[str], *, ignored: list[str]) -> None:
    """Raises Unsupported for a field of ELSEWHERE that asks for something, unless `ignore` has it: then its name is
    appended to `ignored`."""
    for name in extras.keys() & UNSUPPORTED_FIELDS.keys():
        if is_neutral(extras[name], UNSUPPORTED_FIELDS[name]):
            continue
        if name not in ignore:
            raise Unsupported(
                f"no model here can honour {name!r}: leave it out (the operator can have it ignored with "
                "ignore_parameters)",
                param=name,
            )
        ignored.append(name)


def is_neutral(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    """Whether JSON is null, or one of the values; 1 and 1.0 are the same, 1 and true are not."""
    if len(memoryview(raw)) > LONGEST_NEUTRAL:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def parse_sampling_defaults(settings: Mapping[str, Any], able: Collection[str], model: str) -> Sampling:
    """A model's default sampling from its table; a field that it cannot honour is left out, with a warning.

    Raises msgspec.ValidationError for a value of the wrong type and KeyError for a name that is no field.
    """
    for name in settings:
        if name not in FIELDS:
            raise KeyError(name)
    for name in sorted(settings.keys() - set(able)):
        logger.warning("%s cannot honour %r of its sampling defaults: it is left out", model, name)
    return _SAMPLING({name: value for name, value in settings.items() if name in able})


_NOTHING = object()
