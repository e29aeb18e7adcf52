"""A model that runs from its own folder, as its author published it: nothing is converted but the tokenizer.

This is for engines that know the architecture themselves (PyTorch with transformers), where Shoal has no graph.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.errors import ModelFileError
from shoal.models.contract import read_contract
from shoal.models.contract.json_file import read_json
from shoal.models.contract.spec import text_spec
from shoal.models.graphs.head import POOLED, TOKENS
from shoal.models.tokenizer_file import TOKENIZER, write_tokenizer
from shoal.types import TextSpec

SOURCE = "folder"
"""What a manifest calls the graph of such a model."""

_CLASSIFIES = "ForSequenceClassification"
_MAX_HEADER = 100_000_000
_METADATA = "__metadata__"


class Folder(NamedTuple):
    spec: TextSpec
    parameters: int


def take_folder(folder: Path, target: Path) -> Folder:
    """Write the tokenizer of the embedder in `folder` into `target`, and say what its outputs will mean.

    Raises ModelFileError for files that say nothing of it, and for a model with a head of its own, whose meaning is
    only known for architectures that Shoal builds.
    """
    contract = read_contract(folder, elsewhere=True)
    name = contract.file("config.json")
    config = read_json(folder, name)
    named = config.get("architectures") if isinstance(config, dict) else None
    if any(str(each).endswith(_CLASSIFIES) for each in named or []):
        raise ModelFileError(
            "a classifier of an architecture that Shoal does not build needs an onnx/model.onnx; install the 'convert' "
            "extra, or use a repository that ships one",
            file=name,
            key="architectures",
        )
    if not contract.dimension or not contract.max_tokens:
        raise ModelFileError("does not say how wide its vectors are, or how long a text may be", file=name)
    write_tokenizer(folder, contract, target / TOKENIZER)
    inputs = ["input_ids", "attention_mask"] + ([] if contract.pooling.include_prompt else ["pooling_mask"])
    spec = text_spec(contract, tokenizer=TOKENIZER, inputs=inputs, pooled=POOLED, tokens=TOKENS)
    return Folder(spec, sum(map(_parameters, (folder / contract.encoder_path).glob("model*.safetensors"))))


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header. Raises ModelFileError when it has none."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = msgspec.json.decode(opened.read(min(length, _MAX_HEADER)), type=dict[str, msgspec.Raw])
        entries = [msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items() if name != _METADATA]
    except (struct.error, msgspec.MsgspecError) as error:
        raise ModelFileError(f"is not a safetensors file ({error}); fetch the model again", file=file.name) from None
    return sum(math.prod(entry.shape) for entry in entries)


class _Tensor(msgspec.Struct):
    shape: list[int]
