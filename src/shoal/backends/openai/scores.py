"""POST /score, /rerank and /classify: scores of pairs and texts.

Sources: vLLM's pooling routes; Infinity, Jina, Cohere and Voyage for /rerank; Infinity for /classify. Only vLLM and
Infinity return raw scores, each by its own field; both fields are sent, and only to request raw scores.
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
    """RouteCalls for vLLM's /score: float32 [items, 1]. Any pairs may share a call."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.output = "scores"

    def group(self, item: Any) -> Hashable | None:
        return "pairs" if isinstance(item, tuple) else None

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        first, second = ([pair[side] for pair in items] for side in (0, 1))
        return {"model": model, "text_1": first, "text_2": second, **_vllm_options(options)}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        return ResponseLimit.of_entries(count, 1, texts=sent)

    def adapt_to_refusal(self, answer: Answer) -> bool:
        return False

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        return _read_scores(answer, len(items), where)


class RerankCalls:
    """RouteCalls for /rerank: float32 [items, 1]. Pairs of one query share a call, across requests.

    Fields request the scores of all documents and no document texts. Not every server knows them: a field that the
    server rejects by name is omitted from then on.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.output = "scores"
        self._fields = {"top_n", "return_documents"}

    def group(self, item: Any) -> Hashable | None:
        return ("query", item[0]) if isinstance(item, tuple) else None

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]:
        values = {"top_n": len(items), "return_documents": False}
        fields = {name: value for name, value in values.items() if name in self._fields}
        documents = [document for _, document in items]
        return {"model": model, "query": items[0][0], "documents": documents, **fields, **_rerank_options(options)}

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit:
        return ResponseLimit.of_entries(count, 1, texts=sent)  # some servers always return the documents

    def adapt_to_refusal(self, answer: Answer) -> bool:
        refused = {name for name in self._fields if name in answer.raw_message}
        self._fields -= refused
        return bool(refused)

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        return _read_scores(answer, len(items), where)


class LabelNames:
    """The known class names of a model, in the order of its scores. Servers that return scores by name have no order;
    the names are then sorted, with numbers in them by value."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names: list[str | None] = list(names)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names; a class with an unknown name gets the default of transformers, `LABEL_<n>`."""
        return tuple(f"LABEL_{place}" if name is None else name for place, name in enumerate(self._names))

    @property
    def longest_names(self) -> bytes:
        """Bytes at least as long as the names in one answer."""
        # The name of a single class is not read; among several, an answer may have one that is not known yet.
        spare = b" " * ANY_LABEL_BYTES if len(self._names) < 2 or None in self._names else b""
        return spare + "".join(name or "" for name in self._names).encode()

    def order_scores(self, row: ClassWire | list[LabelWire], where: str) -> list[float]:
        """Return the scores of an input in class order. Raises UpstreamFailed if the labels change."""
        if isinstance(row, list):
            return self._by_name({each.label: _number(each.score) for each in row}, len(row), where)
        scores = [_number(each) for each in row.probs]
        self._check_count(len(scores), where)
        if row.label is not None and scores:
            # The first maximum, as argmax picks it.
            self._names[max(range(len(scores)), key=lambda place: _sort_key(scores[place]))] = row.label
        return scores

    def _by_name(self, scores: Mapping[str, float], count: int, where: str) -> list[float]:
        if not self._names or (len(self._names) == 1 and len(scores) == 1):
            self._names = [*sorted(scores, key=_natural_key)]
        if not scores or set(scores) != set(self._names) or len(scores) != count:
            raise UpstreamFailed(
                f"the server at {where} scores labels other than {', '.join(self.class_names[:10]) or 'any'}"
            )
        return [scores[name] for name in self._names if name is not None]

    def _check_count(self, count: int, where: str) -> None:
        self._names = self._names or [None] * count
        if not count or count != len(self._names):
            raise UpstreamFailed(f"the server at {where} scores {count} labels, but the model has {len(self._names)}")


class ClassifyCalls:
    """RouteCalls for /classify of vLLM or Infinity: float32 [items, labels] in the order of `labels`, which collects
    the names."""

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
        return ResponseLimit.of_entries(count, labels, named=labels, names=self.labels.longest_names, texts=sent)

    def adapt_to_refusal(self, answer: Answer) -> bool:
        return False

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows:
        parsed = _decode(_CLASSES, answer, where)
        found = [(row.index if isinstance(row, ClassWire) else None, row) for row in parsed.data]
        rows = [self.labels.order_scores(row, where) for row in sort_by_index(found, len(items), where)]
        return Rows(_floats(rows), parsed.usage.input_token_count if parsed.usage is not None else 0)


def _vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a task as fields of /score and /classify."""
    fields: dict[str, Any] = {}
    if options.get("raw_scores"):
        fields["use_activation"] = False
    if options.get("truncate"):
        fields["truncate_prompt_tokens"] = -1
        fields["truncation_side"] = options.get("truncation_direction", "right")
    return fields


def _rerank_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as fields of /rerank: those of Infinity and vLLM, of Jina and Voyage, and of Cohere."""
    fields: dict[str, Any] = {}
    if options.get("raw_scores"):
        fields |= {"raw_scores": True, "use_activation": False}
    if "truncate" in options:
        fields["truncation"] = options["truncate"]
    if "max_document_tokens" in options:
        fields["max_tokens_per_doc"] = options["max_document_tokens"]
    return fields


def _read_scores(answer: Answer, count: int, where: str) -> Rows:
    parsed = _decode(_SCORES, answer, where)
    listed = parsed.results if parsed.results is not None else parsed.data or []
    found = [(each.index, each.relevance_score if each.score is None else each.score) for each in listed]
    return Rows(_floats([[_number(score)] for score in sort_by_index(found, count, where)]), parsed.input_token_count)


def _decode(decoder: msgspec.json.Decoder[T], answer: Answer, where: str) -> T:
    try:
        return decoder.decode(answer.body)
    except _UNREADABLE as error:
        raise UpstreamFailed(f"the server at {where} returned invalid scores: {error}") from None


def _floats(rows: Sequence[Sequence[float]]) -> Vectors:
    with np.errstate(over="ignore"):  # overflow to infinity fails only its own row
        return np.asarray(rows, dtype=np.float32)


def _number(score: float | None) -> float:
    """Return NaN for null; it fails its own row later."""
    return math.nan if score is None else score


def _sort_key(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _natural_key(label: str) -> tuple[str, int, str]:
    """Return a sort key that puts LABEL_10 after LABEL_9."""
    number = _NUMBER.search(label)
    return (label[: number.start()], int(number[1]), label) if number is not None else (label, -1, label)
