"""Names of the request fields that choose how text is generated, in every API that clients speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

WIRE_NAMES = {"include_stop": "include_stop_str_in_output"}
"""Field names in OpenAI's and vLLM's APIs where they differ from ours; a guide carries its own name."""

SAMPLING_FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "logprobs"),
    *("stop", "stop_token_ids", "include_stop", "ignore_eos", "bad_words", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "guide"),
)
"""The fields of `shoal.types.Sampling`, spelled out so that settings need not import numpy."""

OTHER_NAMES = (
    *("max_completion_tokens", "top_logprobs", "best_of", "tools", "tool_choice", "response_format", "format", "text"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
)
"""What APIs call these fields, or fields that a model may not support either."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    # vLLM
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "repetition_detection": (),
    # llama.cpp and its derivatives
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
    "repeat_last_n": (64, -1),
    "penalize_newline": (True,),
    "n_predict": (-1,),
    "n_probs": (0,),
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
    "max_new_tokens": (),
    "encoder_repetition_penalty": (1,),
    "dynamic_temperature": (False,),
    "temperature_last": (False,),
    # SGLang
    "regex": (),
    "ebnf": (),
    "stop_regex": ([],),
    # NVIDIA NIM
    "nvext": ({},),
}
"""Sampling fields of other servers that no model here supports, with the values that have no effect.

They would change the answer, so they are rejected by name. A remote OpenAI-compatible server receives them unchanged.
"""

FIELDS_OF_OTHER_APIS: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (-1,),
    "max_completion_tokens": (-1,),
    "min_tokens": (0,),
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "seed": (),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "format": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Sampling fields that some API here has, with the values that have no effect.

Where another API lacks one, it would be dropped silently; so it is rejected there, as the fields above.
"""

if TYPE_CHECKING:
    SamplingField: TypeAlias = str
else:
    SamplingField = Literal[(*SAMPLING_FIELDS, *WIRE_NAMES.values(), *OTHER_NAMES, *UNSUPPORTED_FIELDS)]
    """A field that a model may not support, under any of its names."""
