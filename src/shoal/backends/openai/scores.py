"""POST /score, /rerank and /classify: pairs and texts to scores.

Sources: vLLM's pooling routes; Infinity, Jina, Cohere and Voyage for /rerank; Infinity for /classify. Nobody but vLLM
and Infinity gives raw scores, each by a field of its own; both are sent, and only where raw ones are wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.backends.base.http_answer import Answer
from shoal.backends.base.response_limit import ANY_LABEL_BYTES, MAX_VECTOR_WIDTH, ResponseLimit
from shoal.backends.openai.calls import Rows, sort_by_index
from shoal.backends.openai.wire import ClassesWire, ClassWire, LabelWire, ScoresWire
from shoal.decoding import json_decoder
from shoal.errors import UpstreamFailed
from shoal.types import Vectors

_SCORES = json_decoder(ScoresWire)
_CLASSES = json_decoder(ClassesWire)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
_NUMBER = re.compile(r"(\d+)$")

T = TypeVar("T")


class ScoreCalls:
    """vLLM's /score: the pairs of everybody in one call, to float32 [items, 1]."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.output = "scores"

    def group(self, item: Any) -> Hashable | None:
        return "pairs" if isinstance(item, tuple) else None

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        first, second = ([pair[side] for pair in items] for side in (0, 1))
        return {"model": model, "text_1": first, "text_2": second, **_vllm_options(options)}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        return ResponseLimit.of_entries(count, 1, told=sent)

    def adapt_to_refusal(self, answer: Answer) -> bool:
        return False

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        return _read_scores(answer, len(items), where)


class RerankCalls:
    """/rerank: one query with documents of everybody who asks it, to float32 [items, 1].

    All documents are asked for and none to be repeated, by fields that not every server knows: those that it refuses
    by name are left out from then on.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.output = "scores"
        self._fields = {"top_n", "return_documents"}

    def group(self, item: Any) -> Hashable | None:
        return ("query", item[0]) if isinstance(item, tuple) else None

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        values = {"top_n": len(items), "return_documents": False}
        told = {name: value for name, value in values.items() if name in self._fields}
        documents = [document for _, document in items]
        return {"model": model, "query": items[0][0], "documents": documents, **told, **_rerank_options(options)}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        return ResponseLimit.of_entries(count, 1, told=sent)  # some give the documents back, asked or not

    def adapt_to_refusal(self, answer: Answer) -> bool:
        refused = {name for name in self._fields if name in answer.raw_message}
        self._fields -= refused
        return bool(refused)

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        return _read_scores(answer, len(items), where)


class LabelNames:
    """Names of a model's classes in the order of its scores, as far as they are known. Servers that score every name
    have no order of their own: then it is that of the names, numbers in them by their value."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names: list[str | None] = list(names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """A class whose name the server has not told has that of transformers."""
        return tuple(f"LABEL_{place}" if name is None else name for place, name in enumerate(self._names))

    @property
    def longest_names(self) -> bytes:
        """What the names in an answer are at most."""
        # Of one class the name is not looked at; of several, one at a time may be told that is not known yet.
        spare = b" " * ANY_LABEL_BYTES if len(self._names) < 2 or None in self._names else b""
        return spare + "".join(name or "" for name in self._names).encode()

    def order_scores(self, row: ClassWire | list[LabelWire], where: str) -> list[float]:
        """The scores of an input. Raises UpstreamFailed for other labels than before."""
        if isinstance(row, list):
            return self._by_name({each.label: _number(each.score) for each in row}, len(row), where)
        scores = [_number(each) for each in row.probs]
        self._check_count(len(scores), where)
        if row.label is not None and scores:
            # The first of the largest, which is what an argmax takes.
            self._names[max(range(len(scores)), key=lambda place: _sort_key(scores[place]))] = row.label
        return scores

    def _by_name(self, scores: Mapping[str, float], count: int, where: str) -> list[float]:
        if not self._names or (len(self._names) == 1 and len(scores) == 1):
            self._names = [*sorted(scores, key=_natural_key)]
        if not scores or set(scores) != set(self._names) or len(scores) != count:
            raise UpstreamFailed(
                f"the server at {where} scores other labels than {', '.join(self.class_names[:10]) or 'any'}"
            )
        return [scores[name] for name in self._names if name is not None]

    def _check_count(self, count: int, where: str) -> None:
        self._names = self._names or [None] * count
        if not count or count != len(self._names):
            raise UpstreamFailed(f"the server at {where} scores {count} labels, and the model has {len(self._names)}")


class ClassifyCalls:
    """/classify of vLLM, or of Infinity: float32 [items, labels] in the order of `labels`, which learns the names."""

    def __init__(self, path: str, labels: LabelNames) -> None:
        self.path = path
        self.output = "scores"
        self.labels = labels

    def group(self, item: Any) -> Hashable | None:
        return "pairs" if isinstance(item, tuple) else "texts"

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        inputs = [list(item) if isinstance(item, tuple) else item for item in items]
        return {"model": model, "input": inputs, **_vllm_options(options)}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        labels = len(self.labels.class_names) or MAX_VECTOR_WIDTH
        return ResponseLimit.of_entries(count, labels, named=labels, names=self.labels.longest_names, told=sent)

    def adapt_to_refusal(self, answer: Answer) -> bool:
        return False

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        told = _decode(_CLASSES, answer, where)
        found = [(row.index if isinstance(row, ClassWire) else None, row) for row in told.data]
        rows = [self.labels.order_scores(row, where) for row in sort_by_index(found, len(items), where)]
        return Rows(_floats(rows), told.usage.input_token_count if told.usage is not None else 0)


def _vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a task in the words of /score and /classify."""
    told: dict[str, Any] = {}
    if options.get("raw_scores"):
        told["use_activation"] = False
    if options.get("truncate"):
        told["truncate_prompt_tokens"] = -1
        told["truncation_side"] = options.get("truncation_direction", "right")
    return told


def _rerank_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """In the words of /rerank: Infinity's and vLLM's, Jina's and Voyage's, Cohere's."""
    told: dict[str, Any] = {}
    if options.get("raw_scores"):
        told |= {"raw_scores": True, "use_activation": False}
    if "truncate" in options:
        told["truncation"] = options["truncate"]
    if "max_document_tokens" in options:
        told["max_tokens_per_doc"] = options["max_document_tokens"]
    return told


def _read_scores(answer: Answer, count: int, where: str) -> Rows:
    told = _decode(_SCORES, answer, where)
    listed = told.results if told.results is not None else told.data or []
    found = [(each.index, each.relevance_score if each.score is None else each.score) for each in listed]
    return Rows(_floats([[_number(score)] for score in sort_by_index(found, count, where)]), told.input_token_count)


def _decode(decoder: msgspec.json.Decoder[T], answer: Answer, where: str) -> T:
    try:
        return decoder.decode(answer.body)
    except _UNREADABLE as error:
        raise UpstreamFailed(f"the server at {where} answered what are no scores: {error}") from None


def _floats(rows: Sequence[Sequence[float]]) -> Vectors:
    with np.errstate(over="ignore"):  # what no float32 holds becomes an infinity, which fails its own row alone
        return np.asarray(rows, dtype=np.float32)


def _number(score: float | None) -> float:
    """Null stands for NaN, which fails its own row later."""
    return math.nan if score is None else score


def _sort_key(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _natural_key(label: str) -> tuple[str, int, str]:
    """LABEL_10 after LABEL_9."""
    number = _NUMBER.search(label)
    return (label[: number.start()], int(number[1]), label) if number is not None else (label, -1, label)
