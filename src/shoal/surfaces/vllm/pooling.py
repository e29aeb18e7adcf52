"""POST /pooling of vLLM, which returns whatever a model computes for texts: vectors or label scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import InvalidValue, ModelNotFound, ModelNotReady, Unsupported
from shoal.http.json import decoder
from shoal.http.request import Body, Headers, Options, Reply, Request
from shoal.surfaces.shared import (
    default_models,
    input_parsing,
    matrices,
    token_ids,
    truncation,
    vector_encoding,
    vector_kinds,
)
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.vllm import score_replies
from shoal.surfaces.vllm.wire import PoolingRequest
from shoal.types import Array, Classify, Embed, Result, TaskKind, TextItem, TextPair, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


class Pooling:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._token_ids = options.token_ids
        self._decode = decoder.Decoder(PoolingRequest, "scoring", options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        inputs = input_parsing.parse_texts(payload.input, self._limit)
        card = await self._find_model(request, payload)
        result: Result
        token_headers: Headers = []
        if payload.task == "classify" or (payload.task is None and not _can_embed(card)):
            result = await run_task(self._gateway, request, _build_classify(payload, card, inputs))
            rows: Array = result.scores
            token_rows: list[Array] = []
        else:
            inputs, token_headers = await token_ids.resolve_token_ids(
                inputs, payload.model or "", card, self._token_ids
            )
            result = await run_task(self._gateway, request, _build_embed(payload, card, inputs))
            rows, token_rows = result.vectors, result.token_vectors or result.multi_vectors
            matrices.check_matrices(token_rows, "input")
        base64 = payload.encoding_format == "base64"
        body = await (
            _encode_token_rows(token_rows, base64=base64) if token_rows else _encode_rows(rows, base64=base64)
        )
        reply = score_replies.build_reply(request, "pool", card.name, body, result)
        return Reply(reply.status, [*reply.headers, *token_headers], reply.body)

    async def _find_model(self, request: Request, payload: PoolingRequest) -> ModelCard:
        """Find the named model, else the task's default.

        Without a task, it is the default for embedding, or for classification if no model embeds.
        """
        default: TaskKind = "classify" if payload.task == "classify" else "embed"
        try:
            return await default_models.find_default_model(self._gateway, request, payload.model, default)
        except (ModelNotFound, ModelNotReady):
            if payload.model or payload.task is not None:
                raise
        return await default_models.find_default_model(self._gateway, request, None, "classify")


def _can_embed(card: ModelCard) -> bool:
    return card.facts is None or "embed" in card.facts.tasks


def _build_classify(payload: PoolingRequest, card: ModelCard, inputs: list[TextItem]) -> Classify:
    texts: list[str | TextPair] = [each for each in inputs if isinstance(each, str)]
    if len(texts) != len(inputs):
        raise InvalidValue("Token ids cannot be classified; send texts.", param="input")
    truncate, direction = truncation.parse_prompt_truncation(
        card, payload.truncate_prompt_tokens, payload.truncation_side
    )
    return Classify(
        model=card.name,
        inputs=texts,
        raw_scores=payload.use_activation is False,
        truncate=truncate,
        truncation_direction=direction,
    )


def _build_embed(payload: PoolingRequest, card: ModelCard, inputs: list[TextItem]) -> Embed:
    truncate, direction = truncation.parse_prompt_truncation(
        card, payload.truncate_prompt_tokens, payload.truncation_side
    )
    kind = _choose_kind(payload, card)
    task = Embed(
        model=card.name,
        inputs=inputs,
        truncate=truncate,
        truncation_direction=direction,
        normalize=payload.use_activation is not False,
        dimensions=payload.dimensions,
        outputs=(kind,),
    )
    if kind == "multi":
        vector_kinds.check_late_interaction(task, "use_activation")
    elif kind == "tokens" and payload.dimensions is not None:
        raise Unsupported("'dimensions' does not apply to token vectors: omit it.", param="dimensions")
    if kind != "dense":
        matrices.check_inputs(card, inputs, "input")
    return task


def _choose_kind(payload: PoolingRequest, card: ModelCard) -> VectorKind:
    if payload.task != "token_embed":
        return vector_kinds.main_kind(card)
    return "multi" if card.facts is not None and "multi" in card.facts.vectors else "tokens"


async def _encode_rows(rows: Array, *, base64: bool) -> Body:
    def entry(index: int, row: Array) -> bytes:
        data = b'"%b"' % vector_encoding.encode_base64(row) if base64 else vector_encoding.encode_numbers(row)
        return _entry_head(index) + data + b"}"

    return await vector_encoding.encode_rows(vector_encoding.to_contiguous(rows), entry, b"[", b"]")


async def _encode_token_rows(token_rows: list[Array], *, base64: bool) -> Body:
    if not base64:
        return [b"[", *await matrices.encode_entries(token_rows, _entry_head), b"]"]

    def some(start: int, stop: int) -> bytes:
        made = [
            _entry_head(at) + b'"%b"}' % vector_encoding.encode_base64(matrices.take_matrix(token_rows, at))
            for at in range(start, stop)
        ]
        return b"[" + b",".join(made) + b"]"

    return await vector_encoding.encode_array(len(token_rows), some, 8)


def _entry_head(index: int) -> bytes:
    return b'{"index":%d,"object":"pooling","data":' % index
