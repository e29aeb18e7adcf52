"""Texts and token ids to the tensors of an encoder, and its rows to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Tensors, round_up
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, ShoalError, TooLong
from shoal.pipelines import pooling, prompts
from shoal.pipelines.tokenizer import CHARS_PER_TOKEN, Fitted, TextTokenizer, most_chars
from shoal.pipelines.vectors import Shape, check_shape, shape_of, shape_rows
from shoal.types import Array, Direction, Embed, TextItem, TextSpec

INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask"})


class _Asked(NamedTuple):
    """What a task asks of each of its items. `added` is the field that named a prompt; `skip`: tokens of the prompt
    that pooling leaves out."""

    prompt: str
    added: str | None
    skip: int
    truncate: bool
    direction: Direction
    shape: Shape


class _Extra(NamedTuple):
    shape: Shape
    skip: int


class TextPipeline:
    """Pipeline for one text model, with the vectors that sentence-transformers 6 gives for the same files: texts are
    taken as they are, blanks included, with the prompt before them.

    Every item needs the output `spec.pooled` alone and may share an engine call with every other: cutting to
    `dimensions` comes before normalising, so both are done here, in float32 whatever the engine's precision. Where
    that output is "token_embeddings", [rows, length, width], they are pooled here as well.
    `normalize` False is the operator's word that rows stay as the model gives them, whatever a request asks.
    `param` of an error names the field at fault, an item being "input". Raises ModelFileError when the tokenizer or the
    spec cannot be used.
    """

    def __init__(self, folder: Path, spec: TextSpec, *, truncate: bool, normalize: bool | None = None) -> None:
        if unknown := set(spec.inputs) - INPUTS:
            raise ModelFileError(f"inputs that no text gives: {', '.join(sorted(unknown))}", file="graph", key="inputs")
        masked = {prompt for prompt in spec.prompts.values() if prompt and not spec.include_prompt}
        self._modes = _pooled_here(spec)
        if masked and "pooling_mask" not in spec.inputs and self._modes is None:
            raise ModelFileError(
                "false needs a graph with a pooling_mask input; convert the model from its safetensors",
                file="1_Pooling/config.json",
                key="include_prompt",
            )
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = TextTokenizer(folder, spec.tokenizer, lower_case=spec.lower_case)
        self._vocab_size = spec.vocab_size or self.tokenizer.vocab_size
        self._skips = {prompt: self._prompt_length(prompt) for prompt in masked}
        self._gives_raw = self._modes is not None or not spec.ends_normalized or spec.pooled != spec.sentence_embedding
        self._normalize = normalize
        self._outputs = (spec.pooled,)
        self._read_whole = spec.max_tokens * CHARS_PER_TOKEN

    def check(self, task: Embed) -> None:
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize)."""
        self._prompt(task)
        check_shape(task, self.spec.dimension, gives_raw=self._gives_raw)

    def estimate(self, item: TextItem) -> int:
        """Never more than the model takes, except for a text so long that it is read in pieces: that one counts in
        full, so that nobody thinks its tokenising a small job."""
        if not isinstance(item, str):
            return max(1, len(item))
        frame = len(self.tokenizer.prefix) + len(self.tokenizer.suffix)
        if len(item) > self._read_whole:
            return frame + len(item) // 3
        size = len(item) if item.isascii() else len(item.encode(errors="surrogatepass"))
        return max(1, min(self.spec.max_tokens, frame + size // 3))

    def prepare(self, items: Sequence[tuple[Embed, TextItem]]) -> list[Prepared | ShoalError]:
        answers: list[Prepared | ShoalError | None] = []
        texts: list[str] = []
        directions: list[Direction] = []
        waiting: list[tuple[int, _Asked]] = []
        last: Embed | None = None
        asked: _Asked | ShoalError
        for task, item in items:
            if task is not last:
                asked, last = self._asked(task), task
            if isinstance(asked, ShoalError):
                answers.append(asked)
            elif isinstance(item, str):
                waiting.append((len(answers), asked))
                answers.append(None)
                texts.append(asked.prompt + item if asked.prompt else item)
                directions.append(asked.direction)
            else:
                answers.append(self._from_ids(asked, item))
        if texts:
            fits = self._fit(texts, directions)
            for (i, asked), text, fitted in zip(waiting, texts, fits, strict=True):
                answers[i] = self._from_text(asked, text, fitted)
        return [answer for answer in answers if answer is not None]

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        """int64 [rows, length], right-padded; rows past the batch hold one attended token, so that none divides by
        zero. A bucket is never a reason to go past the positions that the model has."""
        count = len(batch)
        rows = round_up(count, facts.size_buckets)
        lengths = np.ones((rows, 1), dtype=np.int64)
        lengths[:count, 0] = [item.cost for item in batch]
        longest = int(lengths.max())
        width = max(longest, min(round_up(longest, facts.length_buckets), self.spec.max_tokens))
        ids = np.full((rows, width), self.spec.pad_id, dtype=np.int64)
        for row, item in zip(ids, batch, strict=False):
            row[: item.cost] = item.tensors["input_ids"]
        positions = np.arange(width, dtype=np.int64)
        attended = positions < lengths
        tensors: dict[str, Array] = {"input_ids": ids}
        for name in self.spec.inputs:
            if name == "attention_mask":
                tensors[name] = attended.astype(np.int64)
            elif name == "token_type_ids":
                tensors[name] = np.zeros_like(ids)
            elif name == "position_ids":
                tensors[name] = np.tile(positions, (rows, 1))
            elif name == "pooling_mask":
                skips = np.zeros((rows, 1), dtype=np.int64)
                skips[:count, 0] = [item.extra.skip for item in batch]
                tensors[name] = (attended & (positions >= skips)).astype(np.int64)
        return tensors

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError]:
        rows = outputs[self.spec.pooled][: len(batch)]
        if self._modes is not None:
            rows = pooling.pool(rows, [item.cost for item in batch], [item.extra.skip for item in batch], self._modes)
        return shape_rows(rows, [item.extra.shape for item in batch])

    def _asked(self, task: Embed) -> _Asked | ShoalError:
        try:
            prompt = self._prompt(task)
        except ShoalError as error:
            return error
        added = None
        if task.prompt_name is not None:
            added = "prompt_name"
        elif task.input_type is not None and prompt:
            added = "input_type"
        return _Asked(
            prompt=prompt,
            added=added,
            skip=self._skips.get(prompt, 0),
            truncate=self.truncate if task.truncate is None else task.truncate,
            direction=task.truncation_direction,
            shape=shape_of(task, self.spec.dimension, self._normalize),
        )

    def _prompt(self, task: Embed) -> str:
        return prompts.resolve(self.spec, task.prompt_name, task.input_type)

    def _prompt_length(self, prompt: str) -> int:
        """As sentence-transformers counts it: the tokens of the prompt alone, without a special token at their end."""
        ids = self.tokenizer.fit([prompt], ["right"], self.spec.max_tokens)[0].ids
        return len(ids) - (ids[-1] in self.tokenizer.special_ids) if ids else 0

    def _fit(self, texts: list[str], directions: list[Direction]) -> list[Fitted | ShoalError]:
        try:
            return list(self.tokenizer.fit(texts, directions, self.spec.max_tokens))
        except (
            Exception
        ) as error:  # the tokenizers library raises plain Exception; which of the texts it was, it tells not
            if len(texts) == 1:
                return [InvalidValue(f"the model's tokenizer cannot read this text: {error}", param="input")]
            return [self._fit([t], [d])[0] for t, d in zip(texts, directions, strict=True)]

    def _from_text(self, asked: _Asked, text: str, fitted: Fitted | ShoalError) -> Prepared | ShoalError:
        if isinstance(fitted, ShoalError):
            return fitted
        ids, skip = fitted.ids, asked.skip
        if not ids:
            return EmptyInput("the model's tokenizer makes no token of this text", param="input")
        truncated = fitted.total > len(ids)
        if truncated:
            if not asked.truncate:
                return too_long(fitted.total, fitted.exact, self.spec.max_tokens)
            if skip and asked.direction == "left":
                skip = max(len(self.tokenizer.prefix), skip - self._lost(text, fitted, skip))
        return self._prepared(ids, asked.shape, skip, truncated)

    def _lost(self, text: str, fitted: Fitted, skip: int) -> int:
        """Tokens that were cut at the left, of which only the first `skip` matter."""
        lost = fitted.total - len(fitted.ids)
        if fitted.exact or lost >= skip:
            return lost
        whole = len(text) <= most_chars(self.spec.max_tokens)
        return len(self.tokenizer.encode([text])[0]) - len(fitted.ids) if whole else skip

    def _from_ids(self, asked: _Asked, ids: list[int]) -> Prepared | ShoalError:
        if asked.added is not None:
            return InvalidValue(
                f"{asked.added} puts a prompt before a text; token ids are used as they are given", param=asked.added
            )
        if not ids:
            return EmptyInput("an empty list of token ids gives no vector; send at least one", param="input")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            return InvalidValue(
                f"token id {bad} is outside this model's vocabulary (0 to {self._vocab_size - 1}). LangChain's "
                "OpenAIEmbeddings sends tiktoken's ids: set its check_embedding_ctx_length=False to send text",
                param="input",
            )
        limit = self.spec.max_tokens
        truncated = len(ids) > limit
        if truncated:
            if not asked.truncate:
                return too_long(len(ids), True, limit)
            ids = ids[:limit] if asked.direction == "right" else ids[-limit:]
        return self._prepared(ids, asked.shape, 0, truncated)

    def _prepared(self, ids: list[int], shape: Shape, skip: int, truncated: bool) -> Prepared:
        tensor = np.array(ids, dtype=np.int64)
        count = len(ids)
        return Prepared(
            tensors={"input_ids": tensor},
            cost=count,
            group=(),
            outputs=self._outputs,
            tokens=count,
            truncated=truncated,
            key=(tensor.tobytes(), skip, shape),
            extra=_Extra(shape, skip),
        )


def too_long(total: int, exact: bool, limit: int) -> TooLong:
    """The refusal of an input of `total` tokens, or of more where that is not `exact`."""
    amount = f"{total}" if exact else f"at least {total}"
    return TooLong(
        f"the input has {amount} tokens, the model takes at most {limit}; shorten it or send truncate=true",
        param="input",
    )


def _pooled_here(spec: TextSpec) -> str | None:
    """The pooling that is left to this side; None where the engine answers sentence vectors."""
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
