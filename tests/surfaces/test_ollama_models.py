"""Ollama's routes for models and embeddings: names, lists, loading and deletion."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.core.lifecycle.lifecycle import Entry
from shoal.errors import NotAtSource, SourceError
from shoal.surfaces.ollama import models
from tests.surfaces.life_kit import FOREIGN, OTHER, Living, Scripted, living
from tests.surfaces.ollama_kit import LineExchange, lines, serve_chat
from tests.surfaces.surface_kit import MODEL, serve


class TestEmbeddings:
    async def test_texts(self) -> None:
        """One vector per input, in order."""
        server = serve()
        body = {"model": "mini:latest", "input": ["a", "bc"], "dimensions": 4, "truncate": False, "keep_alive": "5m"}
        answer = await server.call("POST", "/api/embed", body)
        response = answer.json()
        assert response["embeddings"] == [[0.5, 24.25, 12.125, -0.5], [1.0, 24.5, 24.625, -0.5]]
        assert (response["model"], response["prompt_eval_count"], response["load_duration"]) == ("mini:latest", 3, 0)
        assert response["total_duration"] > 0
        assert "x-shoal-batch-size" in answer.headers
        (task,) = server.runner.tasks
        assert (task.dimensions, task.truncate, task.normalize) == (4, False, True)

    @pytest.mark.parametrize("dimensions", [0, -1, 5, 100_000])
    async def test_unsupported_dimensions(self, dimensions: int) -> None:
        """They are ignored, like in Ollama."""
        server = serve()
        answer = await server.call("POST", "/api/embed", {"model": MODEL, "input": "a", "dimensions": dimensions})
        assert (answer.status, server.runner.tasks[0].dimensions) == (200, None)

    @pytest.mark.parametrize(("path", "text"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
    async def test_invalid_keep_alive(self, path: str, text: str) -> None:
        """400, even with nothing to embed."""
        for content in ("a", ""):
            answer = await serve().call("POST", path, {"model": MODEL, text: content, "keep_alive": "x"})
            assert (answer.status, "keep_alive" in answer.json()["error"]) == (400, True)

    async def test_one_text(self) -> None:
        assert len((await serve().call("POST", "/api/embed", {"model": MODEL, "input": "a"})).json()["embeddings"]) == 1

    async def test_the_older_route(self) -> None:
        """One vector, normalized only if the model normalizes."""
        for normalized in (True, False):
            server = serve()
            server.runner.facts = replace(server.runner.facts, normalized=normalized)
            answer = await server.call("POST", "/api/embeddings", {"model": MODEL, "prompt": "a"})
            assert answer.json() == {"embedding": [0.5, 24.25, 12.125, -0.5]}
            assert [task.normalize for task in server.runner.tasks] == [normalized]

    @pytest.mark.parametrize("empty", ["", [], None])
    async def test_nothing_is_embedded(self, empty: Any) -> None:
        """Empty inputs give no vectors and no task."""
        server = serve()
        response = (await server.call("POST", "/api/embed", {"model": MODEL, "input": empty})).json()
        assert (response["embeddings"], response["prompt_eval_count"]) == ([], 0)
        answer = await server.call("POST", "/api/embeddings", {"model": MODEL, "prompt": ""})
        assert answer.json() == {"embedding": []}
        assert (await server.call("POST", "/api/embed", {"model": MODEL})).json()["embeddings"] == []
        assert server.runner.tasks == []

    async def test_too_many_inputs(self) -> None:
        answer = await serve(max_inputs=2).call("POST", "/api/embed", {"model": MODEL, "input": ["a", "b", "c"]})
        assert answer.status == 400
        assert "2 entries" in answer.json()["error"]

    async def test_adapters_do_not_embed(self) -> None:
        """MODEL:ADAPTER is a 404 here."""
        server, _ = serve_chat()
        answer = await server.call("POST", "/api/embed", {"model": f"{MODEL}:loud", "input": "a"})
        assert answer.status == 404


class TestModels:
    async def test_tags(self) -> None:
        """Every served model and adapter, with Ollama's names."""
        server, _ = serve_chat()
        first, second = (await server.call("GET", "/api/tags")).json()["models"]
        assert (first["name"], first["model"]) == (f"{MODEL}:latest", f"{MODEL}:latest")
        assert second["model"] == f"{MODEL}:loud"
        assert first["modified_at"] == "2023-11-14T22:13:20.000000000Z"
        assert re.fullmatch("[0-9a-f]{64}", first["digest"])
        assert first["digest"] != second["digest"]
        assert first["details"] == {
            "parent_model": "",
            "format": "genai",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "7.6B",
            "quantization_level": "INT4",
        }
        # With "embedding" Ollama's client would refuse to chat.
        assert first["capabilities"] == ["completion", "tools", "thinking"]

    async def test_stored_models_are_listed_for_admins(self) -> None:
        """Others could not load them."""
        entries = [Entry(name=OTHER, source=f"hf:{OTHER}", backend="local", size=7)]
        async with living(Scripted(listed=entries), admin_key=("secret",), api_key=("key",)) as life:
            for key, names in (("secret", [f"{MODEL}:latest", f"{OTHER}:latest"]), ("key", [f"{MODEL}:latest"])):
                answer = await life.call("GET", "/api/tags", headers={"authorization": f"Bearer {key}"})
                assert [each["name"] for each in answer.json()["models"]] == names

    async def test_ps(self) -> None:
        """Only loaded models."""
        entries = [Entry(name=OTHER, source=f"hf:{OTHER}", backend="local")]
        async with living(Scripted(listed=entries)) as life:
            (only,) = (await life.call("GET", "/api/ps")).json()["models"]
        assert (only["model"], only["size_vram"], only["context_length"]) == (f"{MODEL}:latest", 0, 0)
        assert only["expires_at"] == models.FOREVER
        server, _ = serve_chat()
        assert (await server.call("GET", "/api/ps")).json()["models"][0]["context_length"] == 4096

    async def test_ps_shows_when_a_model_sleeps(self) -> None:
        """`expires_at` follows the server's keep-alive."""
        async with living(keep_alive_s=300.0) as life:
            (only,) = (await life.call("GET", "/api/ps")).json()["models"]
        left = datetime.fromisoformat(only["expires_at"]) - datetime.now(UTC)
        assert timedelta(0) < left <= timedelta(seconds=300)

    @pytest.mark.parametrize("name", ["mini", f"{MODEL}:latest", f"{MODEL}:loud"])
    @pytest.mark.parametrize("field", ["model", "name"])
    async def test_show(self, name: str, field: str) -> None:
        """By any of the model's names."""
        server, _ = serve_chat()
        response = (await server.call("POST", "/api/show", {field: name})).json()
        assert response["model_info"] == {
            "general.architecture": "llama",
            "general.basename": MODEL,
            "general.parameter_count": 7_600_000_000,
            "llama.context_length": 4096,
            "llama.embedding_length": 4,
        }
        assert response["capabilities"] == ["completion", "tools", "thinking"]
        assert (response["template"], response["parameters"]) == ("", "")

    async def test_show_of_a_stored_model(self) -> None:
        """Unknown facts are empty, but there is always an architecture."""
        entries = [Entry(name=OTHER, source=f"hf:{OTHER}", backend="local", created=1)]
        async with living(Scripted(listed=entries)) as life:
            response = (await life.call("POST", "/api/show", {"model": OTHER})).json()
            assert response["model_info"]["general.architecture"] == "unknown"
            assert (response["capabilities"], response["details"]["family"]) == ([], "")
            assert (await life.call("POST", "/api/show", {"model": "a/b"})).status == 404

    @pytest.mark.parametrize(
        ("parameters", "size"), [(0, ""), (22_700_000, "22.7M"), (7_600_000_000, "7.6B"), (1_000_000_000, "1.0B")]
    )
    def test_sizes(self, parameters: int, size: str) -> None:
        """In Ollama's format."""
        assert models._format_billions(parameters) == size

    async def test_version(self) -> None:
        """A version number that clients compare, and Shoal's own."""
        response = (await serve().call("GET", "/api/version")).json()
        assert set(response) == {"version", "shoal"}
        assert [int(part) for part in response["version"].split(".")] >= [0, 17, 4]

    @pytest.mark.parametrize("version", ["0.17.4", "0.33.0-rc2"])
    async def test_ollamas_own_client_gets_its_own_version(self, version: str) -> None:
        """It warns about any other version."""
        agent = {"user-agent": f"ollama/{version} (amd64 linux) Go/go1.26.8"}
        assert (await serve().call("GET", "/api/version", headers=agent)).json()["version"] == version

    async def test_a_model_is_listed_once(self) -> None:
        """By its served name, with its files' size and digest, whether loaded, sleeping or stored."""
        entries = [Entry(name="org/files", source=f"hf:{MODEL}", backend="local", size=90, digest="d1" * 32)]
        async with living(Scripted(listed=entries)) as life:
            (loaded,) = (await life.call("GET", "/api/tags")).json()["models"]
            await life.manage("POST", "/api/generate", {"model": MODEL, "keep_alive": 0})
            (asleep,) = (await life.call("GET", "/api/tags")).json()["models"]
            await life.manage("POST", f"/v1/models/{MODEL}/unload")
            (stored,) = (await life.call("GET", "/api/tags")).json()["models"]
        assert loaded["name"] == asleep["name"] == f"{MODEL}:latest"
        assert stored["name"] == "org/files:latest"
        for each in (loaded, asleep, stored):
            assert (each["size"], each["digest"]) == (90, "d1" * 32)


async def wait_for_jobs(life: Living) -> None:
    for job in life.lifecycle.jobs():
        await job.done_event.wait()


class TestLife:
    async def test_pull(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line per step; then the model answers to the name it was pulled by."""
        monkeypatch.setattr(models, "_POLL_INTERVAL_S", 0.001)
        loader = Scripted(hold=asyncio.Event())
        async with living(loader) as life:
            exchange = LineExchange({"model": f"hf.co/{OTHER}:latest"}, b"completed")
            pulling = asyncio.create_task(exchange.call(life.server, "/api/pull"))
            await exchange.received.wait()
            assert loader.hold is not None
            loader.hold.set()
            await pulling
            first, *stages, last = lines(exchange.answer())
            assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
            download = stages[0]
            assert (download["completed"], download["total"]) == (30, 120)
            assert re.fullmatch("sha256:[0-9a-f]{64}", download["digest"])
            assert download["status"] == f"pulling {download['digest'][7:19]}"
            steps = [each["status"] for each in stages]
            assert steps[-2:] == ["verifying sha256 digest", "writing manifest"]
            assert len({(each["status"], each.get("completed")) for each in stages}) == len(stages)
            # Each progress bar is complete before the next one starts, and at the end.
            bars = {each["digest"]: each for each in stages if "digest" in each}
            assert all(each["completed"] == each["total"] for each in bars.values())
            answer = await life.call("POST", "/api/embed", {"model": OTHER, "input": "a"})
            assert answer.status == 200

    async def test_pull_without_a_stream(self) -> None:
        """One status at the end; pulling again succeeds."""
        async with living() as life:
            for _ in range(2):
                answer = await life.manage("POST", "/api/pull", {"name": OTHER, "stream": False})
                assert (answer.status, answer.json()) == (200, {"status": "success"})

    async def test_a_pull_that_fails(self) -> None:
        """The last line, or the status, has the reason."""
        async with living(Scripted(error=SourceError("no such model"))) as life:
            replies = lines(await life.manage("POST", "/api/pull", {"model": OTHER}))
            assert replies[-1] == {"error": "no such model"}
            answer = await life.manage("POST", "/api/pull", {"model": OTHER, "stream": False})
            assert (answer.status, answer.json()) == (424, {"error": "no such model"})

    async def test_a_model_that_the_hub_does_not_have(self) -> None:
        """The error begins as Ollama's own does."""
        words = "pull model manifest: file does not exist: no such repository"
        async with living(Scripted(error=NotAtSource("no such repository"))) as life:
            assert lines(await life.manage("POST", "/api/pull", {"model": OTHER}))[-1] == {"error": words}
            answer = await life.manage("POST", "/api/pull", {"model": OTHER, "stream": False})
            assert answer.json() == {"error": words}

    async def test_a_disconnect_does_not_stop_the_pull(self) -> None:
        """Others may wait for it, too."""
        loader = Scripted(hold=asyncio.Event())
        async with living(loader) as life:
            exchange = LineExchange({"model": OTHER}, b"completed")
            task = asyncio.create_task(exchange.call(life.server, "/api/pull"))
            await exchange.received.wait()
            exchange.leave()
            await task
            assert loader.hold is not None
            loader.hold.set()
            await wait_for_jobs(life)
            assert ("open", OTHER) in loader.touched

    async def test_names_of_ollamas_library(self) -> None:
        """Known names can be pulled and used; for others the error says where models come from."""
        async with living() as life:
            answer = await life.manage("POST", "/api/pull", {"model": "all-minilm", "stream": False})
            assert answer.status == 200
            assert ("open", "sentence-transformers/all-MiniLM-L6-v2") in life.loader.touched
            for name in ("all-minilm", "all-minilm:latest", "all-minilm:22m"):
                answer = await life.manage("POST", "/api/embed", {"model": name, "input": "a"})
                assert (answer.status, answer.json()["model"]) == (200, name)
            answer = await life.manage("POST", "/api/embed", {"model": "all-minilm:33m", "input": "a"})
            assert answer.status == 404
            for name in ("llama3.2:1b", "mistral:7b"):
                answer = await life.manage("POST", "/api/pull", {"model": name, "stream": False})
                assert answer.status == 400
                assert "hf.co/org/name" in answer.json()["error"]
                assert "file:" not in answer.json()["error"]

    async def test_quantizations(self) -> None:
        """Each is a model of its own, listed, shown, asked and deleted by its tag."""
        async with living() as life:
            for name in (f"hf.co/{OTHER}:Q8_0", f"{OTHER}:q8_0"):
                answer = await life.manage("POST", "/api/pull", {"model": name, "stream": False})
                assert (answer.status, answer.json()) == (200, {"status": "success"})
            assert life.loader.touched == [("fetch", f"{OTHER}-Q8_0"), ("open", f"{OTHER}-Q8_0")]
            assert life.loader.runners[f"{OTHER}-Q8_0"].facts.source == f"hf:{OTHER}:Q8_0"
            assert (await life.manage("POST", "/api/pull", {"model": f"hf.co/{OTHER}:Q4_0"})).status == 200
            assert life.loader.touched[-1] == ("open", f"{OTHER}-Q4_0")
            listed = (await life.call("GET", "/api/tags")).json()["models"]
            assert {f"{OTHER}:Q8_0", f"{OTHER}:Q4_0"} <= {each["name"] for each in listed}
            for path in ("/api/embed", "/api/show"):
                answer = await life.manage("POST", path, {"model": f"hf.co/{OTHER}:Q8_0", "input": "a"})
                assert answer.status == 200
            answer = await life.manage("POST", "/api/embed", {"model": f"{OTHER}:Q5_0", "input": "a"})
            assert answer.status == 404
            answer = await life.manage("DELETE", "/api/delete", {"model": f"hf.co/{OTHER}:Q8_0"})
            assert answer.status == 200

    async def test_a_quantization_that_is_served(self) -> None:
        """A tag with the served model's quantization means that model."""
        async with living() as life:
            life.loader.precision = "Q4_K_M"
            assert (await life.manage("POST", "/api/pull", {"model": OTHER, "stream": False})).status == 200
            for name in (f"hf.co/{OTHER}:Q4_K_M", f"{OTHER}:q4_k_m"):
                answer = await life.manage("POST", "/api/pull", {"model": name, "stream": False})
                assert (answer.status, answer.json()) == (200, {"status": "success"})
                answer = await life.manage("POST", "/api/embed", {"model": name, "input": "a"})
                assert answer.status == 200
            answer = await life.manage("POST", "/api/embed", {"model": f"{OTHER}:Q8_0", "input": "a"})
            assert answer.status == 404

    @pytest.mark.parametrize("name", ["", "..", "org/name:7b", "a/b/c"])
    async def test_names_that_cannot_be_pulled(self, name: str) -> None:
        """They are rejected, and nothing is loaded."""
        async with living() as life:
            assert (await life.manage("POST", "/api/pull", {"model": name, "stream": False})).status == 400
            assert (await life.manage("DELETE", "/api/delete", {"model": name})).status == 400
            assert life.loader.touched == []

    async def test_delete(self) -> None:
        """The body is empty; a missing model is a 404, and models that Shoal did not create stay."""
        async with living() as life:
            answer = await life.manage("DELETE", "/api/delete", {"model": f"{MODEL}:latest"})
            assert (answer.status, answer.body) == (200, b"")
            assert life.loader.touched[-1] == ("remove", MODEL)
            answer = await life.manage("DELETE", "/api/delete", {"model": "org/name"})
            assert answer.status == 404
            assert answer.json()["error"].startswith("model 'org/name' not found")
            assert (await life.manage("DELETE", "/api/delete", {"model": FOREIGN})).status == 403

    @pytest.mark.parametrize(
        ("method", "path"), [("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/api/generate")]
    )
    async def test_changes_require_an_admin(self, method: str, path: str) -> None:
        """Also unloading by a request that users may send."""
        async with living(api_key=("key",), admin_key=("secret",)) as life:
            body = {"model": MODEL, "keep_alive": 0}
            answer = await life.call(method, path, body, headers={"authorization": "Bearer key"})
            assert answer.status == 403
            assert set(answer.json()) == {"error"}

    @pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
    @pytest.mark.parametrize("nothing", [0, 0.0, "0", "0s"])
    async def test_loading_and_unloading(self, path: str, field: str, nothing: Any) -> None:
        """A request without a prompt loads the model, and with keep_alive 0 unloads it until the next request."""
        async with living() as life:
            response = (await life.manage("POST", path, {"model": MODEL, "keep_alive": "5m"})).json()
            assert (response["done"], response["done_reason"], field in response) == (True, "load", True)
            assert life.loader.touched == []
            response = (await life.manage("POST", path, {"model": MODEL, "keep_alive": nothing})).json()
            assert (response["done"], response["done_reason"], field in response) == (True, "unload", True)
            response = (await life.manage("POST", path, {"model": MODEL})).json()
            assert response["done_reason"] == "load"
            assert life.loader.touched == [(step, MODEL) for step in ("close", "fetch", "open")]

    async def test_a_loading_model_is_not_loaded_again(self) -> None:
        """The error has its state."""
        loader = Scripted(hold=asyncio.Event())
        async with living(loader) as life:
            life.lifecycle.load(OTHER)
            await loader.begun.wait()
            answer = await life.manage("POST", "/api/generate", {"model": OTHER})
            assert answer.status == 503
            assert "loading" in answer.json()["error"]

    async def test_a_model_on_disk_is_loaded_on_request(self) -> None:
        """If the client may load models; for others it is a 404."""
        entries = [Entry(name=OTHER, source=f"hf:{OTHER}", backend="local")]
        async with living(Scripted(listed=entries), admin_key=("secret",)) as life:
            body = {"model": f"{OTHER}:latest", "input": "a"}
            answer = await life.call("POST", "/api/embed", body)
            assert answer.status == 404
            assert "on disk but not loaded" in answer.json()["error"]
            answer = await life.call("POST", "/api/embed", body, headers={"authorization": "Bearer secret"})
            assert (answer.status, len(answer.json()["embeddings"])) == (200, 1)
            assert (await life.call("POST", "/api/embed", body)).status == 200
