"""OpenAI's embeddings and models, byte for byte."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from shoal.core.registry import Model
from shoal.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidValue,
    NotFinite,
    Overloaded,
    TooLong,
    TransportFailed,
)
from tests.surfaces.surface_kit import MODEL, RecordingRunner, raising, serve, vector

GOLDEN = (
    b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0,24.25,24.375,-0.5]}],'
    b'"model":"all-MiniLM-L6-v2","usage":{"prompt_tokens":2,"total_tokens":2}}'
)


def ask(**fields: Any) -> dict[str, Any]:
    return {"input": "ab", "model": MODEL, **fields}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/embeddings/", "/embeddings/"])
async def test_one_text(path: str) -> None:
    """One text gives one entry with OpenAI's keys in order, on every spelling of the path."""
    answer = await serve().call("POST", path, ask())
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(GOLDEN))
    assert answer.body == GOLDEN


async def test_base64_and_float_agree() -> None:
    """base64 is little-endian float32 of the same numbers."""
    server = serve()
    as_text = (await server.call("POST", "/v1/embeddings", ask(encoding_format="base64"))).json()
    as_numbers = (await server.call("POST", "/v1/embeddings", ask(encoding_format="float"))).json()
    decoded = np.frombuffer(base64.b64decode(as_text["data"][0]["embedding"]), dtype="<f4")
    assert decoded.tolist() == as_numbers["data"][0]["embedding"] == vector("ab")


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([101, 7592, 102], [[101, 7592, 102]]),
        ([[101, 102], [101, 7592, 102]], [[101, 102], [101, 7592, 102]]),
    ],
)
async def test_all_forms_of_input(value: Any, inputs: list[Any]) -> None:
    """A text, texts, token ids and lists of token ids; the reply keeps their order."""
    server = serve(token_ids="accept")
    answer = await server.call("POST", "/v1/embeddings", ask(input=value))
    assert server.runner.tasks[0].inputs == inputs
    assert [(each["index"], each["embedding"]) for each in answer.json()["data"]] == [
        (at, vector(item)) for at, item in enumerate(inputs)
    ]
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, inputs))


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_many_inputs(encoding_format: str) -> None:
    """2,048 inputs are answered in order, in several pieces with one content-length."""
    texts = [f"text {at}" for at in range(2048)]
    answer = await serve().call("POST", "/v1/embeddings", ask(input=texts, encoding_format=encoding_format))
    assert answer.pieces > 2
    assert int(answer.headers["content-length"]) == len(answer.body)
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(2048))
    if encoding_format == "float":
        assert [each["embedding"] for each in data] == [vector(text) for text in texts]


async def test_fields_reach_the_task() -> None:
    """Every supported field becomes a field of the task; an alias is answered with the served name."""
    server = serve()
    fields = {"dimensions": 2, "input_type": "query", "prompt_name": "q", "truncate": False, "normalize": False}
    answer = await server.call("POST", "/v1/embeddings", ask(model="mini", user="u", **fields))
    task = server.runner.tasks[0]
    assert {name: getattr(task, name) for name in fields} == fields
    assert task.model == answer.json()["model"] == MODEL


@pytest.mark.parametrize(
    ("value", "truncate", "direction"),
    [
        (None, None, "right"),
        (True, True, "right"),
        ("NONE", False, "right"),
        ("END", True, "right"),
        ("START", True, "left"),
    ],
)
async def test_truncate_words(value: Any, truncate: bool | None, direction: str) -> None:
    """Words from other servers' clients become a flag and a direction."""
    server = serve()
    await server.call("POST", "/v1/embeddings", ask(truncate=value))
    assert (server.runner.tasks[0].truncate, server.runner.tasks[0].truncation_direction) == (truncate, direction)


async def test_null_means_absent() -> None:
    """Gateways in front of Shoal send null for omitted fields."""
    names = ("encoding_format", "dimensions", "user", "input_type", "prompt_name", "truncate", "normalize")
    server = serve()
    answer = await server.call("POST", "/v1/embeddings", ask(**dict.fromkeys(names)))
    assert answer.body == GOLDEN
    assert server.runner.tasks[0].normalize is True


async def test_unknown_fields_are_ignored() -> None:
    """Fields that OpenAI adds later do not break a request."""
    answer = await serve().call("POST", "/v1/embeddings", ask(new_field={"deep": [1, None]}))
    assert answer.body == GOLDEN


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (ask(input=""), "input", "'input[0]' is empty"),
        (ask(input=[]), "input", "empty list"),
        (ask(input=["a", ""]), "input", "'input[1]' is empty"),
        (ask(input=[[]]), "input", "'input[0]' is empty"),
        (ask(input=["a"] * 2049), "input", "has more than 2048 entries; split the request."),
        (ask(input=["a", [1]]), "input", "mixes"),
        (ask(input=["a", 1]), "input", "mixes"),
        (ask(input=[1, [1]]), "input", "mixes"),
        (ask(input=None), "input", "Missing required field 'input'"),
        (ask(input=1), "input", "got `int`"),
        (ask(input={"text": "a"}), "input", "got `object`"),
        (ask(input=[1.5]), "input", "got `float`"),
        (ask(input=[-1]), "input", ">= 0"),
        (ask(input=[2**31]), "input", "<= 2147483647"),
        (ask(input=[[1, "a"]]), "input", "'input[0][1]' is invalid"),
        ({"model": MODEL}, "input", "Missing required field 'input'"),
        ({"input": "a"}, "model", "Missing required field 'model'"),
        (ask(model=""), "model", "'model' is empty"),
        (ask(model=None), "model", "got `null`"),
        (ask(model=7), "model", "got `int`"),
        (ask(dimensions=0), "dimensions", ">= 1"),
        (ask(dimensions=1.5), "dimensions", "got `float`"),
        (ask(dimensions="4"), "dimensions", "got `str`"),
        (ask(encoding_format="hex"), "encoding_format", "invalid enum value"),
        (ask(truncate="MIDDLE"), "truncate", "invalid enum value"),
        (ask(normalize="yes"), "normalize", "got `str`"),
        ([], None, "got `array`"),
        ("text", None, "got `str`"),
    ],
)
async def test_bad_bodies(body: Any, param: str | None, words: str) -> None:
    """400 in OpenAI's format, with all four keys, naming the field."""
    server = serve()
    answer = await server.call("POST", "/v1/embeddings", body)
    error = answer.json()["error"]
    assert answer.status == 400
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert server.runner.tasks == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty; send JSON"),
        (b"{", "could not be read as JSON"),
        (b'{"input":"a","model":"m"} x', "could not be read as JSON"),
        (b'{"input":"\xff","model":"m"}', "not UTF-8"),
        (b'{"input":"\\ud800","model":"m"}', "half of a character"),
        (b'{"x":' + b"[" * 200_000, "nested too deeply"),
        (b'{"input":"a","model":"m","x":' + b'{"a":' * 100_000, "nested too deeply"),
    ],
)
async def test_bodies_that_are_not_json(body: bytes, words: str) -> None:
    """Invalid JSON and too deep nesting are a 400."""
    answer = await serve().call("POST", "/v1/embeddings", body=body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (TooLong("cut it", param="input"), 400, "invalid_request_error", "context_length_exceeded"),
        (InvalidValue("at most 4", param="dimensions"), 400, "invalid_request_error", "invalid_value"),
        (Overloaded("later", retry_after=1.2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (DeadlineExceeded("too late"), 504, "timeout_error", None),
        (EngineFailed("broken"), 500, "server_error", None),
        (NotFinite("NaN"), 500, "server_error", None),
        (TransportFailed("gone"), 502, "upstream_error", None),
    ],
)
async def test_errors_of_the_model(error: Any, status: int, kind: str, code: str | None) -> None:
    """The gateway's message and field, with OpenAI's status, type and code."""
    answer = await raising(error).call("POST", "/v1/embeddings", ask())
    assert answer.status == status
    assert answer.json() == {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}
    assert answer.headers.get("x-should-retry") == ("false" if status == 500 else None)
    assert answer.headers.get("retry-after") == ("2" if status == 429 else None)


async def test_unknown_model() -> None:
    """OpenAI's 404 for a model that is not served, also on the route for one model."""
    server = serve()
    for answer in (
        await server.call("POST", "/v1/embeddings", ask(model="text-embedding-3-small")),
        await server.call("GET", "/v1/models/text-embedding-3-small"),
    ):
        error = answer.json()["error"]
        assert answer.status == 404
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}, {"model": "text-embedding-3-small"}])
@pytest.mark.parametrize("texts", [["ab"], ["ab" * 40_000]])
async def test_any_model(named: dict[str, Any], texts: list[str]) -> None:
    """text-embeddings-inference's clients need not know its model's name; a wrong type is still an error."""
    server = serve(any_model=True)
    for path in ("/v1/embeddings", "/embeddings"):
        answer = await server.call("POST", path, {"input": texts, **named})
        assert (answer.status, answer.json()["model"]) == (200, MODEL)
    (_, task) = server.runner.tasks
    assert task.model == MODEL
    assert (await server.call("POST", "/v1/embeddings", {"input": texts, "model": 7})).status == 400


async def test_any_model_leaves_known_names() -> None:
    """A served name means its model, including its role suffix."""
    server = serve(any_model=True)
    answer = await server.call("POST", "/v1/embeddings", ask(model="mini-query"))
    assert (answer.status, server.runner.tasks[0].input_type) == (200, "query")


async def test_any_model_mixes_no_vector_spaces() -> None:
    """While a server is pending, an unknown name is not the default, because it may be that server's; no name is."""
    server = serve(any_model=True)
    server.gateway.pending_sources["openai+http://there"] = "connection refused"
    assert (await server.call("POST", "/v1/embeddings", ask(model="theirs"))).status == 503
    assert (await server.call("POST", "/v1/embeddings", {"input": "ab"})).status == 200


async def test_a_loading_model() -> None:
    """503 with `model_loading` and Retry-After."""
    server = serve()
    server.gateway.registry.add(Model(name="slow"))
    answer = await server.call("POST", "/v1/embeddings", ask(model="slow"))
    assert answer.status == 503
    assert answer.json()["error"]["code"] == "model_loading"
    assert answer.headers["retry-after"] == "2"


async def test_batch_facts() -> None:
    """The batch facts are in headers, and in Server-Timing for browsers."""
    answer = await serve(RecordingRunner(truncated=1)).call("POST", "/v1/embeddings", ask())
    facts = {name: value for name, value in answer.headers.items() if name.startswith("x-shoal-")}
    assert facts == {
        "x-shoal-batch-size": "7",
        "x-shoal-batch-id": "42",
        "x-shoal-batches": "1",
        "x-shoal-flush": "full",
        "x-shoal-queue-ms": "1.25",
        "x-shoal-truncated": "1",
        "x-shoal-cached": "0",
        "x-shoal-space": "5pace",
    }
    timing = answer.headers["server-timing"]
    assert timing.startswith("queue;dur=1.25, prepare;dur=2.50, infer;dur=3.75, total;dur=")
