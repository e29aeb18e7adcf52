"""Routes that take a model's address from a client, with the real loader."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from shoal.app import open_app
from shoal.config import load
from tests.surfaces.surface_kit import Exchange, request_scope

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/models/{}/load": {},
    "/v1/models/{}/download": {},
    "/models": {"model": "{}"},
    "/models/load": {"model": "{}"},
    "/load_sentence_transformer_model": {"model_name": "{}"},
    "/load_clip_model": {"model_name": "{}", "pretrained": "x"},
    "/load_model": {"name": "{}"},
    "/infer_text": {"model_name": "{}", "text": "a"},
    "/v1/embeddings": {"model": "{}", "input": "a"},
    "/v1/chat/completions": {"model": "{}", "messages": [{"role": "user", "content": "a"}]},
    "/api/pull": {"model": "{}", "stream": False},
    "/api/embed": {"model": "{}", "input": "a"},
    "/api/generate": {"model": "{}"},
    "/api/chat": {"model": "{}", "messages": []},
}
"""Paths and bodies; {} is the address."""

ADDRESSES = (
    "fake:labels=3000#second",
    "fake:dimension=99999999999",
    "file:models",
    "triton://127.0.0.1:9#m",
    "tei+http://127.0.0.1:9",
    "openai+http://127.0.0.1:9/v1#m",
)


@pytest.mark.parametrize("path", ROUTES)
async def test_no_route_loads_operator_only_schemes(path: str) -> None:
    """Clients, admin or not, cannot name scripted models, folders or other servers; those come from the command line
    and the settings only."""
    async with open_app(load({}, {}), ["fake:"]) as app:
        await app.wait_until_loaded()
        before = {model.name for model in app.gateway.models()}
        for address in ADDRESSES:
            body: dict[str, Any] = {
                key: value.replace("{}", address) if isinstance(value, str) else value
                for key, value in ROUTES[path].items()
            }
            exchange = Exchange([orjson.dumps(body)])
            sent = {"host": "127.0.0.1:8080", "content-type": "application/json"}
            target = path.replace("{}", address.replace("/", "%2F").replace("#", "%23"))
            await app.asgi(request_scope("POST", target, sent), exchange.receive, exchange.send)
            answer = exchange.answer()
            assert 400 <= answer.status < 500, (address, answer.status, answer.body)
            assert app.gateway.lifecycle is not None
            assert not app.gateway.lifecycle.jobs() or {job.model for job in app.gateway.lifecycle.jobs()} <= before
        assert {model.name for model in app.gateway.models()} == before
