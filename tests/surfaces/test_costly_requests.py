"""Small requests that would cost a lot: each is rejected, or answered within its limits."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest

from shoal.surfaces.shared import matrices
from shoal.surfaces.tei import default_route
from shoal.types import Embedded, Vectors
from tests.surfaces.family_kit import CLASSIFIER, DIMENSION, EMBEDDER, family
from tests.surfaces.surface_kit import Server

COUNT = 100_000
MANY = b"[" + b",".join([b"[]"] * COUNT) + b"]"
TEXTS = b"[" + b",".join([b'"ab"'] * COUNT) + b"]"
KINDS = b"[" + b",".join([b'"image"'] * COUNT) + b"]"
PARTS = b",".join([b'{"text":"a"}'] * 60_000)
NAMES = b"{" + b",".join([b'"a%d":""' % at for at in range(COUNT)]) + b"}"
TYPES = b"[" + b",".join([b'"int8"'] * COUNT) + b"]"
COSTLY = [
    ("/v1/rerank", b'{"query":{"text":"a","image":%b},"documents":["b"]}', MANY, b"has an image"),
    ("/v1/rerank", b'{"query":"a","documents":[{"text":"a","image":%b}]}', MANY, b"has an image"),
    ("/v1/rerank", b'{"query":"a","documents":["b"],"rank_fields":%b}', TEXTS, b"rank_fields"),
    ("/v2/rerank", b'{"query":"a","documents":[{"text":"a","image":%b}]}', MANY, b"has an image"),
    ("/v2/embed", b'{"texts":["b"],"images":%b}', TEXTS, b"'texts' and 'images'"),
    ("/v1/embed", b'{"texts":["b"],"images":%b}', TEXTS, b"'texts' and 'images'"),
    ("/v2/embed", b'{"texts":["b"],"embedding_types":%b}', TYPES, b"name each type once"),
    (
        "/v2/embed",
        b'{"inputs":[{"content":[{"type":"image_url","image_url":%b}]}]}',
        MANY,
        b"image_url' is invalid",
    ),
    ("/v1/embeddings", b'{"model":"clip","input":"a","modality":%b}', KINDS, b"'modality' has"),
    ("/v1/embeddings", b'{"model":"clip","messages":[{"content":[%b]}]}', PARTS, b"more than one text"),
    (
        "/v1/embeddings",
        b'{"model":"clip","input":"a","modality":"image","image_download_headers":%b}',
        NAMES,
        b"characters",
    ),
    ("/rank", b'{"image":"a","texts":["a"],"image_download_headers":%b}', NAMES, b"characters"),
    ("/rank", b'{"images":["a"],"texts":%b}', TEXTS, b"more than 2048"),
    ("/v1/embeddings", b'{"model":"embedder","input":"a","embedding_type":%b}', TYPES, b"accepts one type"),
    ("/vertex", b'{"instances":%b}', MANY, b"expected `object`"),
    ("/vertex", b'{"instances":[%b]}', b",".join([b"{}"] * COUNT), b"batch size 100000 > maximum"),
]
JSON = {"content-type": "application/json"}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with family() as server:
        yield server


@pytest.mark.parametrize("before", [b"", b"x" * 10, b"x" * 262_144, b"x" * 262_143 + b"\\n"])
@pytest.mark.parametrize(
    ("path", "around"),
    [
        ("/embed", b'{"inputs":"%b"}'),
        ("/v1/rerank", b'{"query":"a","documents":["%b"]}'),
        ("/classify", b'{"input":[["%b","a"]]}'),
    ],
)
async def test_invalid_utf8(server: Server, path: str, around: bytes, before: bytes) -> None:
    """More invalid bytes than are decoded at once are rejected as not UTF-8, wherever they are."""
    body = around % (before + b"\x80" * 600_000)
    async with asyncio.timeout(30):
        answer = await server.call("POST", path, body=body, headers=JSON)
    assert answer.status == 400
    assert b"not UTF-8" in answer.body


async def measure(server: Server, path: str, body: bytes) -> tuple[int, bytes, int]:
    """Return the status, the body and the peak memory."""
    tracemalloc.start()
    try:
        answer = await server.call("POST", path, body=body, headers=JSON)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return answer.status, answer.body, peak


@pytest.mark.parametrize(("path", "around", "costly", "message"), COSTLY)
async def test_refused_fields(server: Server, path: str, around: bytes, costly: bytes, message: bytes) -> None:
    """A rejected value is rejected by its field, and costs no more than a request with token ids."""
    status, body, peak = await measure(server, path, around % costly)
    assert 400 <= status < 500
    assert message in body
    assert peak < 20_000_000


@pytest.mark.parametrize(("path", "around", "costly", "message"), COSTLY)
async def test_oversized_values_are_not_built(
    server: Server, path: str, around: bytes, costly: bytes, message: bytes
) -> None:
    """Memory stays within a few copies of the body's bytes."""
    body = around % costly.replace(costly[1:-1], b",".join([costly[1:-1]] * 5))
    status, reply, peak = await measure(server, path, body)
    assert 400 <= status < 500
    assert b"more than 1114112 values" in reply
    assert peak < 3 * len(body) + 2_000_000


async def test_too_many_numbers_by_the_inputs_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that must be too large never reaches the model; one vector per text is not limited by this."""
    monkeypatch.setattr(matrices, "MAX_NUMBERS", 100 * DIMENSION)
    long = "word " * 200
    for path, body in (
        ("/embed_all", {"inputs": [long] * 8}),
        ("/embed_all", {"inputs": ["a"] * 101}),
        ("/embed_all", {"inputs": [[7] * 60] * 2}),
        ("/pooling", {"input": [long] * 8, "task": "token_embed", "model": EMBEDDER}),
    ):
        answer = await server.call("POST", path, body)
        assert answer.status in (400, 422)
        assert b"the response would exceed 400 numbers" in answer.body
        assert "x-shoal-batch-size" not in answer.headers
    assert (await server.call("POST", "/embed", {"inputs": [long] * 200})).status == 200


async def test_too_many_numbers_in_the_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response whose size is known only afterwards is rejected before it is written; the exact limit is allowed."""
    monkeypatch.setattr(matrices, "MAX_NUMBERS", 100 * DIMENSION)
    for path, more in (("/embed_all", {}), ("/pooling", {"task": "token_embed", "model": EMBEDDER})):
        name = "input" if more else "inputs"
        right = await server.call("POST", path, {name: ["a " * 50] * 2, **more})
        above = await server.call("POST", path, {name: ["a " * 50, "a " * 51], **more})
        assert (right.status, above.status in (400, 422)) == (200, True)
        assert b"split the request" in above.body


@pytest.mark.parametrize("base64", [False, True])
async def test_a_reply_frees_its_numbers(server: Server, monkeypatch: pytest.MonkeyPatch, base64: bool) -> None:
    """Each matrix is freed once it is encoded, so memory never holds both."""
    results: list[Embedded] = []

    async def run(task: Any, ctx: Any) -> Embedded:
        shape = (1, DIMENSION)
        no_vectors: Vectors = np.zeros((0, DIMENSION), np.float32)
        matrices = [np.full(shape, at, np.float32) for at in range(len(task.inputs))]
        results.append(Embedded(vectors=no_vectors, tokens=[1] * len(task.inputs), token_vectors=list(matrices)))
        return results[-1]

    monkeypatch.setattr(server.runner, "run", run)
    fields: dict[str, Any] = {"model": EMBEDDER, "task": "token_embed"}
    if base64:
        fields["encoding_format"] = "base64"
    pooled = await server.call("POST", "/pooling", {"input": ["a", "b", "c"], **fields})
    plain = await server.call("POST", "/embed_all", {"inputs": ["a", "b", "c"]})
    assert plain.json() == [[[float(at)] * DIMENSION] for at in range(3)]
    assert len(pooled.json()["data"]) == 3
    assert [[each.size for each in one.token_vectors] for one in results] == [[0, 0, 0], [0, 0, 0]]


async def test_instances_do_not_fill_the_queue() -> None:
    """Neither many small instances nor a few large ones are rejected because of their own neighbors' items."""
    async with family(EMBEDDER, CLASSIFIER, max_queue_items=32) as server:
        runner: Any = server.runner
        runner.lane.admission.max_items = 32
        many = {"instances": [{"inputs": f"a {at}"} for at in range(56)]}
        large = {"instances": [{"inputs": [f"a {at}" for at in range(30)]} for _ in range(10)]}
        for body, count in ((many, 56), (large, 10)):
            answer = await server.call("POST", "/vertex", body)
            assert answer.status == 200, answer.body
            assert len(answer.json()["predictions"]) == count


async def test_nothing_starts_after_a_failed_instance(server: Server) -> None:
    """The error names the failed instance."""
    started = 0
    run = server.runner.run

    async def counted(task: Any, ctx: Any) -> Any:
        nonlocal started
        started += len(task.inputs)
        return await run(task, ctx)

    server.runner.run = counted  # type: ignore[method-assign]
    instances: list[Any] = [{"inputs": ["a"] * 60}, {"inputs": ["b", "reject-item"] * 30}, {"inputs": ["c"] * 60}]
    answer = await server.call("POST", "/vertex", {"instances": instances})
    assert (answer.status, started) == (422, 120)
    assert answer.json()["error"].startswith("instances[1]: ")


async def test_instance_answers_share_one_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer may be within its limit while all together exceed the limit of one reply."""
    monkeypatch.setattr(default_route, "MAX_REPLY_BYTES", 10_000)
    instances = [{"inputs": ["a b"] * 60}] * 20
    answer = await server.call("POST", "/vertex", {"instances": instances})
    assert (answer.status, answer.json()["error_type"]) == (422, "Validation")
    assert "split them" in answer.json()["error"]


@pytest.mark.parametrize(
    "instances", [b"[3]", b'["a"]', b"[[]]", b"[null]", b"3", b"null", b'{"inputs":"a"}', b'[{"inputs":"a"},4]']
)
async def test_invalid_instances(server: Server, instances: bytes) -> None:
    """Any other JSON is rejected as the wrong type."""
    answer = await server.call("POST", "/vertex", body=b'{"instances":%b}' % instances, headers=JSON)
    assert answer.status == 422
    assert b"expected `" in answer.body


async def test_whitespace_in_instances(server: Server) -> None:
    """Whitespace and brackets inside texts have no effect."""
    space = b" " * 700_000
    body = b'{"instances":[' + space + b'{"inputs" : ["a, }]{", "b"]}' + space + b', {"inputs":"c"}' + space + b"]}"
    answer = await server.call("POST", "/vertex", body=body, headers=JSON)
    alone = [await server.call("POST", "/", {"inputs": each}) for each in (["a, }]{", "b"], "c")]
    assert answer.json() == {"predictions": [orjson.loads(each.body) for each in alone]}
