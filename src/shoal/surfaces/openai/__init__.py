"""OpenAI's API: embeddings, completions, responses and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.protocols import Operation
from shoal.errors import ShoalError
from shoal.http.errors import OpenAIError, render_error
from shoal.http.json import decoder
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.openai import wire_chat, wire_embeddings
from shoal.surfaces.openai.chat import Chat
from shoal.surfaces.openai.completions import Completions
from shoal.surfaces.openai.embeddings import HEADER_DOCS, Embeddings
from shoal.surfaces.openai.responses import wire as wire_responses
from shoal.surfaces.openai.responses import wire_output
from shoal.surfaces.openai.responses.endpoint import Responses
from shoal.surfaces.openai.responses.store import ResponseStore
from shoal.surfaces.openai.responses.stored import StoredResponses
from shoal.surfaces.shared import anthropic_models, generation, infinity_models, model_jobs
from shoal.surfaces.shared import wire_models as wire
from shoal.surfaces.shared.listing import get_entry, hide_addresses, list_served
from shoal.surfaces.shared.owners import Owners

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), OpenAIError)
_READ_ERRORS: dict[int, Any] = {500: OpenAIError}
_CHANGE_ERRORS: dict[int, Any] = dict.fromkeys((400, 403, 404, 409, 500, 502, 503, 504), OpenAIError)
_CHAT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_STREAM_DESCRIPTION = (
    "With `stream`, the answer is sent as server-sent events while it is generated. Unlisted fields are forwarded to "
    "OpenAI-compatible servers and ignored by other backends. Errors of such a server are returned unchanged, with any "
    "status."
)
_ANTHROPIC = "With the header `anthropic-version`, the answer has the form of Anthropic's API."
_EXAMPLE = {"input": ["The food was delicious.", "The waiter sang."], "model": "all-MiniLM-L6-v2"}


class OpenAI:
    name = "openai"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        embeddings = Embeddings(gateway, self._options)
        images = Embeddings(gateway, self._options, wire_embeddings.ImageEmbeddingsRequest)
        offered = (
            ("embeddings", embeddings, "Embed texts and images", _EXAMPLE),
            ("embeddings_image", images, "Embed images: /embeddings with `modality` image", None),
        )
        operations: list[Operation] = [
            DocumentedOperation(
                method="POST",
                path=f"{prefix}/{path}",
                endpoint=endpoint,
                summary=summary,
                request=endpoint.request,
                response=wire_embeddings.EmbeddingsResponse,
                other_responses=(wire_embeddings.BYTES,),
                errors=_ERRORS,
                headers=HEADER_DOCS,
                example=example,
            )
            for path, endpoint, summary, example in offered
            for prefix in ("/v1", "")
        ]
        return [
            *operations,
            *_generate_operations(gateway, self._options),
            *_model_operations(_ModelEndpoints(gateway, self._options), self._options),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


def _generate_operations(gateway: Gateway, options: Options) -> list[Operation]:
    chat = Chat(gateway, options.heartbeat_s)
    completions = Completions(gateway, options.heartbeat_s, options.max_inputs, chat)
    store = ResponseStore.create(options.response_store_mb, options.response_store_s)
    owners = Owners(options)
    responses = Responses(gateway, options.heartbeat_s, store, owners)
    question = {"role": "user", "content": "What is a shoal?"}
    table: list[tuple[str, Any, str, Any, Any, Any]] = [
        (
            "/chat/completions",
            chat,
            "Generate a chat response",
            wire_chat.ChatRequest,
            wire_chat.ChatCompletion,
            {"model": _CHAT_MODEL, "messages": [question], "max_tokens": 64},
        ),
        (
            "/completions",
            completions,
            "Generate completions",
            wire_chat.CompletionRequest,
            wire_chat.TextCompletion,
            {"model": _CHAT_MODEL, "prompt": "A shoal is", "max_tokens": 16},
        ),
        (
            "/responses",
            responses,
            "Generate a response to a conversation of items",
            wire_responses.ResponsesRequest,
            wire_output.Response,
            {"model": _CHAT_MODEL, "input": "What is a shoal?", "max_output_tokens": 64},
        ),
    ]
    return [
        DocumentedOperation(
            method="POST",
            path=prefix + path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            response=response,
            other_responses=(("text/event-stream", str),),
            errors=_ERRORS,
            headers=generation.HEADER_DOCS,
            description=_STREAM_DESCRIPTION,
            example=example,
            generates=True,
        )
        for path, endpoint, summary, request, response, example in table
        for prefix in ("/v1", "")
    ] + _stored_operations(StoredResponses(store, owners))


def _stored_operations(stored: StoredResponses) -> list[Operation]:
    path, errors = "/v1/responses/{id:path}", dict.fromkeys((400, 404, 500), OpenAIError)
    return [
        Operation(
            method="GET",
            path=path,
            endpoint=stored.show,
            summary="Show a stored response",
            response=wire_output.Response,
            errors=errors,
        ),
        DocumentedOperation(
            method="GET",
            path=f"{path}/input_items",
            endpoint=stored.list_items,
            summary="List the items that a stored response answers",
            response=wire_output.ItemList,
            errors=errors,
            query={
                "after": "Id of the last item of the page before.",
                "limit": "Maximum items of the page, 1 to 100 (default 20).",
                "order": "By time: `desc` (default) or `asc`.",
            },
        ),
        Operation(
            method="DELETE",
            path=path,
            endpoint=stored.delete,
            summary="Delete a stored response",
            response=wire_output.DeletedResponse,
            errors=errors,
            single=True,
        ),
    ]


def _model_operations(models: _ModelEndpoints, options: Options) -> list[Operation]:
    listed = wire.InfinityModelList if options.status_dialect == "infinity" else wire.ModelList
    operations: list[Operation] = [
        DocumentedOperation(
            method="GET",
            path="/v1/models",
            endpoint=models.list,
            summary="List the served models",
            response=(listed, wire.AnthropicModelList),
            description=_ANTHROPIC,
            errors=_READ_ERRORS,
        ),
        DocumentedOperation(
            method="POST",
            path="/v1/models",
            endpoint=models.download,
            summary="List the served models, or download one",
            request=wire.ModelRequest,
            response=(listed, wire.Managed),
            errors=_CHANGE_ERRORS,
            description="With an empty body, the same as GET. With a `model`, which requires an admin key, only "
            "downloads its files.",
            example={},
            query=model_jobs.WAIT,
            accepted=wire.JobStatus,
            optional=True,
        ),
        DocumentedOperation(
            method="GET",
            path="/v1/models/{id:path}",
            endpoint=models.show,
            summary="Show one model",
            response=(wire.ModelEntry, wire.AnthropicModelEntry),
            description=_ANTHROPIC,
            errors={**_READ_ERRORS, 404: OpenAIError},
        ),
    ]
    changes: list[tuple[Literal["POST", "DELETE"], str, Any, str, Any, Any]] = [
        ("POST", "/load", models.load, "Load a model", wire.LoadSettings, wire.Managed),
        ("POST", "/unload", models.unload, "Unload a model", None, wire.Managed),
        ("DELETE", "", models.delete, "Unload a model and delete its files", None, wire.Deleted),
    ]
    operations += [
        DocumentedOperation(
            method=method,
            path="/v1/models/{id:path}" + suffix,
            endpoint=endpoint,
            summary=summary,
            access="admin",
            request=request,
            response=response,
            errors=_CHANGE_ERRORS,
            example=None if request is None else {"backend": "local"},
            query=model_jobs.WAIT,
            accepted=wire.JobStatus,
            optional=True,
        )
        for method, suffix, endpoint, summary, request, response in changes
    ]
    return operations


class _ModelEndpoints:
    """The model routes. Lists come from memory, so that a busy or broken model does not delay user interfaces, which
    fetch them on every page."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._options = options
        self._decode_model = decoder.Decoder(wire.ModelRequest, "openai")
        self._decode_settings = decoder.Decoder(wire.LoadSettings, "openai")

    async def list(self, request: Request) -> Reply:
        entries = hide_addresses(request, list_served(self._gateway))
        if anthropic_models.is_requested(request):
            return model_jobs.json_reply(anthropic_models.build_list(entries))
        if self._options.status_dialect == "infinity":
            return model_jobs.json_reply(infinity_models.build_list(self._gateway, entries, self._options))
        return model_jobs.json_reply(wire.ModelList(data=entries))

    async def show(self, request: Request) -> Reply:
        (entry,) = hide_addresses(request, [get_entry(self._gateway, request.parameter)])
        if anthropic_models.is_requested(request):
            return model_jobs.json_reply(anthropic_models.build_entry(entry))
        return model_jobs.json_reply(entry)

    async def download(self, request: Request) -> Reply:
        payload = await self._decode_model.decode_async(request.body or b"{}")
        if payload.model is None:
            return await self.list(request)
        request.require_access("admin")
        name = model_jobs.check_source(payload.model)
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).download(name)
        return await model_jobs.await_job(request, job, wait=wait) or model_jobs.json_reply(
            wire.Managed(model=job.model)
        )

    async def load(self, request: Request) -> Reply:
        payload = await self._decode_settings.decode_async(request.body or b"{}")
        name = model_jobs.check_source(request.parameter)
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).load(
            name, model_jobs.load_options(payload.backend, payload.text_in)
        )
        return await model_jobs.await_job(request, job, wait=wait) or model_jobs.json_reply(
            wire.Managed(model=job.model)
        )

    async def unload(self, request: Request) -> Reply:
        name = model_jobs.check_model_name(request.parameter)
        wait = model_jobs.should_wait(request)
        job = await model_jobs.start_unload(self._gateway, name)
        return await model_jobs.await_job(request, job, wait=wait) or model_jobs.json_reply(
            wire.Managed(model=job.model)
        )

    async def delete(self, request: Request) -> Reply:
        name = model_jobs.check_model_name(request.parameter)
        wait = model_jobs.should_wait(request)
        job = model_jobs.get_lifecycle(self._gateway).delete(name)
        reply = await model_jobs.await_job(request, job, wait=wait)
        if reply is None:
            model_jobs.check_changed(job)
        return reply or model_jobs.json_reply(wire.Deleted(id=job.model))
