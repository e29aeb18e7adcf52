"""Opens the record of the last requests, and the traces if they are wanted. Part of the composition root."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from shoal.config.settings import Settings
from shoal.core.recording import RequestLog
from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

logger = logging.getLogger("shoal")


async def open_log(stack: AsyncExitStack, settings: Settings) -> RequestLog | None:
    """Open the log until the stack is left; None if nothing is recorded."""
    provider = await asyncio.to_thread(_build_provider) if is_tracing(os.environ) else None
    if provider is None:
        return RequestLog(settings.explain_requests) if settings.explain_requests else None
    from shoal.observability.tracing import OtelTracer, close_provider

    stack.push_async_callback(asyncio.to_thread, close_provider, provider)
    return RequestLog(settings.explain_requests, OtelTracer(provider))


def is_tracing(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for traces:
    https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/."""
    exporters = environment.get("OTEL_TRACES_EXPORTER", "")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporters:  # a list; Shoal has no other exporter
        return "otlp" in [each.strip().lower() for each in exporters.split(",")]
    return any(environment.get(name) for name in ENDPOINTS)


def _build_provider() -> TracerProvider | None:
    """Return None without the extra: the variables may have been set for other programs, too."""
    try:
        from shoal.observability.tracing import build_provider

        return build_provider(os.environ)
    except (ImportError, MissingExtra):
        logger.warning("OpenTelemetry's variables ask for traces: %s", MissingExtra("sending them", "otel").message)
        return None
