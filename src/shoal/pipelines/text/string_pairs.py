"""Send pairs and single texts as strings to rerankers and classifiers with their own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Tensors, WorkWeight
from shoal.errors import ShoalError, Unsupported
from shoal.pipelines.jobs import Entry, Text, prepare_in_order
from shoal.pipelines.scores import score_rows
from shoal.pipelines.text.pairing import PairInput, PairTokenizer
from shoal.pipelines.text.pairs import check_document_limit, token_ids_error
from shoal.pipelines.text.tokenizer import TextTokenizer, byte_size
from shoal.pipelines.upstream_options import (
    PAIR,
    TEXT,
    Count,
    Passes,
    TruncationPolicy,
    attach_counts,
    estimate_cost,
    join_tensors,
    to_object_array,
    utf8_size,
)
from shoal.specs import Activation
from shoal.types import Array, BatchTask, Direction, Embed, Image, Item, Rerank


@dataclass(frozen=True, slots=True, kw_only=True)
class StringPairSpec:
    """What is known of a model that scores texts or pairs of texts.

    `output` names its scores, float32 [rows, labels], `token_count` its count of tokens read ("" if it returns none).
    `one_query`: all pairs of a call must share their first text. `raw`: its scores are logits, and Shoal applies
    `activation`; otherwise they are final, and raw scores require `passes` to contain "raw_scores". `max_tokens`: where
    it cuts a text or pair, counted with the pipeline's tokenizer; 0 if unknown. `passes`: options that it applies
    itself, out of "truncate", "truncation_direction", "raw_scores" and "max_document_tokens".
    """

    labels: tuple[str, ...]
    activation: Activation
    max_tokens: int = 0
    output: str = "scores"
    token_count: str = ""
    one_query: bool = False
    raw: bool = False
    passes: Passes = frozenset()


class _ItemOptions(NamedTuple):
    """The options of a task. `raw`: leave rows as the model returns them."""

    raw: bool
    truncate: bool
    direction: Direction
    params: dict[str, Any]


class StringPairPipeline:
    """Pipeline for one model that takes texts and scores them. A batch is {"text": object array [rows] of str, "pair":
    object array [rows] of str, None for a single text}, never padded.

    `tokenizer` only counts, as in StringPipeline; without one, usage is an estimate. Raises ModelFileError if it frames
    pairs in a way that cannot be counted.
    """

    def __init__(self, spec: StringPairSpec, *, truncate: bool, tokenizer: TextTokenizer | None = None) -> None:
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = tokenizer
        limit = spec.max_tokens if tokenizer is not None else 0
        self._told = spec.token_count if tokenizer is None else ""
        self._cutting = TruncationPolicy(spec.passes, limit=limit, default=truncate)
        self._pairs = None
        if tokenizer is not None:
            self._pairs = PairTokenizer(tokenizer, "tokenizer.json", self._cutting.counted)

    @property
    def work(self) -> WorkWeight:
        return "light" if self.tokenizer is None else "usual"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue (max_tokens_per_doc) and Unsupported (raw_scores, max_tokens_per_doc, truncate,
        truncation_direction)."""
        assert not isinstance(task, Embed)
        check_document_limit(task)
        self._cutting.check(task)
        if task.raw_scores and not self.spec.raw and "raw_scores" not in self.spec.passes:
            raise Unsupported("the model gives no raw scores; leave raw_scores out", param="raw_scores")
        limited = isinstance(task, Rerank) and task.max_document_tokens is not None
        if limited and "max_document_tokens" not in self.spec.passes:
            raise Unsupported(
                "the model reads texts whole and cuts them itself: leave the limit of a document out",
                param="max_tokens_per_doc",
            )

    def estimate(self, item: Item) -> int:
        assert not isinstance(item, list | Image)
        texts = item if isinstance(item, tuple) else (item,)
        return self._cutting.cap_tokens(max(1, sum(map(byte_size, texts)) // 3))

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return prepare_in_order(items, asked=self._read_options, texts=self._from_texts, ids=token_ids_error)

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {TEXT: join_tensors(batch, TEXT), PAIR: join_tensors(batch, PAIR)}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Array | CountedRow | ShoalError]:
        scores = outputs[self.spec.output][: len(batch)].reshape(len(batch), -1)
        rows = score_rows(scores, self.spec.activation, [item.extra for item in batch])
        return attach_counts(rows, outputs[self._told]) if self._told else rows

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        assert not isinstance(task, Embed)
        self.check(task)
        params = self._cutting.params(task)
        told = "raw_scores" in self.spec.passes
        if told:
            params["raw_scores"] = task.raw_scores
        if isinstance(task, Rerank) and task.max_document_tokens is not None:
            params["max_document_tokens"] = task.max_document_tokens
        return _ItemOptions(
            raw=task.raw_scores or told or not self.spec.raw,
            truncate=self._cutting.should_truncate(task),
            direction=task.truncation_direction,
            params=params,
        )

    def _from_texts(self, waiting: list[tuple[_ItemOptions, Text]]) -> list[Entry]:
        parts = [(item, None) if isinstance(item, str) else item for _, item in waiting]
        counts: list[Count | None] = [None] * len(waiting)
        if self._pairs is not None:
            readings = [
                PairInput(first, second, asked.direction)
                for (asked, _), (first, second) in zip(waiting, parts, strict=True)
            ]
            counts = [
                None if isinstance(framed, ShoalError) else Count(framed.total, framed.exact)
                for framed in self._pairs.read(readings)
            ]
        return [
            self._prepare_item(asked, first, second, count)
            for (asked, _), (first, second), count in zip(waiting, parts, counts, strict=True)
        ]

    def _prepare_item(self, asked: _ItemOptions, first: str, second: str | None, count: Count | None) -> Entry:
        size, other = utf8_size(first), 0 if second is None else utf8_size(second)
        if isinstance(size, ShoalError):
            return size
        if isinstance(other, ShoalError):
            return other
        truncated = self._cutting.must_truncate(count)
        if truncated and count is not None:
            error = self._cutting.refusal(count, asked.truncate, asked.direction)
            if error is not None:
                return error
        cost, tokens = estimate_cost(size + other, count, self._cutting)
        told = tuple(asked.params.items())
        group = (told, first) if self.spec.one_query and second is not None else told
        return Prepared(
            tensors={TEXT: to_object_array([first]), PAIR: to_object_array([second])},
            cost=cost,
            group=group,
            outputs=(self.spec.output, self._told) if self._told else (self.spec.output,),
            tokens=tokens,
            truncated=truncated,
            key=(first, second, told, asked.raw),
            extra=asked.raw,
            params=asked.params,
        )
