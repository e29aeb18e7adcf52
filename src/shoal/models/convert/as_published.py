"""Prepare a model that runs from its own folder, as its author published it; only the tokenizer is converted.

For engines that know the architecture themselves (PyTorch with transformers) where Shoal has no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.errors import VerificationFailed
from shoal.models.convert.contract import Contract, read_contract
from shoal.models.convert.contract.classifier import tells_segments
from shoal.models.convert.contract.json_file import read_object
from shoal.models.convert.contract.spec import text_spec
from shoal.models.convert.contract.weights import read_header
from shoal.models.convert.graphs.head import POOLED, TOKENS
from shoal.models.convert.graphs.text import can_build
from shoal.models.convert.verify import Run, verify
from shoal.models.manifest import Verdict
from shoal.models.tokenizer_file import TOKENIZER, write_tokenizer
from shoal.specs import TextSpec

SOURCE = "folder"
"""The manifest's `graph_source` of such a model."""


class PublishedModel(NamedTuple):
    spec: TextSpec
    parameters: int


def prepare_published(folder: Path, target: Path) -> PublishedModel:
    """Write the tokenizer of the model in `folder` into `target`, and return the spec of its outputs.

    Raises ModelFileError for files that do not describe them.
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
    files = (folder / contract.encoder_path).glob("model*.safetensors")
    headers = [read_header(file, contract.file(file.name)) for file in files]
    return PublishedModel(spec, sum(entry.count for header in headers for entry in header.entries.values()))


def verify_published(
    folder: Path, target: Path, spec: TextSpec, *, engine: str, run: Callable[[], Run]
) -> Verdict | None:
    """Compare the named engine, opened by `run`, on `folder` with the numpy forward pass; None for an architecture that
    the latter does not support. `target` holds the tokenizer of `spec`.

    Raises ModelFileError for files that cannot be read, VerificationFailed if the two disagree.
    """
    contract = read_contract(folder, foreign=True)
    if not can_build(folder, contract):
        return None
    found = verify(folder, contract, target, spec, run())
    text = f"{engine} {found.text.removeprefix('the graph ')}"
    if not found.passed:
        raise VerificationFailed(
            f"{text}; serve the model with another engine, and please report this bug with the model's name"
        )
    return Verdict(text, found.min_cosine)


def _inputs(folder: Path, contract: Contract) -> list[str]:
    inputs = ["input_ids", "attention_mask"]
    if contract.classifier is not None:
        config = read_object(folder, contract.file("config.json"))
        types = config.integer("type_vocab_size", 0) if config is not None else 0
        prefix = f"{contract.encoder_path}/" if contract.encoder_path else ""
        return inputs + (["token_type_ids"] if types > 1 and tells_segments(folder, prefix) else [])
    return inputs + ([] if contract.pooling.include_prompt else ["pooling_mask"])
