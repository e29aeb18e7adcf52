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
from shoal.models.contract import Contract, read_contract
from shoal.models.contract.classifier import tells_segments
from shoal.models.contract.json_file import read_object
from shoal.models.contract.spec import text_spec
from shoal.models.graphs.head import POOLED, TOKENS
from shoal.models.tokenizer_file import TOKENIZER, write_tokenizer
from shoal.types import TextSpec

SOURCE = "folder"
"""What a manifest calls the graph of such a model."""

_MAX_HEADER = 100_000_000
_METADATA = "__metadata__"


class Folder(NamedTuple):
    spec: TextSpec
    parameters: int


def take_folder(folder: Path, target: Path) -> Folder:
    """Write the tokenizer of the model in `folder` into `target`, and say what its outputs will mean.

    Raises ModelFileError for files that do not say it.
    """
    contract = read_contract(folder, foreign=True)
    write_tokenizer(folder, contract, target / TOKENIZER)
    spec = text_spec(
        contract,
        tokenizer=TOKENIZER,
        inputs=_inputs(folder, contract),
        pooled=POOLED,
        tokens=TOKENS if contract.dimension else "",
    )
    return Folder(spec, sum(map(_parameters, (folder / contract.encoder_path).glob("model*.safetensors"))))


def _inputs(folder: Path, contract: Contract) -> list[str]:
    inputs = ["input_ids", "attention_mask"]
    if contract.classifier is not None:
        config = read_object(folder, contract.file("config.json"))
        types = config.integer("type_vocab_size", 0) if config is not None else 0
        prefix = f"{contract.encoder_path}/" if contract.encoder_path else ""
        return inputs + (["token_type_ids"] if types > 1 and tells_segments(folder, prefix) else [])
    return inputs + ([] if contract.pooling.include_prompt else ["pooling_mask"])


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
