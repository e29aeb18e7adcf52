"""Convert texts and token ids to the tensors of an encoder, and its rows to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Row, Tensors
from shoal.errors import EmptyInput, ModelFileError, ShoalError
from shoal.pipelines import pooling
from shoal.pipelines.late_interaction import Sides
from shoal.pipelines.outputs import PLAIN, Heads, RowOptions, check_kinds
from shoal.pipelines.text import prompts
from shoal.pipelines.text.base import BasePipeline, Entry, TextInput
from shoal.pipelines.text.padding import IDS, check_inputs, pad_batch
from shoal.pipelines.text.token_ids import find_ids_error
from shoal.pipelines.text.tokenizer import (
    CHARS_PER_TOKEN,
    FittedText,
    TextTokenizer,
    identify_tokenizer,
    most_chars,
    too_long_error,
)
from shoal.pipelines.vectors import Shape, resolve_shape, shape_rows
from shoal.specs import TextSpec
from shoal.types import Array, BatchTask, Direction, Embed, VectorKind


class _ItemOptions(NamedTuple):
    """A task's options for each of its items. `prompt_field`: the field that requested a prompt. `skip`: prompt tokens
    to exclude from pooling. `limit`: maximum tokens of an item; `max_text_tokens`: those for a text and its special
    tokens."""

    prompt: str
    prompt_field: str | None
    skip: int
    limit: int
    max_text_tokens: int
    truncate: bool
    direction: Direction
    shape: Shape
    kinds: tuple[VectorKind, ...]
    query: bool
    outputs: tuple[str, ...]
    group: tuple[str, ...]
    adapter: int


class TextPipeline(BasePipeline[_ItemOptions, FittedText]):
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

    packed_type = FittedText

    def __init__(self, folder: Path, spec: TextSpec, *, truncate: bool, normalize: bool | None = None) -> None:
        check_inputs(spec)
        self.folder = folder
        masked = {prompt for prompt in spec.prompts.values() if prompt and not spec.include_prompt}
        self._modes = _local_pooling(spec)
        if masked and "pooling_mask" not in spec.inputs and self._modes is None:
            raise ModelFileError(
                "false requires a graph with a pooling_mask input; convert the model from its safetensors",
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
        self.tokenizer_id = identify_tokenizer(self.tokenizer, spec)
        self.tokenizer_bytes = self.tokenizer.size
        self._kinds = spec.kinds
        self._vocab_size = spec.vocab_size or self.tokenizer.vocab_size
        self._heads = Heads(spec)
        self._sides = Sides(spec.multi, spec.max_tokens)
        self._skips = {prompt: self._count_prompt_tokens(prompt) for prompt in masked}
        self._blank_zeros = not spec.frame_tokens and set(spec.modules) <= {"normalize"}
        self._pads_unattended = self._sides.fills_unattended or not spec.frame_tokens
        self._masks_pooling = "pooling_mask" in spec.inputs
        self._gives_raw = self._modes is not None or not spec.ends_normalized or spec.pooled != spec.sentence_embedding
        self._normalize = normalize
        super().__init__(
            max_tokens=spec.max_tokens,
            frame=len(self.tokenizer.prefix) + len(self.tokenizer.suffix),
            max_chars=spec.max_tokens * CHARS_PER_TOKEN,
        )

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        attended = None
        if self._pads_unattended:
            least = 1 if self.spec.frame_tokens or self._blank_zeros else 0
            attended = [max(item.extra.tokens, least) for item in batch]
        skips = [item.extra.skip for item in batch] if self._masks_pooling else ()
        adapters = [item.extra.adapter for item in batch] if self.spec.embedding_tasks else ()
        return pad_batch(batch, facts, self.spec, attended, skips, adapters)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | ShoalError]:
        kinds = {item.extra.kinds for item in batch}
        if kinds == {PLAIN}:
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
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize, a kind of vectors)."""
        assert isinstance(task, Embed)
        kinds = task.outputs
        check_kinds(kinds, self._kinds)
        prompt = prompts.resolve_prompt(self.spec, task.prompt_name, task.input_type)
        query = task.input_type == "query" and (self._sides.differ or "multi" in kinds)
        limit = self._sides.limit(query)
        return _ItemOptions(
            prompt=prompt,
            prompt_field=prompts.find_prompt_field(task, prompt),
            skip=self._skips.get(prompt, 0),
            limit=limit,
            max_text_tokens=limit - self._sides.marker_tokens(query),
            truncate=self.truncate if task.truncate is None else task.truncate,
            direction=task.truncation_direction,
            shape=resolve_shape(task, self.spec.dimension, gives_raw=self._gives_raw, normalize=self._normalize),
            kinds=kinds,
            query=query,
            outputs=self._heads.outputs(kinds),
            group=self._heads.group(kinds),
            adapter=prompts.resolve_adapter(self.spec, task.prompt_name, task.input_type),
        )

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Count as sentence-transformers does: the tokens of the prompt alone, without a special token at the end."""
        ids = self.tokenizer.fit([prompt], ["right"], self.spec.max_tokens)[0].ids
        return len(ids) - (ids[-1] in self.tokenizer.special_ids) if ids else 0

    def _tokenize(self, inputs: Sequence[TextInput[_ItemOptions]]) -> list[FittedText | ShoalError]:
        return self.tokenizer.fit_each(
            [text for text, _, _ in inputs],
            [options.direction for _, _, options in inputs],
            [options.max_text_tokens for _, _, options in inputs],
        )

    def _prepare_text(self, item: TextInput[_ItemOptions], fitted: FittedText) -> Entry:
        text, _, options = item
        ids, skip = fitted.ids, options.skip
        truncated = fitted.total > len(ids)
        if truncated:
            if not options.truncate:
                marks = options.limit - options.max_text_tokens
                return too_long_error(fitted.total + marks, fitted.exact, options.limit)
            if skip and options.direction == "left":
                skip = max(len(self.tokenizer.prefix), skip - self._count_lost_tokens(text, fitted, skip))
        tokens = len(ids)
        if self._sides.differ:
            ids = self._sides.insert_marker(ids, options.query, after=len(self.tokenizer.prefix))
            tokens = len(ids)
            ids = self._sides.pad_query(ids, options.query)
        return self._prepare_item(ids, options, skip, truncated, tokens)

    def _count_lost_tokens(self, text: str, fitted: FittedText, skip: int) -> int:
        """Return how many tokens were cut off on the left; only the first `skip` matter."""
        lost = fitted.total - len(fitted.ids)
        if fitted.exact or lost >= skip:
            return lost
        whole = len(text) <= most_chars(self.spec.max_tokens)
        return len(self.tokenizer.encode([text])[0]) - len(fitted.ids) if whole else skip

    def _prepare_ids(self, ids: list[int], options: _ItemOptions) -> Entry:
        advice = (
            ". LangChain's OpenAIEmbeddings sends tiktoken's ids: set its check_embedding_ctx_length=False to send text"
        )
        error = find_ids_error(ids, self._vocab_size, prompt_field=options.prompt_field, advice=advice)
        if error is not None:
            return error
        truncated = len(ids) > options.limit
        if truncated:
            if not options.truncate:
                return too_long_error(len(ids), True, options.limit)
            ids = ids[: options.limit] if options.direction == "right" else ids[-options.limit :]
        return self._prepare_item(ids, options, 0, truncated, len(ids))

    def _prepare_item(self, ids: list[int], options: _ItemOptions, skip: int, truncated: bool, tokens: int) -> Entry:
        if not ids:
            if self.spec.frame_tokens:
                return EmptyInput("the model's tokenizer produces no tokens for this text", param="input")
            ids = [self.spec.pad_id]  # the engine needs a token; `finish` ignores it
        tensor = np.array(ids, dtype=np.int64)
        row = RowOptions(options.shape, skip, tokens, options.kinds, options.query, options.adapter)
        return Prepared(
            tensors={IDS: tensor},
            cost=len(ids),
            group=options.group,
            outputs=options.outputs,
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
                f"a {module} follows the pooling, but the served graph ends in token vectors: serve one that returns "
                "sentence_embedding",
                file="modules.json",
            )
    return spec.pooling
