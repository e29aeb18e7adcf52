"""Export image models that Shoal has no graph for with PyTorch and their libraries: open_clip models with other towers
than a plain ViT (EVA, ConvNeXt, MobileCLIP, CoCa), and timm's classifiers and feature extractors.

It runs in a separate process like `export`, with the same limits and for the same reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from shoal.errors import MissingExtra, ModelFileError
from shoal.models.convert.contract.json_file import is_there, read_object
from shoal.models.convert.export import TIMEOUT_S, Line, Program, run_program
from shoal.models.manifest import Verdict
from shoal.models.progress import Stop
from shoal.models.sources.select import OPEN_CLIP
from shoal.specs import ContrastSpec, ImageSpec, TextSpec

EXTRA = "convert-images"
PACKAGES = ("torch", "torchvision", "open_clip", "timm", "transformers", "onnxscript", "onnx", "safetensors")
PROGRAM = (sys.executable, "-P", "-m", "shoal.models.convert.export_dual_encoder_process")
TIMM_CONFIG = "config.json"

Library: TypeAlias = Literal["open_clip", "timm"]


class ExportedTowers(msgspec.Struct, frozen=True, kw_only=True):
    """Files written into a folder. All models have `image_graph` with `image`. open_clip models also have `graph` of
    the text tower with `text`, tokenizer.json, and `contrast`; `graph` is "" for a timm model. `files` are all of them,
    with the weights beside a large graph. The verdicts compare the graphs with PyTorch's modules."""

    library: Library
    image_graph: str
    image: ImageSpec
    image_verification: Verdict | None = None
    graph: str = ""
    text: TextSpec | None = None
    text_verification: Verdict | None = None
    contrast: ContrastSpec | None = None
    parameters: int = 0
    files: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Describe how the model was made."""
        return f"exported by PyTorch from {self.library}"


def can_export_towers() -> bool:
    """Whether the extra `convert-images` is installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


def library_of(folder: Path) -> Library | None:
    """Return the library whose model is in the folder, by the configuration that each library writes; None for neither.
    Raises ModelFileError for a configuration that is not JSON."""
    if is_there(folder, OPEN_CLIP):
        return "open_clip"
    config = read_object(folder, TIMM_CONFIG)
    return "timm" if config is not None and "architecture" in config and "model_type" not in config else None


def export_towers(
    folder: Path,
    into: Path,
    *,
    progress: Callable[[str, float], None] | None = None,
    stop: Stop | None = None,
    max_memory_mb: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> ExportedTowers:
    """Write the graphs of the model in `folder`, and its tokenizer, into the folder `into`.

    For open_clip it reads open_clip_config.json and open_clip_model.safetensors; for timm, config.json and
    model.safetensors. The graphs are model.onnx (input_ids int64 [b, l] to text_embeds [b, d]; l is free if texts are
    read causally, else `pad_to` of the spec) and image.onnx (pixel_values to image_embeds, or to logits). `progress`
    receives (stage, fraction), on this thread: read, load, export, verify. Blocks, for minutes with a large model.

    Raises MissingExtra, ModelFileError (it cannot be exported or preprocessed as the model requires, or not within
    memory and time), VerificationFailed (a graph or the tokenizer gives something else), Cancelled once the process is
    dead.
    """
    if not can_export_towers():
        raise MissingExtra("Exporting a model of open_clip or timm", EXTRA)
    library = library_of(folder)
    if library is None:
        raise ModelFileError(
            f"is missing, and {TIMM_CONFIG} is not from timm: this is a model of neither library; fetch it again",
            file=OPEN_CLIP,
        )
    program = Program(
        command=[*PROGRAM, str(folder), str(into), library],
        line=Line[ExportedTowers],
        file=OPEN_CLIP if library == "open_clip" else TIMM_CONFIG,
        alternative="pull it on a larger machine and copy its store",
    )
    return run_program(program, progress=progress, stop=stop, max_memory_mb=max_memory_mb, timeout_s=timeout_s)
