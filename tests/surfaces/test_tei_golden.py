"""Whole exchanges with the routes of text-embeddings-inference, byte for byte: one file a route in golden/tei.

A file holds its cases in order. `models` are those of family_kit, `options` of the server, `body` of the request is
sent as compact JSON (a text: as it stands), and `reply` is the whole body, as text, with VERSION for Shoal's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal._version import __version__
from tests.surfaces.family_kit import family

FOLDER = Path(__file__).parent / "golden" / "tei"
CASES = {
    f"{file.stem}: {case['name']}": case
    for file in sorted(FOLDER.glob("*.json"))
    for case in json.loads(file.read_text())
}
TYPES = {"json": "application/json", "text": "text/plain; charset=utf-8"}


@pytest.mark.parametrize("name", CASES)
async def test_exchange(name: str) -> None:
    """Status, content type and every byte of the reply."""
    case: dict[str, Any] = CASES[name]
    body = case.get("body", "")
    sent = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    headers = {"content-type": "application/json"} | case.get("headers", {})
    async with family(*case.get("models", ()), **case.get("options", {})) as server:
        answer = await server.call(case.get("method", "POST"), case["path"], body=sent.encode(), headers=headers)
    assert (answer.status, answer.body.decode()) == (case["status"], case["reply"].replace("VERSION", __version__))
    if answer.body:
        assert answer.headers["content-type"] == TYPES[case.get("type", "json")]


def test_every_route_has_a_file() -> None:
    """Each file has a successful case and one that fails."""
    routes = {"embed", "embed_all", "embed_sparse", "rerank", "predict", "similarity", "tokenize", "decode"}
    assert {file.stem for file in FOLDER.glob("*.json")} == routes | {"info", "default", "vertex", "server"}
    for file in FOLDER.glob("*.json"):
        statuses = {case["status"] for case in json.loads(file.read_text())}
        assert 200 in statuses
        assert len(statuses) > 1, file
