"""The API of the sentence-transformers inference server: load and unload models over HTTP, and embed by model name.

Its later versions embed at /embed_text, /embed_image and /embed. Here /embed belongs to text-embeddings-inference; use
/infer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import ShoalError
from shoal.http.multipart import FORM
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Options
from shoal.surfaces.infer import errors
from shoal.surfaces.infer import wire as wire
from shoal.surfaces.infer.classify import ClassifyImage, FactsEndpoints
from shoal.surfaces.infer.embed import EmbedEndpoints
from shoal.surfaces.infer.lifecycle import LifecycleEndpoints
from shoal.surfaces.shared import batch_headers, model_jobs
from shoal.surfaces.shared.wire_models import JobList, JobStatus

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_READ_ERRORS: dict[int, Any] = {500: wire.Detail}
_CHANGE_ERRORS: dict[int, Any] = {
    **dict.fromkeys((400, 403, 404, 409, 500, 502, 503, 504), wire.Detail),
    422: wire.Problems,
}
_EMBED_ERRORS: dict[int, Any] = {**dict.fromkeys((400, 429, 500, 502, 503, 504), wire.Detail), 422: wire.Problems}
_FACTS_ERRORS: dict[int, Any] = {**dict.fromkeys((400, 404, 500, 503, 504), wire.Detail), 422: wire.Problems}
_NAME = {"model_name": "intfloat/e5-small-v2"}
_CLIP = {"model_name": "ViT-B-32", "pretrained": "laion2b_s34b_b79k"}
_CAT = {**_NAME, "text": ["a cat", "a dog"]}
_MODEL_QUERY = {"name": "The model.", "pretrained": "Its checkpoint, as named by open_clip."}


class Infer:
    name = "infer"
    error = wire.Detail

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        life = LifecycleEndpoints(gateway)
        return [
            *_change_operations(life),
            *_read_operations(life),
            *_embed_operations(EmbedEndpoints(gateway, self._options)),
            _classify_operation(ClassifyImage(gateway, self._options)),
            *_facts_operations(FactsEndpoints(gateway)),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return errors.render_error(error)


def _change_operations(life: LifecycleEndpoints) -> list[Operation]:
    routes: list[tuple[str, Any, Any, str, dict[str, Any]]] = [
        ("/load_sentence_transformer_model", life.load, wire.LoadRequest, "Load a model", _NAME),
        ("/load_clip_model", life.load_clip, wire.LoadClipRequest, "Load an image-text model", _CLIP),
        ("/load_model", life.load_any, wire.LoadAnyRequest, "Load a model of any kind", _NAME),
        ("/unload_model", life.unload, wire.NamedRequest, "Unload a model", _NAME),
        ("/delete_model", life.delete, wire.NamedRequest, "Unload a model and delete its files", _NAME),
    ]
    return [
        DocumentedOperation(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            access="admin",
            request=request,
            response=wire.Message,
            errors=_CHANGE_ERRORS,
            example=example,
            query=model_jobs.WAIT,
            accepted=JobStatus,
        )
        for path, endpoint, request, summary, example in routes
    ]


def _read_operations(life: LifecycleEndpoints) -> list[Operation]:
    return [
        Operation(
            method="GET",
            path="/loaded_models",
            endpoint=life.list_loaded,
            summary="List the loaded models",
            response=wire.LoadedModels,
            errors=_READ_ERRORS,
        ),
        Operation(
            method="GET",
            path="/repository_models",
            endpoint=life.list_repository,
            summary="List all models, with their state in Triton's terms",
            response=wire.RepositoryModels,
            errors=_READ_ERRORS,
        ),
        Operation(
            method="GET",
            path="/jobs",
            endpoint=life.list_jobs,
            quiet=True,
            summary="List running jobs and the most recent finished ones",
            access="admin",
            response=JobList,
            errors={400: wire.Detail, **_READ_ERRORS},
        ),
        Operation(
            method="GET",
            path="/jobs/{id:path}",
            endpoint=life.show_job,
            quiet=True,
            summary="Show one job",
            access="admin",
            response=JobStatus,
            errors={400: wire.Detail, 404: wire.Detail, **_READ_ERRORS},
        ),
    ]


def _embed_operations(embeds: EmbedEndpoints) -> list[Operation]:
    """Build the embedding routes. Those for images have no example, because the default model may accept none."""
    text, image, both = wire.InferTextRequest, wire.InferImageRequest, wire.InferRequest
    routes: list[tuple[str, Any, str, Any, Any, Any, Any]] = [
        ("/infer_text", embeds.infer_text, "Embed texts", text, None, wire.TextEmbedding, _CAT),
        ("/embed_text", embeds.embed_text, "Embed texts", text, None, wire.NewerEmbedding, _CAT),
        ("/infer_image", embeds.infer_image, "Embed images", image, wire.InferImageForm, wire.TextEmbedding, None),
        ("/embed_image", embeds.embed_image, "Embed images", image, wire.InferImageForm, wire.NewerEmbedding, None),
        ("/infer", embeds.infer, "Embed texts, images or both", both, wire.InferForm, wire.Embeddings, _CAT),
    ]
    return [
        DocumentedOperation(
            method="POST",
            path=path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            form=form,
            other_bodies=(FORM,) if form is not None else (),
            response=response,
            errors=_EMBED_ERRORS,
            headers=batch_headers.HEADER_DOCS,
            example=example,
        )
        for path, endpoint, summary, request, form, response, example in routes
    ]


def _classify_operation(classify: ClassifyImage) -> Operation:
    return DocumentedOperation(
        method="POST",
        path="/classify_image",
        endpoint=classify,
        summary="Classify images by the model's labels or the request's",
        request=wire.ClassifyImageRequest,
        form=wire.ClassifyImageForm,
        other_bodies=(FORM,),
        response=wire.Probabilities,
        errors=_EMBED_ERRORS,
        headers=batch_headers.HEADER_DOCS,
    )


def _facts_operations(known: FactsEndpoints) -> list[Operation]:
    routes: list[tuple[str, Any, str, Any]] = [
        ("/model_classification_labels", known.labels, "List the labels of a classifier", wire.ModelLabels),
        ("/model_embedding_size", known.size, "Get the dimension of a model's vectors", wire.EmbeddingSize),
    ]
    return [
        DocumentedOperation(
            method="GET",
            path=path,
            endpoint=endpoint,
            summary=summary,
            response=response,
            errors=_FACTS_ERRORS,
            query=_MODEL_QUERY,
            required_query=frozenset({"name"}),
        )
        for path, endpoint, summary, response in routes
    ]
