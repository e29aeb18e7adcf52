"""Opens models on Triton: combines servers, models and settings.

`publish` and `withdraw` are for the command line, which runs no Shoal server.
"""

from __future__ import annotations

import asyncio

from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost, build_entry_spec
from shoal.config.settings import Settings
from shoal.errors import TransportFailed
from shoal.models.store import StoredModel


async def publish(name: str, stored: StoredModel, settings: Settings) -> str:
    """Write a stored model into the repository of the settings, and load it if Triton can be reached.

    Returns a message that says what was done. Raises SetupError, Forbidden, and the server's error of the load.
    """
    tritons = TritonConnections(settings)
    try:
        host = TritonHost(settings, tritons)
        if not settings.triton_url:
            where = await host.write(name, stored, settings)
            platform = (await asyncio.to_thread(build_entry_spec, name, stored, settings)).options.platform
            return f"written to {where} for the {platform} backend; name a running Triton with --triton-url to load it"
        try:
            where = await host.publish(name, stored, settings)
        except TransportFailed as error:
            return f"written to {settings.triton_repository}; not loaded: {error.message}"
        return f"written to {where} and loaded by Triton at {host.url}"
    finally:
        await tritons.aclose()


async def withdraw(name: str, settings: Settings) -> bool:
    """Remove what Shoal wrote into the repository for a name, after unloading it if Triton can be reached.

    Returns False if there is nothing. Raises Forbidden if Shoal did not make the model, ConfigError for an
    unusable folder.
    """
    tritons = TritonConnections(settings)
    try:
        host = TritonHost(settings, tritons)
        if settings.triton_url:
            await host.unload(name, settings)
        return await host.remove(name)
    finally:
        await tritons.aclose()


__all__ = ["publish", "withdraw"]
