"""Read rotary position embeddings from config.json, in the forms of transformers 4 and 5."""

from __future__ import annotations

import math

import numpy as np

from shoal.models.convert.contract.architecture import Rotary
from shoal.models.convert.contract.families.fields import require_values
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.weights import Floats

_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "ntk")


def read_rotary(config: JsonFile, size: int, theta: float = 10_000.0, kind: str = "") -> Rotary:
    """Read the rotation of heads of `size` numbers. `theta`: the family's default base. `kind`: the kind of layer, for
    families with a rotation for each.

    The settings are `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`. Raises ModelFileError for
    an unknown kind of scaling.
    """
    section = _parameters(config, kind)
    base = section.number("rope_theta", config.number("rope_theta", theta))
    share = section.number("partial_rotary_factor", 1.0)
    width = int(size * min(share, 1.0))
    if base <= 1:
        raise section.refuse("rope_theta", f"must be above 1, not {base}")
    if share > 1 or width < 2 or width % 2:
        raise section.refuse("partial_rotary_factor", f"{share} of {size} numbers cannot be rotated in pairs")
    require_values(config, partial_rotary_factor=1.0)
    scaling = section.text("rope_type", section.text("type", "default"))
    if scaling not in _KINDS:
        raise section.refuse("rope_type", f"{scaling!r} is not supported; Shoal knows {', '.join(_KINDS)}")
    plain = frequencies(base, width)
    if scaling == "linear":
        return make_rotary(plain / np.float32(section.number("factor")))
    if scaling == "llama3":
        return make_rotary(_llama3(section, plain))
    if scaling == "ntk":
        return _fixed_ntk(section, base, width)
    if scaling == "yarn":
        return _yarn(config, section, base, width)
    return make_rotary(plain)  # "dynamic" changes only inputs longer than max_position_embeddings, which are refused


def make_rotary(values: Floats) -> Rotary:
    """Return a rotation by these frequencies."""
    return Rotary(frequencies=tuple(values.tolist()))


def frequencies(base: float, width: int) -> Floats:
    """Return `base ** (-2 i / width)` for each pair i, computed in float32 as the models are."""
    steps = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    found: Floats = (np.float32(1.0) / np.float32(base) ** steps).astype(np.float32)
    return found


def _parameters(config: JsonFile, kind: str) -> JsonFile:
    if "rope_parameters" in config:
        section = config.section("rope_parameters")
        return section.section(kind) if kind and kind in section else section
    return config.section("rope_scaling")


def _llama3(section: JsonFile, plain: Floats) -> Floats:
    """Slow low frequencies down by `factor`, keep high ones, blend between (Llama 3.1)."""
    factor, original = section.number("factor"), section.number("original_max_position_embeddings")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    turns = np.float32(original) * plain / np.float32(2 * math.pi)
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    found: Floats = ((1 - blend) * plain / np.float32(factor) + blend * plain).astype(np.float32)
    return found


def _fixed_ntk(section: JsonFile, base: float, width: int) -> Rotary:
    """Stretch the base by `factor`, and all frequencies so that the lowest is slowed down by it (GTE)."""
    if "mixed_b" in section:
        raise section.refuse("mixed_b", "is not supported with ntk")
    factor = section.number("factor")
    return make_rotary(frequencies(base * factor, width) / np.float32(factor ** (2 / width)))


def _yarn(config: JsonFile, section: JsonFile, base: float, width: int) -> Rotary:
    """Interpolate slow frequencies, keep fast ones, and scale the rotated numbers (Peng et al. 2023)."""
    factor = section.number("factor")
    original = section.number("original_max_position_embeddings", config.number("max_position_embeddings"))
    for key in ("mscale", "mscale_all_dim"):
        if key in section:
            raise section.refuse(key, "is not supported with yarn")

    def pair_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(section.number("beta_fast", 32.0)), pair_of(section.number("beta_slow", 1.0))
    if section.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = np.clip((np.arange(width // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    plain = frequencies(base, width)
    values = (plain / np.float32(factor) * slow + plain * (1 - slow)).astype(np.float32)
    scale = section.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return Rotary(frequencies=tuple(values.tolist()), factor=scale)
