"""Builds the surfaces from the settings. Part of the composition root."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.backends import BACKENDS
from shoal.batches import BatchDesk, Limits
from shoal.batches.lines import Answer
from shoal.config.settings import Settings
from shoal.core.gateway import Gateway
from shoal.core.recording import RequestLog
from shoal.http import in_process
from shoal.http.fetching.allowed import FetchPolicy
from shoal.http.fetching.fetcher import Fetcher
from shoal.http.hand_over import Forward
from shoal.http.openapi import OpenApi
from shoal.surfaces import Application, ImageReader, Options, build_app, build_surfaces
from shoal.web import Pages


async def open_image_reader(stack: AsyncExitStack, settings: Settings) -> ImageReader:
    """Open the reader of images in requests, until the stack is left."""
    max_bytes = settings.image_max_mb * 2**20
    fetcher = Fetcher(FetchPolicy.parse(settings.image_hosts), max_bytes=max_bytes, seconds=settings.image_seconds)
    stack.push_async_callback(fetcher.aclose)
    return ImageReader(fetcher, max_bytes=max_bytes)


def build_application(
    gateway: Gateway,
    settings: Settings,
    metrics: Callable[[Collection[str]], bytes],
    image_reader: ImageReader,
    forward: Forward | None = None,
    desk: BatchDesk | None = None,
    log: RequestLog | None = None,
) -> tuple[Application, Options]:
    """Build the ASGI application of all surfaces, and the options they have. `forward` as in Application, `desk` as in
    `build_surfaces`, `log` as in Options."""
    schemes = {scheme for schemes in BACKENDS.values() for scheme in schemes}
    options = Options.from_settings(settings, metrics, image_reader, schemes, log)
    surfaces = build_surfaces(options, desk)
    return build_app(gateway, [*surfaces, OpenApi(surfaces), Pages()], options, forward), options


def open_desk(stack: AsyncExitStack, gateway: Gateway, settings: Settings) -> BatchDesk:
    """Open the batches under `home`, until the stack is left. `start_desk` lets them run."""
    limits = Limits(
        concurrency=settings.batch_concurrency,
        max_disk_bytes=settings.batch_disk_mb << 20,
        max_line_bytes=settings.max_body_bytes,
    )
    folder = Path(settings.home).expanduser() / "batches"
    desk = BatchDesk(folder, limits, draining=lambda: gateway.draining)
    stack.push_async_callback(desk.aclose)
    return desk


def start_desk(desk: BatchDesk, application: Application) -> None:
    """Run batches by requests to `application`, as bulk of their clients."""

    async def call(client: str, path: str, body: bytes) -> Answer:
        found = await in_process.post(application, path, body, client=client, traffic="bulk")
        pause = found.headers.get(b"retry-after", b"")
        return Answer(
            status=found.status,
            request_id=found.headers.get(b"x-request-id", b"").decode("latin-1"),
            body=found.body,
            retry_after=float(pause) if pause.isdigit() else None,
            may_retry=found.headers.get(b"x-should-retry") != b"false",
        )

    desk.start(call, application.is_revoked)
