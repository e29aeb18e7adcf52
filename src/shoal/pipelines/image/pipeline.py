"""Pictures to the tensors of an image tower, and its rows to vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Row, Tensors, round_up
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.image.budget import SHARED, Budget
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.pipelines.vectors import Shape, check_shape, shape_of, shape_rows
from shoal.specs import ImageSpec
from shoal.types import Array, Batched, Embed, Image, Item

COST = 197
"""Tokens that a picture is taken for by admission and batching: those of 224 x 224 pixels in patches of 16 x 16, and
one for the class. A constant: all pictures of a model cost its tower the same."""


class ImagePipeline:
    """Pipeline for one image tower, with the pixels that transformers' PIL processors make of the same files.

    Every picture is an item by itself: what is wrong with it is its entry, and `param` is "input". Twins are known by
    their bytes. Usage counts no tokens for pictures, which have none. The picture is decoded, and its full size freed,
    within `prepare`; at most `budget` bytes are decoded at a time, so that threads may wait there.
    `normalize` False is the operator's word that rows stay as the model gives them, whatever a request asks.
    Raises ModelFileError when the spec cannot be used.
    """

    def __init__(self, spec: ImageSpec, *, normalize: bool | None = None, budget: Budget = SHARED) -> None:
        self.spec = spec
        self._normalize = normalize
        self._preprocessing = Preprocessing(spec, budget=budget)

    @property
    def light(self) -> bool:
        return False

    def check(self, task: Batched) -> None:
        """Raises InvalidValue (dimensions) and Unsupported (other tasks and kinds of vectors, prompt_name, input_type,
        truncate)."""
        if not isinstance(task, Embed):
            raise Unsupported("the model only embeds pictures; ask for embeddings", param="model")
        if task.outputs != ("dense",):
            raise Unsupported("pictures have dense vectors alone; ask for these", param="model")
        for name, value in (("prompt_name", task.prompt_name), ("input_type", task.input_type)):
            if value is not None:
                raise Unsupported(f"no prompt is put before a picture; leave {name} out", param=name)
        if task.truncate is not None:
            raise Unsupported("pictures are never cut short; leave truncate out", param="truncate")
        check_shape(task, self.spec.dimension, gives_raw=True)

    def estimate(self, item: Item) -> int:
        return COST

    def prepare(self, items: Sequence[tuple[Batched, Item]]) -> list[Prepared | ShoalError]:
        made: dict[bytes, Array | ShoalError] = {}
        return [self._prepared(task, item, made) for task, item in items]

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        name = self.spec.input
        first = batch[0].tensors[name]
        values = np.zeros((round_up(len(batch), facts.size_buckets), *first.shape), dtype=np.float32)
        for row, item in zip(values, batch, strict=False):
            row[:] = item.tensors[name]
        return {name: values}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | ShoalError]:
        shapes: list[Shape] = [item.extra for item in batch]
        return shape_rows(outputs[self.spec.output][: len(batch)], shapes)

    def _prepared(self, task: Batched, item: Item, made: dict[bytes, Array | ShoalError]) -> Prepared | ShoalError:
        """`made`: what became of pictures met before, by digest."""
        try:
            self.check(task)
        except ShoalError as error:
            return error
        if not isinstance(item, Image):
            return InvalidValue("this is a text, and the model takes pictures; send a picture", param="input")
        assert isinstance(task, Embed)
        digest = hashlib.blake2b(item.data, digest_size=32).digest()
        values = made.get(digest)
        if values is None:
            values = made[digest] = self._values(item.data)
        if isinstance(values, ShoalError):
            return values
        shape = shape_of(task, self.spec.dimension, self._normalize)
        return Prepared(
            tensors={self.spec.input: values},
            cost=COST,
            group=(),
            outputs=(self.spec.output,),
            tokens=0,
            key=(digest, shape),
            extra=shape,
        )

    def _values(self, data: bytes) -> Array | ShoalError:
        try:
            return self._preprocessing.values(self._preprocessing.pixels(data))
        except ShoalError as error:
            return error.with_traceback(None)  # whose frames hold the file
