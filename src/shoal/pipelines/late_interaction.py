"""How a late-interaction model reads queries and documents: markers, separate length limits, and query padding.

Matches `encode_query` and `encode_document` of MultiVectorEncoder in sentence-transformers 6 for its own checkpoints
and for those of PyLate and Stanford's ColBERT. A text without a role is read as a document.
"""

from __future__ import annotations

from shoal.specs import MultiSpec


class Sides:
    """The token limits and markers for queries and documents; without a `MultiSpec` (None) the two are the same.

    They apply to every kind of vector of such a model: its graph has one input, and it was trained only on texts read
    this way.
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
        """Maximum tokens of a text, marker and special tokens included."""
        return self._limits[query]

    def marker_tokens(self, query: bool) -> int:
        """Number of those tokens that are the marker (0 or 1)."""
        return self._markers[query] is not None

    def insert_marker(self, ids: list[int], query: bool, *, after: int) -> list[int]:
        """Insert the marker after the first special token; `after` is the number of tokens before the text."""
        marker = self._markers[query]
        if marker is None:
            return ids
        at = min(after, 1)
        return [*ids[:at], marker, *ids[at:]]

    def pad_query(self, ids: list[int], query: bool) -> list[int]:
        """Pad a query to the query length; leave documents unchanged."""
        if self._fill is None or not query:
            return ids
        fill, length = self._fill
        return [*ids, *(fill,) * (length - len(ids))]
