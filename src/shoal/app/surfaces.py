"""Builds the surfaces from the settings. Part of the composition root."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from shoal.backends import BACKENDS
from shoal.config.settings import Settings
from shoal.core.gateway import Gateway
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
    metrics: Callable[[], bytes],
    image_reader: ImageReader,
    forward: Forward | None = None,
) -> tuple[Application, Options]:
    """Build the ASGI application of all surfaces, and the options they have. `forward` as in Application."""
    schemes = {scheme for schemes in BACKENDS.values() for scheme in schemes}
    options = Options.from_settings(settings, metrics, image_reader, schemes)
    surfaces = build_surfaces(options)
    return build_app(gateway, [*surfaces, OpenApi(surfaces), Pages()], options, forward), options
