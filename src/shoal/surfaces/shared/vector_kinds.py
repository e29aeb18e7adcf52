"""Pick the kind of vectors that an embeddings route returns, and check the limits of late interaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import Unsupported
from shoal.types import Embed, VectorKind

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard


def main_kind(card: ModelCard) -> VectorKind:
    """Return "dense" if the model has dense vectors, else "multi" (late interaction).

    Raises Unsupported if it has neither.
    """
    vectors = card.facts.vectors if card.facts is not None and "embed" in card.facts.tasks else ("dense",)
    if "dense" in vectors:
        return "dense"
    if "multi" in vectors:
        return "multi"
    raise Unsupported(
        f"the model {card.name!r} has {' and '.join(vectors)} vectors, which this route does not return: use "
        + ("POST /embed_sparse" if "sparse" in vectors else "POST /embed_all"),
        param="model",
    )


def check_late_interaction(task: Embed, normalize: str = "normalize") -> None:
    """Check that the task does not change late-interaction vectors, which always come as the model makes them.

    `normalize` is the dialect's name for that field. Raises Unsupported for other dimensions or no normalization.
    """
    for name, is_changed in (("dimensions", task.dimensions is not None), (normalize, not task.normalize)):
        if is_changed:
            raise Unsupported(
                f"'{name}' has no effect on the late-interaction vectors of the model {task.model!r}: omit it.",
                param=name,
            )
