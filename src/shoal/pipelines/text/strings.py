"""Send texts as strings to models with their own tokenizer, and convert their rows to vectors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Row, Tensors, VectorSet, WorkWeight
from shoal.errors import EmptyInput, InvalidValue, ShoalError
from shoal.pipelines.jobs import Entry, OptionsCache, Text, prepare_in_order
from shoal.pipelines.outputs import PLAIN, check_finite, check_kinds
from shoal.pipelines.text import prompts
from shoal.pipelines.text.tokenizer import TextTokenizer, byte_size
from shoal.pipelines.upstream_options import (
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
from shoal.pipelines.vectors import Shape, check_shape, resolve_shape, shape_rows
from shoal.types import Array, BatchTask, Direction, Embed, Image, Item, SparseVector, VectorKind

NIM_PASSES: Passes = frozenset({"truncate", "truncation_direction", "input_type", "dimensions"})
_NIM_ROLES = {"query": "query", "document": "passage"}
_WHOLE: Shape = (None, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StringSpec:
    """What is known of a model that reads texts.

    `normalized`: its rows are already unit vectors. `max_tokens`: where it cuts a text, on the right unless told
    otherwise, counted with the pipeline's tokenizer; 0 if unknown. `kinds`: the kinds of vectors it returns. `output`
    names the dense ones, [rows, dimension]; `sparse` an object array [rows] of SparseVector; `tokens` and `multi`
    object arrays [rows] of float32 [l, width]; `token_count` its count of tokens read ("" if it returns none).
    `passes`: options that it applies itself, out of "truncate", "truncation_direction", "prompt_name", "input_type",
    "normalize" and "dimensions"; if it takes prompt names, Shoal sends the name and adds no prompt to the text. `nim`:
    it takes NIM_PASSES, named as in NVIDIA NIM's API. `ids`: it takes token ids, a list of int in place of a text, in
    separate calls.
    """

    dimension: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    normalized: bool = False
    max_tokens: int = 0
    kinds: tuple[VectorKind, ...] = PLAIN
    output: str = "embedding"
    sparse: str = "sparse_embedding"
    tokens: str = "token_embeddings"
    multi: str = "multi_vectors"
    token_count: str = ""
    passes: Passes = frozenset()
    nim: bool = False
    ids: bool = False


class _ItemOptions(NamedTuple):
    """A task's options for each of its items. `shape`: the shaping left to do here."""

    prompt: str
    added: str | None
    truncate: bool
    direction: Direction
    shape: Shape
    kinds: tuple[VectorKind, ...]
    outputs: tuple[str, ...]
    params: dict[str, Any]
    group: Hashable


class _Row(NamedTuple):
    shape: Shape
    kinds: tuple[VectorKind, ...]


class StringPipeline:
    """Pipeline for one model that takes text: a batch is {"text": object array [rows] of str}, never padded.

    Items that request different kinds of vectors go in different calls, since servers have an endpoint for each kind.
    `tokenizer` only counts, which makes usage exact. Without one, usage is the model's own count (`spec.token_count`),
    or else an estimate of one token per 4 bytes. `normalize` False is the operator's setting to leave rows as the model
    returns them, whatever a request asks. `truncate` is the default for requests that do not say. Truncation by the
    model is detected only with a tokenizer and `spec.max_tokens`.
    """

    def __init__(
        self,
        spec: StringSpec,
        *,
        truncate: bool,
        normalize: bool | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = tokenizer
        self._normalize = normalize
        self._passes = NIM_PASSES if spec.nim else spec.passes
        self._cutting = TruncationPolicy(
            self._passes, limit=spec.max_tokens if tokenizer is not None else 0, default=truncate
        )
        self._told = spec.token_count if tokenizer is None else ""
        self._names: dict[VectorKind, str] = {
            "dense": spec.output,
            "sparse": spec.sparse,
            "tokens": spec.tokens,
            "multi": spec.multi,
        }
        self._known: OptionsCache[_ItemOptions] = OptionsCache()
        self._ids_end = tokenizer.vocab_size if tokenizer is not None else 2**31

    @property
    def work(self) -> WorkWeight:
        return "light" if self.tokenizer is None else "usual"

    def check(self, task: BatchTask) -> None:
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize, truncate,
        truncation_direction, a kind of vectors)."""
        self._read_options(task)

    def estimate(self, item: Item) -> int:
        assert not isinstance(item, tuple | Image)
        if not isinstance(item, str):
            return max(1, len(item))
        return self._cutting.cap_tokens(max(1, byte_size(item) // 3))

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return prepare_in_order(items, asked=self._read_options, texts=self._from_texts, ids=self._from_ids)

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {TEXT: join_tensors(batch, TEXT)}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | CountedRow | ShoalError]:
        count = len(batch)
        kinds = batch[0].extra.kinds  # all items of a group request the same kinds
        dense: list[Array | ShoalError] = []
        if "dense" in kinds:
            vectors = outputs[self.spec.output][:count].reshape(count, -1)
            dense = shape_rows(vectors, [item.extra.shape for item in batch])
        rows: list[Row | ShoalError]
        rows = (
            [*dense]
            if kinds == PLAIN
            else [self._build_vector_set(outputs, place, kinds, dense) for place in range(count)]
        )
        return [*attach_counts(rows, outputs[self._told])] if self._told else [*rows]

    def _build_vector_set(
        self, outputs: Tensors, place: int, kinds: tuple[VectorKind, ...], dense: Sequence[Array | ShoalError]
    ) -> VectorSet | ShoalError:
        vector = dense[place] if dense else None
        if isinstance(vector, ShoalError):
            return vector
        found = {kind: outputs[self._names[kind]][place] for kind in kinds if kind != "dense"}
        sparse: SparseVector | None = found.pop("sparse", None)
        arrays = {kind: np.asarray(rows, dtype=np.float32) for kind, rows in found.items()}
        return check_finite(
            VectorSet(dense=vector, sparse=sparse, tokens=arrays.get("tokens"), multi=arrays.get("multi"))
        )

    def _prompt(self, task: Embed) -> str:
        """Return the prompt that Shoal puts before each text."""
        prompts.check_role(task.input_type)
        if "prompt_name" in self._passes:
            return ""
        if "input_type" in self._passes and task.input_type is not None and task.prompt_name is None:
            return ""  # the model adds the prompt of a role itself
        return prompts.resolve_prompt(self.spec, task.prompt_name, task.input_type)

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        assert isinstance(task, Embed)
        return self._known.get_or_compute(task, self._resolve_options)

    def _resolve_options(self, task: Embed) -> _ItemOptions:
        kinds = task.outputs
        check_kinds(kinds, self.spec.kinds)
        prompt = self._prompt(task)
        shape = _WHOLE
        if "dense" in kinds:
            gives_raw = "normalize" in self._passes or not self.spec.normalized
            check_shape(task, self.spec.dimension, gives_raw=gives_raw)
            shape = resolve_shape(task, self.spec.dimension, self._normalize)
        self._cutting.check(task)
        params = self._params(task, shape)
        names = tuple([self._names[kind] for kind in kinds])
        told = tuple(params.items())
        return _ItemOptions(
            prompt=prompt,
            added=None if "prompt_name" in self._passes else prompts.find_prompt_field(task, prompt),
            truncate=self._cutting.should_truncate(task),
            direction=task.truncation_direction,
            shape=self._remaining_shape(shape),
            kinds=kinds,
            outputs=(*names, self._told) if self._told else names,
            params=params,
            group=told if kinds == PLAIN else (told, kinds),
        )

    def _params(self, task: Embed, shape: Shape) -> dict[str, Any]:
        passes, (dimensions, normalize) = self._passes, shape
        params = self._cutting.params(task)
        name, role = task.prompt_name, task.input_type
        if "input_type" in passes:
            if role is not None:
                params["input_type"] = role
        elif role is not None and name is None:
            name = prompts.find_role_prompt(self.spec, role)
        if "prompt_name" in passes and name is not None:
            params["prompt_name"] = name
        if "dense" in task.outputs:
            if "normalize" in passes:
                params["normalize"] = normalize
            if "dimensions" in passes and dimensions is not None:
                params["dimensions"] = dimensions
        return _to_nim_params(params) if self.spec.nim else params

    def _remaining_shape(self, shape: Shape) -> Shape:
        """Return the shaping left to do here. Rows cut here are normalized again; cutting what the model already cut
        changes nothing."""
        dimensions, normalize = shape
        cut_here = dimensions is not None and "dimensions" not in self._passes
        return dimensions, normalize and (cut_here or "normalize" not in self._passes)

    def _from_texts(self, waiting: list[tuple[_ItemOptions, Text]]) -> list[Entry]:
        texts: list[str] = []
        for asked, item in waiting:
            assert isinstance(item, str)
            texts.append(asked.prompt + item if asked.prompt else item)
        return [
            self._from_text(asked, text, count)
            for (asked, _), text, count in zip(waiting, texts, self._count_tokens(texts), strict=True)
        ]

    def _count_tokens(self, texts: list[str]) -> list[Count | None]:
        """Return the token count of each text; None if it cannot be counted."""
        if self.tokenizer is None:
            return [None] * len(texts)
        fits = self.tokenizer.fit_each(texts, ["right"] * len(texts), self._cutting.counted)
        return [None if isinstance(fitted, ShoalError) else Count(fitted.total, fitted.exact) for fitted in fits]

    def _from_text(self, asked: _ItemOptions, text: str, count: Count | None) -> Entry:
        size = utf8_size(text)
        if isinstance(size, ShoalError):
            return size
        return self._prepare_item(asked, text, text, count, estimate_cost(size, count, self._cutting))

    def _from_ids(self, asked: _ItemOptions, ids: list[int]) -> Entry:
        if not self.spec.ids:
            return InvalidValue(
                "the model reads text, not token ids: send the text itself, or serve the model that its tokenizer "
                "feeds, with `tokenizer` set",
                param="input",
            )
        if asked.added is not None:
            return prompts.prompt_with_ids_error(asked.added)
        if not ids:
            return EmptyInput("an empty list of token ids gives no vector; send at least one", param="input")
        if min(ids) < 0 or max(ids) >= self._ids_end:
            bad = next(i for i in ids if not 0 <= i < self._ids_end)
            return InvalidValue(
                f"token id {bad} is outside this model's vocabulary (0 to {self._ids_end - 1}): send the text itself",
                param="input",
            )
        count = Count(len(ids), True)
        return self._prepare_item(asked, ids, tuple(ids), count, estimate_cost(0, count, self._cutting))

    def _prepare_item(
        self, asked: _ItemOptions, item: str | list[int], key: Hashable, count: Count | None, weight: tuple[int, int]
    ) -> Entry:
        truncated = self._cutting.must_truncate(count)
        if truncated and count is not None:
            error = self._cutting.refusal(count, asked.truncate, asked.direction)
            if error is not None:
                return error
        cost, tokens = weight
        row = _Row(asked.shape, asked.kinds)
        return Prepared(
            tensors={TEXT: to_object_array([item])},
            cost=cost,
            group=asked.group if isinstance(item, str) else ("ids", asked.group),
            outputs=asked.outputs,
            tokens=tokens,
            truncated=truncated,
            key=(key, asked.group, row),
            extra=row,
            params=asked.params,
        )


def _to_nim_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options to the parameters of NVIDIA NIM's embedding API."""
    end = "START" if params.get("truncation_direction") == "left" else "END"
    worded: dict[str, Any] = {"truncate": end if params["truncate"] else "NONE"}
    if "input_type" in params:
        worded["input_type"] = _NIM_ROLES[params["input_type"]]
    if "dimensions" in params:
        worded["dimensions"] = params["dimensions"]
    return worded
