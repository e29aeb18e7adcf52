"""Convert texts and token ids to the tensors of an encoder, and its rows to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Row, Tensors, WorkWeight
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, ShoalError
from shoal.pipelines import pooling
from shoal.pipelines.jobs import Entry, OptionsCache, Text, prepare_in_order
from shoal.pipelines.late_interaction import Sides
from shoal.pipelines.outputs import PLAIN, Heads, check_kinds
from shoal.pipelines.outputs import RowOptions as AskedRow
from shoal.pipelines.text import prompts
from shoal.pipelines.text.padding import IDS, check_inputs, pad_batch
from shoal.pipelines.text.tokenizer import (
    CHARS_PER_TOKEN,
    FittedText,
    TextTokenizer,
    byte_size,
    most_chars,
    too_long_error,
)
from shoal.pipelines.vectors import Shape, check_shape, resolve_shape, shape_rows
from shoal.specs import TextSpec
from shoal.types import Array, BatchTask, Direction, Embed, Image, Item, VectorKind

_WHOLE: Shape = (None, False)


class _ItemOptions(NamedTuple):
    """A task's options for each of its items. `added`: the field that requested a prompt. `skip`: prompt tokens to
    exclude from pooling."""

    prompt: str
    added: str | None
    skip: int
    truncate: bool
    direction: Direction
    shape: Shape
    kinds: tuple[VectorKind, ...]
    query: bool
    outputs: tuple[str, ...]
    group: tuple[str, ...]


class TextPipeline:
    """Pipeline for one text model, with the same vectors as sentence-transformers 6 for the same files. Texts are used
    as they are, blanks included, with the prompt before them.

    Items that only want dense vectors need only the output `spec.pooled` and share engine calls. `dimensions` are cut
    before normalizing, so both are done here, in float32 whatever the engine's precision. If that output is
    "token_embeddings", [rows, length, width], pooling is done here as well. `outputs.Heads` decides which other outputs
    an item needs, and which items share a call.

    A static model (`spec.frame_tokens` False) returns zeros for a text without known tokens, as model2vec and
    StaticEmbedding do, or whatever the modules after its table make of zeros. Any other text without tokens is
    EmptyInput. `normalize` False is the operator's setting to leave rows as the model returns them, whatever a request
    asks. `param` of an error names the field at fault, "input" for an item. Raises ModelFileError if the tokenizer or
    the spec cannot be used.
    """

    def __init__(self, folder: Path, spec: TextSpec, *, truncate: bool, normalize: bool | None = None) -> None:
        check_inputs(spec)
        masked = {prompt for prompt in spec.prompts.values() if prompt and not spec.include_prompt}
        self._modes = _local_pooling(spec)
        if masked and "pooling_mask" not in spec.inputs and self._modes is None:
            raise ModelFileError(
                "false needs a graph with a pooling_mask input; convert the model from its safetensors",
                file="1_Pooling/config.json",
                key="include_prompt",
            )
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = TextTokenizer(
            folder,
            spec.tokenizer,
            lower_case=spec.lower_case,
            frame=spec.frame_tokens,
            dropped=spec.dropped,
            cleaning=spec.cleaning,
        )
        self._kinds = spec.kinds
        self._vocab_size = spec.vocab_size or self.tokenizer.vocab_size
        self._heads = Heads(spec)
        self._sides = Sides(spec.multi, spec.max_tokens)
        self._skips = {prompt: self._prompt_length(prompt) for prompt in masked}
        self._blank_zeros = not spec.frame_tokens and set(spec.modules) <= {"normalize"}
        self._gives_raw = self._modes is not None or not spec.ends_normalized or spec.pooled != spec.sentence_embedding
        self._normalize = normalize
        self._read_whole = spec.max_tokens * CHARS_PER_TOKEN
        self._known: OptionsCache[_ItemOptions] = OptionsCache()

    @property
    def work(self) -> WorkWeight:
        return "usual"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize, a kind of vectors)."""
        self._read_options(task)

    def estimate(self, item: Item) -> int:
        """Estimate at most the model's limit, except for a text so long that it is read in pieces. That one counts in
        full, since tokenizing it is not a small job."""
        assert not isinstance(item, tuple | Image)
        if not isinstance(item, str):
            return max(1, len(item))
        frame = len(self.tokenizer.prefix) + len(self.tokenizer.suffix)
        if len(item) > self._read_whole:
            return frame + len(item) // 3
        return max(1, min(self.spec.max_tokens, frame + byte_size(item) // 3))

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return prepare_in_order(items, asked=self._read_options, texts=self._from_texts, ids=self._from_ids)

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        attended = None
        if self._sides.fills_unattended or not self.spec.frame_tokens:
            least = 1 if self.spec.frame_tokens or self._blank_zeros else 0
            attended = [max(item.extra.tokens, least) for item in batch]
        skips = [item.extra.skip for item in batch] if "pooling_mask" in self.spec.inputs else ()
        return pad_batch(batch, facts, self.spec, attended, skips)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | ShoalError]:
        kinds = [item.extra.kinds for item in batch]
        if kinds.count(PLAIN) == len(kinds):
            return self._dense(outputs, batch)
        dense = self._dense(outputs, batch) if any("dense" in each for each in kinds) else []
        return self._heads.rows(outputs, batch, dense)

    def _dense(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError]:
        rows = outputs[self.spec.pooled][: len(batch)]
        if self._modes is not None:
            lengths = [max(item.extra.tokens, 1) for item in batch]
            rows = pooling.pool(rows, lengths, [item.extra.skip for item in batch], self._modes)
        vectors = shape_rows(rows, [item.extra.shape for item in batch])
        if self._blank_zeros:
            for place, item in enumerate(batch):
                vector = vectors[place]
                if not item.extra.tokens and not isinstance(vector, ShoalError):
                    vectors[place] = np.zeros_like(vector)
        return vectors

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        assert isinstance(task, Embed)
        return self._known.get_or_compute(task, self._resolve_options)

    def _resolve_options(self, task: Embed) -> _ItemOptions:
        kinds = task.outputs
        check_kinds(kinds, self._kinds)
        prompt = prompts.resolve_prompt(self.spec, task.prompt_name, task.input_type)
        dense = "dense" in kinds
        if dense:
            check_shape(task, self.spec.dimension, gives_raw=self._gives_raw)
        return _ItemOptions(
            prompt=prompt,
            added=prompts.find_prompt_field(task, prompt),
            skip=self._skips.get(prompt, 0),
            truncate=self.truncate if task.truncate is None else task.truncate,
            direction=task.truncation_direction,
            shape=resolve_shape(task, self.spec.dimension, self._normalize) if dense else _WHOLE,
            kinds=kinds,
            query=task.input_type == "query" and (self._sides.differ or "multi" in kinds),
            outputs=self._heads.outputs(kinds),
            group=self._heads.group(kinds),
        )

    def _prompt_length(self, prompt: str) -> int:
        """Count as sentence-transformers does: the tokens of the prompt alone, without a special token at the end."""
        ids = self.tokenizer.fit([prompt], ["right"], self.spec.max_tokens)[0].ids
        return len(ids) - (ids[-1] in self.tokenizer.special_ids) if ids else 0

    def _from_texts(self, waiting: list[tuple[_ItemOptions, Text]]) -> list[Entry]:
        texts: list[str] = []
        for asked, item in waiting:
            assert isinstance(item, str)
            texts.append(asked.prompt + item if asked.prompt else item)
        if not self._sides.differ:
            return self._read(waiting, texts, query=False)
        entries: list[Entry | None] = [None] * len(waiting)
        for query in (False, True):
            places = [place for place, (asked, _) in enumerate(waiting) if asked.query == query]
            read = self._read([waiting[place] for place in places], [texts[place] for place in places], query=query)
            for place, entry in zip(places, read, strict=True):
                entries[place] = entry
        return [entry for entry in entries if entry is not None]

    def _read(self, waiting: list[tuple[_ItemOptions, Text]], texts: list[str], *, query: bool) -> list[Entry]:
        """Tokenize texts of one side: queries or documents."""
        room = self._sides.limit(query) - self._sides.marker_tokens(query)
        fits = self.tokenizer.fit_each(texts, [asked.direction for asked, _ in waiting], room)
        return [
            self._from_text(asked, text, fitted) for (asked, _), text, fitted in zip(waiting, texts, fits, strict=True)
        ]

    def _from_text(self, asked: _ItemOptions, text: str, fitted: FittedText | ShoalError) -> Entry:
        if isinstance(fitted, ShoalError):
            return fitted
        ids, skip = fitted.ids, asked.skip
        truncated = fitted.total > len(ids)
        if truncated:
            if not asked.truncate:
                marks = self._sides.marker_tokens(asked.query)
                return too_long_error(fitted.total + marks, fitted.exact, self._sides.limit(asked.query))
            if skip and asked.direction == "left":
                skip = max(len(self.tokenizer.prefix), skip - self._count_lost_tokens(text, fitted, skip))
        if not self._sides.differ:
            return self._prepare_item(asked, ids, skip, truncated, len(ids))
        ids = self._sides.insert_marker(ids, asked.query, after=len(self.tokenizer.prefix))
        return self._prepare_item(asked, self._sides.pad_query(ids, asked.query), skip, truncated, len(ids))

    def _count_lost_tokens(self, text: str, fitted: FittedText, skip: int) -> int:
        """Return how many tokens were cut off on the left; only the first `skip` matter."""
        lost = fitted.total - len(fitted.ids)
        if fitted.exact or lost >= skip:
            return lost
        whole = len(text) <= most_chars(self.spec.max_tokens)
        return len(self.tokenizer.encode([text])[0]) - len(fitted.ids) if whole else skip

    def _from_ids(self, asked: _ItemOptions, ids: list[int]) -> Entry:
        if asked.added is not None:
            return prompts.prompt_with_ids_error(asked.added)
        if not ids:
            return EmptyInput("an empty list of token ids gives no vector; send at least one", param="input")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            return InvalidValue(
                f"token id {bad} is outside this model's vocabulary (0 to {self._vocab_size - 1}). LangChain's "
                "OpenAIEmbeddings sends tiktoken's ids: set its check_embedding_ctx_length=False to send text",
                param="input",
            )
        limit = self._sides.limit(asked.query)
        truncated = len(ids) > limit
        if truncated:
            if not asked.truncate:
                return too_long_error(len(ids), True, limit)
            ids = ids[:limit] if asked.direction == "right" else ids[-limit:]
        return self._prepare_item(asked, ids, 0, truncated, len(ids))

    def _prepare_item(self, asked: _ItemOptions, ids: list[int], skip: int, truncated: bool, tokens: int) -> Entry:
        if not ids:
            if self.spec.frame_tokens:
                return EmptyInput("the model's tokenizer makes no token of this text", param="input")
            ids = [self.spec.pad_id]  # the engine needs a token; `finish` ignores it
        tensor = np.array(ids, dtype=np.int64)
        row = AskedRow(asked.shape, skip, tokens, asked.kinds, asked.query)
        return Prepared(
            tensors={IDS: tensor},
            cost=len(ids),
            group=asked.group,
            outputs=asked.outputs,
            tokens=tokens,
            truncated=truncated,
            key=(tensor.tobytes(), row),
            extra=row,
        )


def _local_pooling(spec: TextSpec) -> str | None:
    """Return the pooling left to do here; None if the engine returns sentence vectors."""
    if spec.pooled != pooling.TOKENS:
        return None
    pooling.check_modes(spec.pooling)
    for module in spec.modules:
        if module != "normalize":
            raise ModelFileError(
                f"a {module} follows the pooling, but the served graph ends in token vectors: serve one that gives "
                "sentence_embedding",
                file="modules.json",
            )
    return spec.pooling
