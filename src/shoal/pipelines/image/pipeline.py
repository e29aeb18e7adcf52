"""Convert images to the tensors of an image tower, and its rows to vectors or scores."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Row, Tensors, WorkWeight, round_up
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.image.budget import SHARED, Budget, ImageBudget
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.pipelines.scores import score_rows
from shoal.pipelines.vectors import Shape, resolve_shape, shape_rows
from shoal.specs import ImageSpec
from shoal.types import Array, BatchTask, Classify, Embed, Image, Item

COST = 1
"""Cost of one image in tokens for admission and batching. All images of a model cost its tower the same and share their
lane with no texts, so one image is the unit."""


class ImagePipeline:
    """Pipeline for one image tower, with the same pixels as transformers' PIL processors for the same files.

    Each image is its own item: its error is its entry, with `param` "input". Equal images are recognized by their
    bytes. Images have no tokens, so usage counts none. `prepare` decodes the image and frees its full-size pixels.

    `budget` counts decoded images. It also counts each prepared image twice, for itself and its place in a batch, until
    nothing references it. Threads may wait for the budget, so prepare few images per call. `normalize` False is the
    operator's setting to leave rows as the model returns them, whatever a request asks. Raises ModelFileError if the
    spec cannot be used.
    """

    def __init__(self, spec: ImageSpec, *, normalize: bool | None = None, budget: Budget = SHARED) -> None:
        self.spec = spec
        self._normalize = normalize
        self._preprocessing = Preprocessing(spec, budget=budget)
        self._output_bytes = 2 * 4 * 3 * spec.size[0] * spec.size[1]
        # Half of the budget: a model whose engine hangs leaves the other half to all others.
        self.max_held_items = max(1, budget.total // 2 // self._output_bytes)

    @property
    def work(self) -> WorkWeight:
        return "heavy"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue (dimensions) and Unsupported (other tasks and kinds of vectors, prompt_name).
        `input_type` and `truncate` are ignored, since some clients always send them."""
        self._read_options(task)

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
        """Prepare one item. `made` caches the results of earlier images by digest."""
        try:
            options = self._read_options(task)
        except ShoalError as error:
            return error
        if not isinstance(item, Image):
            return InvalidValue("this is a text, but the model accepts only images; send an image", param="input")
        digest = hashlib.blake2b(item.data, digest_size=32).digest()
        values = made.get(digest)
        if values is None:
            values = made[digest] = self._values(item.data)
        if isinstance(values, ShoalError):
            return values
        return Prepared(
            tensors={self.spec.input: values},
            cost=COST,
            group=(),
            outputs=(self.spec.output,),
            tokens=0,
            key=(digest, options),
            extra=options,
        )

    def _values(self, data: bytes) -> Array | ShoalError:
        keeping = ImageBudget(self._preprocessing.budget, self._output_bytes)
        try:
            values = self._preprocessing.values(self._preprocessing.pixels(data, keeping))
            weakref.finalize(values, self._preprocessing.budget.give, self._output_bytes).atexit = False
            keeping.is_held = False  # the array's finalizer gives it back
            return values
        except ShoalError as error:
            return error.with_traceback(None)  # its frames hold the file
        finally:
            if keeping.is_held:
                self._preprocessing.budget.give(self._output_bytes)

    def _read_options(self, task: BatchTask) -> Shape | bool:
        """Return the shape of the task's vectors, or whether its scores stay raw."""
        if isinstance(task, Classify) and self.spec.score is not None:
            return task.raw_scores
        if not isinstance(task, Embed) or self.spec.score is not None:
            can = "embeds" if self.spec.score is None else "classifies"
            raise Unsupported(f"the model only {can} images; request that instead", param="model")
        if task.outputs != ("dense",):
            raise Unsupported("images have only dense vectors; request those", param="model")
        if task.prompt_name is not None:
            raise Unsupported("prompts do not apply to images; omit prompt_name", param="prompt_name")
        return resolve_shape(task, self.spec.dimension, gives_raw=True, normalize=self._normalize)
