"""Ollama's API under /api: chat, generate, embeddings and models."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from shoal.core.protocols import Operation
from shoal.errors import ModelNotFound, ShoalError, Unsupported
from shoal.http import status_codes
from shoal.http.json import decoder
from shoal.http.json.extras import ExtrasDecoder
from shoal.http.operation import DocumentedOperation
from shoal.http.request import JSON, Options, Reply, Request
from shoal.http.streaming import open_stream_body
from shoal.surfaces.ollama import wire as wire
from shoal.surfaces.ollama.chat_replies import ENCODE, LineEncoder
from shoal.surfaces.ollama.chat_requests import chat_task, generate_task, parse_extras, parse_keep_alive
from shoal.surfaces.ollama.models import NDJSON, ModelCatalog, ModelTransfers, find_model, find_or_load
from shoal.surfaces.shared import batch_headers, default_models, model_jobs, vector_encoding
from shoal.surfaces.shared.generation import HEADER_DOCS, prompt_headers
from shoal.surfaces.shared.input_parsing import check_count
from shoal.surfaces.shared.task_runs import run_task
from shoal.types import Embed, Embedded, Generate

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 403, 404, 409, 429, 500, 502, 503, 504), wire.OllamaError)
_NDJSON_TYPE = "application/x-ndjson"
_STREAM = [NDJSON, (b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
_PROMPT_HEADER_DOCS = {name: HEADER_DOCS[name] for name in ("x-shoal-prompt-cut", "x-shoal-ignored")}
_MODEL = "all-MiniLM-L6-v2"
A = TypeVar("A", bound=wire.OllamaChatRequest | wire.OllamaGenerateRequest)


class Ollama:
    name = "ollama"
    error = wire.OllamaError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [
            *_answer_operations(gateway, self._options),
            *_embedding_operations(gateway, self._options.max_inputs),
            *_model_operations(gateway, self._options.address_schemes),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.status(error)
        headers = {"content-type": "application/json", **status_codes.headers(error, status)}
        return status, headers, ENCODE(wire.OllamaError(error=error.message))


def _answer_operations(gateway: Gateway, options: Options) -> list[Operation]:
    chat = _GenerateEndpoint(gateway, options, "chat", wire.OllamaChatRequest, chat_task)
    generate = _GenerateEndpoint(gateway, options, "generate", wire.OllamaGenerateRequest, generate_task)
    question = "Why is the sky blue?"
    return [
        DocumentedOperation(
            method="POST",
            path="/api/chat",
            endpoint=chat,
            summary="Generate a chat response",
            request=wire.OllamaChatRequest,
            response=wire.OllamaChatAnswer,
            other_responses=((_NDJSON_TYPE, wire.OllamaChatAnswer),),
            errors=_ERRORS,
            generates=True,
            headers=_PROMPT_HEADER_DOCS,
            description=_GENERATE_DESCRIPTION.format("messages"),
            example={"model": _MODEL, "messages": [{"role": "user", "content": question}], "stream": False},
        ),
        DocumentedOperation(
            method="POST",
            path="/api/generate",
            endpoint=generate,
            summary="Generate a completion for a prompt",
            request=wire.OllamaGenerateRequest,
            response=wire.OllamaGenerateAnswer,
            other_responses=((_NDJSON_TYPE, wire.OllamaGenerateAnswer),),
            errors=_ERRORS,
            generates=True,
            headers=_PROMPT_HEADER_DOCS,
            description=_GENERATE_DESCRIPTION.format("a prompt"),
            example={"model": _MODEL, "prompt": question, "stream": False},
        ),
    ]


_GENERATE_DESCRIPTION = (
    "A stream of JSON lines unless `stream` is false; the last line has `done` true. An error in the middle of the "
    "stream is a line with `error`. Without {} the model is only loaded; with `keep_alive` 0 it is unloaded, which "
    "requires an admin key."
)


def _embedding_operations(gateway: Gateway, max_inputs: int) -> list[Operation]:
    embeddings = _Embeddings(gateway, max_inputs)
    return [
        Operation(
            method="POST",
            path="/api/embed",
            endpoint=embeddings.embed_many,
            summary="Embed texts",
            request=wire.OllamaEmbedRequest,
            response=wire.OllamaEmbedAnswer,
            errors=_ERRORS,
            headers=batch_headers.HEADER_DOCS,
            example={"model": _MODEL, "input": ["Why is the sky blue?", "Why is the grass green?"]},
        ),
        Operation(
            method="POST",
            path="/api/embeddings",
            endpoint=embeddings.embed_one,
            summary="Embed one text; /api/embed accepts several",
            request=wire.OllamaEmbeddingsRequest,
            response=wire.OllamaEmbeddingsAnswer,
            errors=_ERRORS,
            example={"model": _MODEL, "prompt": "Here is an article about llamas."},
        ),
    ]


def _model_operations(gateway: Gateway, schemes: Container[str]) -> list[Operation]:
    shelf, moves = ModelCatalog(gateway), ModelTransfers(gateway, schemes)
    reads: list[tuple[str, Any, str, Any]] = [
        ("/api/tags", shelf.list_tags, "List models", wire.OllamaTags),
        ("/api/ps", shelf.list_running, "List loaded models", wire.OllamaPs),
        ("/api/version", shelf.get_version, "Get the version of this API", wire.OllamaVersion),
    ]
    operations: list[Operation] = [
        Operation(
            method="GET",
            path=path,
            endpoint=endpoint,
            summary=summary,
            response=response,
            errors={500: wire.OllamaError},
        )
        for path, endpoint, summary, response in reads
    ]
    operations += [
        Operation(
            method="POST",
            path="/api/show",
            endpoint=shelf.show,
            summary="Show one model",
            request=wire.OllamaNamed,
            response=wire.OllamaShown,
            errors=_ERRORS,
            example={"model": _MODEL},
        ),
        DocumentedOperation(
            method="POST",
            path="/api/pull",
            endpoint=moves.pull,
            summary="Download a model and load it",
            access="admin",
            request=wire.OllamaPullRequest,
            response=wire.OllamaProgress,
            other_responses=((_NDJSON_TYPE, wire.OllamaProgress),),
            errors=_ERRORS,
            description="A stream of JSON lines unless `stream` is false. Errors in the stream are lines with `error`.",
            example={"model": "intfloat/e5-small-v2", "stream": False},
        ),
        Operation(
            method="DELETE",
            path="/api/delete",
            endpoint=moves.delete,
            summary="Unload a model and delete its files",
            access="admin",
            request=wire.OllamaNamed,
            errors=_ERRORS,
        ),
    ]
    return [*operations, *_refusal_operations()]


_CREATE = (
    "This server does not create models: pull one from the hub (`ollama pull hf.co/org/name`), or start `shoal serve "
    "ADDRESS`."
)
_ACCOUNTS = (
    "This server has no accounts: it neither pushes models to ollama.com nor runs them there. Upload a model's files "
    "to the source you pulled them from."
)
_REFUSALS = {
    "/api/create": _CREATE,
    # Ollama's own client calls this first and shows the error message.
    "/api/blobs/{digest:path}": _CREATE,
    "/api/me": _ACCOUNTS,
    "/api/signout": _ACCOUNTS,
    "/api/copy": "This server does not copy models: give a model more names with `aliases` in its table in shoal.toml.",
    "/api/push": "This server does not push models: upload the files to the source you pulled them from.",
}


def _refusal_operations() -> list[Operation]:
    return [
        Operation(
            method="POST",
            path=path,
            endpoint=partial(_refuse, why),
            summary="Refused",
            errors={400: wire.OllamaError},
            limit=0,
            description=why,
        )
        for path, why in _REFUSALS.items()
    ]


async def _refuse(why: str, request: Request) -> NoReturn:
    raise Unsupported(why)


class _GenerateEndpoint(Generic[A]):
    """The endpoint of /api/chat or /api/generate."""

    def __init__(
        self,
        gateway: Gateway,
        options: Options,
        kind: Literal["chat", "generate"],
        request: type[A],
        task: Callable[..., Generate],
    ) -> None:
        self._gateway = gateway
        self._heartbeat_s = options.heartbeat_s
        self._kind = kind
        long, also = ("messages", ()) if kind == "chat" else ("prompt", ("system", "images"))
        self._decode: ExtrasDecoder[A] = ExtrasDecoder(request, "ollama", long, also=also)
        self._task = task

    async def __call__(self, request: Request) -> Reply:
        payload, fields, _ = await self._decode(request.body)
        keep_alive = parse_keep_alive(payload.keep_alive)
        if _is_empty(payload):
            return await self._load_or_unload(request, payload, unload=keep_alive == 0)
        model, adapter = await find_or_load(self._gateway, request, payload.model, "generate")
        stream = payload.stream is not False
        extras = parse_extras(fields.get("options"))
        task = self._task(payload, model, adapter, stream=stream, extras=extras)
        lines = await self._start_answer(request, payload, model)
        chunks = self._gateway.stream(task, request.context())
        if stream:
            body = await open_stream_body(
                chunks, lines, self._heartbeat_s, request_id=request.id, exchange=request.exchange
            )
            return Reply(200, [*_STREAM, *prompt_headers(body.first)], body)
        async with aclosing(chunks):
            async for chunk in chunks:
                lines.gather(chunk)
        return Reply(200, [JSON, *prompt_headers(lines)], lines.encode_whole())

    async def _load_or_unload(self, request: Request, payload: A, *, unload: bool) -> Reply:
        """Only load or unload the model. Unloading requires admin access."""
        if unload:
            model, _ = find_model(self._gateway, payload.model, "generate")
            request.require_access("admin")
            lines = LineEncoder(self._kind, payload.model, request, request.started)
            model_jobs.get_lifecycle(self._gateway).try_sleep(model)
            return Reply(200, [JSON], lines.encode_empty("unload"))
        model, _ = await find_or_load(self._gateway, request, payload.model, "generate")
        lines = await self._start_answer(request, payload, model)
        card = self._gateway.model(model)
        if card.state != "ready":
            raise card.refusal()
        return Reply(200, [JSON], lines.encode_empty("load"))

    async def _start_answer(self, request: Request, payload: A, model: str) -> LineEncoder:
        """Wake the model and start its answer, which reports the load time separately."""
        request.model, request.items = model, 1
        ctx = request.context()
        request.is_handed_over = False  # only the HTTP layer counts failures to wake
        await self._gateway.wake(model, ctx)
        return LineEncoder(self._kind, payload.model, request, time.monotonic())


def _is_empty(payload: wire.OllamaChatRequest | wire.OllamaGenerateRequest) -> bool:
    if isinstance(payload, wire.OllamaChatRequest):
        return not payload.messages
    return not (payload.prompt or payload.images)


class _Embeddings:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._limit = max_inputs
        self._decode_many = decoder.Decoder(wire.OllamaEmbedRequest, "ollama", max_inputs)
        self._decode_one = decoder.Decoder(wire.OllamaEmbeddingsRequest, "ollama")

    async def embed_many(self, request: Request) -> Reply:
        payload = await self._decode_many.decode_async(request.body)
        parse_keep_alive(payload.keep_alive)
        inputs = payload.input if isinstance(payload.input, list) else [payload.input] if payload.input else []
        check_count(inputs, "input", self._limit)
        result = None
        if inputs:
            result = await self._embed(
                request, payload.model, inputs, truncate=payload.truncate, dimensions=payload.dimensions
            )
        else:
            await self._find_model(request, payload.model)
        tail = b'],"model":%b,"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (
            ENCODE(payload.model),
            round((time.monotonic() - request.started) * 1e9),
            sum(result.tokens) if result is not None else 0,
        )
        if result is None:
            return Reply(200, [JSON], b'{"embeddings":[' + tail)
        body = await vector_encoding.encode_rows(
            vector_encoding.to_contiguous(result.vectors), _encode_row, b'{"embeddings":[', tail
        )
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)

    async def embed_one(self, request: Request) -> Reply:
        payload = await self._decode_one.decode_async(request.body)
        parse_keep_alive(payload.keep_alive)
        model = await self._find_model(request, payload.model)
        if not payload.prompt:
            return Reply(200, [JSON], b'{"embedding":[]}')
        card = await default_models.wake_model(self._gateway, request, self._gateway.model(model))
        normalize = card.facts is None or card.facts.normalized
        result = await self._embed(request, payload.model, [payload.prompt], normalize=normalize)
        numbers = vector_encoding.encode_numbers(vector_encoding.to_contiguous(result.vectors)[0])
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], b'{"embedding":%b}' % numbers)

    async def _find_model(self, request: Request, name: str) -> str:
        model, adapter = await find_or_load(self._gateway, request, name, "embed")
        if adapter:
            raise ModelNotFound(f"model '{name}' not found: adapters generate text and do not embed", param="model")
        return model

    async def _embed(
        self, request: Request, name: str, inputs: list[str], dimensions: int | None = None, **more: Any
    ) -> Embedded:
        model = await self._find_model(request, name)
        if dimensions is not None:
            card = await default_models.wake_model(self._gateway, request, self._gateway.model(model))
            own = card.facts.dimension if card.facts is not None else None
            # The original ignores lengths that it cannot cut to.
            if dimensions < 1 or (own is not None and dimensions > own):
                dimensions = None
        task = Embed(model=model, inputs=list(inputs), dimensions=dimensions, **more)
        return await run_task(self._gateway, request, task)


def _encode_row(index: int, row: Any) -> bytes:
    return vector_encoding.encode_numbers(row)
