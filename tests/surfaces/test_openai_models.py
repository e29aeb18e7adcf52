"""OpenAI's model routes, and loading, unloading and deleting on the same paths."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.core.lifecycle.lifecycle import Entry, LoadOptions
from shoal.core.registry import Model
from shoal.errors import ModelFileError, SourceError
from tests.surfaces.life_kit import FOREIGN, OTHER, Scripted, living
from tests.surfaces.surface_kit import MODEL, serve


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
async def test_models(method: str, path: str) -> None:
    """Every model, loaded or not, with OpenAI's four keys and Shoal's own."""
    server = serve()
    server.gateway.registry.add(Model(name="slow", created=1_700_000_001))
    answer = await server.call(method, path)
    assert answer.status == 200
    assert answer.json() == {
        "object": "list",
        "data": [
            {
                "id": MODEL,
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "shoal",
                "status": {"value": "loaded"},
                "aliases": ["mini", "sentence-transformers/all-MiniLM-L6-v2"],
                "tasks": ["embed"],
                "backend": "openvino",
                "source": "hf:sentence-transformers/all-MiniLM-L6-v2",
                "revision": "abc123",
                "dimension": 4,
                "vectors": ["dense"],
                "max_input_tokens": 256,
                "precision": "bf16",
                "pooling": "mean",
                "space": "5pace",
                "verified": "cosine 0.99999",
            },
            {
                "id": "slow",
                "object": "model",
                "created": 1_700_000_001,
                "owned_by": "shoal",
                "status": {"value": "loading"},
            },
        ],
    }


@pytest.mark.parametrize("name", [MODEL, "mini", "sentence-transformers/all-MiniLM-L6-v2", MODEL + "/"])
async def test_one_model(name: str) -> None:
    """By name or alias, with or without a slash at the end."""
    answer = await serve().call("GET", f"/v1/models/{name}")
    assert (answer.status, answer.json()["id"]) == (200, MODEL)


async def test_a_failed_model_has_a_reason() -> None:
    """A model that failed to load stays in the list with its reason; requests tell clients not to retry."""
    server = serve()
    broken = Model(name="broken")
    server.gateway.registry.add(broken)
    broken.mark_failed(ModelFileError("is missing", file="config.json"))
    answer = await server.call("GET", "/v1/models/broken")
    status = {"value": "unloaded", "failed": True, "error": "config.json: is missing"}
    assert answer.json()["status"] == status
    answer = await server.call("POST", "/v1/embeddings", {"input": "ab", "model": "broken"})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (503, "model_failed", "model")
    assert "config.json: is missing" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("body", [b"", b"{}", b'{"model": null}'])
async def test_post_without_a_model_lists(body: bytes) -> None:
    """Some clients POST for the list; only a model in the body makes it a download."""
    server = serve()
    listed = (await server.call("GET", "/v1/models")).json()
    assert (await server.call("POST", "/v1/models", body=body)).json() == listed


async def test_download() -> None:
    """The files exist when the answer is sent; nothing is served."""
    async with living() as life:
        answer = await life.manage("POST", "/v1/models", {"model": f"hf:{OTHER}"})
        assert (answer.status, answer.json()) == (200, {"status": "success", "model": OTHER})
        assert life.loader.touched == [("fetch", OTHER)]
        assert [each["id"] for each in (await life.call("GET", "/v1/models")).json()["data"]] == [MODEL]


@pytest.mark.parametrize("body", [None, {}, {"backend": "triton", "text_in": False}])
async def test_load(body: Any) -> None:
    """With or without options; a second load succeeds, too."""
    async with living() as life:
        for _ in range(2):
            answer = await life.manage("POST", f"/v1/models/{OTHER}/load", body)
            assert (answer.status, answer.json()) == (200, {"status": "success", "model": OTHER})
        chosen = LoadOptions(backend="triton", text_in=False) if body else LoadOptions()
        assert life.loader.options == [chosen]
        assert (await life.call("GET", f"/v1/models/{OTHER}")).json()["status"] == {"value": "loaded"}


@pytest.mark.parametrize("source", [f"{OTHER}@main", f"hf:{OTHER}"])
async def test_load_from_a_source(source: str) -> None:
    """The id may be a source; the answer has the served name."""
    async with living() as life:
        answer = await life.manage("POST", f"/v1/models/{source}/load")
        assert (answer.status, answer.json()["model"]) == (200, OTHER)


async def test_unload_and_delete() -> None:
    """Unloading twice is no error; deleting answers like OpenAI, and a missing model is a 404."""
    async with living() as life:
        for _ in range(2):
            answer = await life.manage("POST", f"/v1/models/{MODEL}/unload/")
            assert (answer.status, answer.json()) == (200, {"status": "success", "model": MODEL})
        assert (await life.call("GET", f"/v1/models/{MODEL}")).status == 404
        answer = await life.manage("DELETE", f"/v1/models/{MODEL}")
        assert (answer.status, answer.json()) == (200, {"id": MODEL, "object": "model", "deleted": True})
        answer = await life.manage("DELETE", f"/v1/models/{MODEL}")
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert life.loader.touched.count(("remove", MODEL)) >= 1


@pytest.mark.parametrize("path", [f"/v1/models/{OTHER}/unload", f"/v1/models/{OTHER}/unload?wait=false"])
async def test_unloading_an_unknown_model(path: str) -> None:
    """404; for a stored model there is nothing to do."""
    async with living() as life:
        answer = await life.manage("POST", path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await life.manage("POST", "/models/unload", {"model": OTHER})).status == 404
        life.loader.listed = [Entry(name=OTHER, source=f"hf:{OTHER}", backend="local")]
        assert (await life.manage("POST", path)).status in (200, 202)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/embed", {"inputs": "a"}),
        ("/v1/embedding", [{"query": "a"}]),
        ("/api/embed", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}),
    ],
)
async def test_an_unloaded_model_is_reported(path: str, body: Any) -> None:
    """In every dialect, also without a name; a deleted model is forgotten."""
    async with living() as life:
        await life.manage("POST", f"/v1/models/{MODEL}/unload")
        if isinstance(body, dict) and path != "/embed":
            body = body | {"model": MODEL}
        answer = await life.call("POST", path, body)
        assert 400 <= answer.status < 500
        assert b"unloaded" in answer.body or b"can be loaded again" in answer.body
        await life.manage("DELETE", f"/v1/models/{MODEL}")
        answer = await life.call("POST", path, body)
        assert b"unloaded" not in answer.body
        assert b"loaded again" not in answer.body


async def test_models_of_others_are_not_deleted() -> None:
    """403, in OpenAI's format."""
    async with living() as life:
        answer = await life.manage("DELETE", f"/v1/models/{FOREIGN}")
        assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")


async def test_a_load_that_fails() -> None:
    """The answer has the reason, with a status that clients do not retry; nothing is served."""
    async with living(Scripted(error=SourceError("the hub has no such model"))) as life:
        answer = await life.manage("POST", f"/v1/models/{OTHER}/load")
        assert (answer.status, answer.json()["error"]["message"]) == (424, "the hub has no such model")
        assert (await life.call("GET", f"/v1/models/{OTHER}")).status == 404


async def test_requests_in_flight_finish_before_an_unload() -> None:
    async with living() as life:
        runner = life.loader.runners[MODEL]
        runner.release = asyncio.Event()
        pending = asyncio.create_task(life.call("POST", "/v1/embeddings", {"input": "ab", "model": MODEL}))
        await runner.begun.wait()
        unloading = asyncio.create_task(life.manage("POST", f"/v1/models/{MODEL}/unload"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not unloading.done()
        runner.release.set()
        assert (await pending).status == 200
        assert (await unloading).status == 200
