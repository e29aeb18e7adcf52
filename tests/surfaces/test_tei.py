"""text-embeddings-inference, byte for byte: JSON of its own errors, plain text of its framework's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.protocols import ModelFacts
from shoal.core.registry import Model
from shoal.errors import (
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    InvalidValue,
    Overloaded,
    SetupError,
    TooLong,
    Unavailable,
    Unsupported,
)
from tests.surfaces.surface_kit import MODEL, RecordingRunner, raising, serve, vector


@pytest.mark.parametrize("path", ["/embed", "/embed/", "/"])
async def test_one_text(path: str) -> None:
    """Two-dimensional even for one text; clients that know only the server's address post to `/`."""
    answer = await serve().call("POST", path, {"inputs": "ab"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == b"[[1.0,24.25,24.375,-0.5]]"


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        (["ab", "cd"], ["ab", "cd"]),
        ([101, 7592, 102], [[101, 7592, 102]]),
        ([[101, 102], "ab", [5]], [[101, 102], "ab", [5]]),
    ],
)
async def test_all_forms_of_inputs(value: Any, inputs: list[Any]) -> None:
    """Texts and lists of ids may mix; a bare list of ids is one input."""
    server = serve()
    answer = await server.call("POST", "/embed", {"inputs": value})
    assert server.runner.tasks[0].inputs == inputs
    assert answer.json() == [vector(item) for item in inputs]


async def test_many_inputs() -> None:
    """TEI's default limit of 32 does not apply: 2,048 inputs are answered in order."""
    texts = [f"text {at}" for at in range(2048)]
    answer = await serve().call("POST", "/embed", {"inputs": texts})
    assert answer.json() == [vector(text) for text in texts]


async def test_fields_reach_the_task() -> None:
    """Every field becomes a field of the task."""
    server = serve()
    fields = {"truncate": True, "truncation_direction": "left", "prompt_name": "q", "normalize": False, "dimensions": 2}
    await server.call("POST", "/embed", {"inputs": "ab", **fields})
    task = server.runner.tasks[0]
    assert {name: getattr(task, name) for name in fields} == fields


async def test_null_and_unknown_fields() -> None:
    """null means absent, and unknown fields are ignored."""
    server = serve()
    names = ("truncate", "truncation_direction", "prompt_name", "normalize", "dimensions")
    answer = await server.call("POST", "/embed", {"inputs": "ab", "parameters": {}, **dict.fromkeys(names)})
    task = server.runner.tasks[0]
    assert answer.status == 200
    assert (task.truncate, task.truncation_direction, task.normalize) == (None, "right", True)


async def test_headers() -> None:
    """The original's headers in whole milliseconds, the real compute type, and Shoal's batch facts."""
    answer = await serve().call("POST", "/embed", {"inputs": ["ab", [1, 2, 3]]})
    headers = {name: value for name, value in answer.headers.items() if name.startswith("x-") and "time" not in name}
    assert headers["x-compute-type"] == "openvino+bf16"
    assert headers["x-compute-characters"] == "5"
    assert headers["x-compute-tokens"] == "5"
    assert headers["x-shoal-batch-size"] == "7"
    times = ("x-tokenization-time", "x-queue-time", "x-inference-time")
    assert [answer.headers[name] for name in times] == ["2", "1", "3"]
    assert answer.headers["x-compute-time"].isdigit()
    assert answer.headers["x-total-time"].isdigit()


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type"),
    [
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": ["a"] * 2049}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
        ("/tokenize", {"inputs": ["a"] * 2049}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [[1]] * 2049}, 422, "Validation"),
    ],
)
async def test_its_own_errors(path: str, body: Any, status: int, error_type: str) -> None:
    """`error` and `error_type`, and nothing else."""
    answer = await serve().call("POST", path, body)
    assert answer.status == status
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.json()["error_type"] == error_type


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", b"{", 400),
        ("/embed", b'{"inputs":"\xff"}', 400),
        ("/embed", b'{"x":' + b"[" * 200_000, 400),
        ("/embed", b"{}", 422),
        ("/embed", b'{"inputs":null}', 422),
        ("/embed", b'{"inputs":[1,"a"]}', 422),
        ("/embed", b'{"inputs":[-1]}', 422),
        ("/embed", b'{"inputs":"a","truncation_direction":"up"}', 422),
        ("/tokenize", b'{"inputs":[1]}', 422),
        ("/decode", b'{"ids":[1,[2]]}', 422),
        ("/decode", b'{"ids":"a"}', 422),
    ],
)
async def test_its_frameworks_errors(path: str, body: bytes, status: int) -> None:
    """Bodies that do not match the request's type are rejected as plain text."""
    answer = await serve().call("POST", path, body=body, headers={"content-type": "application/json"})
    assert answer.status == status
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (TooLong("cut it"), 422, "Validation"),
        (InvalidValue("no such prompt"), 422, "Validation"),
        (Unsupported("not an embedding model"), 424, "Backend"),
        (EngineFailed("broken"), 424, "Backend"),
        (Overloaded("later"), 429, "Overloaded"),
        (Unavailable("draining"), 503, "Unhealthy"),
        (DeadlineExceeded("too late"), 504, "Backend"),
    ],
)
async def test_errors_of_the_model(error: Any, status: int, error_type: str) -> None:
    """The gateway's message, with the original's status and type."""
    answer = await raising(error).call("POST", "/embed", {"inputs": "a"})
    assert answer.status == status
    assert answer.json() == {"error": error.message, "error_type": error_type}


async def test_bugs_are_not_shown() -> None:
    """A bug is a 500 in the dialect, without details."""
    answer = await raising(InternalError("secret path")).call("POST", "/embed", {"inputs": "a"})
    assert (answer.status, answer.json()["error_type"]) == (500, "Backend")
    assert "secret" not in answer.json()["error"]


async def test_wrong_key_has_no_body() -> None:
    """401 is empty, like the original's."""
    answer = await serve(api_key=("k",)).call("POST", "/embed", {"inputs": "a"})
    assert (answer.status, answer.body) == (401, b"")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-length"] == "0"


async def test_tokenize() -> None:
    """One list of tokens per text; offsets are null for tokens that the tokenizer added."""
    server = serve()
    answer = await server.call("POST", "/tokenize", {"inputs": "ab"})
    assert answer.json() == [
        [
            {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": 7, "text": "ab", "special": False, "start": 0, "stop": 2},
        ]
    ]
    await server.call("POST", "/tokenize", {"inputs": ["a", "b"], "add_special_tokens": False, "prompt_name": "q"})
    assert server.runner.tokenized == [(["ab"], True, None), (["a", "b"], False, "q")]


async def test_tokenize_many() -> None:
    """More texts than are encoded at once are returned completely and in order."""
    texts = [f"text {at}" for at in range(200)]
    answer = await serve().call("POST", "/tokenize", {"inputs": texts})
    assert [each[1]["text"] for each in answer.json()] == texts


async def test_decode() -> None:
    """One text per list of ids; a bare list of ids is one."""
    server = serve()
    assert (await server.call("POST", "/decode", {"ids": [101, 5]})).json() == ["101 5"]
    assert (await server.call("POST", "/decode", {"ids": [[1], [2]], "skip_special_tokens": False})).json() == [
        "1",
        "2",
    ]
    assert server.runner.decoded == [([[101, 5]], True), ([[1], [2]], False)]


async def test_info() -> None:
    """All of the original's keys, with this server's values."""
    answer = await serve(max_inputs=100, max_batch_size=8, max_batch_tokens=99, truncate=False).call("GET", "/info")
    reply = answer.json()
    assert isinstance(reply.pop("version"), str)
    assert reply == {
        "model_id": "sentence-transformers/all-MiniLM-L6-v2",
        "model_sha": "abc123",
        "model_dtype": "bfloat16",
        "served_model_name": MODEL,
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 16384,
        "max_input_length": 256,
        "max_batch_tokens": 99,
        "max_batch_requests": 8,
        "max_client_batch_size": 100,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "sha": None,
        "docker_label": None,
    }


async def test_info_of_a_model_with_its_own_settings() -> None:
    """They override the server's settings; a size of 0 means unset."""
    own = {"max_queue_items": 5, "max_batch_tokens": 6, "max_batch_size": 7, "truncate": False}
    names = ("max_concurrent_requests", "max_batch_tokens", "max_batch_requests", "auto_truncate")
    runner = RecordingRunner()
    runner.facts = replace(runner.facts, details=own)
    reply = (await serve(runner).call("GET", "/info")).json()
    assert [reply[name] for name in names] == [5, 6, 7, False]
    runner.facts = replace(runner.facts, details={"max_batch_size": 0})
    reply = (await serve(runner, max_batch_size=8).call("GET", "/info")).json()
    assert [reply[name] for name in names] == [16_384, 16_384, 8, True]


async def test_info_of_a_model_without_an_id() -> None:
    """The served name replaces it."""
    server = serve(RecordingRunner(facts=ModelFacts(source="fake", backend="fake", tasks=("embed",))))
    assert (await server.call("GET", "/info")).json()["model_id"] == MODEL


async def test_while_the_model_loads() -> None:
    """503 Unhealthy on every route, at once."""
    server = serve()
    server.gateway.registry.remove(server.model)
    server.gateway.registry.add(Model(name="slow"))
    for answer in (
        await server.call("POST", "/embed", {"inputs": "a"}),
        await server.call("POST", "/tokenize", {"inputs": "a"}),
        await server.call("GET", "/info"),
    ):
        assert (answer.status, answer.json()["error_type"]) == (503, "Unhealthy")


async def test_after_the_model_failed() -> None:
    """503 Unhealthy with the reason, also from /info; clients are told not to retry."""
    server = serve()
    server.gateway.registry.remove(server.model)
    server.gateway.registry.add(broken := Model(name="broken"))
    broken.mark_failed(SetupError("the file is broken"))
    for answer in (await server.call("POST", "/embed", {"inputs": "a"}), await server.call("GET", "/info")):
        assert (answer.status, answer.json()["error_type"]) == (503, "Unhealthy")
        assert answer.json()["error"] == "the model 'broken' failed to load: the file is broken"
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


async def test_truncation_is_reported() -> None:
    """The header counts truncated inputs, like on other surfaces."""
    answer = await serve(RecordingRunner(truncated=3)).call("POST", "/embed", {"inputs": ["a", "b", "c"]})
    assert answer.headers["x-shoal-truncated"] == "3"
