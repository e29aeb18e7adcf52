"""How a model of late interaction reads queries and documents: marked, to lengths of their own, queries filled up.

As `encode_query` and `encode_document` of MultiVectorEncoder in sentence-transformers 6 do with its own checkpoints,
with those of PyLate and of Stanford's ColBERT. A text of neither role is read as a document.
"""

from __future__ import annotations

from shoal.specs import MultiSpec


class Sides:
    """The two ways of reading; they differ for no model without a `MultiSpec` (None).

    What it says goes for every vector of such a model: there is one input to the graph, and it has no other vectors
    than what it was trained to make of texts that are read so.
    """

    def __init__(self, spec: MultiSpec | None, max_tokens: int) -> None:
        self.fills_unattended = spec is not None and spec.fill_id is not None and not spec.attended
        self.differ = False
        self._limits = (max_tokens, max_tokens)
        self._markers: tuple[int | None, int | None] = (None, None)
        self._fill: tuple[int, int] | None = None
        if spec is None:
            return
        self._markers = (spec.document_marker, spec.query_marker)
        self._limits = (
            min(max_tokens, spec.document_length or max_tokens),
            min(max_tokens, spec.query_length or max_tokens),
        )
        if spec.fill_id is not None and spec.query_length is not None:
            self._fill = (spec.fill_id, self._limits[True])
        self.differ = self._markers != (None, None) or self._limits != (max_tokens, max_tokens)

    def limit(self, query: bool) -> int:
        """Tokens of a text at most, all of them."""
        return self._limits[query]

    def marker_tokens(self, query: bool) -> int:
        """How many of those are its marker."""
        return self._markers[query] is not None

    def insert_marker(self, ids: list[int], query: bool, *, after: int) -> list[int]:
        """With the marker after the first special token; `after` tokens stand before the text."""
        marker = self._markers[query]
        if marker is None:
            return ids
        at = min(after, 1)
        return [*ids[:at], marker, *ids[at:]]

    def pad_query(self, ids: list[int], query: bool) -> list[int]:
        """A query up to its length."""
        if self._fill is None or not query:
            return ids
        fill, length = self._fill
        return [*ids, *(fill,) * (length - len(ids))]
