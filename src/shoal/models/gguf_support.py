"""Check which parts of a GGUF model OpenVINO GenAI computes, and reject all others by name.

The library's reader ignores unknown keys and tensors, which silently changes the results. So this is a list of what is
known to be computed as the model defines it; a test compares each entry with a computation in NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shoal.errors import ModelFileError
from shoal.models.gguf import BLOCKS, Gguf

KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16"}
_MATRIX = frozenset({1, 2, 3, 8, 12, 14})
_TABLE = _MATRIX | {0, 30}
_NORM = frozenset({0})
_BIAS = frozenset({0, 1, 30})

ROUNDED = frozenset({3, 12})
"""Kinds with a minimum for each group of weights, which the library rounds to a whole number of steps.

This raises the error of Q4_1 and Q4_K by 40 %, above that of Q4_0, which is computed exactly.
"""

_PLAIN_TYPES = (0, 1)
"""general.file_type of F32 and F16 files: for these the library does not look for the scales of quantized weights."""

_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
    }
)
_DESCRIPTIVE = frozenset({"feed_forward_length", "vocab_size", "tensor_data_layout"})
"""Keys that repeat what the tensors show, or that are the same for every file of the architecture."""

_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")

INSTEAD = (
    "export the original model with `optimum-cli export openvino` and serve that folder, or run the file with a server "
    "such as llama.cpp's behind Shoal"
)


def check(model: Gguf) -> None:
    """Raises ModelFileError for a model that the library would compute differently, or not at all."""
    kind = model.metadata.get("general.type", "model")
    if kind != "model":
        raise model.refuse(f"{kind!r} cannot be served on its own; name the model", "general.type")
    _check_keys(model)
    _check_tensors(model)
    _check_file_type(model)


def rounded_kinds(model: Gguf) -> list[str]:
    """Return the names of this model's weight kinds that are computed with rounded minima."""
    return sorted({KINDS[tensor.kind] for tensor in model.tensors if tensor.kind in ROUNDED})


def _check_keys(model: Gguf) -> None:
    prefix = f"{model.architecture}."
    _, width = model.cache_heads[0]
    neutral = _neutral(model, width)
    for key, value in model.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ or name in _DESCRIPTIVE:
            continue
        if name not in neutral or not neutral[name](value):
            raise model.refuse(f"the engine ignores this key, so answers would differ: {INSTEAD}", key)


def _neutral(model: Gguf, width: int) -> dict[str, Callable[[Any], bool]]:
    """Return the keys that the library ignores, each with a test whether its value changes nothing."""
    factor = model.metadata.get(f"{model.architecture}.rope.scaling.factor", 1)
    unscaled = factor in (0, 1)
    context = model.number("context_length")
    return {
        "attention.value_length": lambda value: value == width,
        "attention.causal": lambda value: value is True,
        "attention.sliding_window": lambda value: value == 0 or (isinstance(value, int) and value >= context),
        "rope.dimension_count": lambda value: value == width,
        "rope.scaling.type": lambda value: value == "none" or (value in ("linear", "yarn") and unscaled),
        "rope.scaling.factor": lambda value: value in (0, 1),
        "rope.scale_linear": lambda value: value in (0, 1),
        "rope.scaling.attn_factor": lambda value: value in (0, 1),
        "rope.scaling.original_context_length": lambda _: unscaled,
        "rope.scaling.finetuned": lambda _: unscaled,
        "expert_count": lambda value: value == 0,
        "expert_used_count": lambda value: value == 0,
        "pooling_type": lambda value: value == 0,
        "logit_scale": lambda value: value == 1,
    }


def _check_tensors(model: Gguf) -> None:
    allowed = {"token_embd.weight": _TABLE, "output.weight": _TABLE, "output_norm.weight": _NORM}
    required = {"token_embd.weight", "output_norm.weight"}
    layers = model.number("block_count")
    of_block = _block_tensors(model.architecture)
    needed = {name for name in of_block if name.endswith(".weight")}
    found: dict[int, set[str]] = {layer: set() for layer in range(layers)}
    for tensor in model.tensors:
        block = _BLOCK.fullmatch(tensor.name)
        layer = int(block[1]) if block else -1
        kinds = of_block.get(block[2]) if block else allowed.get(tensor.name)
        if kinds is None or (block and layer >= layers):
            raise model.refuse(f"the engine ignores this tensor, so answers would differ: {INSTEAD}", tensor.name)
        if tensor.kind not in kinds:
            names = ", ".join(KINDS[kind] for kind in sorted(kinds))
            why = f"is in {KINDS[tensor.kind]}, but the engine supports only {names}; use a file in Q8_0 or F16"
            raise model.refuse(why, tensor.name)
        if tensor.shape[0] % BLOCKS[tensor.kind][0]:
            raise model.refuse("has rows that are not whole blocks; fetch it again", tensor.name)
        required.discard(tensor.name)
        if block:
            found[layer].add(block[2])
    for layer, names_found in found.items():
        required |= {f"blk.{layer}.{name}" for name in needed - names_found}
    if required:
        raise model.refuse("this tensor is missing; use another file of the model", min(required))


def _block_tensors(architecture: str) -> dict[str, frozenset[int]]:
    """Return the tensors of one block with the kinds that each may have."""
    made = {f"{name}.weight": _MATRIX for name in _PROJECTIONS}
    made |= {f"{name}.weight": _NORM for name in _NORMS}
    made |= {f"{name}.bias": _BIAS for name in _PROJECTIONS}
    if architecture == "qwen3":
        made |= {f"{name}.weight": _NORM for name in _HEAD_NORMS}
    if architecture == "llama":
        for name in ("attn_q.bias", "attn_k.bias"):
            del made[name]  # the library reorders the rows of these weights, but not their biases
    return made


def _check_file_type(model: Gguf) -> None:
    key = "general.file_type"
    kind = model.metadata.get(key)
    if isinstance(kind, bool) or not isinstance(kind, int):
        raise model.refuse("must be a whole number; use another file of the model", key)
    quantized = next((tensor for tensor in model.tensors if BLOCKS[tensor.kind][0] > 1), None)
    if kind in _PLAIN_TYPES and quantized is not None:
        raise ModelFileError(
            f"is {kind}, for unquantized weights, but {quantized.name} is {KINDS[quantized.kind]}; use another file",
            file=model.name,
            key=key,
        )
