"""Token ids as the input of /v1/embeddings: accepted only if it is known which tokenizer made them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from tests.surfaces.surface_kit import MODEL, Answer, RecordingRunner, Server, serve

ALIAS = "text-embedding-3-small"
TABLE = {9906: "Hello", 1917: " world"}
IDS = [9906, 1917]

Install = Callable[[bool], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a fake tiktoken; `cached` False: its vocabulary would have to be fetched. Without a call it is not
    installed."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)

    def make(cached: bool) -> None:
        def read_file(path: str) -> bytes:
            pytest.fail("a request fetched a table")

        class Encoding:
            def decode(self, ids: list[int]) -> str:
                return "".join(TABLE[each] for each in ids)

        def get_encoding(name: str) -> Encoding:
            assert name == "cl100k_base"
            if not cached:
                load.read_file("somewhere")
            return Encoding()

        load: Any = ModuleType("tiktoken.load")
        load.read_file = read_file
        module: Any = ModuleType("tiktoken")
        module.get_encoding, module.load = get_encoding, load
        monkeypatch.setitem(sys.modules, "tiktoken", module)
        monkeypatch.setitem(sys.modules, "tiktoken.load", load)

    return make


async def ask(server: Server, inputs: Any, model: str = MODEL) -> Answer:
    return await server.call("POST", "/v1/embeddings", {"model": model, "input": inputs})


def serve_alias(**options: Any) -> Server:
    """Serve a model that also has one of OpenAI's names."""
    return serve(aliases=(ALIAS,), **options)


@pytest.mark.parametrize("inputs", [IDS, [IDS], [IDS, [9906]]])
async def test_unknown_tokenizers_are_rejected(inputs: list[Any]) -> None:
    """A wrong vector would go unnoticed; the error says what to send, and what the operator can set."""
    server = serve()
    answer = await ask(server, inputs)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "input")
    assert "check_embedding_ctx_length=False" in error["message"]
    assert "token_ids" in error["message"]
    assert not server.runner.tasks


async def test_texts_need_no_check() -> None:
    answer = await ask(serve(), ["one", "two"])
    assert answer.status == 200
    assert "x-shoal-token-ids" not in answer.headers


async def test_the_operator_may_accept_them() -> None:
    """They are passed unchanged, as the model's own; a header says so."""
    server = serve(token_ids="accept")
    answer = await ask(server, [IDS, [101]])
    assert (answer.status, answer.headers["x-shoal-token-ids"]) == (200, "taken")
    assert server.runner.tasks[0].inputs == [IDS, [101]]


async def test_a_server_with_its_own_tokenizer() -> None:
    """An upstream has the tokenizer that its clients use."""
    server = serve(RecordingRunner(facts=replace(RecordingRunner().facts, knows_token_ids=True)))
    answer = await ask(server, IDS)
    assert (answer.status, answer.headers["x-shoal-token-ids"]) == (200, "taken")


@pytest.mark.parametrize("policy", ["accept", "refuse"])
async def test_openai_names_decode_to_texts(install: Install, policy: str) -> None:
    """OpenAI's clients use its vocabulary whatever is served under that name."""
    install(True)
    server = serve_alias(token_ids=policy)
    answer = await ask(server, [IDS, [9906]], ALIAS)
    assert (answer.status, answer.headers["x-shoal-token-ids"]) == (200, "decoded")
    assert server.runner.tasks[0].inputs == ["Hello world", "Hello"]
    assert answer.json()["data"] == (await ask(server, ["Hello world", "Hello"], ALIAS)).json()["data"]


@pytest.mark.parametrize("cached", [None, False])
@pytest.mark.parametrize("policy", ["accept", "refuse"])
async def test_ids_without_the_vocabulary_are_rejected(install: Install, cached: bool | None, policy: str) -> None:
    """Nothing is fetched for a request, and tiktoken can fetch again afterwards."""
    if cached is not None:
        install(cached)
        fetch = sys.modules["tiktoken.load"].read_file
    answer = await ask(serve_alias(token_ids=policy), IDS, ALIAS)
    assert answer.status == 400
    assert "the vocabulary cl100k_base, which is not installed" in answer.json()["error"]["message"]
    if cached is not None:
        assert sys.modules["tiktoken.load"].read_file is fetch


async def test_an_id_outside_the_vocabulary(install: Install) -> None:
    install(True)
    answer = await ask(serve_alias(), [9906, 5], ALIAS)
    assert answer.status == 400
    assert "a token id that the vocabulary cl100k_base does not contain" in answer.json()["error"]["message"]


async def test_pooling_follows_the_same_rules(install: Install) -> None:
    """Its vectors are as wrong for ids of another tokenizer."""
    body = {"model": ALIAS, "input": [IDS]}
    refused = await serve().call("POST", "/pooling", {**body, "model": MODEL})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "input")
    taken = await serve(token_ids="accept").call("POST", "/pooling", {**body, "model": MODEL})
    assert (taken.status, taken.headers["x-shoal-token-ids"]) == (200, "taken")
    unknown = await serve_alias(token_ids="accept").call("POST", "/pooling", body)
    assert (unknown.status, "cl100k_base" in unknown.json()["error"]["message"]) == (400, True)
    install(True)
    server = serve_alias()
    decoded = await server.call("POST", "/pooling", body)
    assert (decoded.status, decoded.headers["x-shoal-token-ids"]) == (200, "decoded")
    assert server.runner.tasks[0].inputs == ["Hello world"]


async def test_tei_says_that_it_took_ids() -> None:
    """TEI's clients have the model's own ids from /tokenize."""
    answer = await serve().call("POST", "/embed", {"inputs": [IDS, "text"]})
    assert (answer.status, answer.headers["x-shoal-token-ids"]) == (200, "taken")
    assert "x-shoal-token-ids" not in (await serve().call("POST", "/embed", {"inputs": "text"})).headers
