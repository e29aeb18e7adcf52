"""The surface of text-embeddings-inference: vectors, scores, the tokenizer, and the model's card.

/rerank is another surface's, because other dialects have that path, too: it asks `_tei_rerank` where there are `texts`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import ShoalError, Unavailable
from shoal.surfaces import _tei_errors, _tei_replies, _wire_tei
from shoal.surfaces._operation import Described
from shoal.surfaces._request import Options, Reply, Request
from shoal.surfaces._tei_codec import TeiCodec
from shoal.surfaces._tei_default import TeiDefault
from shoal.surfaces._tei_embed import TeiEmbed
from shoal.surfaces._tei_info import TeiInfo
from shoal.surfaces._tei_predict import TeiPredict
from shoal.surfaces._tei_rerank import TeiRerank

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_DENSE: Any = list[list[float]]
_SPARSE: Any = list[list[_wire_tei.TeiSparseValue]]
_PREDICTIONS: Any = (list[_wire_tei.TeiPrediction], list[list[_wire_tei.TeiPrediction]])
_RANKS: Any = list[_wire_tei.TeiRank]
_SIMILARITIES: Any = list[float]
_TEXT = "What is Deep Learning?"


class Tei:
    """The original knows one model and no names: each route works on the first model that can do it, or on the one
    that the body names."""

    name = "tei"
    error = _wire_tei.TeiError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        vectors = TeiEmbed(gateway, self._options)
        predict = TeiPredict(gateway, self._options).predict
        default = TeiDefault(
            gateway,
            self._options,
            embed=vectors.embed,
            embed_sparse=vectors.embed_sparse,
            similarity=vectors.similarity,
            predict=predict,
            rerank=TeiRerank(gateway, self._options).rerank_texts,
        )
        return [
            *_of_vectors(vectors),
            _batched(
                "/predict",
                predict,
                "Classify texts, or pairs of texts",
                _wire_tei.TeiPredictRequest,
                _PREDICTIONS,
                {"inputs": "I like you."},
            ),
            *_of_any_model(default),
            *_of_tokens(TeiCodec(gateway, self._options)),
            *_of_the_server(gateway, self._options),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return _tei_errors.render_error(error)


def _of_vectors(vectors: TeiEmbed) -> list[Operation]:
    inputs, kind = {"inputs": [_TEXT]}, _wire_tei.TeiInputsRequest
    compared = {"inputs": {"source_sentence": _TEXT, "sentences": ["What is a fish?"]}}
    return [
        _batched("/embed", vectors.embed, "Embed texts", _wire_tei.TeiEmbedRequest, _DENSE, inputs),
        _batched("/embed_all", vectors.embed_all, "Embed each token of texts", kind, list[_DENSE], inputs),
        _batched("/embed_sparse", vectors.embed_sparse, "Embed texts by weights of words", kind, _SPARSE, inputs),
        _batched(
            "/similarity",
            vectors.similarity,
            "Compare sentences with one",
            _wire_tei.TeiSimilarityRequest,
            _SIMILARITIES,
            compared,
        ),
    ]


def _of_any_model(default: TeiDefault) -> list[Operation]:
    """What the addresses of cloud providers lead to; clients that are given nothing but a server's post to /."""
    answers = (_DENSE, _SPARSE, *_PREDICTIONS, _RANKS, _SIMILARITIES)
    return [
        *(
            _batched(
                path,
                default.default,
                "What the default model is for: embed, rerank or classify",
                _wire_tei.TeiDefaultRequest,
                answers,
                {"inputs": [_TEXT]},
            )
            for path in ("/", "/invocations")
        ),
        Operation(
            method="POST",
            path="/vertex",
            endpoint=default.vertex,
            summary="The same for several bodies, as Vertex AI sends them",
            request=_wire_tei.TeiVertexRequest,
            response=_wire_tei.TeiVertexResponse,
            errors=_tei_replies.ERRORS,
            example={"instances": [{"inputs": _TEXT}]},
            description=_tei_replies.UNREADABLE,
        ),
    ]


def _of_tokens(codec: TeiCodec) -> list[Operation]:
    return [
        Operation(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            response=response,
            errors=_tei_replies.ERRORS,
            example=example,
            description=_tei_replies.UNREADABLE,
        )
        for path, endpoint, summary, request, response, example in (
            (
                "/tokenize",
                codec.tokenize,
                "Show the tokens of texts",
                _wire_tei.TeiTokenizeRequest,
                list[list[_wire_tei.TeiToken]],
                {"inputs": _TEXT},
            ),
            (
                "/decode",
                codec.decode,
                "Turn token ids into texts",
                _wire_tei.TeiDecodeRequest,
                list[str],
                {"ids": [101, 2023, 102]},
            ),
        )
    ]


def _of_the_server(gateway: Gateway, options: Options) -> list[Operation]:
    async def ping(request: Request) -> Reply:
        models = list(gateway.registry)
        if models and not any(model.able() for model in models):
            raise Unavailable("unhealthy")
        return Reply()

    return [
        Described(
            method="GET",
            path="/info",
            endpoint=TeiInfo(gateway, options),
            summary="Describe the default model",
            response=_wire_tei.TeiInfo,
            errors={424: _wire_tei.TeiError, 503: _wire_tei.TeiError},
            query={"model": "A served model, by name or alias."},
        ),
        Operation(
            method="GET",
            path="/ping",
            endpoint=ping,
            summary="Can any model answer?",
            access="public",
            quiet=True,
            errors={503: _wire_tei.TeiError},
            description="As SageMaker asks it; without a body.",
        ),
    ]


def _batched(
    path: str,
    endpoint: Callable[[Request], Awaitable[Reply]],
    summary: str,
    request: Any,
    response: Any,
    example: Any,
) -> Operation:
    """A route that is answered in batches, with what they came to in the headers."""
    return Operation(
        method="POST",
        path=path,
        endpoint=endpoint,
        summary=summary,
        request=request,
        response=response,
        errors=_tei_replies.ERRORS,
        headers=_tei_replies.DOCUMENTED,
        example=example,
        description=_tei_replies.UNREADABLE,
    )
