"""The tools of `shoal mcp`, called by the SDK's client, over scripted models."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import rich  # noqa: F401  # here: the SDK imports it late, which reads files
from mcp import Client

import shoal
from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.mcp import collection, server
from shoal.mcp.passages import Passage
from shoal.mcp.server import MAX_TEXTS, build_server

EMBED, RERANK = "e=fake:", "r=fake:labels=1"
OPEN = shoal.open  # the first use imports the API, which reads files


@asynccontextmanager
async def connected(*addresses: str, folders: tuple[Path, ...] = (), model: str = "") -> AsyncIterator[Client]:
    async with OPEN(*addresses) as models, Client(build_server(models, folders, model)) as client:
        yield client


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    """Return the structured result of a call that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    (content,) = result.content
    return str(getattr(content, "text", ""))


async def test_tools_and_their_nature() -> None:
    """Only add_documents changes anything; every argument is bounded."""
    async with connected(EMBED) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"search", "add_documents", "rerank", "embed", "list_models"}
        for name, tool in tools.items():
            assert tool.description
            assert tool.annotations is not None
            assert bool(tool.annotations.read_only_hint) is (name != "add_documents")
        assert tools["embed"].input_schema["properties"]["texts"]["maxItems"] == MAX_TEXTS
        assert client.server_info is not None
        assert client.server_info.version == shoal.__version__


async def test_models() -> None:
    async with connected(EMBED, RERANK) as client:
        first, second = (await call(client, "list_models"))["result"]
        assert first == {"name": "e", "tasks": ["embed", "generate"], "modalities": ["text"]}
        assert second["name"] == "r"


async def test_embed_and_rerank() -> None:
    async with connected(EMBED, RERANK) as client:
        (vector,) = (await call(client, "embed", texts=["a b"]))["vectors"]
        right = compute_vector(tokenize_item("a b"), 32)
        assert vector == pytest.approx((right / (right**2).sum() ** 0.5).tolist(), abs=1e-6)
        ranked = (await call(client, "rerank", query="q", documents=["x", "y", "z"], limit=2))["result"]
        assert len(ranked) == 2
        assert ranked[0]["score"] >= ranked[1]["score"]
        by_vectors = await call(client, "rerank", query="a b", documents=["c", "a b"], model="e")
        assert by_vectors["result"][0]["index"] == 1


async def test_added_documents_are_found() -> None:
    """A later document replaces that of its source, and a session does not see another's."""
    async with OPEN(EMBED) as models:
        async with Client(build_server(models)) as client:
            nothing = {"results": [], "passages": 0, "complete": True}
            assert await call(client, "search", query="a b") == nothing
            documents = [{"source": "one", "text": "a b"}, {"source": "two", "text": "c d\n"}]
            assert await call(client, "add_documents", documents=documents) == {"passages": 2}
            found = await call(client, "search", query="c d", limit=1)
            assert found["results"] == [{"source": "two", "line": 1, "score": 1.0, "text": "c d"}]
            assert await call(client, "add_documents", documents=[{"source": "two", "text": "e"}]) == {"passages": 2}
            assert {each["text"] for each in (await call(client, "search", query="c d"))["results"]} == {"a b", "e"}
            assert await call(client, "add_documents", documents=[{"source": "b", "text": " "}]) == {"passages": 2}
        async with Client(build_server(models)) as client:
            assert (await call(client, "search", query="a"))["passages"] == 0


async def test_files_of_folders_are_found(tmp_path: Path) -> None:
    """More than one batch of them; results name file and line."""
    for number in range(700):
        (tmp_path / f"{number:03}.txt").write_text(f"\nword-{number}\n")
    async with connected(EMBED, folders=(tmp_path,)) as client:
        assert str(tmp_path) in (client.instructions or "")
        found = await call(client, "search", query="word-666", limit=1)
        assert (found["passages"], found["complete"]) == (700, True)
        (first,) = found["results"]
        assert (first["source"], first["text"]) == (str(tmp_path / "666.txt"), "word-666")


async def test_a_search_does_not_wait_long_for_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks through what is there, and says that more is to come."""
    monkeypatch.setattr(server, "_PATIENCE_S", 0.05)

    def hang(_: object) -> Iterator[list[Passage]]:
        yield [Passage("a", 1, "one")] * server._READ
        reading.wait()

    reading = threading.Event()
    monkeypatch.setattr(server, "read_passages", hang)
    async with connected(EMBED) as client:
        found = await call(client, "search", query="one")
        assert (found["passages"] in (0, server._READ), found["complete"]) == (True, False)
        reading.set()
        while not (found := await call(client, "search", query="one"))["complete"]:
            pass
        assert found["passages"] == server._READ


async def test_errors_are_results_that_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of files, at each search, and of models that could not be loaded."""
    (tmp_path / "a.txt").write_text("one")
    async with connected(EMBED, folders=(tmp_path,)) as client:
        assert "at least 1 item" in await refusal(client, "embed", texts=[])
        assert "at most 256 items" in await refusal(client, "embed", texts=["a"] * (MAX_TEXTS + 1))
        assert "available models: 'e'" in await refusal(client, "embed", texts=["a"], model="other")
        assert "greater than or equal to 1" in await refusal(client, "search", query="a", limit=0)
        assert (await call(client, "search", query="one"))["passages"] == 1
        monkeypatch.setattr(collection, "MAX_PASSAGES", 1)
        words = await refusal(client, "add_documents", documents=[{"source": "b", "text": "two"}] * 2)
        assert words.endswith("the collection holds at most 1 passages, and has 1: name fewer folders, or add less")
    async with connected(EMBED, folders=(tmp_path,), model="other") as client:
        for _ in range(2):
            assert "available models: 'e'" in await refusal(client, "search", query="a")
    models = OPEN(f"file:{tmp_path}/none")
    async with Client(build_server(models)) as client:
        assert "none" in await refusal(client, "list_models")
    await models.aclose()
