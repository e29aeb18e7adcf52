"""Models of a server named at start that is not ready yet: every dialect answers 503 with Retry-After, not 404."""

from __future__ import annotations

from typing import Any

import pytest

from tests.surfaces.surface_kit import serve

WHY = "openai+http://there: connection refused"

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT_BODY = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "/v1/completions": {"model": "m", "prompt": "hello"},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/embeddings": {"model": "m", "input": "hello"},
    "/api/chat": {"model": "m", "messages": MESSAGES},
    "/api/embed": {"model": "m", "input": "hello"},
    "/v2/embed": {
        "model": "m",
        "texts": ["hello"],
        "input_type": "search_query",
        "embedding_types": ["float"],
    },
    "/v1/rerank": {"model": "m", "query": "hello", "documents": ["a"]},
    "/infer_text": {"model_name": "m", "text": "hello"},
    "/pooling": {"input": "hello"},
    "/embed": {"inputs": "hello"},
    "/embed_sparse": {"inputs": "hello"},
    "/predict": {"inputs": "hello"},
    "/rank": {"image": "data:image/png;base64,AAAA", "texts": ["hello"]},
}


@pytest.mark.parametrize(("path", "body"), CHAT_BODY.items())
async def test_a_model_of_a_pending_source(path: str, body: dict[str, Any]) -> None:
    server = serve()
    server.gateway.registry.remove(server.model)
    assert "retry-after" not in (await server.call("POST", path, body)).headers
    place, _, reason = WHY.partition(": ")
    server.gateway.pending_sources[place] = reason
    answer = await server.call("POST", path, body)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2"), answer.body
    assert "may be on a server that is not ready yet ([address hidden]: connection refused)" in answer.body.decode()
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/api/tags", "/health"])
async def test_routes_without_a_model_answer(path: str) -> None:
    server = serve()
    server.gateway.registry.remove(server.model)
    server.gateway.pending_sources["openai+http://there"] = "connection refused"
    assert (await server.call("GET", path)).status == 200
