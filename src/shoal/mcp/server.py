"""The tools that assistants call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from shoal._version import __version__
from shoal.errors import ShoalError
from shoal.mcp.collection import Collection
from shoal.mcp.passages import Passage, read_passages, split_text
from shoal.python.api import Shoal
from shoal.python.results import ModelInfo, Ranked

MAX_TEXTS = 256
"""In one call: assistants write all of them."""

_MAX_CHARACTERS = 1_000_000
_READ = 512
"""Passages of files that are embedded at once."""

_PATIENCE_S = 20.0
"""How long a search waits for the files: assistants give up after a minute."""

Text = Annotated[str, Field(min_length=1, max_length=_MAX_CHARACTERS)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
Model = Annotated[str, Field(description="Name from list_models; empty: the first that can do it.")]
Limit = Annotated[int, Field(ge=1, le=100, description="Maximum results.")]

_INSTRUCTIONS = (
    "Local embedding and reranking models. Use search to find passages by meaning in the user's collection{folders}; "
    "add_documents extends it for this session. embed and rerank work on texts that you pass."
)


@dataclass
class Document:
    """A text to find later; `source` names it in results, and a later document of that name replaces it."""

    source: Annotated[str, Field(min_length=1, max_length=1000)]
    text: Text


@dataclass
class Found:
    """A passage; `line` is where it begins in `source`. `score`: cosine similarity."""

    source: str
    line: int
    score: float
    text: str


@dataclass
class SearchResult:
    """`passages`: how many were compared. `complete`: false while files are still being read."""

    results: list[Found]
    passages: int
    complete: bool


@dataclass
class Added:
    """`passages`: how many the collection has now."""

    passages: int


@dataclass
class Embeddings:
    """One unit vector a text."""

    vectors: list[list[float]]


class Tools:
    """The tools, over these models. The files below `folders` are embedded while `running`."""

    def __init__(self, models: Shoal, folders: Sequence[Path], model: str = "") -> None:
        self._models = models
        self._folders = folders
        self._collection = Collection(models, model)
        self._indexing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        """Embed the files in the background."""
        self._indexing = asyncio.create_task(self._index(), name="indexing")
        try:
            yield
        finally:
            self._indexing.cancel()
            await asyncio.gather(self._indexing, return_exceptions=True)  # searches have raised what it failed with

    async def list_models(self) -> list[ModelInfo]:
        """List the local models and what each can do."""
        with _reporting():
            return await self._models.amodels()

    async def embed(self, texts: Texts, model: Model = "") -> Embeddings:
        """Convert texts to vectors that compare by meaning. To search, use search."""
        with _reporting():
            vectors = await self._models.aembed(texts, model=model)
        return Embeddings(np.round(vectors.astype(np.float64), 6).tolist())  # digits are tokens of the assistant

    async def rerank(self, query: Text, documents: Texts, limit: Limit = 10, model: Model = "") -> list[Ranked]:
        """Sort documents by how well they answer the query, best first; index is the place in documents."""
        with _reporting():
            return await self._models.arerank(query, documents, top_n=limit, model=model)

    async def add_documents(
        self, documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_TEXTS)]
    ) -> Added:
        """Add documents to the collection that search looks through, until this session ends."""
        with _reporting():
            await self._collection.add([part for each in documents for part in split_text(each.source, each.text)])
        return Added(len(self._collection))

    async def search(self, query: Text, limit: Limit = 5) -> SearchResult:
        """Find the passages of the user's files and of added documents that are closest to the query in meaning."""
        with _reporting():
            complete = await self._wait_for_files()
            found = await self._collection.search(query, limit)
        results = [Found(each.source, each.line, round(score, 4), each.text) for score, each in found]
        return SearchResult(results, len(self._collection), complete)

    async def _wait_for_files(self) -> bool:
        """Return whether all files are embedded, after a while; raises what that failed with, each time."""
        assert self._indexing is not None
        done, _ = await asyncio.wait([self._indexing], timeout=_PATIENCE_S)
        for task in done:
            task.result()
        return bool(done)

    async def _index(self) -> None:
        files = read_passages(self._folders)
        waiting: list[Passage] = []
        while (passages := await asyncio.to_thread(next, files, None)) is not None:
            waiting += passages
            if len(waiting) >= _READ:
                await self._collection.add(waiting)
                waiting = []
        await self._collection.add(waiting)


@contextmanager
def _reporting() -> Iterator[None]:
    """Errors of Shoal as the tool's result, for the assistant to read; others are bugs, and logged."""
    try:
        yield
    except ShoalError as error:
        raise ToolError(error.message) from None


def build_server(models: Shoal, folders: Sequence[Path] = (), model: str = "") -> MCPServer[None]:
    """Return the server, which embeds the files below `folders` once it runs. `model` embeds the collection."""
    tools = Tools(models, folders, model)
    named = f" ({', '.join(map(str, folders))})" if folders else ""
    server = MCPServer(
        "shoal",
        version=__version__,
        instructions=_INSTRUCTIONS.format(folders=named),
        log_level="WARNING",
        lifespan=tools.running,
    )
    for tool in (tools.search, tools.rerank, tools.embed, tools.list_models):
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    server.add_tool(tools.add_documents, annotations=ToolAnnotations(destructive_hint=False, open_world_hint=False))
    return server
