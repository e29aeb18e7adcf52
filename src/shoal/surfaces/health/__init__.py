"""Liveness, readiness and metrics of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from shoal._version import __version__
from shoal.core.protocols import Operation
from shoal.errors import InvalidValue, ShoalError
from shoal.http.errors import OpenAIError, render_error
from shoal.http.operation import DocumentedOperation
from shoal.http.request import JSON, TEXT, Options, Reply, Request
from shoal.surfaces.health import statistics, wire
from shoal.surfaces.shared import listing

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ENCODE = msgspec.json.Encoder()
_PROMETHEUS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Health:
    """The health routes.

    - /health: `ok` while at least one model can answer, or none was named at start; else 503 with the reason. For
      simple health checks.
    - /health/live: the process is alive; restart it if this fails.
    - /health/ready: every model can answer and the server is not draining; send traffic only then.
    """

    name = "health"
    error = OpenAIError

    def __init__(self, options: Options) -> None:
        self._metrics = options.metrics
        self._json_first = options.metrics_default == "json"
        self._infinity = options.status_dialect == "infinity"

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        running = wire.Clock if self._infinity else wire.Running if self._json_first else str
        state = _HealthEndpoints(gateway, running)
        operations = [
            *(
                DocumentedOperation(
                    method="GET",
                    path=path,
                    endpoint=state.health,
                    summary="Check whether any model is ready",
                    access="public",
                    quiet=True,
                    response=running,
                    media_type="text/plain" if running is str else "application/json",
                    other_responses=(("application/json", wire.Health),) if running is str else (),
                    errors={503: str},
                    description="`ok` as text; with `Accept: application/json` the state of every model.",
                )
                for path in ("/health", "/v1/health")
            ),
            Operation(
                method="GET",
                path="/health/live",
                endpoint=state.live,
                summary="Check whether the process is alive",
                access="public",
                quiet=True,
                response=str,
                media_type="text/plain",
            ),
            Operation(
                method="GET",
                path="/health/ready",
                endpoint=state.ready,
                summary="Check whether all models are ready",
                access="public",
                quiet=True,
                response=wire.Health,
                errors={503: wire.Health},
            ),
        ]
        if self._metrics is not None:
            operations.append(
                DocumentedOperation(
                    method="GET",
                    path="/metrics",
                    endpoint=_MetricsEndpoint(gateway, self._metrics, json_first=self._json_first),
                    summary="Get Prometheus metrics, or statistics of each model as JSON",
                    quiet=True,
                    response=statistics.Statistics if self._json_first else str,
                    media_type="application/json" if self._json_first else "text/plain",
                    other_responses=(
                        ("text/plain", str) if self._json_first else ("application/json", statistics.Statistics),
                    ),
                    errors={400: OpenAIError},
                    description="JSON with `Accept: application/json`, in the shape of Triton's ModelStatistics.",
                    query={
                        "format": "`json` or `prometheus`; overrides `Accept`.",
                        "names": "Of Prometheus metrics, only these of Shoal's, separated by commas.",
                    },
                )
            )
        return operations

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


class _HealthEndpoints:
    """`running`: the form of /health while the server serves."""

    def __init__(self, gateway: Gateway, running: type[wire.Clock | wire.Running | str]) -> None:
        self._gateway = gateway
        self._health_form = running

    async def live(self, request: Request) -> Reply:
        return Reply(200, [TEXT], b"ok")

    async def ready(self, request: Request) -> Reply:
        ready = self._gateway.ready()
        status = "ready" if ready else self._unready_reason()
        return Reply(200 if ready else 503, [JSON], self._encode_health(status))

    async def health(self, request: Request) -> Reply:
        models = list(self._gateway.registry)
        # Only models named at start count: one that is loaded through the API may be absent without a failure.
        serves = not any(model.required for model in models) or any(model.can_answer() for model in models)
        why = "ok" if serves else self._unready_reason()
        if request.accepts_json():
            return Reply(200 if serves else 503, [JSON], self._encode_health(why))
        if serves and self._health_form is wire.Running:
            return Reply(200, [JSON], _ENCODE.encode(wire.Running()))
        if serves and self._health_form is wire.Clock:
            return Reply(200, [JSON], _ENCODE.encode(wire.Clock(unix=time.time())))
        if serves:
            return Reply(200, [TEXT], b"ok")
        return Reply(
            503,
            [TEXT],
            "; ".join(f"{name}: {why}" for name, why in listing.list_statuses(self._gateway).items()).encode(),
        )

    def _unready_reason(self) -> Literal["loading", "failed", "draining"]:
        if self._gateway.draining:
            return "draining"
        failed = any(card.state == "failed" for card in self._gateway.models()) or listing.find_unresponsive(
            self._gateway
        )
        return "failed" if failed else "loading"

    def _encode_health(self, status: Literal["ok", "ready", "loading", "failed", "draining"]) -> bytes:
        return _ENCODE.encode(
            wire.Health(status=status, version=__version__, models=listing.list_statuses(self._gateway))
        )


class _MetricsEndpoint:
    def __init__(self, gateway: Gateway, render: Callable[[Collection[str]], bytes], *, json_first: bool) -> None:
        self._gateway = gateway
        self._render = render
        self._json_first = json_first

    async def __call__(self, request: Request) -> Reply:
        form = self._choose_format(request)
        if form == "prometheus":
            names = request.query_parameter("names")
            wanted = frozenset(names.split(",")) if names else frozenset()
            return Reply(200, [_PROMETHEUS], await asyncio.to_thread(self._render, wanted))
        models = await self._gateway.statistics()
        if form == "original":
            models = [msgspec.structs.replace(each, name=each.name.replace("/", "_")) for each in models]
        return Reply(200, [JSON], statistics.encode_statistics(models))

    def _choose_format(self, request: Request) -> Literal["json", "prometheus", "original"]:
        """Choose the format by `format`, else by the Accept header. Raises InvalidValue.

        `original` is JSON with inference-server's names of its models in Triton, which have no slash.
        """
        match request.query_parameter("format"):
            case "json" | "prometheus" as form:
                return form
            case None:
                accepted = request.headers.get(b"accept", b"")
                if b"application/json" in accepted:
                    return "json"
                # Prometheus accepts text or OpenMetrics, browsers text/html: any client that accepts text gets it.
                text = b"text/" in accepted or b"openmetrics" in accepted
                return "original" if self._json_first and not text else "prometheus"
            case other:
                raise InvalidValue(f"format={other[:64]!r} is neither json nor prometheus.", param="format")
