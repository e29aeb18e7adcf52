"""/embed, /embed_all, /embed_sparse and /similarity of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.core.input_errors import parse_input_index
from shoal.core.similarity import cosines
from shoal.errors import EmptyInput, InvalidValue, ShoalError, WrongType
from shoal.http.json import decoder
from shoal.http.request import Body, Options, Reply, Request
from shoal.surfaces.shared import default_models, matrices, token_ids, vector_encoding
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.tei import replies, token_vectors, wire
from shoal.types import Embed, Embedded, TextItem, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


class _TeiSimilarityRequest(wire.TeiSimilarityRequest, kw_only=True):
    """The object that `inputs` is gets decoded by itself, so that errors name its own fields."""

    inputs: msgspec.Raw  # type: ignore[assignment]


class TeiEmbed:
    """The endpoints that return or compare vectors."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        limit = self._limit = options.max_inputs
        self._gateway = gateway
        self._dense = decoder.Decoder(wire.TeiEmbedRequest, "tei", limit)
        self._inputs_decoder = decoder.Decoder(wire.TeiInputsRequest, "tei", limit)
        self._comparison = decoder.Decoder(_TeiSimilarityRequest, "tei", limit)
        self._sentences = decoder.Decoder(wire.TeiSentences, "tei", limit)

    async def embed(self, request: Request) -> Reply:
        payload = await self._dense.decode_async(request.body)
        normalize = payload.normalize is not False
        if payload.dimensions == 0:
            raise InvalidValue("Input validation error: `dimensions` should be positive", param="dimensions")
        inputs = _parse_inputs(payload.inputs, self._limit)
        requirement = default_models.NORMALIZED if normalize else default_models.DENSE
        card = await default_models.find_model(self._gateway, request, payload.model, requirement)
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=payload.prompt_name,
            truncate=payload.truncate,
            truncation_direction=replies.parse_direction(payload.truncation_direction),
            normalize=normalize,
            dimensions=payload.dimensions,
        )
        result = await run_task(self._gateway, request, task)
        vectors = vector_encoding.to_contiguous(result.vectors)
        body = await vector_encoding.encode_array(
            len(vectors), lambda start, stop: vector_encoding.encode_numbers(vectors[start:stop])
        )
        return _build_reply(request, card, inputs, result, body)

    async def embed_all(self, request: Request) -> Reply:
        """Return the vectors of all tokens, before pooling."""
        card, inputs, result = await self._embed_kind(request, "tokens", default_models.TOKENS)
        matrices.check_matrices(result.token_vectors, "inputs")
        return _build_reply(request, card, inputs, result, await token_vectors.encode_matrices(result.token_vectors))

    async def embed_sparse(self, request: Request) -> Reply:
        card, inputs, result = await self._embed_kind(request, "sparse", default_models.SPARSE)
        return _build_reply(request, card, inputs, result, await token_vectors.encode_sparse(result.sparse))

    async def similarity(self, request: Request) -> Reply:
        """Return the cosine similarity of each sentence with the source."""
        payload = await self._comparison.decode_async(request.body)
        compared = await self._sentences.decode_async(bytes(payload.inputs))
        if not compared.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty", param="inputs")
        inputs: list[TextItem] = [compared.source_sentence, *compared.sentences]
        replies.check_count(len(inputs), self._limit)
        _check_not_empty(inputs)
        parameters = payload.parameters or wire.TeiSimilarityParameters()
        card = await default_models.find_model(self._gateway, request, payload.model, default_models.DENSE)
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=parameters.prompt_name,
            truncate=parameters.truncate,
            truncation_direction=replies.parse_direction(parameters.truncation_direction),
            normalize=False,
        )
        try:
            result = await run_task(self._gateway, request, task)
        except ShoalError as error:
            raise _name_sentence(error) from None
        source, others = result.vectors[:1], result.vectors[1:]
        body = vector_encoding.encode_numbers(cosines(np.broadcast_to(source, others.shape), others))
        return _build_reply(request, card, inputs, result, body)

    async def _embed_kind(
        self, request: Request, kind: VectorKind, requirement: default_models.ModelRequirement
    ) -> tuple[ModelCard, list[TextItem], Embedded]:
        payload = await self._inputs_decoder.decode_async(request.body)
        inputs = _parse_inputs(payload.inputs, self._limit)
        card = await default_models.find_model(self._gateway, request, payload.model, requirement)
        if kind == "tokens":
            matrices.check_inputs(card, inputs, "inputs")
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=payload.prompt_name,
            truncate=payload.truncate,
            truncation_direction=replies.parse_direction(payload.truncation_direction),
            outputs=(kind,),
        )
        return card, inputs, await run_task(self._gateway, request, task)


def _build_reply(request: Request, card: ModelCard, inputs: Sequence[TextItem], result: Embedded, body: Body) -> Reply:
    headers = replies.build_headers(request, card, replies.count_characters(inputs), result)
    if list in set(map(type, inputs)):
        headers += token_ids.TAKEN
    return Reply(200, headers, body)


def _name_sentence(error: ShoalError) -> ShoalError:
    """Replace an error's input index by the field as sent, because source and sentences are one list of inputs."""
    place, message = parse_input_index(error)
    if place is None:
        return error
    return error.with_message(f"{f'sentences[{place - 1}]' if place else 'source_sentence'}: {message}")


def _parse_inputs(inputs: str | list[Any], limit: int) -> list[TextItem]:
    """Parse texts and lists of ids, in any mixture. One bare list of ids is one input, also if it is empty."""
    items: list[Any] = [inputs] if isinstance(inputs, str) else inputs
    kinds = set(map(type, items))
    if int in kinds or not items:
        if len(kinds) > 1:
            raise WrongType("'inputs' mixes bare token ids with other inputs; put them into a list.", param="inputs")
        items = [items]
    replies.check_count(len(items), limit)
    _check_not_empty(items)
    return items


def _check_not_empty(inputs: Sequence[TextItem]) -> None:
    if not all(inputs):
        raise EmptyInput(replies.EMPTY_INPUT, param="inputs")
