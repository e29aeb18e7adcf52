"""The API of llama.cpp's router, through which user interfaces manage models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import msgspec

from shoal.core.lifecycle.events import Event
from shoal.core.protocols import Operation
from shoal.errors import InvalidValue, Overloaded, ShoalError
from shoal.http.errors import OpenAIError, render_error
from shoal.http.json import decoder
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.shared import infinity_models, model_jobs
from shoal.surfaces.shared import wire_models as wire
from shoal.surfaces.shared.listing import get_entry, hide_addresses, list_all_entries, list_served

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

HEARTBEAT_S = 15.0
"""Seconds without an event before a comment is sent, so that proxies do not close an idle stream."""

MAX_STREAMS = 100
"""Maximum event streams. Each holds a connection, and up to a full queue of events."""

_POLL_INTERVAL_S = 1.0  # how soon an idle stream notices a shutdown
_CHANGE_ERRORS: dict[int, Any] = dict.fromkeys((400, 403, 404, 409, 500, 502, 503, 504), OpenAIError)
_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_ENCODE = msgspec.json.Encoder()


class Models:
    """The surface of llama.cpp's router. Loads, unloads and downloads return once started, and report as events."""

    name = "models"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        router = _ModelEndpoints(gateway, self._options)
        listed = wire.InfinityModelList if self._options.status_dialect == "infinity" else wire.ModelList
        operations: list[Operation] = [
            Operation(
                method="GET",
                path="/models",
                endpoint=router.list,
                summary="List all models, served or not",
                response=listed,
                errors={500: OpenAIError},
            ),
            DocumentedOperation(
                method="POST",
                path="/models",
                endpoint=router.download,
                summary="List all models, or start downloading one",
                request=wire.ModelRequest,
                response=(listed, wire.Done),
                errors=_CHANGE_ERRORS,
                description="With an empty body, the same as GET. With a `model`, which requires an admin key, "
                "starts its download.",
                example={},
                optional=True,
            ),
            DocumentedOperation(
                method="DELETE",
                path="/models",
                endpoint=router.delete,
                summary="Unload a model and delete its files",
                access="admin",
                response=wire.Done,
                errors=_CHANGE_ERRORS,
                query={"model": "Name of the model."},
                required_query=frozenset({"model"}),
            ),
            Operation(
                method="GET",
                path="/models/sse",
                endpoint=_EventStream(gateway),
                summary="Stream model events as server-sent events",
                response=str,
                media_type="text/event-stream",
                errors={400: OpenAIError, 429: OpenAIError},
                description='Each event is a JSON object: `{"model", "event", "data"}`. Events: `model_status`, '
                "`download_progress`, `download_finished`, `download_failed`, `model_remove`.",
            ),
            Operation(
                method="GET",
                path="/models/{id:path}",
                endpoint=router.show,
                summary="Show one model",
                response=wire.ModelEntry,
                errors={404: OpenAIError, 500: OpenAIError},
            ),
        ]
        return [*operations, *_change_operations(router)]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


def _change_operations(router: _ModelEndpoints) -> list[Operation]:
    actions: list[tuple[Literal["/load", "/unload"], Any, str]] = [
        ("/load", router.load, "Start loading a model"),
        ("/unload", router.unload, "Start unloading a model, or cancel its load or download"),
    ]
    return [
        Operation(
            method="POST",
            path=f"/models{suffix}",
            endpoint=endpoint,
            summary=summary,
            access="admin",
            request=wire.ModelName,
            response=wire.Done,
            errors=_CHANGE_ERRORS,
            example={"model": "intfloat/e5-small-v2"},
        )
        for suffix, endpoint, summary in actions
    ]


class _ModelEndpoints:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._options = options
        self._decode = decoder.Decoder(wire.ModelRequest, "models")
        self._decode_name = decoder.Decoder(wire.ModelName, "models")

    async def list(self, request: Request) -> Reply:
        if self._options.status_dialect == "infinity":
            entries = hide_addresses(request, list_served(self._gateway))
            return model_jobs.json_reply(infinity_models.build_list(self._gateway, entries, self._options))
        return model_jobs.json_reply(
            wire.ModelList(data=hide_addresses(request, await list_all_entries(self._gateway)))
        )

    async def show(self, request: Request) -> Reply:
        return model_jobs.json_reply(*hide_addresses(request, [get_entry(self._gateway, request.parameter)]))

    async def download(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body or b"{}")
        if payload.model is None:
            return await self.list(request)
        request.require_access("admin")
        request.model = model_jobs.get_lifecycle(self._gateway).download(model_jobs.check_source(payload.model)).model
        return model_jobs.json_reply(wire.Done())

    async def load(self, request: Request) -> Reply:
        payload = await self._decode_name.decode_async(request.body)
        name = model_jobs.check_source(payload.model)
        request.model = model_jobs.get_lifecycle(self._gateway).load(name).model
        return model_jobs.json_reply(wire.Done())

    async def unload(self, request: Request) -> Reply:
        payload = await self._decode_name.decode_async(request.body)
        name = model_jobs.check_model_name(payload.model)
        request.model = (await model_jobs.start_unload(self._gateway, name)).model
        return model_jobs.json_reply(wire.Done())

    async def delete(self, request: Request) -> Reply:
        name = request.query_parameter("model")
        if name is None:
            raise InvalidValue("Missing query parameter 'model'; send DELETE /models?model=NAME.", param="model")
        job = model_jobs.get_lifecycle(self._gateway).delete(model_jobs.check_model_name(name))
        await model_jobs.await_job(request, job, wait=True)
        model_jobs.check_changed(job)
        return model_jobs.json_reply(wire.Done())


class _EventStream:
    """Streams events of models. A stream ends on disconnect, on shutdown, or if the client reads too slowly."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: WeakSet[AsyncGenerator[Event]] = WeakSet()  # weak: a stream that never started does not count

    async def __call__(self, request: Request) -> Reply:
        lifecycle = model_jobs.get_lifecycle(self._gateway)
        if len(self._open) >= MAX_STREAMS:
            raise Overloaded(
                f"{MAX_STREAMS} clients already stream events; poll GET /models instead.", retry_after=30.0
            )
        events = lifecycle.events()
        self._open.add(events)
        return Reply(200, _STREAM, self._stream_events(events))

    async def _stream_events(self, events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
        upcoming: asyncio.Future[Event] | None = None
        try:
            yield b": watching\n\n"
            quiet = 0.0
            while not self._gateway.draining:
                # Not cancelled on a timeout: that would end the generator.
                upcoming = upcoming or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({upcoming}, timeout=_POLL_INTERVAL_S)
                if done:
                    event = upcoming.result()
                    upcoming, quiet = None, 0.0
                    if event.data.get("status") != "unloading":  # the router has no such state; "unloaded" follows
                        yield _encode_event(event)
                    continue
                quiet += _POLL_INTERVAL_S
                if quiet >= HEARTBEAT_S:
                    quiet = 0.0
                    yield b": still here\n\n"
        except StopAsyncIteration:
            return
        finally:
            self._open.discard(events)
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await events.aclose()


def _encode_event(event: Event) -> bytes:
    data = dict(event.data)
    if event.name == "model_status":
        data = _to_router_status(data)
    elif event.name == "download_progress":
        data = {event.model: {"done": data.get("done") or 0, "total": data.get("total") or 0}}
    fields: dict[str, Any] = {"model": event.model, "event": event.name}
    return b"data: %b\n\n" % _ENCODE.encode({**fields, "data": data} if data else fields)


def _to_router_status(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a status to the router's, which has no state for failed models."""
    word = str(data.get("status", ""))
    status: dict[str, Any] = {"status": "unloaded" if word == "failed" else word}
    if word == "failed":
        status["failed"] = True
    if data.get("error"):
        status["error"] = data["error"]
    if word == "loading" and data.get("stage"):
        status["progress"] = {"stages": [data["stage"]], "current": data["stage"], "value": data.get("fraction") or 0.0}
    return status
