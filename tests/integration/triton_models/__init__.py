"""Models of Triton's python backend that behave as a test needs; the modules beside this one are their `model.py`.

near_free   text -> embedding [1024], at next to no cost; see `near_free_vector`
tokens_in   input_ids, attention_mask -> token_embeddings [length, 16]; see `token_vectors`
slow        text (milliseconds) -> embedding [8], unless it is cancelled; notes what it saw
failing     text -> embedding [8]; words in the text make it fail, see the module
big         text (millions of bytes) -> embedding, so large
decoupled   text (a number) -> so many responses on one stream
"""

from __future__ import annotations

import math
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.types import Array

_HERE = Path(__file__).parent
_TEXT = ("text", "TYPE_STRING", "[ 1 ]")


@dataclass(frozen=True, slots=True)
class TestModel:
    """One entry: tensors are (name, type, dims); `extra` is further protobuf text of its configuration."""

    __test__ = False  # its name is for people, not for pytest

    inputs: tuple[tuple[str, str, str], ...] = (_TEXT,)
    outputs: tuple[tuple[str, str, str], ...] = (("embedding", "TYPE_FP32", "[ 8 ]"),)
    max_batch_size: int = 32
    extra: str = ""

    def config(self, name: str, notes: Path) -> str:
        lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {self.max_batch_size}"]
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            lines += [f'{kind} [ {{ name: "{n}" data_type: {t} dims: {d} }} ]' for n, t, d in tensors]
        lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
        lines.append(f'parameters {{ key: "notes" value: {{ string_value: "{notes}" }} }}')
        return "\n".join([*lines, self.extra, ""])


MODELS = {
    "near_free": TestModel(outputs=(("embedding", "TYPE_FP32", "[ 1024 ]"),), max_batch_size=256),
    "tokens_in": TestModel(
        inputs=(("input_ids", "TYPE_INT64", "[ -1 ]"), ("attention_mask", "TYPE_INT64", "[ -1 ]")),
        outputs=(("token_embeddings", "TYPE_FP32", "[ -1, 16 ]"),),
        max_batch_size=64,
    ),
    "slow": TestModel(),
    "failing": TestModel(extra="dynamic_batching { }"),
    "big": TestModel(outputs=(("embedding", "TYPE_FP32", "[ -1 ]"),), max_batch_size=0),
    "decoupled": TestModel(
        outputs=(("text_output", "TYPE_STRING", "[ 1 ]"),),
        max_batch_size=0,
        extra="model_transaction_policy { decoupled: true }",
    ),
}


def write_models(repository: Path, notes: Path) -> None:
    """Write every model's entry. Models append a line to the file `notes` for what a test may ask about."""
    for name, model in MODELS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        shutil.copyfile(_HERE / f"{name}.py", folder / "model.py")
        (repository / name / "config.pbtxt").write_text(model.config(name, notes))


def near_free_vector(text: str) -> Array:
    """What `near_free` answers for a text: [1024] float32, ones after a first number that tells texts apart."""
    vector = np.ones(1024, np.float32)
    vector[0] = zlib.crc32(text.encode()) % 1000
    return vector


def token_vectors(ids: list[int]) -> Array:
    """What `tokens_in` answers for tokens that are not masked: [length, 16] float32."""
    return np.array([[math.sin(number * (place + 1) / 7) for place in range(16)] for number in ids], np.float32)
