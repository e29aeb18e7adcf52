"""Opening models of a server in this process: their tasks are detected, and served."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends import parse_address, parse_served
from shoal.backends.base.http_client import MAX_CARD_BYTES
from shoal.backends.base.served_name import served_name
from shoal.backends.openai.open import list_offers, make_client
from shoal.config.settings import Settings
from shoal.core.protocols import Replicated, Runner
from shoal.core.scheduling.ejection import MAX_FAILURES
from shoal.errors import (
    ConfigError,
    InvalidValue,
    ShoalError,
    TransportFailed,
    Unsupported,
    UpstreamFailed,
    UpstreamRefused,
)
from shoal.models.address import ServedModel
from shoal.types import Array, Chunk, Context, Generate, Message, Tool
from tests.fakes.openai_server import DIMENSION, Exchange, FakeUpstream, Script, answer, fields_of, vector_of
from tests.unit.backends.openai.open.kit import NO_MODEL, NO_ROUTE, Open, chats, embed
from tests.unit.models import checkpoints


async def chat(runner: Runner, **fields: Any) -> list[Chunk]:
    ctx = Context(id="r", deadline=time.monotonic() + 10.0)
    task = Generate(model="m", messages=[Message(role="user", content="hi")], **fields)
    async with aclosing(runner.stream(task, ctx)) as chunks:
        return [chunk async for chunk in chunks]


def embeds(server: FakeUpstream) -> Script:
    return lambda exchange: answer(server.embeddings_reply(exchange.request.json))(exchange)


def unit(vector: Array) -> Array:
    return np.asarray(vector / np.linalg.norm(vector))


class TestWhatItCanDo:
    async def test_both(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened()
        assert runner.facts.tasks == ("embed", "generate")
        assert np.allclose((await embed(runner, "a")).vectors, [unit(vector_of("a"))], atol=1e-6)
        assert (await chat(runner))[0].text == "hey"
        assert runner.ready()

    @pytest.mark.parametrize(
        "script", [NO_ROUTE, answer({}, 501), answer({"error": "does not support embeddings"}, 400)]
    )
    async def test_chat_alone(self, server: FakeUpstream, opened: Open, script: Script) -> None:
        server.on("/embeddings", script)
        runner = await opened()
        assert runner.facts.tasks == ("generate",)
        with pytest.raises(Unsupported, match="cannot embed"):
            await embed(runner, "a")

    @pytest.mark.parametrize(
        "script",
        [NO_ROUTE, answer({}, 405), answer({"error": {"message": "does not support Chat Completions API"}}, 400)],
    )
    async def test_embeddings_alone(self, server: FakeUpstream, opened: Open, script: Script) -> None:
        server.on("/chat/completions", script)
        runner = await opened()
        assert runner.facts.tasks == ("embed",)
        with pytest.raises(Unsupported, match="cannot generate"):
            await chat(runner)

    async def test_the_questions_make_no_tokens(self, server: FakeUpstream, opened: Open) -> None:
        await opened()
        requests = [one.json for one in server.requests if one.path == "/v1/chat/completions"]
        assert requests == [{"model": "up/model", "messages": [], "max_tokens": 0}]

    async def test_tasks_from_the_table(self, server: FakeUpstream, opened: Open) -> None:
        """With tasks in the table, the server is only checked for reachability."""
        runner = await opened(tasks=("generate",))
        assert runner.facts.tasks == ("generate",)
        assert [one.path for one in server.requests] == ["/v1/models"]

    async def test_tasks_from_the_server(self, server: FakeUpstream, opened: Open) -> None:
        """Another Shoal lists the tasks of its models."""
        server.models[0] |= {"tasks": ["generate", "draw"], "context_tokens": 512}
        facts = (await opened()).facts
        assert (facts.tasks, facts.context_tokens) == (("generate",), 512)
        assert [one.path for one in server.requests] == ["/v1/models"]

    @pytest.mark.parametrize("script", [NO_ROUTE, answer(b'{"data":' + b"[" * 5000 + b"]" * 5000 + b"}")])
    async def test_a_server_that_lists_nothing(self, server: FakeUpstream, opened: Open, script: Script) -> None:
        server.on("/models", script)
        assert (await opened()).facts.tasks == ("embed", "generate")

    async def test_neither(self, server: FakeUpstream, opened: Open) -> None:
        for path in ("/embeddings", "/chat/completions"):
            server.on(path, NO_ROUTE)
        with pytest.raises(
            ConfigError, match=r"neither embeds, scores nor chats \(Not Found\): check the name and the path"
        ):
            await opened()

    async def test_a_model_that_is_not_there(self, server: FakeUpstream, opened: Open) -> None:
        for path in ("/embeddings", "/chat/completions"):
            server.on(path, NO_MODEL)
        with pytest.raises(ConfigError, match=r"has no model 'other'; it has up/model"):
            await opened(model="other")

    async def test_a_key_that_it_does_not_take(self, server: FakeUpstream, opened: Open) -> None:
        for path in ("/models", "/embeddings", "/chat/completions"):
            server.on(path, answer({"error": {"message": "bad key sk-1"}}, 401))
        with pytest.raises(ConfigError, match="upstream_api_key") as caught:
            await opened()
        assert "sk-" not in caught.value.message

    async def test_vectors_that_are_none(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/embeddings", answer({"data": []}))
        with pytest.raises(ConfigError, match=r"m does not embed: .* 0 vectors for 4 texts"):
            await opened(tasks=("embed",))


class TestFacts:
    async def test_of_a_model_that_does_both(self, server: FakeUpstream, opened: Open) -> None:
        server.models[0]["max_model_len"] = 4096
        facts = (await opened(adapters={"sql": "up/sql", "old": 3})).facts
        assert (facts.id, facts.backend) == ("up/model", "openai")
        assert facts.source == f"openai+http://{server.target}#up/model"
        assert (facts.context_tokens, facts.max_input_tokens, facts.dimension) == (4096, 4096, DIMENSION)
        assert facts.adapters == ("old", "sql")
        assert facts.verified == "4 texts answered, all finite"
        assert len(facts.space) == 16
        assert facts.details["usage"] == "reported"
        assert facts.details["servers"] == [facts.source]

    @pytest.mark.parametrize(
        ("listed", "tokens"),
        [
            ({"max_model_len": 8192}, 8192),
            ({"meta": {"n_ctx_train": 32768}}, 32768),
            ({"meta": {"n_ctx_train": 32768, "n_ctx": 4096}}, 4096),
            ({"context_length": 1000}, 1000),
            ({"max_model_len": None, "meta": "x", "context_length": "9"}, None),
            ({"max_model_len": 10**30, "context_length": True}, None),
        ],
    )
    async def test_the_context_that_servers_tell(
        self, server: FakeUpstream, opened: Open, listed: dict[str, Any], tokens: int | None
    ) -> None:
        server.models[0] |= listed
        assert (await opened(tasks=("generate",))).facts.context_tokens == tokens
        assert (await opened(tasks=("generate",), context_tokens=77)).facts.context_tokens == 77

    @pytest.mark.parametrize(
        ("listed", "sees"),
        [
            ({}, False),
            ({"vision": True}, True),
            ({"architecture": {"input_modalities": ["text", "image"]}}, True),
            ({"capabilities": {"vision": True}}, True),
            ({"vision": 1, "architecture": {"input_modalities": "image"}, "capabilities": ["vision"]}, False),
        ],
    )
    async def test_images_in_chats(
        self, server: FakeUpstream, opened: Open, listed: dict[str, Any], sees: bool
    ) -> None:
        server.models[0] |= listed
        assert (await opened(tasks=("generate",))).facts.details.get("vision", False) == sees
        assert "vision" not in (await opened(tasks=("generate",), vision=False)).facts.details
        assert (await opened(tasks=("generate",), vision=True)).facts.details["vision"]
        assert "vision" not in (await opened(tasks=("embed",), vision=True)).facts.details

    async def test_another_space_for_another_prompt(self, opened: Open) -> None:
        one = await opened(tasks=("embed",))
        other = await opened(tasks=("embed",), prompts={"q": "query: "})
        assert one.facts.space != other.facts.space


class TestEmbeddings:
    async def test_many_users_share_a_batch(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("embed",))
        before = len(server.requests)
        texts = [f"text {number}" for number in range(40)]
        answers = await asyncio.gather(*(embed(runner, text, normalize=False) for text in texts))
        for text, result in zip(texts, answers, strict=True):
            assert np.array_equal(result.vectors[0], vector_of(text))
        calls = [one for one in server.requests[before:] if one.path == "/v1/embeddings"]
        assert len(calls) < 10

    async def test_usage_is_what_the_server_counts(self, server: FakeUpstream, opened: Open) -> None:
        """The server's count is exact for a whole batch."""
        runner = await opened(tasks=("embed",))
        assert sum((await embed(runner, "one two", "three four")).tokens) == 8
        server.usage = False
        guessing = await opened(tasks=("embed",))
        assert guessing.facts.details["usage"] == "estimated"
        assert (await embed(guessing, "a" * 40)).tokens == [10]

    async def test_a_tokenizer_of_the_table_counts(self, opened: Open, tmp_path: Path) -> None:
        folder = checkpoints.checkpoint(tmp_path / "tiny")
        runner = await opened(tasks=("embed",), tokenizer=str(folder))
        assert runner.facts.details["usage"] == "counted"
        assert (await embed(runner, "fish to")).tokens == [4]

    async def test_dimensions_are_cut_here(self, opened: Open) -> None:
        runner = await opened(tasks=("embed",))
        vectors = (await embed(runner, "a", dimensions=3)).vectors
        assert np.allclose(vectors, [unit(vector_of("a")[:3])], atol=1e-6)
        with pytest.raises(InvalidValue, match="between 1 and 8"):
            await embed(runner, "a", dimensions=9)

    async def test_prompts_of_the_table(self, opened: Open) -> None:
        runner = await opened(tasks=("embed",), prompts={"q": "query: "}, default_prompt_name="q")
        assert np.array_equal((await embed(runner, "a", normalize=False)).vectors[0], vector_of("query: a"))

    async def test_a_dimension_that_was_not_expected(self, opened: Open) -> None:
        with pytest.raises(ConfigError, match="m returns vectors of 8 dimensions, but the configuration says 16"):
            await opened(tasks=("embed",), dimension=16)

    async def test_one_bad_text_costs_the_others_nothing(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("embed",))

        async def picky(exchange: Exchange) -> None:
            body = exchange.request.json
            bad = "bad" in body["input"]
            await (answer({"error": {"message": "no"}}, 400) if bad else answer(server.embeddings_reply(body)))(
                exchange
            )

        server.on("/embeddings", picky)
        pending = [embed(runner, text) for text in ("a", "b", "bad", "c")]
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [isinstance(one, ShoalError) for one in results] == [False, False, True, False]

    async def test_replicas_agree_before_they_serve(self, server: FakeUpstream, opened: Open) -> None:
        async with FakeUpstream() as same, FakeUpstream(seed=1) as other:
            runner = await opened(server, same, other, tasks=("embed",))
            engines = runner._runners[0].lane.replicas  # type: ignore[attr-defined]
            async with asyncio.timeout(30):
                while not (engines[1].engine.ready() and engines[2].engine.reason.count("cosine")):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert not engines[2].engine.ready()
            await runner.aclose()


class TestGeneration:
    async def test_fields_of_the_operator(self, server: FakeUpstream, opened: Open, tmp_path: Path) -> None:
        settings = Settings(home=str(tmp_path), strip_parameters=("priority",), default_max_tokens=9)
        runner = await opened(tasks=("generate",), settings=settings, sampling={"top_k": 4})
        await chat(runner, raw=("openai.chat", fields_of(b'{"model":"m","messages":[1],"priority":2}')))
        assert server.requests[-1].json == {"model": "up/model", "messages": [1], "top_k": 4, "max_tokens": 9}

    async def test_servers_whose_responses_are_translated(self, opened: Open, tmp_path: Path) -> None:
        """Then nothing may be sent on that only such a server understands."""
        assert "openai.responses" in (await opened(tasks=("generate",))).facts.passes
        settings = Settings(home=str(tmp_path), translate_responses=True)
        assert "openai.responses" not in (await opened(tasks=("generate",), settings=settings)).facts.passes

    async def test_llama_cpp_gets_chat_completions(self, server: FakeUpstream, opened: Open) -> None:
        """Under any name; its routes for other dialects ignore fields, and its chats a choice of one tool."""
        server.models = [{"id": "/models/tiny.gguf", "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx": 512}}]
        runner = await opened(tasks=("generate",))
        assert set(runner.facts.passes) == {"openai.chat", "openai.completions"}
        tools = [Tool(name="a"), Tool(name="b")]
        for dialect in ("anthropic.messages", "openai.responses"):
            await chat(runner, raw=(dialect, fields_of(b"{}")), tools=tools, tool_choice="function", tool_name="b")
            sent = server.requests[-1]
            assert sent.path == "/v1/chat/completions"
            assert sent.json["tools"] == [{"type": "function", "function": {"name": "b"}}]
            assert (sent.json["tool_choice"], sent.json["parallel_tool_calls"]) == ("required", False)

    async def test_how_long_a_first_piece_may_take(self, opened: Open, tmp_path: Path) -> None:
        """A replica is judged by the gateway's first-token timeout."""
        settings = Settings(home=str(tmp_path), first_token_timeout_s=7.0)
        runner = await opened(tasks=("generate",), settings=settings)
        assert runner._runners[0]._options.first_token_timeout_s == 7.0  # type: ignore[attr-defined]

    async def test_the_key_goes_along(self, server: FakeUpstream, opened: Open, tmp_path: Path) -> None:
        settings = Settings(home=str(tmp_path), upstream_api_key="sk-1")
        await chat(await opened(tasks=("generate",), settings=settings))
        assert {one.headers["authorization"] for one in server.requests} == {"Bearer sk-1"}

    async def test_adapters(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("generate",), adapters={"sql": "up/sql"})
        await chat(runner, adapter="sql")
        assert server.requests[-1].json["model"] == "up/sql"

    async def test_a_model_that_was_unloaded_there(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("generate",))
        server.on("/chat/completions", NO_MODEL)
        with pytest.raises(UpstreamRefused) as caught:
            await chat(runner)
        assert caught.value.status == 404


class TestWaiting:
    async def wait_for_note(self, notes: list[str], words: str) -> None:
        async with asyncio.timeout(30):
            while not any(words in note for note in notes):  # noqa: ASYNC110 - notes are a list
                await asyncio.sleep(0.001)

    async def test_for_a_server_to_come(self, server: FakeUpstream, opened: Open) -> None:
        await server.stop()
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes))
        await self.wait_for_note(notes, "not reachable")
        assert notes[0].startswith(f"waiting for openai+http://{server.target}#up/model: ")
        await server.start()
        assert (await opening).facts.tasks == ("embed", "generate")

    async def test_for_a_server_that_loads(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/models", answer({"error": {"message": "Loading model"}}, 503))
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes))
        await self.wait_for_note(notes, "status 503 (Loading model)")
        server.on("/models", answer({"data": []}))
        assert (await opening).facts.tasks == ("embed", "generate")

    async def test_for_a_server_whose_answer_cannot_be_read(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/models", answer({"data": [], "more": "x" * MAX_CARD_BYTES}))
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes))
        await self.wait_for_note(notes, f"returned more than {MAX_CARD_BYTES} bytes")
        server.on("/models", answer({"data": []}))
        assert (await opening).facts.tasks == ("embed", "generate")

    async def test_for_routes_that_fail(self, server: FakeUpstream, opened: Open) -> None:
        for path in ("/embeddings", "/chat/completions"):
            server.on(path, answer({"error": "busy"}, 503))
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes))
        await self.wait_for_note(notes, "it returns status 503 (busy)")
        server.on("/chat/completions", chats)
        await self.wait_for_note(
            notes, "whether it can embed: it returns status 503 (busy); if it cannot, set the model's `tasks`"
        )
        assert not opening.done()
        server.on("/embeddings", NO_ROUTE)
        assert (await opening).facts.tasks == ("generate",)

    @pytest.mark.parametrize(
        ("path", "script"),
        [
            ("/chat/completions", answer({"error": "busy"}, 503)),
            ("/chat/completions", answer({"error": "busy"}, 429)),
            ("/chat/completions", answer({"error": "key"}, 401)),
            ("/embeddings", answer({"error": "busy"}, 429)),
            ("/embeddings", answer({"error": "key"}, 403)),
        ],
    )
    async def test_for_the_other_task(self, server: FakeUpstream, opened: Open, path: str, script: Script) -> None:
        """A model that is busy for a moment, or has a wrong key at first, does not lose a task for good."""
        usual = {"/chat/completions": chats, "/embeddings": embeds(server)}[path]
        server.on(path, script)
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes))
        await self.wait_for_note(notes, "cannot find out whether it can")
        server.on(path, usual)
        assert (await opening).facts.tasks == ("embed", "generate")

    async def test_not_for_a_task_that_fails_for_good(self, server: FakeUpstream, opened: Open) -> None:
        """Servers that cannot embed may answer with status 500."""
        server.on("/embeddings", answer({"error": "this model does not embed"}, 500))
        assert (await opened()).facts.tasks == ("generate",)

    async def test_not_with_tasks_from_the_table(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/chat/completions", answer({"error": "busy"}, 503))
        assert (await opened(tasks=("embed",))).facts.tasks == ("embed",)

    async def test_for_a_server_that_goes_before_its_first_vector(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/embeddings", answer(b"", 502))
        notes: list[str] = []
        opening = asyncio.create_task(opened(notes=notes, tasks=("embed",)))
        await self.wait_for_note(notes, "cannot serve the model now")
        server.on("/embeddings", embeds(server))
        assert (await opening).facts.tasks == ("embed",)

    async def test_any_server_will_do(self, server: FakeUpstream, opened: Open) -> None:
        """An unreachable server joins when it comes up."""
        async with FakeUpstream() as away:
            await away.stop()
            runner = await opened(away, server)
            assert runner.facts.id == "up/model"
            assert np.allclose((await embed(runner, "a")).vectors, [unit(vector_of("a"))], atol=1e-6)
            await runner.aclose()

    async def test_a_cancelled_load_leaves_nothing(self, server: FakeUpstream, opened: Open) -> None:
        """Warnings about unclosed sessions would fail this test."""
        server.on("/models", Exchange.left)
        opening = asyncio.create_task(opened())
        request = await server.request(path="/models")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        async with asyncio.timeout(30):
            await request.disconnected.wait()


class TestOffered:
    async def test_names_that_can_be_served(self) -> None:
        ids = ["org/name", "llama3:latest", "llama3:8b", "gpt-4o", "accounts/fw/models/llama", "sse", "/m/x.gguf"]
        async with FakeUpstream(*ids) as server:
            address = parse_address(f"openai+http://{server.target}")
            found = await list_offers(address, Settings())
        served = {name: one for name, one in found.items() if isinstance(one, ServedModel)}
        assert {name: one.addresses[0].model for name, one in served.items()} == {
            "org/name": "org/name",
            "llama3": "llama3:latest",
            "llama3-8b": "llama3:8b",
            "gpt-4o": "gpt-4o",
            "models/llama": "accounts/fw/models/llama",
        }
        assert all(parse_served(str(one)) == one for one in served.values())
        refused = {name: one for name, one in found.items() if isinstance(one, str)}
        assert "reserved" in refused["sse"]
        assert refused["/m/x.gguf"]

    async def test_two_of_one_name(self) -> None:
        """The first keeps the name; the other one needs an explicit name."""
        async with FakeUpstream("a:b", "a-b", "a-b") as server:
            address = parse_address(f"openai+http://{server.target}")
            found = await list_offers(address, Settings())
        assert isinstance(found["a-b"], ServedModel)
        assert found["a-b"].addresses[0].model == "a-b"
        assert found["a:b"] == f"another model is already served as a-b: give this one a name, NAME={address}#a:b"

    async def test_a_server_that_does_not_list(self, server: FakeUpstream) -> None:
        address = parse_address(f"openai+http://{server.target}")
        server.on("/models", NO_ROUTE)
        with pytest.raises(ConfigError, match="does not list its models: name the one to serve"):
            await list_offers(address, Settings())
        server.on("/models", answer({"error": "key"}, 401))
        with pytest.raises(ConfigError, match="upstream_api_key"):
            await list_offers(address, Settings())
        server.on("/models", answer(b"", 503))
        with pytest.raises(TransportFailed, match="status 503"):
            await list_offers(address, Settings())
        await server.stop()
        with pytest.raises(TransportFailed, match="not reachable"):
            await list_offers(address, Settings())

    @pytest.mark.parametrize(
        ("model", "name"),
        [("a", "a"), ("a/b", "a/b"), ("x/a/b", "a/b"), ("a:latest", "a"), ("a b+c", "a-b-c"), ("./m/.x", "x")],
    )
    def test_names(self, model: str, name: str) -> None:
        assert served_name(model) == name


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "base"),
        [
            ("openai+http://gpu:8000/v1#m", "http://gpu:8000/v1"),
            ("openai+https://api.example.org/openai/v1#m", "https://api.example.org/openai/v1"),
            ("openai+http://gpu#m", "http://gpu/v1"),
            ("openai+http://[::1]:8000#m", "http://[::1]:8000/v1"),
        ],
    )
    async def test_where_they_lead(self, address: str, base: str) -> None:
        client = make_client(parse_address(address), Settings())
        assert client.base == base
        await client.aclose()

    async def test_a_key_that_cannot_be_sent(self) -> None:
        with pytest.raises(ConfigError, match="upstream_api_key"):
            make_client(
                parse_address("openai+http://gpu#m"), msgspec.structs.replace(Settings(), upstream_api_key="a b")
            )


WRONG_WIDTH = {"object": "list", "data": [{"index": 0, "embedding": [1.0, 2.0, 3.0]}]}


class TestOneThatFailsFast:
    """Of two servers one fails fast on every request: no request of a client fails for it."""

    @pytest.mark.parametrize(
        "script",
        [
            answer({"error": {"message": "boom"}}, 500),
            answer({"error": "Backend error", "error_type": "Backend"}, 424),
            answer(b"<html>proxy</html>"),
            answer(b'{"data": [{"index": 0, "embe'),
            answer({"data": []}),
            answer(WRONG_WIDTH),
        ],
        ids=["500", "424", "page", "cut", "none", "width"],
    )
    async def test_embeddings(self, server: FakeUpstream, opened: Open, script: Script) -> None:
        async def works(exchange: Exchange) -> None:
            await asyncio.sleep(0.003)
            await embeds(other)(exchange)

        async with FakeUpstream() as other:
            other.on("/embeddings", works)
            runner = await opened(server, other, tasks=("embed",))
            assert isinstance(runner, Replicated)
            engines = runner._runners[0].lane.replicas  # type: ignore[attr-defined]
            async with asyncio.timeout(5.0):
                while not engines[1].engine.ready():  # noqa: ASYNC110 - the watch tells nobody
                    await asyncio.sleep(0.001)
            before = len(server.requests), len(other.requests)
            server.on("/embeddings", script)
            for wave in range(40):
                texts = [f"text {wave} {at}" for at in range(8)]
                answers = await asyncio.gather(*(embed(runner, text) for text in texts))
                assert np.allclose(
                    [each.vectors[0] for each in answers], [unit(vector_of(t)) for t in texts], atol=1e-6
                )
            broken, well = (
                [one.path for one in each.requests[at:]].count("/v1/embeddings")
                for each, at in zip((server, other), before, strict=True)
            )
            assert 1 <= broken <= well / 2
            first, last = runner.replicas()
            # How the replicas share the work is the scheduler's: one that gets little is not ejected.
            assert broken < MAX_FAILURES or first.state != "in_service"
            assert last.state == "in_service"
            await runner.aclose()

    async def test_alone_its_answers_are_a_bad_gateways(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("embed",))
        server.on("/embeddings", answer({"error": {"message": "boom"}}, 500))
        with pytest.raises(UpstreamFailed, match="failed with status 500"):
            await embed(runner, "a")
        await runner.aclose()
