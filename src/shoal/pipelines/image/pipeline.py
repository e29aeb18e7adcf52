"""Pictures to the tensors of an image tower, and its rows to vectors or scores."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Row, Tensors, WorkWeight, round_up
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.image.budget import SHARED, Budget, PictureBudget
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.pipelines.scores import score_rows
from shoal.pipelines.vectors import Shape, check_shape, resolve_shape, shape_rows
from shoal.specs import ImageSpec
from shoal.types import Array, BatchTask, Classify, Embed, Image, Item

COST = 1
"""Tokens that a picture is taken for by admission and batching. All pictures of a model cost its tower the same, and
no texts share their lane: a picture is the unit."""


class ImagePipeline:
    """Pipeline for one image tower, with the pixels that transformers' PIL processors make of the same files.

    Every picture is an item by itself: what is wrong with it is its entry, and `param` is "input". Twins are known by
    their bytes. Usage counts no tokens for pictures, which have none. The picture is decoded, and its full size freed,
    within `prepare`. `budget` counts what is decoded, and each prepared picture twice, for itself and for its place in
    a batch, until nothing holds it any more; threads may wait there, so few pictures are to be prepared in one call.
    `normalize` False is the operator's word that rows stay as the model gives them, whatever a request asks.
    Raises ModelFileError when the spec cannot be used.
    """

    def __init__(self, spec: ImageSpec, *, normalize: bool | None = None, budget: Budget = SHARED) -> None:
        self.spec = spec
        self._normalize = normalize
        self._preprocessing = Preprocessing(spec, budget=budget)
        self._kept = 2 * 4 * 3 * spec.size[0] * spec.size[1]
        # Half of the budget: what a model holds whose engine hangs leaves the other half to all others.
        self.max_held_items = max(1, budget.total // 2 // self._kept)

    @property
    def work(self) -> WorkWeight:
        return "heavy"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue (dimensions) and Unsupported (other tasks and kinds of vectors, prompt_name).
        `input_type` and `truncate` change nothing: some clients always send them."""
        if isinstance(task, Classify) and self.spec.score is not None:
            return
        if not isinstance(task, Embed) or self.spec.score is not None:
            can = "embeds" if self.spec.score is None else "classifies"
            raise Unsupported(f"the model only {can} pictures; ask it for that", param="model")
        if task.outputs != ("dense",):
            raise Unsupported("pictures have dense vectors alone; ask for these", param="model")
        if task.prompt_name is not None:
            raise Unsupported("no prompt is put before a picture; leave prompt_name out", param="prompt_name")
        check_shape(task, self.spec.dimension, gives_raw=True)

    def estimate(self, item: Item) -> int:
        return COST

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        made: dict[bytes, Array | ShoalError] = {}
        return [self._prepare_item(task, item, made) for task, item in items]

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        name = self.spec.input
        first = batch[0].tensors[name]
        values = np.zeros((round_up(len(batch), facts.size_buckets), *first.shape), dtype=np.float32)
        for row, item in zip(values, batch, strict=False):
            row[:] = item.tensors[name]
        return {name: values}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | ShoalError]:
        rows = outputs[self.spec.output][: len(batch)]
        if self.spec.score is not None:
            return score_rows(rows, self.spec.score.activation, [item.extra for item in batch])
        shapes: list[Shape] = [item.extra for item in batch]
        return shape_rows(rows, shapes)

    def _prepare_item(
        self, task: BatchTask, item: Item, made: dict[bytes, Array | ShoalError]
    ) -> Prepared | ShoalError:
        """`made`: what became of pictures met before, by digest."""
        try:
            self.check(task)
        except ShoalError as error:
            return error
        if not isinstance(item, Image):
            return InvalidValue("this is a text, and the model takes pictures; send a picture", param="input")
        digest = hashlib.blake2b(item.data, digest_size=32).digest()
        values = made.get(digest)
        if values is None:
            values = made[digest] = self._values(item.data)
        if isinstance(values, ShoalError):
            return values
        asked = self._read_options(task)
        return Prepared(
            tensors={self.spec.input: values},
            cost=COST,
            group=(),
            outputs=(self.spec.output,),
            tokens=0,
            key=(digest, asked),
            extra=asked,
        )

    def _values(self, data: bytes) -> Array | ShoalError:
        keeping = PictureBudget(self._preprocessing.budget, self._kept)
        try:
            values = self._preprocessing.values(self._preprocessing.pixels(data, keeping))
            weakref.finalize(values, self._preprocessing.budget.give, self._kept).atexit = False
            keeping.held = False  # it is the array's now
            return values
        except ShoalError as error:
            return error.with_traceback(None)  # whose frames hold the file
        finally:
            if keeping.held:
                self._preprocessing.budget.give(self._kept)

    def _read_options(self, task: BatchTask) -> Shape | bool:
        if isinstance(task, Embed):
            return resolve_shape(task, self.spec.dimension, self._normalize)
        return task.raw_scores
