"""/info of text-embeddings-inference: a model's card in the original's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shoal._version import __version__
from shoal.core.protocols import ModelFacts
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.shared import default_models
from shoal.surfaces.tei import wire

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ENCODE = msgspec.json.Encoder()
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_POOLINGS = {"lasttoken": "last_token"}


class TeiInfo:
    """Describes the server's main model, or a named one."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._options = options

    async def __call__(self, request: Request) -> Reply:
        card = default_models.find_main_model(self._gateway, request.query_parameter("model"))
        if card.facts is None:
            raise card.refusal()
        return Reply(200, [JSON], _ENCODE.encode(_build_info(card.name, card.facts, self._options)))


def model_type(facts: ModelFacts) -> wire.TeiModelType:
    """Return the type of a model: a reranker (one label), a classifier (several), or an embedder."""
    if {"rerank", "classify"} & set(facts.tasks):
        labels = wire.TeiLabels(
            id2label={str(number): label for number, label in enumerate(facts.labels)},
            label2id={label: number for number, label in enumerate(facts.labels)},
        )
        if "rerank" in facts.tasks:
            return wire.TeiModelType(reranker=labels)
        return wire.TeiModelType(classifier=labels)
    pooling = "splade" if default_models.is_sparse(facts) else _POOLINGS.get(facts.pooling, facts.pooling)
    return wire.TeiModelType(embedding=wire.TeiPooling(pooling=pooling))


def _build_info(name: str, facts: ModelFacts, options: Options) -> wire.TeiInfo:
    """Build the card. A model's own settings are in the details of its facts; the rest are the server's."""
    details = facts.details
    return wire.TeiInfo(
        model_id=facts.id or name,
        model_sha=facts.revision or None,
        model_dtype=_DTYPES.get(facts.precision, facts.precision),
        served_model_name=name,
        model_type=model_type(facts),
        max_concurrent_requests=details.get("max_queue_items", options.max_queue_items),
        max_input_length=facts.max_input_tokens or 0,
        max_batch_tokens=details.get("max_batch_tokens", options.max_batch_tokens),
        max_batch_requests=details.get("max_batch_size") or options.max_batch_size,
        max_client_batch_size=options.max_inputs,
        auto_truncate=details.get("truncate", options.truncate),
        tokenization_workers=1,
        version=__version__,
        sha=None,
        docker_label=None,
    )
