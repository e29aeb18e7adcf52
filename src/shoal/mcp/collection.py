"""Passages and their vectors in memory, searched by comparing the query with each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.errors import TooManyInputs
from shoal.mcp.passages import Passage
from shoal.python.api import Shoal
from shoal.types import Vectors

MAX_PASSAGES = 20_000
"""At 1,024 numbers each 80 MB, compared in a few milliseconds."""


class Collection:
    """Passages by the first model that embeds, or the one that is named."""

    def __init__(self, models: Shoal, model: str = "") -> None:
        self._models = models
        self._model = model
        self._passages: list[Passage] = []
        self._vectors: Vectors | None = None

    def __len__(self) -> int:
        return len(self._passages)

    async def add(self, passages: Sequence[Passage]) -> None:
        """Embed and add passages, in place of those of the same sources. Raises TooManyInputs beyond MAX_PASSAGES."""
        if not passages:
            return
        self._check_room(passages)
        texts = [passage.text for passage in passages]
        vectors = await self._models.aembed(texts, model=self._model, input_type="document")
        self._check_room(passages)  # others may have been added meanwhile
        kept = self._others(passages)
        if self._vectors is not None:
            vectors = np.concatenate([self._vectors[kept], vectors])
        self._passages = [*(self._passages[at] for at in kept), *passages]
        self._vectors = vectors

    async def search(self, query: str, limit: int) -> list[tuple[float, Passage]]:
        """Return the closest passages with their cosines, best first."""
        vector = (await self._models.aembed([query], model=self._model, input_type="query"))[0]
        if self._vectors is None:
            return []
        scores = self._vectors @ vector
        best = np.argsort(-scores, kind="stable")[:limit]
        return [(float(scores[at]), self._passages[at]) for at in best]

    def _others(self, passages: Sequence[Passage]) -> list[int]:
        sources = {passage.source for passage in passages}
        return [at for at, passage in enumerate(self._passages) if passage.source not in sources]

    def _check_room(self, passages: Sequence[Passage]) -> None:
        if len(self._others(passages)) + len(passages) > MAX_PASSAGES:
            raise TooManyInputs(
                f"the collection holds at most {MAX_PASSAGES} passages, and has {len(self)}: name fewer folders, or "
                "add less"
            )
