"""The backend and the dialect of docs/extending.md: each is a folder of examples/extending and one line of a table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import shoal.backends
import shoal.surfaces
from shoal.app import App, open_app
from shoal.backends import BACKENDS
from shoal.config import load
from shoal.core.protocols import Prompt
from shoal.types import Context, Sampling
from tests.surfaces.surface_kit import Answer, Exchange, request_scope
from tests.unit.backends.tei.kit import until

EXAMPLES = Path(__file__).parents[2] / "examples" / "extending"
DIMENSION = 3
READY = {"words": "ready", "parrot": "ready"}


@pytest.fixture
def extended_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are beside Shoal's own, and each has its line in the table."""
    for package, folder in ((shoal.backends, "backends"), (shoal.surfaces, "surfaces")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(EXAMPLES / folder)])
    monkeypatch.setitem(BACKENDS, "reef", ("reef",))
    plain = import_module("shoal.surfaces.plain").Plain
    monkeypatch.setattr(shoal.surfaces, "SURFACES", (*shoal.surfaces.SURFACES, plain))


class ReefServer:
    """A Reef server: vectors count letters, answers repeat the prompt's words."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.app = web.Application()
        self.app.add_routes(
            [web.get("/models", self.models), web.post("/vectors", self.vectors), web.post("/complete", self.complete)]
        )

    async def models(self, request: web.Request) -> web.Response:
        listed = [{"name": "words", "kind": "embed", "dimension": DIMENSION}, {"name": "parrot", "kind": "chat"}]
        return web.json_response({"models": listed})

    async def vectors(self, request: web.Request) -> web.Response:
        texts = (await request.json())["texts"]
        if "poison" in texts:
            return web.json_response({"error": "poison"}, status=422)
        self.batches.append(texts)
        return web.json_response({"vectors": [[len(text), text.count("a"), 1] for text in texts]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"content-type": "text/plain"})
        await response.prepare(request)
        for word in body["prompt"].split()[: body["max_tokens"]]:
            await response.write(f"{word} ".encode())
        return response


@asynccontextmanager
async def reef_server() -> AsyncIterator[tuple[ReefServer, str]]:
    reef = ReefServer()
    runner = web.AppRunner(reef.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield reef, f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def post(app: App, path: str, body: object) -> Answer:
    exchange = Exchange([json.dumps(body).encode()])
    sent = {"host": "127.0.0.1:8080", "content-type": "application/json"}
    await app.asgi(request_scope("POST", path, sent), exchange.receive, exchange.send)
    return exchange.answer()


async def test_a_backend_and_a_dialect_take_one_folder_each(extended_checkout: None, tmp_path: Path) -> None:
    """Every model that the server lists is served, in every dialect including the new one."""
    async with (
        reef_server() as (reef, place),
        open_app(load({"home": str(tmp_path)}, {}), [f"reef://{place}"]) as app,
    ):
        # On a busy machine the first question for the list may go unanswered; it is asked again.
        await until(lambda: {card.name: card.state for card in app.gateway.models()} == READY)

        answer = await post(app, "/v1/embeddings", {"model": "words", "input": ["abba", "b"], "normalize": False})
        assert answer.status == 200, answer.body
        assert [each["embedding"] for each in answer.json()["data"]] == [[4.0, 2.0, 1.0], [1.0, 0.0, 1.0]]
        assert reef.batches == [["abba", "b"]]

        answer = await post(app, "/v1/embeddings", {"model": "words", "input": ["fine", "poison"]})
        assert answer.status == 400, answer.body
        assert "input 1" in answer.json()["error"]["message"]

        answer = await post(app, "/plain", {"text": "a"})
        assert answer.status == 200, answer.body
        assert len(answer.json()) == DIMENSION
        answer = await post(app, "/plain", {"text": 1})
        assert answer.status == 400
        assert list(answer.json()) == ["msg"]

        body = {"model": "parrot", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3}
        answer = await post(app, "/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        assert answer.json()["choices"][0]["message"]["content"].split() == ["user:", "one", "two"]


def test_the_guide_shows_the_dialect() -> None:
    """The page equals the file."""
    guide = (EXAMPLES.parents[1] / "docs" / "extending.md").read_text()
    assert (EXAMPLES / "surfaces" / "plain" / "__init__.py").read_text() in guide


async def test_the_generator_of_the_guide() -> None:
    """It repeats at most `max_tokens` words of its prompt."""
    guide = (EXAMPLES.parents[1] / "docs" / "extending.md").read_text()
    (example,) = [each for each in re.findall(r"(?s)```python\n(.*?)```", guide) if "class Echo" in each]
    names: dict[str, Any] = {}
    exec(compile(example, "docs/extending.md", "exec"), names)
    prompt, ctx = Prompt(text="one two three"), Context(id="1", deadline=math.inf)
    pieces = names["Echo"]("echo").generate(prompt, Sampling(max_tokens=2), ctx)
    assert [piece.text async for piece in pieces] == ["one ", "two "]


def code_lines(folder: Path) -> int:
    return sum(bool(line.strip()) for path in folder.rglob("*.py") for line in path.read_text().splitlines())


@pytest.mark.parametrize("folder", ["backends/reef", "surfaces/plain"])
def test_the_examples_stay_small(folder: str) -> None:
    assert code_lines(EXAMPLES / folder) < 250
