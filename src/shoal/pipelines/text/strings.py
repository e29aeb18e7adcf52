"""Send texts as strings to models with their own tokenizer, and convert their rows to vectors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Row, Tensors, VectorSet
from shoal.errors import InvalidValue, ShoalError
from shoal.pipelines.outputs import PLAIN, check_finite, check_kinds
from shoal.pipelines.text import prompts
from shoal.pipelines.text.base import BasePipeline, Entry, TextInput
from shoal.pipelines.text.token_ids import find_ids_error
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.upstream_options import (
    TEXT,
    Count,
    Passes,
    TruncationPolicy,
    attach_counts,
    count_tokens,
    join_tensors,
    to_object_array,
)
from shoal.pipelines.vectors import Shape, resolve_shape, shape_rows
from shoal.types import Array, BatchTask, Direction, Embed, SparseVector, VectorKind

NIM_PASSES: Passes = frozenset({"truncate", "truncation_direction", "input_type", "dimensions"})
_NIM_ROLES = {"query": "query", "document": "passage"}


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


class _RowOptions(NamedTuple):
    """How to build an item's row; `shape` is the shaping that is left to do here."""

    shape: Shape
    kinds: tuple[VectorKind, ...]


class _ItemOptions(NamedTuple):
    """A task's options for each of its items. `prompt_field`: the field that requested a prompt."""

    prompt: str
    prompt_field: str | None
    truncate: bool
    direction: Direction
    row: _RowOptions
    outputs: tuple[str, ...]
    params: dict[str, Any]
    group: Hashable


class StringPipeline(BasePipeline[_ItemOptions, Count | None]):
    """Pipeline for one model that takes text: a batch is {"text": object array [rows] of str}, never padded.

    Items that request different kinds of vectors go in different calls, since servers have an endpoint for each kind.
    `tokenizer` only counts, which makes usage exact. Without one, usage is the model's own count (`spec.token_count`),
    or else an estimate of one token per 4 bytes. `normalize` False is the operator's setting to leave rows as the model
    returns them, whatever a request asks. `truncate` is the default for requests that do not say. Truncation by the
    model is detected only with a tokenizer and `spec.max_tokens`. `vocab_size` bounds token ids where there is no
    tokenizer; None: unknown, so that the model has to reject them.
    """

    def __init__(
        self,
        spec: StringSpec,
        *,
        truncate: bool,
        normalize: bool | None = None,
        tokenizer: TextTokenizer | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = tokenizer
        self._normalize = normalize
        self._passes = NIM_PASSES if spec.nim else spec.passes
        self._truncation = TruncationPolicy(
            self._passes, limit=spec.max_tokens if tokenizer is not None else 0, default=truncate
        )
        self._count_output = spec.token_count if tokenizer is None else ""
        self._names: dict[VectorKind, str] = {
            "dense": spec.output,
            "sparse": spec.sparse,
            "tokens": spec.tokens,
            "multi": spec.multi,
        }
        self._vocab_size = tokenizer.vocab_size if tokenizer is not None else vocab_size or 2**31
        super().__init__(max_tokens=self._truncation.max_counted, work="light" if tokenizer is None else "usual")

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {TEXT: join_tensors(batch, TEXT)}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]:
        count = len(batch)
        kinds = batch[0].extra.kinds  # all items of a group request the same kinds
        dense: list[Array | ShoalError] = []
        if "dense" in kinds:
            vectors = outputs[self.spec.output][:count].reshape(count, -1)
            dense = shape_rows(vectors, [item.extra.shape for item in batch])
        rows: Sequence[Row | ShoalError] = dense
        if kinds != PLAIN:
            rows = [self._build_vector_set(outputs, place, kinds, dense) for place in range(count)]
        return attach_counts(rows, outputs[self._count_output]) if self._count_output else rows

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
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize, truncate,
        truncation_direction, a kind of vectors)."""
        assert isinstance(task, Embed)
        kinds = task.outputs
        check_kinds(kinds, self.spec.kinds)
        prompt = self._prompt(task)
        gives_raw = "normalize" in self._passes or not self.spec.normalized
        shape = resolve_shape(task, self.spec.dimension, gives_raw=gives_raw, normalize=self._normalize)
        self._truncation.check(task)
        params = self._params(task, shape)
        names = tuple([self._names[kind] for kind in kinds])
        sent = tuple(params.items())
        return _ItemOptions(
            prompt=prompt,
            prompt_field=None if "prompt_name" in self._passes else prompts.find_prompt_field(task, prompt),
            truncate=self._truncation.should_truncate(task),
            direction=task.truncation_direction,
            row=_RowOptions(self._remaining_shape(shape), kinds),
            outputs=(*names, self._count_output) if self._count_output else names,
            params=params,
            group=sent if kinds == PLAIN else (sent, kinds),
        )

    def _params(self, task: Embed, shape: Shape) -> dict[str, Any]:
        passes, (dimensions, normalize) = self._passes, shape
        params = self._truncation.params(task)
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

    def _tokenize(self, inputs: Sequence[TextInput[_ItemOptions]]) -> list[Count | None]:
        if self.tokenizer is None:
            return [None] * len(inputs)
        return [
            count_tokens(fitted)
            for fitted in self.tokenizer.fit_each(
                [text for text, _, _ in inputs], ["right"] * len(inputs), [self._truncation.max_counted] * len(inputs)
            )
        ]

    def _prepare_text(self, item: TextInput[_ItemOptions], count: Count | None) -> Entry:
        return self._prepare_item(item.text, item.options, count)

    def _prepare_ids(self, ids: list[int], options: _ItemOptions) -> Entry:
        if not self.spec.ids:
            return InvalidValue(
                "the model accepts text, not token ids: send the text itself, or serve the model behind its tokenizer, "
                "with `tokenizer` set",
                param="input",
            )
        error = find_ids_error(
            ids, self._vocab_size, prompt_field=options.prompt_field, advice=": send the text itself"
        )
        if error is not None:
            return error
        return self._prepare_item(ids, options, Count(len(ids), True))

    def _prepare_item(self, item: str | list[int], options: _ItemOptions, count: Count | None) -> Entry:
        is_text = isinstance(item, str)
        weight = self._truncation.weigh(
            [item] if isinstance(item, str) else [], count, truncate=options.truncate, direction=options.direction
        )
        if isinstance(weight, ShoalError):
            return weight
        return Prepared(
            tensors={TEXT: to_object_array([item])},
            cost=weight.cost,
            group=options.group if is_text else ("ids", options.group),
            outputs=options.outputs,
            tokens=weight.tokens,
            truncated=weight.truncated,
            key=(item if is_text else tuple(item), options.group, options.row),
            extra=options.row,
            params=options.params,
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
