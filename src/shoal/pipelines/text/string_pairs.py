"""Send pairs and single texts as strings to rerankers and classifiers with their own tokenizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Tensors
from shoal.errors import ShoalError, Unsupported
from shoal.pipelines.scores import score_rows
from shoal.pipelines.text.base import BasePipeline, Entry, TextInput
from shoal.pipelines.text.pairing import PairInput, PairTokenizer
from shoal.pipelines.text.pairs import read_document_limit, token_ids_error
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.upstream_options import (
    PAIR,
    TEXT,
    Count,
    Passes,
    TruncationPolicy,
    attach_counts,
    count_tokens,
    join_tensors,
    to_object_array,
)
from shoal.specs import Activation
from shoal.types import Array, BatchTask, Direction, Embed


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
    """A task's options for each of its items. `raw`: leave rows as the model returns them."""

    raw: bool
    truncate: bool
    direction: Direction
    params: dict[str, Any]
    group: Hashable
    prompt: str = ""


class StringPairPipeline(BasePipeline[_ItemOptions, Count | None]):
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
        self._count_output = spec.token_count if tokenizer is None else ""
        self._outputs = (spec.output, self._count_output) if self._count_output else (spec.output,)
        self._truncation = TruncationPolicy(spec.passes, limit=limit, default=truncate)
        self._pairs = None
        if tokenizer is not None:
            self._pairs = PairTokenizer(tokenizer, "tokenizer.json", self._truncation.max_counted)
        super().__init__(max_tokens=self._truncation.max_counted, work="light" if tokenizer is None else "usual")

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {TEXT: join_tensors(batch, TEXT), PAIR: join_tensors(batch, PAIR)}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Array | CountedRow | ShoalError]:
        scores = outputs[self.spec.output][: len(batch)].reshape(len(batch), -1)
        rows = score_rows(scores, self.spec.activation, [item.extra for item in batch])
        return attach_counts(rows, outputs[self._count_output]) if self._count_output else rows

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        """Raises InvalidValue (max_tokens_per_doc) and Unsupported (raw_scores, max_tokens_per_doc, truncate,
        truncation_direction)."""
        assert not isinstance(task, Embed)
        document_limit = read_document_limit(task)
        self._truncation.check(task)
        passes_raw = "raw_scores" in self.spec.passes
        if task.raw_scores and not self.spec.raw and not passes_raw:
            raise Unsupported("the model returns no raw scores; omit raw_scores", param="raw_scores")
        if document_limit is not None and "max_document_tokens" not in self.spec.passes:
            raise Unsupported(
                "the model truncates texts itself: omit the document limit",
                param="max_tokens_per_doc",
            )
        params = self._truncation.params(task)
        if passes_raw:
            params["raw_scores"] = task.raw_scores
        if document_limit is not None:
            params["max_document_tokens"] = document_limit
        return _ItemOptions(
            raw=task.raw_scores or passes_raw or not self.spec.raw,
            truncate=self._truncation.should_truncate(task),
            direction=task.truncation_direction,
            params=params,
            group=tuple(params.items()),
        )

    def _tokenize(self, inputs: Sequence[TextInput[_ItemOptions]]) -> list[Count | None]:
        if self._pairs is None:
            return [None] * len(inputs)
        read = self._pairs.read([PairInput(text, pair, options.direction) for text, pair, options in inputs])
        return [count_tokens(framed) for framed in read]

    def _prepare_ids(self, ids: list[int], options: _ItemOptions) -> Entry:
        return token_ids_error()

    def _prepare_text(self, item: TextInput[_ItemOptions], count: Count | None) -> Entry:
        text, pair, options = item
        weight = self._truncation.weigh(
            [text, pair or ""], count, truncate=options.truncate, direction=options.direction
        )
        if isinstance(weight, ShoalError):
            return weight
        shares_query = self.spec.one_query and pair is not None
        return Prepared(
            tensors={TEXT: to_object_array([text]), PAIR: to_object_array([pair])},
            cost=weight.cost,
            group=(options.group, text) if shares_query else options.group,
            outputs=self._outputs,
            tokens=weight.tokens,
            truncated=weight.truncated,
            key=(text, pair, options.group, options.raw),
            extra=options.raw,
            params=options.params,
        )
