"""Decode a model's pieces into the chunks of one choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from shoal.core.protocols import Piece
from shoal.pipelines.chat.detokenize import REPLACEMENT, Detokenizer
from shoal.pipelines.chat.logprobs import LogprobQueue
from shoal.pipelines.chat.segments import AnswerFormat, Segment, Segments
from shoal.pipelines.chat.stops import StopTexts
from shoal.pipelines.chat.token_count import Tally
from shoal.pipelines.chat.vocabulary import Vocabulary
from shoal.types import Chunk

Gives: TypeAlias = Literal["delta", "cumulative", "ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode the pieces of an answer.

    `stops` end the answer's text; they do not apply to reasoning and tool calls, since clients mean the answer.
    `include_stop` shows the stop text. `stop_ids` end it too, and are never shown. `hidden_reasoning`: reasoning is
    counted but not returned. `max_tokens`: drop tokens beyond this number, for a backend that has no limit itself.
    `skip_special_tokens`, `visible_ids`, `context`: see Detokenizer.
    """

    output_mode: Gives
    vocabulary: Vocabulary | None = None
    stops: Sequence[str] = ()
    include_stop: bool = False
    stop_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    visible_ids: frozenset[int] = frozenset()
    context: Sequence[int] = ()
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    hidden_reasoning: bool = False
    max_tokens: int | None = None


REVISED = 256
"""Characters of emitted text to look for in a changed text: looking for all of them would take quadratic time."""


class CumulativeText:
    """Converts cumulative texts (all of the text so far, each time) to deltas.

    Emitted text is never taken back. A backend may change the end of its text later. Half a character (U+FFFD at the
    end) is held back; after any other change, the output continues where the new text matches what was emitted.
    """

    def __init__(self) -> None:
        self._emitted = ""
        self._pending = ""

    def push(self, text: str) -> str:
        sure = text.rstrip(REPLACEMENT)
        new = self._new(sure)
        self._emitted += new
        self._pending = text[len(sure) :]
        return new

    def flush(self) -> str:
        kept, self._pending = self._pending, ""
        return kept

    def _new(self, text: str) -> str:
        if text.startswith(self._emitted):
            return text[len(self._emitted) :]
        if self._emitted.startswith(text):
            return ""
        same = next(i for i, (old, new) in enumerate(zip(self._emitted, text, strict=False)) if old != new)
        # Find the longest suffix of the emitted text that the changed part also contains; the text continues after it.
        for start in range(max(same, len(self._emitted) - REVISED), len(self._emitted)):
            at = text.find(self._emitted[start:], same)
            if at >= 0:
                new = text[at + len(self._emitted) - start :]
                self._emitted = text[: len(text) - len(new)]
                return new
        new = text[len(self._emitted) :]
        self._emitted = text[: len(text) - len(new)]
        return new


class AnswerDecoder:
    """The Decoder of one choice: detokenizes, separates reasoning and tool calls, and ends at stop texts.

    Log probabilities come with the content they belong to. Blanks directly before a call are dropped together with its
    markup before stop texts are matched, so a stop text of blanks alone does not end an answer there.
    """

    def __init__(self, index: int, decoding: DecodingOptions) -> None:
        self.index = index
        self.stopped = False
        self._options = decoding
        self._has_ended = False
        self._hit = False
        self._tally = Tally(decoding.vocabulary, decoding.max_tokens)
        # A stop text before a call discards the call, one after it does not, and one that spans it does not match.
        self._segments = Segments(decoding.answer_format, exact=bool(decoding.stops))
        self._stops = StopTexts(decoding.stops, include=decoding.include_stop)
        self._logprobs = LogprobQueue()
        self._emitted_size = 0
        # Without stops, calls or reasoning, text passes through unchanged: most answers, at an eighth of the time.
        self._is_plain = not decoding.stops and not self._segments.is_divided
        self._has_token_counts = decoding.output_mode == "ids"
        self._detokenizer = _detokenizer(decoding) if decoding.output_mode == "ids" else None
        self._cumulative = CumulativeText() if decoding.output_mode == "cumulative" else None

    @property
    def tokens(self) -> int:
        return self._tally.tokens

    @property
    def reasoning_tokens(self) -> int:
        return self._tally.reasoning_tokens

    def push(self, piece: Piece) -> list[Chunk]:
        if self.stopped:
            return []
        tokens, text, logprobs = piece.tokens, piece.text, piece.logprobs
        if self._detokenizer is not None:
            ids = self._before_end(piece.ids)
            tokens = len(ids) + self._has_ended if tokens is None else tokens
            text = self._detokenizer.push(ids)
            if len(logprobs) == len(piece.ids):
                logprobs = logprobs[: len(ids)]  # the token that ended the answer is not shown either
        elif self._cumulative is not None:
            text = self._cumulative.push(text)
        self._has_token_counts = self._has_token_counts or tokens is not None
        if tokens is None and self._options.max_tokens is not None:
            text = self._tally.fitting(text)
        if logprobs:
            self._is_plain = False  # some tokens may wait for their text until a piece without log probabilities
        if self._is_plain:
            self._tally.add_plain(tokens, text)
            self.stopped = self._has_ended
            return [Chunk(index=self.index, text=text)] if text else []
        self._logprobs.add(logprobs)
        segments = self._segments.push(text) if text else []
        self._tally.add(tokens, text, segments)
        chunks = self._chunks(segments)
        self.stopped = self._hit or self._has_ended
        return _merge_chunks(chunks)

    def flush(self, reason: str) -> list[Chunk]:
        chunks: list[Chunk] = []
        if not self._hit:
            chunks = self._flush_rest()
        self.stopped = True
        if self._hit or self._has_ended:
            reason = "stop"
        if reason == "stop" and not self._hit and self._segments.calls:
            reason = "tool_calls"
        return [*_merge_chunks(chunks), Chunk(index=self.index, finish_reason=reason, stop=self._stops.found)]

    def _flush_rest(self) -> list[Chunk]:
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.flush()
        elif self._cumulative is not None:
            text = self._cumulative.flush()
        segments = self._segments.push(text) if text else []
        more = self._segments.flush()
        self._tally.add(0 if self._has_token_counts else None, text, [*segments, *more])
        chunks = self._chunks(segments)
        if not self._hit:
            chunks += self._chunks(more)
        return chunks if self._hit else chunks + self._release_held()

    def _before_end(self, ids: Sequence[int]) -> Sequence[int]:
        for at, token in enumerate(ids):
            if token in self._options.stop_ids:
                self._has_ended = True
                return ids[:at]
        return ids

    def _chunks(self, segments: Sequence[Segment]) -> list[Chunk]:
        self._logprobs.place(segments, self._segments.is_divided)
        chunks: list[Chunk] = []
        for segment in segments:
            if segment.kind == "text":
                text, self._hit = self._stops.push(segment.text)
                chunks.append(self._content(text))
                if self._hit:
                    break
                continue
            chunks += self._release_held()
            if self._hit:
                break
            if segment.kind == "tools":
                chunks.append(Chunk(index=self.index, tools=list(segment.tools)))
            elif not self._options.hidden_reasoning:
                chunks.append(Chunk(index=self.index, reasoning=segment.text))
        return chunks

    def _release_held(self) -> list[Chunk]:
        """Release text held back for a stop text that did not come."""
        text, self._hit = self._stops.flush()
        return [self._content(text)]

    def _content(self, text: str) -> Chunk:
        self._emitted_size += len(text)
        return Chunk(index=self.index, text=text, logprobs=self._logprobs.pop_tokens(self._emitted_size))


def _detokenizer(decoding: DecodingOptions) -> Detokenizer:
    if decoding.vocabulary is None:
        raise ValueError("ids can be decoded with a vocabulary only")
    return Detokenizer(
        decoding.vocabulary,
        skip_special_tokens=decoding.skip_special_tokens,
        shown=decoding.visible_ids,
        context=decoding.context,
    )


def _merge_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merge neighboring chunks of one kind, and drop empty ones."""
    made: list[Chunk] = []
    for chunk in chunks:
        if not (chunk.text or chunk.reasoning or chunk.tools or chunk.logprobs):
            continue
        last = made[-1] if made else None
        if last is None or _kind(last) != _kind(chunk):
            made.append(chunk)
            continue
        made[-1] = Chunk(
            index=chunk.index,
            text=last.text + chunk.text,
            reasoning=last.reasoning + chunk.reasoning,
            tools=[*last.tools, *chunk.tools],
            logprobs=[*last.logprobs, *chunk.logprobs],
        )
    return made


def _kind(chunk: Chunk) -> str:
    return "reasoning" if chunk.reasoning else "tools" if chunk.tools else "text"
