"""Whether a replica gives the vectors of its peers: asked before it may join, so that no index is filled from two
different models under one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.protocols import Counted, Engine, Pipeline
from shoal.errors import ConfigError, EngineFailed, ShoalError
from shoal.types import Array, Embed, Vectors

TEXTS = ("A shoal of herring turns as one.", "42", "Où est la bibliothèque ?", "for i in range(10): print(i)")
"""Short, and unlike each other: models that differ at all differ on one of them."""

LEAST_COSINE = 0.999
"""Between replicas: below it are other weights, pooling or prompts; bf16 beside f32 stays well above."""

UNIT_TOLERANCE = 5e-3
"""Of a norm: half precision of a thousand dimensions stays within it."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the model answered for TEXTS: float32 [len(TEXTS), dimension], as it gives them."""

    vectors: Vectors

    @property
    def dimension(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def unit(self) -> bool:
        """All rows are unit vectors: the model normalises by itself."""
        norms = np.linalg.norm(self.vectors, axis=1)
        return bool(np.all(np.abs(norms - 1.0) < UNIT_TOLERANCE))

    def check(self, peer: Probed, name: str) -> None:
        """Raise ConfigError when `peer`, called `name`, does not give the same vectors."""
        if peer.dimension != self.dimension:
            raise ConfigError(
                f"{name} gives {peer.dimension} dimensions and its peers {self.dimension}: it is another model;"
                " serve it under a name of its own"
            )
        cosine = least_cosine(self.vectors, peer.vectors)
        if not cosine >= LEAST_COSINE:
            raise ConfigError(
                f"{name} does not give the vectors of its peers (cosine {cosine:.4f}, at least {LEAST_COSINE} is"
                " asked): it holds other weights or pools otherwise; serve it under a name of its own"
            )


def least_cosine(one: Vectors, other: Vectors) -> float:
    """The smallest cosine between rows of two [n, dimension] arrays; NaN when a row has no direction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        products = np.einsum("ij,ij->i", one, other)
        cosines = products / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    return float(cosines.min())


async def probe(engine: Engine, pipeline: Pipeline, deadline: float) -> Probed:
    """Run TEXTS through a pipeline and one replica, not normalised. Raises what either of them raises."""
    task = Embed(model="", inputs=list(TEXTS), truncate=True, normalize=False)
    prepared = [_whole(each) for each in pipeline.prepare([(task, text) for text in TEXTS])]
    most = max(1, engine.facts.max_batch_size)
    rows: list[Array] = []
    for at in range(0, len(prepared), most):
        batch = prepared[at : at + most]
        inputs = pipeline.collate(batch, engine.facts)
        outputs = await engine.infer(inputs, batch[0].outputs, batch[0].params, deadline)
        finished = [_whole(each) for each in pipeline.finish(outputs, batch)]
        rows += [each.row if isinstance(each, Counted) else each for each in finished]
    if len(rows) != len(TEXTS):
        raise EngineFailed(f"the model answered {len(rows)} rows for {len(TEXTS)} inputs")
    return Probed(np.stack(rows).astype(np.float32))


def _whole(answer: Any) -> Any:
    if isinstance(answer, ShoalError):
        raise answer
    return answer


__all__ = ["LEAST_COSINE", "TEXTS", "Probed", "least_cosine", "probe"]
