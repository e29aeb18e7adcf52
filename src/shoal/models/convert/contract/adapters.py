"""Read an encoder's weights with the adapter of a task added, or none, from tensors stored with those of all tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from shoal.models.convert.contract.architecture import Adapters, Encoder
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.weights import Floats, Part, Weights, open_weights

TASK = "default_task"
ARGUMENTS = ("model_args", "model_kwargs")
_ORIGINAL, _FIRST, _SECOND = (f".parametrizations.weight.{name}" for name in ("original", "0.lora_A", "0.lora_B"))
"""How torch stores a matrix with an adapter."""


def choose_task(encoder: Encoder, sentence: JsonFile) -> Encoder:
    """Return the encoder with the task that sentence_bert_config.json names for it, if any. Raises ModelFileError for
    an unknown one."""
    for arguments in map(sentence.section, ARGUMENTS):
        if TASK not in arguments:
            continue
        task, adapters = arguments.text(TASK), encoder.adapters
        if adapters is None or task not in adapters.tasks:
            known = ", ".join(adapters.tasks) if adapters else "no tasks"
            raise arguments.refuse(TASK, f"unknown task {task!r}; the model has {known}")
        return set_task(encoder, task)
    return encoder


def set_task(encoder: Encoder, task: str | None) -> Encoder:
    """Return the encoder with the adapter of this task (None: without any)."""
    if encoder.adapters is None:
        return encoder
    return msgspec.structs.replace(encoder, adapters=msgspec.structs.replace(encoder.adapters, task=task))


def name_tasks(encoder: Encoder | None, prompts: Mapping[str, str]) -> dict[str, str]:
    """Return the prompts, with an empty one for each task of the encoder that has none: a task is requested by the
    name of its prompt."""
    tasks = encoder.adapters.tasks if encoder is not None and encoder.adapters is not None else ()
    return {**prompts, **{task: "" for task in tasks if task not in prompts}}


def open_encoder(folder: Path, path: str, encoder: Encoder | None) -> Weights:
    """Open an encoder's weights in `folder / path`. Raises as `open_weights` does."""
    weights = open_weights(folder, path)
    if encoder is None or encoder.adapters is None:
        return weights
    usual = {name.replace(_ORIGINAL, ".weight"): Part(name, None) for name in weights.tensors}
    return _Adapted(weights.rename_tensors(usual), encoder.adapters)


def has_factors(weights: Weights, name: str) -> bool:
    """Whether the matrix of that name has adapters."""
    return f"{name.removesuffix('.weight')}{_FIRST}" in weights


def read_factors(weights: Weights, adapters: Adapters, name: str, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return two matrices for each task, whose product is the change of the matrix `name` of this shape: [tasks, rows,
    rank] and [tasks, rank, columns]. The adapter of a map has them as B and A, that of an embedding table as A and B.

    Raises ModelFileError if one is missing or of another shape.
    """
    count, stem = len(adapters.tasks), name.removesuffix(".weight")
    shapes = (count, shape[0], adapters.rank), (count, adapters.rank, shape[1])
    names = (_FIRST, _SECOND) if "embeddings." in name else (_SECOND, _FIRST)
    tall, wide = (weights.get(stem + each, size) for each, size in zip(names, shapes, strict=True))
    return tall * np.float32(adapters.scale), wide


class _Adapted(Weights):
    """Adds the task's change to every matrix that has one, when it is read."""

    def __init__(self, weights: Weights, adapters: Adapters) -> None:
        super().__init__(weights.where, weights.tensors)
        self._adapters = adapters

    def get(self, name: str, shape: tuple[int, ...]) -> Floats:
        found = super().get(name, shape)
        factors = self._factors(name, shape)
        return found if factors is None else found + factors[0] @ factors[1]

    def rows(
        self, name: str, shape: tuple[int, ...], indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> Floats:
        found = super().rows(name, shape, indices)
        factors = self._factors(name, shape)
        return found if factors is None else found + factors[0][indices] @ factors[1]

    def _factors(self, name: str, shape: tuple[int, ...]) -> tuple[Floats, Floats] | None:
        """Return two matrices whose product is the task's change, [rows, rank] and [rank, columns]; None if there is
        none."""
        adapters = self._adapters
        if adapters.task is None or not has_factors(self, name):
            return None
        tall, wide = read_factors(self, adapters, name, shape)
        place = adapters.tasks.index(adapters.task)
        return tall[place], wide[place]
