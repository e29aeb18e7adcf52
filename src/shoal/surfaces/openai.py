"""The surface of OpenAI's clients: embeddings, completions, responses and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.protocols import Operation
from shoal.errors import ShoalError
from shoal.surfaces import _embeddings, _generation, _jobs, _wire, _wire_chat, _wire_embeddings, _wire_responses
from shoal.surfaces import _wire_models as wire
from shoal.surfaces._chat import Chat
from shoal.surfaces._completions import Completions
from shoal.surfaces._embeddings import Embeddings
from shoal.surfaces._errors import render_error
from shoal.surfaces._listing import one, served_all
from shoal.surfaces._operation import Described
from shoal.surfaces._request import Options, Reply, Request
from shoal.surfaces._responses import Responses

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

__all__ = ["OpenAI", "render_error"]

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), _wire.OpenAIError)
_READ_ERRORS: dict[int, Any] = {500: _wire.OpenAIError}
_CHANGE_ERRORS: dict[int, Any] = dict.fromkeys((400, 403, 404, 409, 500, 502, 503, 504), _wire.OpenAIError)
_TALKER = "Qwen/Qwen2.5-0.5B-Instruct"
_STREAMS = (
    "With `stream` the answer is told in server-sent events while it is made. Fields that are not listed are passed on "
    "to OpenAI-compatible servers, and ignored by other backends. What such a server refuses comes back as it said it, "
    "with any status."
)
_EXAMPLE = {"input": ["The food was delicious.", "The waiter sang."], "model": "all-MiniLM-L6-v2"}


class OpenAI:
    name = "openai"
    error = _wire.OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        embeddings = Embeddings(gateway, self._options)
        operations: list[Operation] = [
            Described(
                method="POST",
                path=f"{prefix}/embeddings",
                endpoint=embeddings,
                summary="Embed texts and pictures",
                request=embeddings.request,
                response=_wire_embeddings.EmbeddingsResponse,
                also=(_wire_embeddings.BYTES,),
                errors=_ERRORS,
                headers=_embeddings.DOCUMENTED,
                example=_EXAMPLE,
            )
            for prefix in ("/v1", "")
        ]
        return [*operations, *_generating(gateway, self._options), *_managing(_Models(gateway))]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


def _generating(gateway: Gateway, options: Options) -> list[Operation]:
    chat = Chat(gateway, options.heartbeat_s)
    completions = Completions(gateway, options.heartbeat_s, options.max_inputs)
    responses = Responses(gateway, options.heartbeat_s)
    question = {"role": "user", "content": "What is a shoal?"}
    table: list[tuple[str, Any, str, Any, Any, Any]] = [
        (
            "/chat/completions",
            chat,
            "Answer a conversation",
            _wire_chat.ChatRequest,
            _wire_chat.ChatCompletion,
            {"model": _TALKER, "messages": [question], "max_tokens": 64},
        ),
        (
            "/completions",
            completions,
            "Continue texts",
            _wire_chat.CompletionRequest,
            _wire_chat.TextCompletion,
            {"model": _TALKER, "prompt": "A shoal is", "max_tokens": 16},
        ),
        (
            "/responses",
            responses,
            "Answer a conversation, told as items",
            _wire_responses.ResponsesRequest,
            _wire_responses.Response,
            {"model": _TALKER, "input": "What is a shoal?", "max_output_tokens": 64},
        ),
    ]
    return [
        Described(
            method="POST",
            path=prefix + path,
            endpoint=endpoint,
            summary=summary,
            request=request,
            response=response,
            also=(("text/event-stream", str),),
            errors=_ERRORS,
            headers=_generation.DOCUMENTED,
            description=_STREAMS,
            example=example,
            generates=True,
        )
        for path, endpoint, summary, request, response, example in table
        for prefix in ("/v1", "")
    ]


def _managing(models: _Models) -> list[Operation]:
    operations: list[Operation] = [
        Operation(
            method="GET",
            path="/v1/models",
            endpoint=models.list,
            summary="List the served models",
            response=wire.ModelList,
            errors=_READ_ERRORS,
        ),
        Described(
            method="POST",
            path="/v1/models",
            endpoint=models.download,
            summary="List the served models, or download one",
            request=wire.ModelRequest,
            response=(wire.ModelList, wire.Managed),
            errors=_CHANGE_ERRORS,
            description="With an empty body as GET. With a `model`, which asks for an admin key, its files are fetched "
            "and nothing more.",
            example={},
            query=_jobs.WAIT,
            accepted=wire.JobStatus,
            optional=True,
        ),
        Operation(
            method="GET",
            path="/v1/models/{id:path}",
            endpoint=models.show,
            summary="Show one model",
            response=wire.ModelEntry,
            errors={**_READ_ERRORS, 404: _wire.OpenAIError},
        ),
    ]
    changes: list[tuple[Literal["POST", "DELETE"], str, Any, str, Any, Any]] = [
        ("POST", "/load", models.load, "Load a model", wire.LoadSettings, wire.Managed),
        ("POST", "/unload", models.unload, "Unload a model", None, wire.Managed),
        ("DELETE", "", models.delete, "Unload a model and delete its files", None, wire.Deleted),
    ]
    operations += [
        Described(
            method=method,
            path="/v1/models/{id:path}" + suffix,
            endpoint=endpoint,
            summary=summary,
            access="admin",
            request=request,
            response=response,
            errors=_CHANGE_ERRORS,
            example=None if request is None else {"backend": "local"},
            query=_jobs.WAIT,
            accepted=wire.JobStatus,
            optional=True,
        )
        for method, suffix, endpoint, summary, request, response in changes
    ]
    return operations


class _Models:
    """Lists from memory: interfaces ask for them on every page, and a busy or broken model must not delay them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_model = _wire.Decoder(wire.ModelRequest, "openai")
        self._decode_settings = _wire.Decoder(wire.LoadSettings, "openai")

    async def list(self, request: Request) -> Reply:
        return _jobs.encoded(wire.ModelList(data=served_all(self._gateway)))

    async def show(self, request: Request) -> Reply:
        return _jobs.encoded(one(self._gateway, request.parameter))

    async def download(self, request: Request) -> Reply:
        asked = await self._decode_model.in_turns(request.body or b"{}")
        if asked.model is None:
            return await self.list(request)
        request.demand("admin")
        name = _jobs.checked_source(asked.model)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).download(name)
        return await _jobs.settle(request, job, wait=wait) or _jobs.encoded(wire.Managed(model=job.model))

    async def load(self, request: Request) -> Reply:
        asked = await self._decode_settings.in_turns(request.body or b"{}")
        name = _jobs.checked_source(request.parameter)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).load(name, _jobs.load_options(asked.backend, asked.text_in))
        return await _jobs.settle(request, job, wait=wait) or _jobs.encoded(wire.Managed(model=job.model))

    async def unload(self, request: Request) -> Reply:
        name = _jobs.checked_name(request.parameter)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).unload(name)
        return await _jobs.settle(request, job, wait=wait) or _jobs.encoded(wire.Managed(model=job.model))

    async def delete(self, request: Request) -> Reply:
        name = _jobs.checked_name(request.parameter)
        wait = _jobs.waits(request)
        job = _jobs.lifecycle_of(self._gateway).delete(name)
        reply = await _jobs.settle(request, job, wait=wait)
        if reply is None:
            _jobs.must_have_changed(job)
        return reply or _jobs.encoded(wire.Deleted(id=job.model))
