"""Completes names of models in a shell: those of the running server, and those on this machine's disk.

Nothing is written and no error is shown, because a shell calls this while somebody types.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.config.settings import Settings

TIMEOUT_S = 0.2
"""Timeout of the running server's list of models, so that a key press never waits for long."""


def complete_stored(incomplete: str) -> list[str]:
    """Complete the name of a model on this machine's disk."""
    return _with_prefix(incomplete, _list_stored)


def complete_running(incomplete: str) -> list[str]:
    """Complete the name of a model that the running server knows."""
    return _with_prefix(incomplete, _list_running)


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model on the running server or on this machine's disk."""
    return _with_prefix(incomplete, _list_running, _list_stored)


def complete_from(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one of `words`."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _with_prefix(incomplete: str, *sources: Callable[[Settings], list[str]]) -> list[str]:
    from shoal import config
    from shoal.errors import ShoalError

    names: dict[str, None] = {}
    with contextlib.suppress(ShoalError):  # wrong settings: the command itself reports them
        settings = config.load({}, os.environ, config.find_file(os.environ, Path.cwd())).settings
        for source in sources:
            with contextlib.suppress(ShoalError):  # no server there, or a store that cannot be read
                names |= dict.fromkeys(source(settings))
    return [name for name in names if name.startswith(incomplete)]


def _list_running(settings: Settings) -> list[str]:
    """Ask only a server on this machine: nobody chose the file of settings here, and a key goes to the server."""
    from urllib.parse import urlsplit

    from shoal.cli._asking import first_key
    from shoal.cli._running import RunningServer
    from shoal.cli.banner import browser_url
    from shoal.config import is_loopback

    url = browser_url(settings.host, settings.port)
    if not settings.port or not is_loopback(urlsplit(url).hostname or ""):
        return []
    server = RunningServer(url, first_key(*settings.api_key), timeout_s=TIMEOUT_S)
    return [str(each["id"]) for each in server.models()]


def _list_stored(settings: Settings) -> list[str]:
    from shoal.models.stored_names import list_stored_names

    return list_stored_names(settings.home)
