"""The KServe v2 REST API with Triton's extensions: binary tensors, generate, repository, configuration, statistics.

`grpc_calls` has the same over gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.http import status_codes
from shoal.http.json.decoder import Decoder
from shoal.http.operation import DocumentedOperation
from shoal.http.request import JSON, Options, Reply, Request
from shoal.http.streaming import open_stream_body
from shoal.surfaces.kserve import repository, rest_codec, wire
from shoal.surfaces.kserve.inference import AnswerPieces, Inference
from shoal.surfaces.kserve.signature import build_config, build_metadata
from shoal.surfaces.kserve.tasks import Generation
from shoal.surfaces.kserve.tensors import InferRequest
from shoal.surfaces.shared.batch_headers import HEADER_DOCS, batch_headers
from shoal.surfaces.shared.generation import EVENT_STREAM
from shoal.types import Chunk

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ENCODE = msgspec.json.Encoder()
_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 503, 504), wire.KServeError)
_MODEL_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 500, 503, 504), wire.KServeError)
_CHANGE_ERRORS: dict[int, Any] = dict.fromkeys((400, 403, 404, 409, 424, 500, 502, 503, 504), wire.KServeError)

_OTHER_BODIES = (b"application/octet-stream",)
"""The media type of binary tensors, and of what aiohttp, and so tritonclient's asyncio client, sends without one."""


class KServe:
    name = "kserve"
    error = wire.KServeError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        inference = Inference(gateway, self._options)
        return [
            *_server_operations(_ServerEndpoints(gateway)),
            *_model_operations(_ModelEndpoints(gateway, inference)),
            *_inference_operations(_InferenceEndpoints(inference, self._options)),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status = status_codes.status(error)
        headers = {"content-type": "application/json", **status_codes.headers(error, status)}
        return status, headers, _ENCODE.encode(wire.KServeError(error=error.message))


def _server_operations(server: _ServerEndpoints) -> list[Operation]:
    return [
        Operation(
            method="GET",
            path="/v2",
            endpoint=server.metadata,
            summary="Describe the server",
            response=wire.ServerMetadata,
        ),
        Operation(
            method="GET",
            path="/v2/health/live",
            endpoint=server.live,
            summary="Check that the server runs",
            access="public",
            response=wire.Live,
            quiet=True,
        ),
        Operation(
            method="GET",
            path="/v2/health/ready",
            endpoint=server.ready,
            summary="Check that the server can answer",
            access="public",
            response=wire.Ready,
            errors={503: wire.Ready},
            quiet=True,
        ),
        Operation(
            method="GET",
            path="/v2/models/stats",
            endpoint=server.statistics,
            summary="Statistics of all models",
            response=wire.Statistics,
            errors={500: wire.KServeError},
        ),
        DocumentedOperation(
            method="POST",
            path="/v2/repository/index",
            endpoint=server.index,
            summary="List all models and their states",
            request=wire.IndexBody,
            response=list[wire.IndexEntry],
            errors={400: wire.KServeError, 500: wire.KServeError},
            example={},
            optional=True,
            other_bodies=_OTHER_BODIES,
        ),
        *(
            DocumentedOperation(
                method="POST",
                path=f"/v2/repository/models/{{id:path}}/{action}",
                endpoint=endpoint,
                summary=summary,
                access="admin",
                request=wire.LoadBody,
                errors=_CHANGE_ERRORS,
                optional=True,
                other_bodies=_OTHER_BODIES,
            )
            for action, endpoint, summary in (
                ("load", server.load, "Load a model, and wait until it is ready"),
                ("unload", server.unload, "Unload a model, and wait until it is gone"),
            )
        ),
    ]


class _ServerEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decode_index = Decoder(wire.IndexBody, "kserve")
        self._decode_load = Decoder(wire.LoadBody, "kserve")

    async def metadata(self, request: Request) -> Reply:
        return _json_reply(repository.describe_server())

    async def live(self, request: Request) -> Reply:
        return _json_reply(wire.Live(live=True))

    async def ready(self, request: Request) -> Reply:
        ready = self._gateway.ready()
        return Reply(200 if ready else 503, [JSON], _ENCODE.encode(wire.Ready(ready=ready)))

    async def statistics(self, request: Request) -> Reply:
        return _json_reply(wire.Statistics(model_stats=await repository.list_statistics(self._gateway)))

    async def index(self, request: Request) -> Reply:
        payload = self._decode_index(request.body or b"{}")
        return _json_reply(await repository.list_index(self._gateway, ready=payload.ready))

    async def load(self, request: Request) -> Reply:
        payload = self._decode_load(request.body or b"{}")
        await repository.load_model(self._gateway, request, request.parameter, payload.parameters)
        return Reply(200, [JSON], b"{}")

    async def unload(self, request: Request) -> Reply:
        self._decode_load(request.body or b"{}")
        await repository.unload_model(self._gateway, request, request.parameter)
        return Reply(200, [JSON], b"{}")


def _model_operations(models: _ModelEndpoints) -> list[Operation]:
    table: list[tuple[str, Any, str, Any]] = [
        ("", models.metadata, "Describe a model's tensors", wire.ModelMetadata),
        ("/ready", models.ready, "Check that a model can answer", wire.Ready),
        ("/config", models.config, "Describe a model as Triton's ModelConfig", dict[str, Any]),
        ("/stats", models.statistics, "Statistics of a model", wire.Statistics),
    ]
    return [
        Operation(
            method="GET",
            path=f"/v2/models/{{id:path}}{suffix}",
            endpoint=endpoint,
            summary=summary,
            response=response,
            errors=_MODEL_ERRORS,
            quiet=suffix == "/ready",
        )
        for suffix, endpoint, summary, response in table
    ]


class _ModelEndpoints:
    def __init__(self, gateway: Gateway, inference: Inference) -> None:
        self._gateway = gateway
        self._inference = inference

    async def metadata(self, request: Request) -> Reply:
        name, signature = await self._inference.describe(request, *split_version(request.parameter))
        return _json_reply(build_metadata(name, signature))

    async def config(self, request: Request) -> Reply:
        name, signature = await self._inference.describe(request, *split_version(request.parameter))
        return _json_reply(build_config(name, signature))

    async def ready(self, request: Request) -> Reply:
        ready = repository.is_ready(self._gateway, *split_version(request.parameter))
        return Reply(200 if ready else 503, [JSON], _ENCODE.encode(wire.Ready(ready=ready)))

    async def statistics(self, request: Request) -> Reply:
        found = await repository.list_statistics(self._gateway, *split_version(request.parameter))
        return _json_reply(wire.Statistics(model_stats=found))


def _inference_operations(calls: _InferenceEndpoints) -> list[Operation]:
    path = "/v2/models/{id:path}"
    generate: dict[str, Any] = {"method": "POST", "request": wire.GenerateBody, "errors": _ERRORS, "generates": True}
    return [
        DocumentedOperation(
            method="POST",
            path=f"{path}/infer",
            endpoint=calls.infer,
            summary="Run a model on tensors",
            request=wire.InferBody,
            response=wire.InferReply,
            errors=_ERRORS,
            headers=HEADER_DOCS,
            generates=True,
            other_bodies=_OTHER_BODIES,
            description="Tensors may also be binary, behind the JSON, as Triton's binary tensor data extension says.",
            example={"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["What is a shoal?"]}]},
            other_responses=(("application/octet-stream", bytes),),
        ),
        Operation(
            path=f"{path}/generate",
            endpoint=calls.generate,
            summary="Run a model on named values",
            response=dict[str, Any],
            example={"text": "What is a shoal?"},
            **generate,
        ),
        Operation(
            path=f"{path}/generate_stream",
            endpoint=calls.generate_stream,
            summary="Stream a language model's answer as server-sent events",
            response=str,
            media_type="text/event-stream",
            **generate,
        ),
    ]


class _InferenceEndpoints:
    def __init__(self, inference: Inference, options: Options) -> None:
        self._inference = inference
        self._heartbeat_s = options.heartbeat_s
        self._decoder = rest_codec.InferDecoder(options.max_inputs)
        self._decode = Decoder(dict[str, Any], "kserve", options.max_inputs)

    async def infer(self, request: Request) -> Reply:
        model, version = split_version(request.parameter)
        json_length = request.headers.get(rest_codec.JSON_LENGTH)
        call, form = await self._decoder.decode(model, version, request.body, json_length)
        response = await self._inference.infer(request, call)
        headers, body = await rest_codec.encode_response(response, form)
        if request.result is not None:
            headers = [*headers, *batch_headers(request, request.result)]
        return Reply(200, headers, body)

    async def generate(self, request: Request) -> Reply:
        call = await self._read(request)
        response = await self._inference.infer(request, call)
        return Reply(200, [JSON], await rest_codec.encode_generated(response))

    async def generate_stream(self, request: Request) -> Reply:
        call = await self._read(request)
        job = await self._inference.prepare(request, call, stream=True)
        if not isinstance(job.task, Generation) or not job.streams:
            raise Unsupported(f"{job.model!r} does not stream this request: use generate", param="stream")
        chunks = self._inference.open_stream(request, job.task)
        events = _AnswerEvents(job.model, call.id, AnswerPieces(job.task), request)
        body = await open_stream_body(
            chunks, events, self._heartbeat_s, request_id=request.id, exchange=request.exchange
        )
        return Reply(200, list(EVENT_STREAM), body)

    async def _read(self, request: Request) -> InferRequest:
        await rest_codec.check_json(memoryview(request.body))
        body = await self._decode.decode_async(request.body)
        if not isinstance(body.get("parameters", {}), dict) or not isinstance(body.get("id", ""), str):
            raise InvalidValue("'parameters' must be an object, and 'id' a string", param="parameters")
        sent = {*body, *body.get("parameters", {})} - {"id", "parameters"}
        name, signature = await self._inference.describe(request, *split_version(request.parameter), sent)
        return rest_codec.read_generate(name, body, signature)


class _AnswerEvents:
    """Encodes the stream of generate_stream, which has no marker at its end."""

    heartbeat = b": \n\n"

    def __init__(self, model: str, id: str, pieces: AnswerPieces, request: Request) -> None:
        self._model = model
        self._id = id
        self._pieces = pieces
        self._request = request

    def encode_chunk(self, chunk: Chunk) -> bytes:
        tensors = self._pieces.push(chunk)
        return self._event(rest_codec.to_generate_fields(self._model, self._id, tensors)) if tensors else b""

    def encode_error(self, error: ShoalError) -> bytes:
        return self._event(_ENCODE.encode(wire.KServeError(error=error.message)))

    def encode_end(self) -> bytes:
        self._request.usage = self._pieces.usage
        return self._event(rest_codec.to_generate_fields(self._model, self._id, self._pieces.finish()))

    def _event(self, data: bytes) -> bytes:
        return b"data: %b\n\n" % data


def split_version(path: str) -> tuple[str, str]:
    """Split the path of a model into its name and version: `name` or `name/versions/1`."""
    name, slash, version = path.rpartition("/versions/")
    return (name, version) if slash else (path, "")


def _json_reply(value: Any) -> Reply:
    return Reply(200, [JSON], _ENCODE.encode(value))
