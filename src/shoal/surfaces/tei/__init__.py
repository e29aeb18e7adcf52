"""The API of text-embeddings-inference: vectors, scores, the tokenizer, and the model's card.

/rerank is a separate surface, because other dialects use that path, too: see `shared.rerank_path`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import ShoalError, Unavailable
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.tei import errors, replies, wire
from shoal.surfaces.tei.codec import TeiCodec
from shoal.surfaces.tei.default_route import TeiDefault
from shoal.surfaces.tei.embed import TeiEmbed
from shoal.surfaces.tei.info import TeiInfo
from shoal.surfaces.tei.predict import TeiPredict
from shoal.surfaces.tei.rerank import TeiRerank

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_DENSE: Any = list[list[float]]
_SPARSE: Any = list[list[wire.TeiSparseValue]]
_PREDICTIONS: Any = (list[wire.TeiPrediction], list[list[wire.TeiPrediction]])
_RANKS: Any = list[wire.TeiRank]
_SIMILARITIES: Any = list[float]
_TEXT = "What is Deep Learning?"


class Tei:
    """The surface of text-embeddings-inference, without /rerank.

    The original has one model and no model names. Here each route uses the model that the body names, or the first one
    that can do its task.
    """

    name = "tei"
    error = wire.TeiError

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
            *_vector_operations(vectors),
            _batched_operation(
                "/predict",
                predict,
                "Classify texts, or pairs of texts",
                wire.TeiPredictRequest,
                _PREDICTIONS,
                {"inputs": "I like you."},
            ),
            *_default_operations(default),
            *_token_operations(TeiCodec(gateway, self._options)),
            *_server_operations(gateway, self._options),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return errors.render_error(error)


class RerankTexts:
    """The surface of /rerank with `texts`."""

    name = "rerank"
    error = wire.TeiError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        endpoint = TeiRerank(gateway, self._options).rerank_texts
        example = {"query": _TEXT, "texts": ["A way to learn.", "A kind of fish."]}
        return [_batched_operation("/rerank", endpoint, "Rank texts", wire.TeiRerankRequest, _RANKS, example)]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return errors.render_error(error)


def _vector_operations(vectors: TeiEmbed) -> list[Operation]:
    inputs, kind = {"inputs": [_TEXT]}, wire.TeiInputsRequest
    compared = {"inputs": {"source_sentence": _TEXT, "sentences": ["What is a fish?"]}}
    return [
        _batched_operation("/embed", vectors.embed, "Embed texts", wire.TeiEmbedRequest, _DENSE, inputs),
        _batched_operation("/embed_all", vectors.embed_all, "Embed each token of texts", kind, list[_DENSE], inputs),
        _batched_operation(
            "/embed_sparse", vectors.embed_sparse, "Embed texts as sparse vectors", kind, _SPARSE, inputs
        ),
        _batched_operation(
            "/similarity",
            vectors.similarity,
            "Compare sentences with a source sentence",
            wire.TeiSimilarityRequest,
            _SIMILARITIES,
            compared,
        ),
    ]


def _default_operations(default: TeiDefault) -> list[Operation]:
    """Build the routes of cloud providers. Clients that have only a server's address post to /."""
    answers = (_DENSE, _SPARSE, *_PREDICTIONS, _RANKS, _SIMILARITIES)
    return [
        *(
            _batched_operation(
                path,
                default.default,
                "Run the default model's task: embed, rerank or classify",
                wire.TeiDefaultRequest,
                answers,
                {"inputs": [_TEXT]},
            )
            for path in ("/", "/invocations")
        ),
        Operation(
            method="POST",
            path="/vertex",
            endpoint=default.vertex,
            summary="Run the default model's task for several bodies, as Vertex AI sends them",
            request=wire.TeiVertexRequest,
            response=wire.TeiVertexResponse,
            errors=replies.ERRORS,
            example={"instances": [{"inputs": _TEXT}]},
            description=replies.PLAIN_TEXT_NOTE,
        ),
    ]


def _token_operations(codec: TeiCodec) -> list[Operation]:
    return [
        Operation(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            response=response,
            errors=replies.ERRORS,
            example=example,
            description=replies.PLAIN_TEXT_NOTE,
        )
        for path, endpoint, summary, request, response, example in (
            (
                "/tokenize",
                codec.tokenize,
                "Tokenize texts",
                wire.TeiTokenizeRequest,
                list[list[wire.TeiToken]],
                {"inputs": _TEXT},
            ),
            (
                "/decode",
                codec.decode,
                "Decode token ids to texts",
                wire.TeiDecodeRequest,
                list[str],
                {"ids": [101, 2023, 102]},
            ),
        )
    ]


def _server_operations(gateway: Gateway, options: Options) -> list[Operation]:
    async def ping(request: Request) -> Reply:
        models = list(gateway.registry)
        if models and not any(model.can_answer() for model in models):
            raise Unavailable("unhealthy")
        return Reply()

    return [
        DocumentedOperation(
            method="GET",
            path="/info",
            endpoint=TeiInfo(gateway, options),
            summary="Describe the default model",
            response=wire.TeiInfo,
            errors={424: wire.TeiError, 503: wire.TeiError},
            query={"model": "Name or alias of a served model."},
        ),
        Operation(
            method="GET",
            path="/ping",
            endpoint=ping,
            summary="Check whether any model is ready",
            access="public",
            quiet=True,
            errors={503: wire.TeiError},
            description="The health check of SageMaker; the response has no body.",
        ),
    ]


def _batched_operation(
    path: str,
    endpoint: Callable[[Request], Awaitable[Reply]],
    summary: str,
    request: Any,
    response: Any,
    example: Any,
) -> Operation:
    """Build a batched route, whose replies describe the batches in headers."""
    return Operation(
        method="POST",
        path=path,
        endpoint=endpoint,
        summary=summary,
        request=request,
        response=response,
        errors=replies.ERRORS,
        headers=replies.HEADER_DOCS,
        example=example,
        description=replies.PLAIN_TEXT_NOTE,
    )
