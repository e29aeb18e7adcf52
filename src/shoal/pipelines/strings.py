"""Texts sent as they are, to models that bring their own tokenizer, and their rows to vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.core.protocols import Counted, EngineFacts, Prepared, Tensors
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines import prompts
from shoal.pipelines.text import too_long
from shoal.pipelines.tokenizer import TextTokenizer
from shoal.pipelines.vectors import Shape, check_shape, shape_of, shape_rows
from shoal.types import Array, Direction, Embed, TextItem

TEXT = "text"
BYTES_PER_TOKEN = 4
"""For usage where nobody counts: what ordinary prose has. Admission takes 3, to be on the safe side."""

_NIM_ROLES = {"query": "query", "document": "passage"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StringSpec:
    """What is known of a model that reads texts.

    `normalized`: its rows are unit vectors as they come. `max_tokens`: where it cuts a text, at the right, as counted
    by the tokenizer that the pipeline is given; 0: not known. `output` names its vectors, `token_count` its count of
    the tokens read ("" where it gives none). `nim`: it takes `input_type`, `truncate` and `dimensions` as parameters
    and does what they say itself.
    """

    dimension: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    normalized: bool = False
    max_tokens: int = 0
    output: str = "embedding"
    token_count: str = ""
    nim: bool = False


class _Asked(NamedTuple):
    prompt: str
    truncate: bool
    direction: Direction
    shape: Shape
    params: dict[str, Any]


class _Count(NamedTuple):
    """Tokens of a text; a lower bound for one that is far too long."""

    total: int
    exact: bool


class StringPipeline:
    """Pipeline for one model that takes text: a batch is {"text": object array [rows] of str}, never padded.

    `tokenizer` only counts: usage is exact with it. Without one usage is what the model says (`spec.token_count`), or
    else an estimate, a token for 4 bytes. `normalize` False is the operator's word that rows stay as the model gives
    them, whatever a request asks. `truncate` is the default for requests that do not say; what a model cuts is known
    only with a tokenizer and `spec.max_tokens`.
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
        self._limit = spec.max_tokens if tokenizer is not None else 0
        self._told = spec.token_count if tokenizer is None else ""
        self._outputs = (spec.output, self._told) if self._told else (spec.output,)

    def check(self, task: Embed) -> None:
        """Raises InvalidValue (prompt_name, input_type, dimensions) and Unsupported (normalize, truncate,
        truncation_direction)."""
        self._prompt(task)
        check_shape(task, self.spec.dimension, gives_raw=not self.spec.normalized)
        if self.spec.nim or self._limit:
            return
        if task.truncate is False:
            raise Unsupported(
                "the model cuts long texts itself and does not tell: leave truncate out, or set `tokenizer` and "
                "`max_tokens` for the model, so that Shoal can refuse them",
                param="truncate",
            )
        if task.truncation_direction == "left":
            raise Unsupported(_ONLY_RIGHT, param="truncation_direction")

    def estimate(self, item: TextItem) -> int:
        if not isinstance(item, str):
            return max(1, len(item))
        size = len(item) if item.isascii() else len(item.encode(errors="surrogatepass"))
        return self._capped(max(1, size // 3))

    def prepare(self, items: Sequence[tuple[Embed, TextItem]]) -> list[Prepared | ShoalError]:
        answers: list[Prepared | ShoalError | None] = []
        texts: list[str] = []
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
            else:
                answers.append(
                    InvalidValue(
                        "the model reads text, not token ids: send the text itself, or serve the model that its "
                        "tokenizer feeds, with `tokenizer` set",
                        param="input",
                    )
                )
        for (i, asked), text, count in zip(waiting, texts, self._counts(texts), strict=True):
            answers[i] = self._prepared(asked, text, count)
        return [answer for answer in answers if answer is not None]

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        texts = np.empty(len(batch), dtype=object)
        texts[:] = [item.tensors[TEXT][0] for item in batch]
        return {TEXT: texts}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | Counted | ShoalError]:
        count = len(batch)
        rows = outputs[self.spec.output][:count].reshape(count, -1)
        vectors = shape_rows(rows, [item.extra for item in batch])
        if not self._told:
            return [*vectors]
        tokens = outputs[self._told][:count].reshape(count, -1)[:, 0].tolist()
        return [
            vector if isinstance(vector, ShoalError) else Counted(vector, int(read))
            for vector, read in zip(vectors, tokens, strict=True)
        ]

    def _prompt(self, task: Embed) -> str:
        if self.spec.nim and task.input_type is not None and task.prompt_name is None:
            prompts.check_role(task.input_type)  # the model puts the words of a role before a text itself
            return ""
        return prompts.resolve(self.spec, task.prompt_name, task.input_type)

    def _asked(self, task: Embed) -> _Asked | ShoalError:
        try:
            prompt = self._prompt(task)
        except ShoalError as error:
            return error
        truncate = self.truncate if task.truncate is None else task.truncate
        shape = shape_of(task, self.spec.dimension, self._normalize)
        params: dict[str, Any] = {}
        if self.spec.nim:
            if task.input_type is not None:
                params["input_type"] = _NIM_ROLES[task.input_type]
            end = "START" if task.truncation_direction == "left" else "END"
            params["truncate"] = end if truncate else "NONE"
            if shape[0] is not None:
                params["dimensions"] = shape[0]
        return _Asked(prompt, truncate, task.truncation_direction, shape, params)

    def _counts(self, texts: list[str]) -> list[_Count | None]:
        """The tokens of each text; None where nobody can count them."""
        tokenizer = self.tokenizer
        if tokenizer is None or not texts:
            return [None] * len(texts)
        try:
            if self._limit:
                fits = tokenizer.fit(texts, ["right"] * len(texts), self._limit)
                return [_Count(one.total, one.exact) for one in fits]
            return [_Count(len(ids), True) for ids in tokenizer.encode(texts)]
        except Exception:  # the tokenizers library raises plain Exception; a text that it cannot read is only estimated
            return [None] if len(texts) == 1 else [self._counts([text])[0] for text in texts]

    def _prepared(self, asked: _Asked, text: str, count: _Count | None) -> Prepared | ShoalError:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return InvalidValue("the text holds half of a surrogate pair, which UTF-8 cannot carry", param="input")
        truncated = count is not None and 0 < self._limit < count.total
        if truncated and count is not None and (error := self._refusal(asked, count)):
            return error
        tokens = max(1, size // BYTES_PER_TOKEN) if count is None else self._capped(count.total)
        group = tuple(asked.params.items())
        item = np.empty(1, dtype=object)
        item[0] = text
        return Prepared(
            tensors={TEXT: item},
            cost=self._capped(max(1, size // 3)) if count is None else max(1, tokens),
            group=group,
            outputs=self._outputs,
            tokens=tokens,
            truncated=truncated,
            key=(text, group, asked.shape),
            extra=asked.shape,
            params=asked.params,
        )

    def _refusal(self, asked: _Asked, count: _Count) -> ShoalError | None:
        """Why a text that is too long cannot be cut as it was asked for; None when it can."""
        if not asked.truncate:
            return too_long(count.total, count.exact, self._limit)
        if asked.direction == "left" and not self.spec.nim:
            return Unsupported(_ONLY_RIGHT, param="truncation_direction")
        return None

    def _capped(self, tokens: int) -> int:
        return min(tokens, self._limit) if self._limit else tokens


_ONLY_RIGHT = (
    "the model cuts long texts at their end: leave truncation_direction out, or send the end of the text alone"
)
