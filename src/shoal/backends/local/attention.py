"""How much of a model's work is attention, which grows with the square of a text's length."""

from __future__ import annotations

from pathlib import Path

from shoal.models.convert.contract.json_file import read_object
from shoal.specs import TextSpec

EVEN_LENGTH = 5
"""Length, in widths of the model, at which attention takes as long as the other layers of a transformer. These multiply
each token by 12 width^2 weights and attention does it by 2 length * width, which gives 6. Measured on two cores, up to
8,192 tokens: 4 with heads of 32 (OpenVINO f32 and bf16), 3 with ONNX Runtime, and 6 to 7 with heads of 64, OpenVINO. A
length of 8,192 at a width of 384 costs 5.3 times as much per token as a short text; 5.0 to 6.2 were measured."""

WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")
"""Names of the width in config.json, by family of models."""


def read_attention(folder: Path, spec: TextSpec) -> float:
    """Return `CostModel.attention` of a published model; 0 without attention, or where its width is not known."""
    config = read_object(folder / (spec.parts.encoder if spec.parts else ""), "config.json")
    if config is None or not spec.frame_tokens:
        return 0.0
    width = next((config.data[name] for name in WIDTHS if isinstance(config.data.get(name), int)), 0)
    return 1.0 / (EVEN_LENGTH * width) if width > 0 else 0.0
