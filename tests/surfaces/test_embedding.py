"""The Triton proxy's route: its bodies, without its bugs."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import EngineFailed, ModelFailed, Overloaded
from tests.surfaces.surface_kit import raising, serve, vector


async def test_queries() -> None:
    """One object per query, in order; unknown keys are ignored."""
    server = serve()
    answer = await server.call("POST", "/v1/embedding", [{"query": "ab"}, {"query": "cd", "id": 7}])
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == b'[{"embedding":[1.0,24.25,24.375,-0.5]},{"embedding":[1.0,24.75,24.875,-0.5]}]'
    assert server.runner.tasks[0].inputs == ["ab", "cd"]


async def test_empty_array() -> None:
    """No queries give no embeddings; the original crashed."""
    server = serve()
    answer = await server.call("POST", "/v1/embedding", [])
    assert (answer.status, answer.body) == (200, b"[]")
    assert server.runner.tasks == []


async def test_large_body() -> None:
    """The original's limit of 32 KiB does not apply."""
    answer = await serve().call("POST", "/v1/embedding", [{"query": "asdf" * 125}] * 256)
    assert answer.json() == [{"embedding": vector("asdf" * 125)}] * 256


async def test_batch_facts() -> None:
    """This surface sends the batch headers, too."""
    answer = await serve().call("POST", "/v1/embedding", [{"query": "ab"}])
    assert answer.headers["x-shoal-batch-size"] == "7"
    assert "total;dur=" in answer.headers["server-timing"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[{", "could not be read"),
        (b'{"query":"a"}', "got `object`"),
        (b'[{"text":"a"}]', "Missing required field '[0].query'"),
        (b'[{"query":1}]', "got `int`"),
        (b'["a"]', "got `str`"),
        (b"[" + b'{"query":"a"},' * 2048 + b'{"query":"a"}]', "more than 2048 queries"),
        (b'[{"query":"a","x":' + b"[" * 200_000, "nested too deeply"),
    ],
)
async def test_bad_bodies(body: bytes, words: str) -> None:
    """400 with only `msg`."""
    answer = await serve().call("POST", "/v1/embedding", body=body)
    assert answer.status == 400
    assert set(answer.json()) == {"msg"}
    assert words in answer.json()["msg"]


@pytest.mark.parametrize(
    ("error", "status"), [(EngineFailed("broken"), 500), (Overloaded("later"), 429), (ModelFailed("no"), 503)]
)
async def test_errors_of_the_model(error: Any, status: int) -> None:
    """A failure is an answer; the original's process exited."""
    answer = await raising(error).call("POST", "/v1/embedding", [{"query": "a"}])
    assert (answer.status, answer.json()) == (status, {"msg": error.message})


async def test_wrong_content_type() -> None:
    """400, like in the original's framework."""
    answer = await serve().call("POST", "/v1/embedding", body=b"[]", headers={"content-type": "text/plain"})
    assert answer.status == 400
    assert "application/json" in answer.json()["msg"]


async def test_a_long_list_is_not_decoded_to_its_end() -> None:
    """Decoding stops at the first query above the limit; the next request is counted separately."""
    server = serve(max_inputs=3)
    body = b'[{"query":"a"},{"query":"b"},{"query":"c"},{"query":"d"},{"nothing":1}]'
    answer = await server.call("POST", "/v1/embedding", body=body)
    assert (answer.status, answer.json()) == (
        400,
        {"msg": "The request has more than 3 queries; split it."},
    )
    for _ in range(2):
        assert (await server.call("POST", "/v1/embedding", [{"query": "a"}] * 3)).status == 200
