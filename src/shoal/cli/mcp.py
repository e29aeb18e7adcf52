"""`shoal mcp`: local models as tools of assistants, over standard input and output."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli._completion import complete_model
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from shoal.python.api import Shoal


@with_settings("Batching", "Engine", "Model files")
def mcp(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="[NAME=]ADDRESS, as for serve; none is the default model.",
            autocompletion=complete_model,
        ),
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option("--folder", metavar="PATH", help="Folder or text file to search; repeat for several."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model that embeds the collection (default: the first that embeds).")
    ] = "",
    *,
    loaded: LoadedConfig,
) -> None:
    """Serve models to an assistant that starts this command, by the Model Context Protocol.

    Tools: search, add_documents, rerank, embed, list_models. The files of --folder are embedded at start, into memory.
    """
    try:
        from shoal.mcp.server import build_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise MissingExtra("`shoal mcp`", "mcp") from None
    from shoal.mcp.passages import check_folders
    from shoal.python.api import Shoal

    check_folders(folders or ())
    models = Shoal(loaded)
    asyncio.run(_run(build_server(models, [folder.absolute() for folder in folders or ()], model), models))


async def _run(server: MCPServer[None], models: Shoal) -> None:
    """Until the assistant closes standard input, or a signal comes."""
    loop = asyncio.get_running_loop()
    signaled: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signaled.put_nowait, number)
    serving: asyncio.Task[Any] = loop.create_task(server.run_stdio_async())
    stopping: asyncio.Task[Any] = loop.create_task(signaled.get())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await models.aclose()
    if stopping.done():
        os._exit(128 + stopping.result())  # a thread of the SDK reads standard input, and Python would wait for it
    await serving
