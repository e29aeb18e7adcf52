"""What text-embeddings-inference makes of vectors: /embed, /embed_all, /embed_sparse and /similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.core.placing import place_in
from shoal.core.similarity import cosines
from shoal.errors import EmptyInput, InvalidValue, ShoalError, WrongType
from shoal.surfaces import _matrices, _rows, _tei_models, _tei_replies, _tei_rows, _wire, _wire_tei
from shoal.surfaces._request import Body, Options, Reply, Request
from shoal.types import Embed, Embedded, TextItem, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


class TeiEmbed:
    """The endpoints that answer vectors, or compare them."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        limit = self._limit = options.max_inputs
        self._gateway = gateway
        self._dense = _wire.Decoder(_wire_tei.TeiEmbedRequest, "tei", "inputs", limit)
        self._other = _wire.Decoder(_wire_tei.TeiInputsRequest, "tei", "inputs", limit)
        # The list is inside of an object: it is taken out first, so that it can be decoded in turns.
        shell: Any = msgspec.defstruct(
            "TeiSimilarityRequest",
            [("inputs", msgspec.Raw)],
            bases=(_wire_tei.TeiSimilarityRequest,),
            kw_only=True,
        )
        self._comparison: _wire.Decoder[Any] = _wire.Decoder(shell, "tei")
        self._sentences = _wire.Decoder(_wire_tei.TeiSentences, "tei", "sentences", limit)

    async def embed(self, request: Request) -> Reply:
        asked = await self._dense.in_turns(request.body)
        normalize = asked.normalize is not False
        if asked.dimensions == 0:
            raise InvalidValue("Input validation error: `dimensions` should be positive", param="dimensions")
        inputs = _inputs(asked.inputs, self._limit)
        wanted = _tei_models.NORMALIZED if normalize else _tei_models.DENSE
        card = await _tei_models.find(self._gateway, request, asked.model, wanted)
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=asked.prompt_name,
            truncate=asked.truncate,
            truncation_direction=_tei_replies.direction(asked.truncation_direction),
            normalize=normalize,
            dimensions=asked.dimensions,
        )
        result = await self._run(request, task)
        vectors = _rows.contiguous(result.vectors)
        body = await _rows.array_of(len(vectors), lambda start, stop: _rows.numbers(vectors[start:stop]))
        return _reply(request, card, inputs, result, body)

    async def embed_all(self, request: Request) -> Reply:
        """The vectors of all tokens, as the model gives them before pooling."""
        card, inputs, result = await self._of_kind(request, "tokens", _tei_models.TOKENS)
        _matrices.check_matrices(result.token_vectors, "inputs")
        return _reply(request, card, inputs, result, await _tei_rows.matrices(result.token_vectors))

    async def embed_sparse(self, request: Request) -> Reply:
        card, inputs, result = await self._of_kind(request, "sparse", _tei_models.SPARSE)
        return _reply(request, card, inputs, result, await _tei_rows.sparse(result.sparse))

    async def similarity(self, request: Request) -> Reply:
        """The cosine of each sentence with the source."""
        asked = await self._comparison.in_turns(request.body)
        compared = await self._sentences.in_turns(bytes(asked.inputs))
        if not compared.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty", param="inputs")
        inputs: list[TextItem] = [compared.source_sentence, *compared.sentences]
        _tei_replies.check_count(len(inputs), self._limit)
        _check_not_empty(inputs)
        parameters = asked.parameters or _wire_tei.TeiSimilarityParameters()
        card = await _tei_models.find(self._gateway, request, asked.model, _tei_models.DENSE)
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=parameters.prompt_name,
            truncate=parameters.truncate,
            truncation_direction=_tei_replies.direction(parameters.truncation_direction),
            normalize=False,
        )
        try:
            result = await self._run(request, task)
        except ShoalError as error:
            raise _of_sentence(error) from None
        source, others = result.vectors[:1], result.vectors[1:]
        body = _rows.numbers(cosines(np.broadcast_to(source, others.shape), others))
        return _reply(request, card, inputs, result, body)

    async def _of_kind(
        self, request: Request, kind: VectorKind, wanted: _tei_models.Wanted
    ) -> tuple[ModelCard, list[TextItem], Embedded]:
        asked = await self._other.in_turns(request.body)
        inputs = _inputs(asked.inputs, self._limit)
        card = await _tei_models.find(self._gateway, request, asked.model, wanted)
        if kind == "tokens":
            _matrices.check_inputs(card, inputs, "inputs")
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=asked.prompt_name,
            truncate=asked.truncate,
            truncation_direction=_tei_replies.direction(asked.truncation_direction),
            outputs=(kind,),
        )
        return card, inputs, await self._run(request, task)

    async def _run(self, request: Request, task: Embed) -> Embedded:
        request.items = len(task.inputs)
        result = await self._gateway.run(task, request.context())
        request.result = result
        return result


def _reply(request: Request, card: ModelCard, inputs: Sequence[TextItem], result: Embedded, body: Body) -> Reply:
    return Reply(200, _tei_replies.headers(request, card, _tei_replies.characters(inputs), result), body)


def _of_sentence(error: ShoalError) -> ShoalError:
    """Source and sentences are one list of inputs here: the place that is named becomes the field that was sent."""
    place, message = place_in(error)
    if place is None:
        return error
    return error.saying(f"{f'sentences[{place - 1}]' if place else 'source_sentence'}: {message}")


def _inputs(given: str | list[Any], limit: int) -> list[TextItem]:
    """Texts and lists of ids, in any mixture. One bare list of ids is one input, and an empty list is such a one."""
    items: list[Any] = [given] if isinstance(given, str) else given
    kinds = set(map(type, items))
    if int in kinds or not items:
        if len(kinds) > 1:
            raise WrongType("'inputs' mixes bare token ids with other inputs; put them into a list.", param="inputs")
        items = [items]
    _tei_replies.check_count(len(items), limit)
    _check_not_empty(items)
    return items


def _check_not_empty(inputs: Sequence[TextItem]) -> None:
    if not all(inputs):
        raise EmptyInput(_tei_replies.EMPTY_INPUT, param="inputs")
