"""Make one text of a query and a document with a model's template, and cut only the document.

The text is tokenized as a whole, as sentence-transformers does. Of a pair that is too long, the tokens before the
template's end are cut, as there; but a query that leaves no room for the document is an error here, never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError

from shoal.errors import InvalidValue, ModelFileError, ShoalError, TooLong
from shoal.pipelines.chat import bounds, jinja
from shoal.pipelines.text.pairing import FramedText, PairInput
from shoal.pipelines.text.tokenizer import FittedText, TextTokenizer
from shoal.specs import PairTemplate
from shoal.types import Direction

_QUERY, _DOCUMENT, _PROMPT = " Shoal query ", " Shoal document ", " Shoal prompt "
_FILLERS = ("0", "1 2 3 4")
"""Contents whose tokens differ up to the last: what their texts have in common at the end is the template."""


class Pieces(NamedTuple):
    """A template's text before the query, between query and document, and after the document."""

    opening: str
    middle: str
    closing: str

    def join(self, query: str, document: str) -> str:
        return f"{self.opening}{query}{self.middle}{document}{self.closing}"


def split_template(template: PairTemplate, prompt: str) -> Pieces:
    """Return the template's own text, with `prompt` as the system message unless empty.

    Raises ModelFileError for a template that fails, changes its contents, or has them in another order.
    """
    text = _render(template, prompt)
    opening, found, rest = text.partition(_QUERY)
    middle, then, closing = rest.partition(_DOCUMENT)
    if not found or not then or _QUERY in rest or _DOCUMENT in closing:
        raise ModelFileError(
            "the template must contain the query, then the document, each once and unchanged", file=template.file
        )
    return Pieces(opening, middle, closing)


def reads_prompt(template: PairTemplate) -> bool:
    """Whether the template has a place for a prompt of its pairs."""
    try:
        return any(_PROMPT in text for text in split_template(template, _PROMPT))
    except ModelFileError:  # it raises for a system message
        return False


def _render(template: PairTemplate, prompt: str) -> str:
    roles = [("system", prompt)] if prompt else []
    roles += [("query", _QUERY), ("document", _DOCUMENT)]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if template.structured else text}
        for role, text in roles
    ]
    try:
        return jinja.render(_compile(template.source), {**template.variables, "messages": messages})
    except (TemplateError, SyntaxError, RecursionError) as error:
        words = getattr(error, "message", None) or str(error) or type(error).__name__
        raise ModelFileError(f"the template cannot be rendered: {words}", file=template.file) from error


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    """Compile once, as each new instruction is rendered. Raises TemplateError, SyntaxError or RecursionError."""
    with bounds.budget():
        return jinja.create_environment().from_string(source)


class TemplateTokenizer:
    """Tokenizes pairs for a model whose input is a template's text of at most `max_tokens`, with `prompt` in it.

    `overhead`: tokens of the template. Safe to use from several threads at once. Raises ModelFileError for a template
    that cannot be used, or leaves no room.
    """

    def __init__(self, tokenizer: TextTokenizer, template: PairTemplate, max_tokens: int, prompt: str) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._pieces = split_template(template, prompt)
        self._end = self._find_end()
        self.overhead = len(self._encode(self._pieces.join("", "")))
        if self.overhead >= max_tokens:
            why = f"its {self.overhead} tokens leave no room for a text: the model reads {max_tokens}"
            raise ModelFileError(why, file=template.file)

    def read(self, readings: Sequence[PairInput]) -> list[FramedText | ShoalError]:
        """Return one entry per reading, in order: InvalidValue for a single text, and for one that the tokenizer cannot
        read; TooLong for a query that leaves no room for its document."""
        pairs = [(place, each, each.second) for place, each in enumerate(readings) if each.second is not None]
        texts = [self._pieces.join(each.first, second) for _, each, second in pairs]
        fitted = self._tokenizer.fit_each(texts, ["right"] * len(pairs), [self._max_tokens] * len(pairs), special=False)
        entries: list[FramedText | ShoalError] = [single_text_error()] * len(readings)
        for (place, reading, document), whole in zip(pairs, fitted, strict=True):
            entries[place] = whole if isinstance(whole, ShoalError) else self._read_pair(reading, document, whole)
        return entries

    def types(self, framed: FramedText) -> list[int]:
        """Return the segment id of each token."""
        return [0] * len(framed.ids)

    def _read_pair(self, reading: PairInput, document: str, whole: FittedText) -> FramedText | ShoalError:
        """Frame a pair from the tokens of its `whole` text, cut to the model's limit."""
        limit, direction = reading.max_second, reading.direction
        fits = whole.exact and whole.total <= self._max_tokens
        own = None if limit is None else self._fit(document, limit, direction)
        shortened = own is not None and not (own.exact and own.total <= len(own.ids))
        if fits and not shortened:
            return self._frame(whole.ids, whole, fits=True, cut=False)
        start = self._fit(f"{self._pieces.opening}{reading.first}{self._pieces.middle}", self._max_tokens, "right")
        room = self._max_tokens - len(self._end) - start.total
        if room < 1:
            return no_room_error(start.total, self._max_tokens)
        if not shortened and direction == "right":
            ids = [*whole.ids[: self._max_tokens - len(self._end)], *self._end]
            return self._frame(ids, whole, fits=False, cut=True)
        kept = self._fit(document, room if limit is None else min(limit, room), direction)
        entire = kept.exact and kept.total <= len(kept.ids)
        fits = entire or (limit is not None and limit <= room)
        return self._frame([*start.ids, *kept.ids, *self._end], whole, fits=fits, cut=not entire)

    def _frame(self, ids: list[int], whole: FittedText, *, fits: bool, cut: bool) -> FramedText:
        return FramedText(ids=ids, first=0, second=len(ids), total=whole.total, exact=whole.exact, fits=fits, cut=cut)

    def _fit(self, text: str, limit: int, direction: Direction) -> FittedText:
        return self._tokenizer.fit([text], [direction], limit, special=False)[0]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode([text], special=False)[0]

    def _find_end(self) -> list[int]:
        """Return the tokens of the template after the document."""
        one, other = (self._encode(self._pieces.join(filler, filler)) for filler in _FILLERS)
        count = 0
        while count < min(len(one), len(other)) and one[-count - 1] == other[-count - 1]:
            count += 1
        return one[len(one) - count :]


def no_room_error(total: int, max_tokens: int) -> TooLong:
    """Return the error for a query of `total` tokens with the template before it."""
    return TooLong(
        f"the query has {total} tokens with the model's template, which leaves no room for a document: the model "
        f"accepts at most {max_tokens}; shorten it",
        param="input",
    )


def single_text_error() -> InvalidValue:
    """Return the error for a text alone."""
    return InvalidValue("this model scores a query with a document, not a text alone: send both", param="input")
