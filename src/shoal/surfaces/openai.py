"""The surface of OpenAI's clients: embeddings, completions, responses and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import EmptyInput, InvalidValue, ShoalError, TooManyInputs, WrongType
from shoal.surfaces import _facts, _generation, _jobs, _rows, _wire, _wire_chat, _wire_responses
from shoal.surfaces import _wire_models as wire
from shoal.surfaces._chat import Chat
from shoal.surfaces._completions import Completions
from shoal.surfaces._errors import render_error
from shoal.surfaces._listing import one, served_all
from shoal.surfaces._operation import Described
from shoal.surfaces._request import JSON, Options, Reply, Request
from shoal.surfaces._responses import Responses
from shoal.types import Direction, Embed, Embedded, TextItem

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
_ENCODE = msgspec.json.Encoder()
_EXAMPLE = {"input": ["The food was delicious.", "The waiter sang."], "model": "all-MiniLM-L6-v2"}


class OpenAI:
    name = "openai"
    error = _wire.OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        embeddings = _Embeddings(gateway, self._options.max_inputs)
        operations = [
            Operation(
                method="POST",
                path=f"{prefix}/embeddings",
                endpoint=embeddings,
                summary="Embed texts",
                request=_wire.EmbeddingsRequest,
                response=_wire.EmbeddingsResponse,
                errors=_ERRORS,
                headers=_facts.DOCUMENTED,
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


class _Embeddings:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._max_inputs = max_inputs
        self._decode = _wire.Decoder(_wire.EmbeddingsRequest, "openai", "input", max_inputs)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        if not asked.model:
            raise InvalidValue("'model' is empty; name a model of GET /v1/models.", param="model")
        inputs = _inputs(asked.input, self._max_inputs)
        model = self._gateway.model(asked.model).name
        request.model, request.items = model, len(inputs)
        truncate, direction = _truncation(asked.truncate)
        task = Embed(
            model=model,
            inputs=inputs,
            prompt_name=asked.prompt_name,
            input_type=asked.input_type,
            truncate=truncate,
            truncation_direction=direction,
            normalize=asked.normalize is not False,
            dimensions=asked.dimensions,
        )
        result = await self._gateway.run(task, request.context())
        request.result = result
        body = await _encoded(result, model, base64=asked.encoding_format == "base64")
        return Reply(200, [JSON, *_facts.batch_headers(request, result)], body)


def _inputs(given: str | list[Any], limit: int) -> list[TextItem]:
    """Texts or lists of ids, one entry an input. One bare list of ids is one input."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise EmptyInput("'input' is an empty list; send at least one text.", param="input")
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise WrongType("'input' mixes texts and token ids; send one kind a request.", param="input")
    if int in kinds:
        given = [given]
    if len(given) > limit:
        raise TooManyInputs(
            f"'input' holds more than the {limit} entries that one request may hold; split it.", param="input"
        )
    if not all(given):
        at = next(at for at, each in enumerate(given) if not each)
        raise EmptyInput(f"'input[{at}]' is empty; leave it out or send a text.", param="input")
    return cast(list[TextItem], given)


def _truncation(asked: bool | str | None) -> tuple[bool | None, Direction]:
    if isinstance(asked, str):
        return asked != "NONE", "left" if asked == "START" else "right"
    return asked, "right"


async def _encoded(result: Embedded, model: str, *, base64: bool) -> bytes | list[bytes]:
    total = sum(result.tokens)
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (_ENCODE.encode(model), total, total)
    vectors = _rows.contiguous(result.vectors)
    return await _rows.joined(vectors, _base64_entry if base64 else _float_entry, b'{"object":"list","data":[', tail)


def _float_entry(index: int, row: Any) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, _rows.numbers(row))


def _base64_entry(index: int, row: Any) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, _rows.base64(row))


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
