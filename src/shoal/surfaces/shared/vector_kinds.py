"""Which kind of vectors a route of embeddings answers, and what late interaction rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import Unsupported
from shoal.types import Embed, VectorKind

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard


def main_kind(card: ModelCard) -> VectorKind:
    """Dense vectors where the model has them, else those of late interaction. Raises Unsupported for sparse ones."""
    vectors = card.facts.vectors if card.facts is not None and "embed" in card.facts.tasks else ("dense",)
    if "dense" in vectors:
        return "dense"
    if "multi" in vectors:
        return "multi"
    raise Unsupported(
        f"the model {card.name!r} gives {' and '.join(vectors)} vectors, which this route does not answer: use "
        + ("POST /embed_sparse" if "sparse" in vectors else "POST /embed_all"),
        param="model",
    )


def check_late_interaction(task: Embed, normalize: str = "normalize") -> None:
    """Vectors of late interaction are as the model makes them. Raises Unsupported where others are asked for.

    `normalize`: what the dialect calls that field.
    """
    for name, asked in (("dimensions", task.dimensions is not None), (normalize, not task.normalize)):
        if asked:
            raise Unsupported(
                f"'{name}' changes nothing about vectors of late interaction, which the model {task.model!r} gives: "
                "leave it out.",
                param=name,
            )
