"""`--as triton-openai` as a drop-in for the original: its requests to language models on a Triton in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
import pytest

from shoal.app import open_app
from shoal.backends import parse_address
from shoal.backends.triton.open.host import build_entry_spec
from shoal.backends.triton.repository import Repository
from shoal.config import load
from shoal.config.settings import Settings
from shoal.models.prepare import prepare
from shoal.models.sources import Access
from shoal.models.store import Store
from tests.fakes.triton import FakeTriton
from tests.fakes.triton_llm import Script, Talker, talker
from tests.fixtures.tiny_llama import write_tokenizer
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton
from tests.surfaces.surface_kit import Answer, Exchange, request_scope
from tests.unit.backends.triton.open.kit import grpc_in_use
from tests.unit.models.checkpoints import checkpoint

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
# The original sends all of these with every request, even if the client did not set them.
REQUEST = {"model": "ensemble", "messages": QUESTION, "temperature": 0.7, "top_p": 1.0, "max_tokens": 16, "stop": None}

Call: TypeAlias = Callable[..., Any]


@pytest.fixture
async def simulated() -> AsyncIterator[FakeTriton]:
    async with grpc_in_use(), FakeTriton() as server:
        yield server


@pytest.fixture
def ensemble(simulated: FakeTriton) -> Talker:
    model = talker("ensemble", Script(["Hel", "lo", " you"]), name="ensemble")
    simulated.add(model)
    return model


@asynccontextmanager
async def serving(triton: FakeTriton | Triton, home: Path, *words: str) -> AsyncIterator[Call]:
    """`words`: flags of the original and their values. The address names the Triton, which has a port of its own."""
    flags = {
        "as": "triton-openai",
        "models": [f"triton://{triton.target if isinstance(triton, FakeTriton) else triton.url}"],
        "foreign": dict(zip(words[::2], words[1::2], strict=True)),
        "home": str(home),
    }
    loaded = await asyncio.to_thread(load, flags, {})
    async with open_app(loaded, loaded.served) as app:
        await app.wait_until_loaded()
        assert app.gateway.lifecycle is not None
        for job in app.gateway.lifecycle.jobs():
            await job.wait()

        async def call(method: str, path: str, body: Any = None) -> Answer:
            exchange = Exchange([b"" if body is None else orjson.dumps(body)])
            headers = {"host": "localhost", "content-type": "application/json"}
            await app.asgi(request_scope(method, path, headers), exchange.receive, exchange.send)
            return exchange.answer()

        yield call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the original's two folders, in one."""
    engine = tmp_path / "engine"
    engine.mkdir()
    write_tokenizer(engine)
    (engine / "config.json").write_text(
        json.dumps({**json.loads((engine / "config.json").read_text()), "build_config": {"max_seq_len": 1024}})
    )
    return engine


@pytest.fixture
def original(simulated: FakeTriton, tmp_path: Path, folder: Path) -> AbstractAsyncContextManager[Call]:
    flags = ("--tokenizer_dir", str(folder), "--engine_dir", str(folder), "--default_max_tokens", "32")
    return serving(simulated, tmp_path / "home", *flags)


async def test_its_requests(original: AbstractAsyncContextManager[Call], ensemble: Talker) -> None:
    """Health, models and a chat, complete and as a stream; the model gets all of the request."""
    async with original as call:
        assert (await call("GET", "/health")).status == 200
        listed = (await call("GET", "/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == ["ensemble"]
        answer = (await call("POST", "/v1/chat/completions", REQUEST)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello you"
        streamed = await call("POST", "/v1/chat/completions", {**REQUEST, "stream": True})
        events = [line for line in streamed.body.decode().split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        deltas = [orjson.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello you"
    for request in ensemble.script.requests:
        assert "Be brief." in request["text_input"]
        assert request["text_input"].endswith("<|im_start|>assistant\n")
        assert (request["max_tokens"], round(request["temperature"], 3)) == (16, 0.7)


async def test_the_prompt_is_not_cut_by_the_answer_s_length(
    original: AbstractAsyncContextManager[Call], ensemble: Talker
) -> None:
    """The original keeps the last three messages, cut to max_tokens characters. `stop` is not sent as bad words."""
    turns = [{"role": role, "content": f"turn {at}"} for at in range(4) for role in ("user", "assistant")]
    body = {**REQUEST, "messages": [*turns, {"role": "user", "content": "And now?"}], "max_tokens": 2, "stop": ["lo"]}
    async with original as call:
        answer = (await call("POST", "/v1/chat/completions", body)).json()
        assert answer["choices"][0]["message"]["content"] == "Hel"
        assert answer["usage"]["prompt_tokens"] == 7  # as this Triton counts; the original counts only the last message
    (request,) = ensemble.script.requests
    assert all(f"turn {at}" in request["text_input"] for at in range(4))
    assert request["max_tokens"] == 2
    assert "lo" not in str(request.get("bad_words", ""))


async def test_the_default_length(original: AbstractAsyncContextManager[Call], ensemble: Talker) -> None:
    """The original ignores the flag; here it is the answer's length for requests without one."""
    async with original as call:
        body = {"model": "ensemble", "messages": QUESTION, "seed": 1, "presence_penalty": 0.5}
        assert (await call("POST", "/v1/chat/completions", body)).status == 200
    assert [request["max_tokens"] for request in ensemble.script.requests] == [32]


async def test_fields_that_the_original_drops_are_accepted(simulated: FakeTriton, tmp_path: Path, folder: Path) -> None:
    """Clients send fields that a model lacks; those for response formats and tools are rejected all the same."""
    model = talker("text", Script(["Hello"]), name="plain", without=("temperature",))
    simulated.add(model)
    async with serving(simulated, tmp_path / "home", "--tokenizer_dir", str(folder)) as call:
        body = {**REQUEST, "model": "plain", "seed": 1, "frequency_penalty": 1.0}
        assert (await call("POST", "/v1/chat/completions", body)).status == 200
        answer = await call("POST", "/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "response_format"


async def test_the_engine_s_context_is_a_limit(original: AbstractAsyncContextManager[Call], ensemble: Talker) -> None:
    """A prompt that is too long is rejected with both numbers; the original cuts it in the middle of a word."""
    long = [{"role": "user", "content": "東京 " * 2000}]
    async with original as call:
        answer = await call("POST", "/v1/chat/completions", {**REQUEST, "messages": long})
        assert answer.status == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "1024" in answer.json()["error"]["message"]
    assert ensemble.script.requests == []


FISH = ["fish to fish", "the longer of two texts about fish"]


@pytest.mark.timeout(PATIENCE_S)
async def test_an_embedder_keeps_its_own_tokenizer(own_triton: OwnTriton, tmp_path: Path, folder: Path) -> None:
    """The flag is for the language model beside it, on a real Triton; another tokenizer gives other vectors."""
    triton = await asyncio.to_thread(own_triton)  # Shoal opens every model that the server has loaded
    await asyncio.to_thread(_write_embedder, triton, tmp_path)
    await asyncio.to_thread(triton.load, "llama", "keeps_its_own")
    vectors = []
    for flags in ((), ("--tokenizer_dir", str(folder))):
        async with serving(triton, tmp_path / f"home-{len(flags)}", *flags) as call:
            answer = await call("POST", "/v1/embeddings", {"model": "keeps_its_own", "input": FISH})
            assert answer.status == 200, answer.body
            vectors.append([each["embedding"] for each in answer.json()["data"]])
            talk = await call("POST", "/v1/completions", {"model": "llama", "prompt": "Say hello.", "max_tokens": 4})
            assert talk.status == (200 if flags else 404)  # the language model needs the flag
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-6)


def _write_embedder(triton: Triton, folder: Path) -> None:
    """Write a file model as `keeps_its_own` to the repository."""
    address = parse_address(f"file:{checkpoint(folder / 'embedder')}")
    stored = prepare(address, store=Store(folder / "other-home"), access=Access(offline=True))
    Repository(triton.repository).write(build_entry_spec("keeps_its_own", stored, Settings(triton_platform="python")))
