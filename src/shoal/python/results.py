"""What the methods of the Python API take as options and return, beside arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`, with the defaults and meanings of `shoal.types.Embed`; `model` "" is the default one."""

    model: str
    input_type: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool
    truncate: bool | None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and how well it answers; `index` is its place in the list that was given."""

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Label:
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Match:
    """A text and how well it describes an image; `index` is its place in the list that was given. `score` is the
    model's own: of CLIP a probability among all texts of the call, of SigLIP one by itself."""

    index: int
    text: str
    cosine: float
    score: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model; `tasks`: "embed", "rerank", "classify", "generate"."""

    name: str
    tasks: tuple[str, ...]
    modalities: tuple[str, ...]
