"""Embeddings of Ray datasets: every worker has the model, and blocks of rows go through it as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import InvalidValue

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH_ROWS = 1024
"""Rows that a worker takes at once: enough to put texts of similar length together."""


class Embedder:
    """A worker: embeds a column of a batch of rows."""

    def __init__(self, model: str, column: str, output: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
        import shoal

        self._shoal = shoal.open(model, **settings)
        self._column, self._output, self._options = column, output, options

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the rows with one more column: float32 [rows, dimension]. Raises the errors of Shoal.embed."""
        texts = [str(each) for each in rows[self._column]]
        return {**rows, self._output: np.asarray(self._shoal.embed(texts, **self._options))}


def embed(  # noqa: PLR0913 - options of Ray Data, named
    dataset: Dataset,
    *,
    model: str,
    column: str = "text",
    output: str = "embedding",
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    batch_rows: int = BATCH_ROWS,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Return the dataset with a column of vectors: float32 [dimension] in each row.

    `model`: an address, as `shoal.open` takes it. `concurrency`: workers, or the fewest and the most; each has
    `num_cpus` cores (None: one) and `num_gpus` GPUs. `settings`: of `shoal.open`; `options`: of `Shoal.embed`. Nothing
    runs before the dataset is read. Raises InvalidValue for a column that the dataset has already.
    """
    if column == output:
        raise InvalidValue(f"the column {column!r} cannot hold texts and vectors: set output", param="output")
    from ray.data import ActorPoolStrategy

    fewest, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    cores = 1.0 if num_cpus is None else num_cpus
    own = {"threads": max(1, int(cores)), **(settings or {})}
    return dataset.map_batches(
        Embedder,
        fn_constructor_args=(model, column, output, options, own),
        batch_size=batch_rows,
        compute=ActorPoolStrategy(min_size=fewest, max_size=most),
        num_cpus=cores,
        num_gpus=num_gpus,
    )
