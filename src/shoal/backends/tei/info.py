"""The model and the limits of a text-embeddings-inference server, from GET /info.

Source: router/src/http/types.rs and router/src/lib.rs of huggingface/text-embeddings-inference (struct Info). Keys that
a version lacks have that server's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.backends.base.http_answer import Answer, quote_message, rejected_key_error
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, UpstreamFailed
from shoal.types import TaskKind, VectorKind

Kind = Literal["embedding", "splade", "reranker", "classifier"]
Count = Annotated[int, Meta(ge=1, le=2**53)]

DTYPES: Mapping[str, str] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the server may answer differently later."""


class EmbeddingWire(msgspec.Struct):
    pooling: str = ""


class LabelsWire(msgspec.Struct):
    id2label: dict[str, str] = {}


class ModelTypeWire(msgspec.Struct):
    """The type of the model: exactly one field is set."""

    embedding: EmbeddingWire | None = None
    classifier: LabelsWire | None = None
    reranker: LabelsWire | None = None


class InfoWire(msgspec.Struct):
    model_type: ModelTypeWire
    model_id: str = ""
    model_sha: str | None = None
    model_dtype: str = ""
    served_model_name: str | None = None
    max_concurrent_requests: Count = 512
    max_input_length: Count | None = None
    max_batch_tokens: Count = 16384
    max_client_batch_size: Count = 32
    auto_truncate: bool = False
    version: str = ""


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """A server's model and limits.

    `labels`: of a classifier or reranker, by class number. `max_input_length`: tokens, including special ones.
    `max_batch_tokens`: tokens in one of the server's own batches. `max_client_batch_size`: inputs per call.
    `max_concurrent_requests`: inputs in flight across all calls and clients.
    """

    kind: Kind
    model_id: str
    served_name: str = ""
    revision: str = ""
    dtype: str = ""
    pooling: str = ""
    labels: tuple[str, ...] = ()
    max_input_length: int | None = None
    max_batch_tokens: int = 16384
    max_client_batch_size: int = 32
    max_concurrent_requests: int = 512
    auto_truncate: bool = False
    version: str = ""

    @property
    def embeds(self) -> bool:
        return self.kind in ("embedding", "splade")

    @property
    def tasks(self) -> tuple[TaskKind, ...]:
        if self.embeds:
            return ("embed",)
        return ("rerank", "classify") if self.kind == "reranker" else ("classify",)

    @property
    def vectors(self) -> tuple[VectorKind, ...]:
        """The vector kinds: sparse for a SPLADE model, dense and per token for other embedders."""
        if self.kind == "embedding":
            return ("dense", "tokens")
        return ("sparse",) if self.kind == "splade" else ()

    def same_model(self, other: Info) -> bool:
        """Whether both describe the same model; limits may differ."""
        return (self.kind, self.model_id, self.revision, self.dtype, self.pooling, self.labels) == (
            other.kind,
            other.model_id,
            other.revision,
            other.dtype,
            other.pooling,
            other.labels,
        )


_INFO = json_decoder(InfoWire)


def parse_info(answer: Answer, where: str) -> Info:
    """Parse the answer of GET /info. Raises UpstreamFailed for a temporary error, ConfigError for another kind of
    server or one that rejects Shoal's key."""
    if refused := rejected_key_error(answer, where):
        raise ConfigError(refused.message)
    if answer.status in TEMPORARY_STATUSES:
        raise UpstreamFailed(f"{where}/info returns status {answer.status}{quote_message(answer)}: it may be starting")
    if answer.status != 200:
        raise ConfigError(
            f"{where}/info returns status {answer.status}{quote_message(answer)}: this is not a"
            " text-embeddings-inference server; check the address (for a server with OpenAI's API, write"
            " openai+http://HOST:PORT/v1)"
        )
    try:
        parsed = _INFO.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where}/info is not an info of text-embeddings-inference ({error}): check the address"
        ) from None
    return _to_info(parsed, where)


def _to_info(parsed: InfoWire, where: str) -> Info:
    kind, labels, pooling = _parse_kind(parsed.model_type, where)
    return Info(
        kind=kind,
        model_id=parsed.model_id,
        served_name=parsed.served_model_name or "",
        revision=parsed.model_sha or "",
        dtype=DTYPES.get(parsed.model_dtype, parsed.model_dtype),
        pooling=pooling,
        labels=labels,
        max_input_length=parsed.max_input_length,
        max_batch_tokens=parsed.max_batch_tokens,
        max_client_batch_size=parsed.max_client_batch_size,
        max_concurrent_requests=parsed.max_concurrent_requests,
        auto_truncate=parsed.auto_truncate,
        version=parsed.version,
    )


def _parse_kind(model_type: ModelTypeWire, where: str) -> tuple[Kind, tuple[str, ...], str]:
    if model_type.embedding is not None:
        pooling = model_type.embedding.pooling
        return ("splade" if pooling == "splade" else "embedding"), (), pooling
    if model_type.reranker is not None:
        return "reranker", _labels(model_type.reranker, where) or ("LABEL_0",), ""
    if model_type.classifier is not None:
        labels = _labels(model_type.classifier, where)
        if not labels:
            raise ConfigError(f"{where}/info has a classifier without labels: add id2label to its config.json")
        return ("reranker" if len(labels) == 1 else "classifier"), labels, ""
    raise ConfigError(
        f"{where}/info has no known model_type (embedding, reranker, classifier): the server is too new for this"
        " version of Shoal"
    )


def _labels(parsed: LabelsWire, where: str) -> tuple[str, ...]:
    """Return the names of classes 0 to n-1. Raises ConfigError for duplicates: answers identify classes by name."""
    labels = tuple(label for _, label in sorted(parsed.id2label.items(), key=lambda each: _number(each[0])))
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"{where}/info has several classes with the same name, which the server's answers do not distinguish: give"
            " each a unique name in the model's config.json"
        )
    return labels


def _number(text: str) -> int:
    """Return a class number; a name that is not a number sorts last."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 2**53
