"""Asks the configured servers for their models without serving anything. Part of the composition root."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shoal.app.resources import ModelResources, RunningLanes
from shoal.backends import backend_for_scheme
from shoal.cache import RowCaches
from shoal.config import LoadedConfig
from shoal.core.protocols import Observer
from shoal.core.threads import Threads
from shoal.errors import TransportFailed
from shoal.models.address import Address, ServedModel


async def list_offers(loaded: LoadedConfig, address: Address, timeout_s: float) -> dict[str, ServedModel | str]:
    """Return what the server of an address offers, as Backend.offers does. Raises a ShoalError if it does not answer
    within `timeout_s`."""
    threads = Threads("probe", 1)
    resources = ModelResources(
        loaded, Observer(), threads, caches=RowCaches(Path(loaded.settings.home)), queues=RunningLanes()
    )
    name = backend_for_scheme(address.scheme)
    assert name is not None, "addresses of unknown schemes are rejected during parsing"
    try:
        async with asyncio.timeout(timeout_s):
            return await resources.backends[name].offers(address)
    except TimeoutError:
        raise TransportFailed(f"{address} did not answer within {timeout_s:g} s: is it running?") from None
    finally:
        await resources.backends.aclose()
        threads.close()
