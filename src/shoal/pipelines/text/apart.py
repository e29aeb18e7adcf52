"""Make the tokens of a query and a document with a template whose parts are tokenized apart, and cut them.

So do the authors of bge-reranker-v2-gemma and mxbai-rerank-v2: first the query is cut to its own limit, then the
document to the room that is left. A query that leaves none is an error here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import InvalidValue, ModelFileError, ShoalError
from shoal.pipelines.text.pairing import FramedText, PairInput
from shoal.pipelines.text.templating import no_room_error, single_text_error, split_template
from shoal.pipelines.text.tokenizer import FittedText, TextTokenizer
from shoal.specs import PairTemplate


class ApartTokenizer:
    """Tokenizes pairs for a model of at most `max_tokens`, each part of the template by itself, with `prompt` in it.

    `overhead`: tokens of the template. Safe to use from several threads at once. Raises ModelFileError for a template
    that cannot be used or leaves no room, InvalidValue for a prompt with its mark.
    """

    def __init__(self, tokenizer: TextTokenizer, template: PairTemplate, max_tokens: int, prompt: str) -> None:
        if template.apart in prompt:
            raise InvalidValue("the instruction contains a control character (U+001E)", param="instruction")
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        pieces = split_template(template, prompt)
        *before, self._query_start = pieces.opening.split(template.apart)
        self._query_end, *between, self._document_start = pieces.middle.split(template.apart)
        self._document_end, *after = pieces.closing.split(template.apart)
        self._before, self._between, self._after = (self._join(texts) for texts in (before, between, after))
        self._max_query = max_tokens if template.max_query is None else template.max_query
        self._start_ids = self._join([self._document_start])
        self._frame_tokens = len(self._before) + len(self._between) + len(self._after)
        self._room = max_tokens - self._frame_tokens
        if template.max_pair is not None:
            self._room = min(self._room, template.max_pair - len(self._between))
        self._max_query = min(self._max_query, self._room)
        query = self._join([f"{self._query_start}{self._query_end}"])
        self.overhead = self._frame_tokens + len(query) + len(self._start_ids)
        if self.overhead >= max_tokens:
            why = f"its {self.overhead} tokens leave no room for a text: the model reads {max_tokens}"
            raise ModelFileError(why, file=template.file)
        if len(query) >= self._max_query:
            why = f"its {len(query)} tokens before a query leave no room for one: both have {self._max_query}"
            raise ModelFileError(why, file=template.file)

    def read(self, readings: Sequence[PairInput]) -> list[FramedText | ShoalError]:
        """Return one entry per reading, in order: InvalidValue for a single text, and for one that the tokenizer cannot
        read; TooLong for a query that leaves no room for its document."""
        pairs = [(place, each, each.second) for place, each in enumerate(readings) if each.second is not None]
        # One query of many documents is tokenized once.
        queries = dict.fromkeys(f"{self._query_start}{each.first}{self._query_end}" for _, each, _ in pairs)
        fitted = dict(zip(queries, self._fit(list(queries), self._max_query), strict=True))
        documents = self._fit([f"{self._document_start}{text}{self._document_end}" for *_, text in pairs], self._room)
        entries: list[FramedText | ShoalError] = [single_text_error()] * len(readings)
        for (place, reading, text), document in zip(pairs, documents, strict=True):
            query = fitted[f"{self._query_start}{reading.first}{self._query_end}"]
            if isinstance(query, ShoalError):
                entries[place] = query
            elif isinstance(document, ShoalError):
                entries[place] = document
            else:
                entries[place] = self._frame(reading, text, query, document)
        return entries

    def types(self, framed: FramedText) -> list[int]:
        """Return the segment id of each token."""
        return [0] * len(framed.ids)

    def _frame(self, reading: PairInput, text: str, query: FittedText, document: FittedText) -> FramedText | ShoalError:
        room = self._room - len(query.ids)
        if room <= len(self._start_ids):
            return no_room_error(query.total, self._max_tokens)
        own = None if reading.max_second is None else reading.max_second + len(self._start_ids)
        limit = room if own is None else min(own, room)
        entire = document.exact and document.total <= limit
        kept = document.ids if entire else self._cut(reading, text, document, limit)
        whole_query = query.exact and query.total <= len(query.ids)
        return FramedText(
            ids=[*self._before, *query.ids, *self._between, *kept, *self._after],
            first=0,
            second=0,
            total=self._frame_tokens + query.total + document.total,
            exact=query.exact and document.exact,
            fits=whole_query and (entire or (own is not None and own <= room)),
            cut=not (whole_query and entire),
        )

    def _cut(self, reading: PairInput, text: str, document: FittedText, limit: int) -> list[int]:
        """Return the document's part with at most `limit` tokens, its start included."""
        if reading.direction == "right":
            return document.ids[:limit]
        space = limit - len(self._start_ids)
        (kept,) = self._tokenizer.fit([text], ["left"], space, special=False)
        return [*self._start_ids, *kept.ids]

    def _fit(self, texts: Sequence[str], limit: int) -> list[FittedText | ShoalError]:
        return self._tokenizer.fit_each(texts, ["right"] * len(texts), [limit] * len(texts), special=False)

    def _join(self, texts: Sequence[str]) -> list[int]:
        return [token for ids in self._tokenizer.encode(texts, special=False) for token in ids] if texts else []
