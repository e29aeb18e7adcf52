"""Convert query-document pairs and single texts to the tensors of a cross-encoder or classifier, and its logits to
scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Tensors, WorkWeight
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, ShoalError
from shoal.pipelines.jobs import Entry, Text, prepare_in_order
from shoal.pipelines.scores import score_rows
from shoal.pipelines.text.padding import IDS, INPUTS, TYPES, check_inputs, pad_batch
from shoal.pipelines.text.pairing import FramedText, PairInput, PairTokenizer
from shoal.pipelines.text.tokenizer import CHARS_PER_TOKEN, TextTokenizer, byte_size, too_long_error
from shoal.specs import TextSpec
from shoal.types import Array, BatchTask, Direction, Embed, Image, Item, Rerank


class _ItemOptions(NamedTuple):
    raw: bool
    truncate: bool
    direction: Direction
    most: int | None


class PairPipeline:
    """Pipeline for one model with `spec.score`: a row is its scores, float32 [labels].

    Pairs are framed and cut as transformers' fast tokenizers do with truncation "longest_first"; single texts like any
    text. The model's default prompt, if any, precedes a single text or the first of a pair, as in sentence-transformers
    6. The activation is applied to the logits here, so items with and without it share a call. `param` of an error
    names the field at fault, "input" for an item. Raises ModelFileError if the tokenizer or the spec cannot be used.
    """

    def __init__(self, folder: Path, spec: TextSpec, *, truncate: bool) -> None:
        if spec.score is None:
            raise ModelFileError("it gives no scores: it cannot rerank or classify", file="graph", key="outputs")
        check_inputs(spec, INPUTS - {"pooling_mask"})
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = TextTokenizer(folder, spec.tokenizer, lower_case=spec.lower_case)
        self._pairs = PairTokenizer(self.tokenizer, spec.tokenizer, spec.max_tokens)
        self._head = spec.score
        self._prompt = spec.prompts.get(spec.default_prompt_name, "") if spec.default_prompt_name else ""
        self._typed = TYPES in spec.inputs
        self._read_whole = spec.max_tokens * CHARS_PER_TOKEN

    @property
    def work(self) -> WorkWeight:
        return "usual"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue for an invalid document limit."""
        check_document_limit(task)

    def estimate(self, item: Item) -> int:
        """Estimate as TextPipeline does: never more than the model's limit, except for texts that are read in
        pieces."""
        assert not isinstance(item, list | Image)
        texts = item if isinstance(item, tuple) else (item,)
        frame = self._pairs.frame.size
        length = sum(map(len, texts))
        if length > self._read_whole:
            return frame + length // 3
        size = sum(map(byte_size, texts))
        return max(1, min(self.spec.max_tokens, frame + size // 3))

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return prepare_in_order(items, asked=self._read_options, texts=self._from_texts, ids=token_ids_error)

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return pad_batch(batch, facts, self.spec)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError]:
        logits = outputs[self._head.output][: len(batch)].reshape(len(batch), -1)
        return score_rows(logits, self._head.activation, [item.extra for item in batch])

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        assert not isinstance(task, Embed)
        check_document_limit(task)
        return _ItemOptions(
            raw=task.raw_scores,
            truncate=self.truncate if task.truncate is None else task.truncate,
            direction=task.truncation_direction,
            most=task.max_document_tokens if isinstance(task, Rerank) else None,
        )

    def _from_texts(self, waiting: list[tuple[_ItemOptions, Text]]) -> list[Entry]:
        readings = []
        for asked, item in waiting:
            first, second = (item, None) if isinstance(item, str) else item
            readings.append(PairInput(self._prompt + first, second, asked.direction, asked.most))
        read = self._pairs.read(readings)
        return [self._prepare_item(asked, framed) for (asked, _), framed in zip(waiting, read, strict=True)]

    def _prepare_item(self, asked: _ItemOptions, framed: FramedText | ShoalError) -> Entry:
        if isinstance(framed, ShoalError):
            return framed
        if not framed.ids:
            return EmptyInput("the model's tokenizer makes no token of this text", param="input")
        if not framed.fits and not asked.truncate:
            return too_long_error(framed.total, framed.exact, self.spec.max_tokens)
        ids = np.array(framed.ids, dtype=np.int64)
        tensors = {IDS: ids}
        if self._typed and framed.second is not None:
            tensors[TYPES] = np.array(self._pairs.types(framed), dtype=np.int64)
        count = len(framed.ids)
        return Prepared(
            tensors=tensors,
            cost=count,
            group=(),
            outputs=(self._head.output,),
            tokens=count,
            truncated=framed.cut,
            key=(ids.tobytes(), None if framed.second is None else framed.first, asked.raw),
            extra=asked.raw,
        )


def check_document_limit(task: BatchTask) -> None:
    """Raises InvalidValue for a `max_document_tokens` below 1."""
    if isinstance(task, Rerank) and task.max_document_tokens is not None and task.max_document_tokens < 1:
        raise InvalidValue(
            f"a document must be allowed at least 1 token; got {task.max_document_tokens}", param="max_tokens_per_doc"
        )


def token_ids_error(asked: object, ids: list[int]) -> InvalidValue:
    """Return the error for token ids sent to a scoring task."""
    return InvalidValue("scores are of texts, not of token ids: send the text itself", param="input")
