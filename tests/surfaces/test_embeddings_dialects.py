"""Fields that NVIDIA, Voyage, Jina and vLLM add to /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import FakeScript, compute_vector, tokenize_item
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.registry import Model, Registry
from shoal.surfaces import SURFACES, Options, build_app
from shoal.surfaces.shared import matrices
from tests.surfaces.family_kit import EMBEDDER, SPLADE, Words, facts_of, family
from tests.surfaces.surface_kit import MODEL, RecordingRunner, Server, serve
from tests.unit.core.lanes import make_lane

TEXTS = ["a group of fish", "a kind of bread"]
COLBERT = "colbert"


async def parse_task(fields: dict[str, Any], *, model: str = MODEL, prompts: dict[str, str] | None = None) -> Any:
    """Return the task that a body becomes."""
    runner = RecordingRunner()
    runner.facts = replace(runner.facts, prompts=prompts or {})
    answer = await serve(runner).call("POST", "/v1/embeddings", {"model": model, "input": ["ab"], **fields})
    assert answer.status == 200, answer.body
    return runner.tasks[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input_type": "passage", "truncate": "END"}, {"input_type": "document", "truncate": True}),
        ({"input_type": "query", "truncate": "NONE"}, {"input_type": "query", "truncate": False}),
        ({"input_type": None, "truncation": True, "output_dimension": 2}, {"truncate": True, "dimensions": 2}),
        ({"truncation": False, "output_dtype": None, "output_dimension": None}, {"truncate": False}),
        ({"task": "retrieval.query"}, {"input_type": "query", "prompt_name": None}),
        ({"task": "retrieval.passage"}, {"input_type": "document"}),
        ({"task": "text-matching"}, {"input_type": None, "prompt_name": "text-matching"}),
        ({"task": "separation"}, {"input_type": None, "prompt_name": None}),
        ({"task": "retrieval.query", "input_type": "document"}, {"input_type": "document"}),
        ({"normalized": False}, {"normalize": False}),
        ({"use_activation": False, "normalize": False}, {"normalize": False}),
        ({"late_chunking": False, "add_special_tokens": True}, {"normalize": True}),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate_prompt_tokens": 256}, {"truncate": True, "truncation_direction": "right"}),
        ({"truncate_prompt_tokens": 512, "truncate": False}, {"truncate": False}),
        ({"dimensions": 3, "output_dimension": 3}, {"dimensions": 3}),
        ({"dimensions": 0, "modality": "text"}, {"dimensions": None}),
        ({"dimensions": 3, "modality": "text"}, {"dimensions": 3}),
        ({"input": [{"text": "ab"}, "cd"]}, {"inputs": ["ab", "cd"]}),
    ],
)
async def test_fields_reach_the_task(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Other dialects' names for fields of the task."""
    task = await parse_task(fields, prompts={"text-matching": "match: "})
    assert {name: getattr(task, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/embeddings", {"input": "ab", "task": "text-matching"}, "text-matching"),
        ("/v2/embed", {"texts": ["ab"], "input_type": "clustering"}, "separation"),
        ("/v1/embeddings", {"input": "ab", "task": "cooking"}, None),
        ("/v2/embed", {"texts": ["ab"], "input_type": "classification"}, None),
    ],
)
async def test_tasks_of_a_model(path: str, fields: dict[str, Any], named: str | None) -> None:
    """A model with vectors for several tasks refuses others by name, with the list."""
    tasks = ("retrieval.query", "text-matching", "separation")
    runner = RecordingRunner()
    runner.facts = replace(runner.facts, prompts=dict.fromkeys(tasks, ""), embedding_tasks=tasks)
    answer = await serve(runner).call("POST", path, {"model": MODEL, **fields})
    if named is not None:
        assert (answer.status, runner.tasks[0].prompt_name) == (200, named)
        return
    assert (answer.status, runner.tasks) == (400, [])
    assert "it has: retrieval.query, text-matching, separation" in answer.body.decode()


async def test_suffixes_of_models() -> None:
    """MODEL-query and MODEL-passage are the model in that role, unless a model has that name itself."""
    assert (await parse_task({}, model=f"{MODEL}-query")).input_type == "query"
    assert (await parse_task({}, model="mini-passage")).input_type == "document"
    assert (await parse_task({"input_type": "document"}, model="mini-query")).input_type == "document"
    server = serve()
    server.gateway.registry.add(other := Model(name="mini-query"))
    other.mark_loaded(runner := RecordingRunner())
    assert (await server.call("POST", "/v1/embeddings", {"model": "mini-query", "input": "a"})).status == 200
    assert runner.tasks[0].input_type is None
    unknown = await server.call("POST", "/v1/embeddings", {"model": "nobody-query", "input": "a"})
    assert (unknown.status, "nobody-query" in unknown.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    ("precision", "code"), [("int8", "i1"), ("uint8", "u1"), ("binary", "i1"), ("ubinary", "u1"), ("float", "<f4")]
)
async def test_quantized_vectors(precision: str, code: str) -> None:
    """Voyage's and NVIDIA's field names, as numbers and as base64 of that type, which Voyage's client decodes."""
    async with family(EMBEDDER) as server:
        body = {"model": EMBEDDER, "input": TEXTS}
        plain = await server.call("POST", "/v1/embeddings", {**body, "embedding_type": precision})
        listed = await server.call("POST", "/v1/embeddings", {**body, "embedding_type": [precision]})
        packed = await server.call(
            "POST", "/v1/embeddings", {**body, "output_dtype": precision, "encoding_format": "base64"}
        )
    assert plain.json() == listed.json()
    for text, each, other in zip(TEXTS, plain.json()["data"], packed.json()["data"], strict=True):
        vector = compute_vector(tokenize_item(text), 4)
        vector /= np.linalg.norm(vector)
        expected = {
            "float": vector,
            "int8": np.rint(vector * 127),
            "uint8": np.rint(vector * 127) + 128,
            "ubinary": np.packbits(vector > 0),
            "binary": np.packbits(vector > 0).astype(int) - 128,
        }[precision]
        assert each["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
        assert np.frombuffer(base64.b64decode(other["embedding"]), code).tolist() == pytest.approx(each["embedding"])


async def test_voyage_client() -> None:
    """Its client's whole body, including nulls: float32 in base64, in order, with the total tokens."""
    body = {
        "input": TEXTS,
        "model": EMBEDDER,
        "input_type": None,
        "truncation": True,
        "output_dtype": None,
        "output_dimension": None,
        "encoding_format": "base64",
    }
    async with family(EMBEDDER) as server:
        reply = (await server.call("POST", "/v1/embeddings", body)).json()
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in reply["data"]]
    assert [len(each) for each in vectors] == [4, 4]
    assert reply["usage"]["total_tokens"] == sum(len(tokenize_item(each)) for each in TEXTS)


async def test_jina_base64() -> None:
    """base64 as an embedding type, unless another field selects the encoding."""
    server = serve()
    body = {"model": MODEL, "input": "ab", "embedding_type": "base64"}
    reply = (await server.call("POST", "/v1/embeddings", body)).json()["data"][0]["embedding"]
    plain = (await server.call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab"})).json()
    assert np.frombuffer(base64.b64decode(reply), "<f4").tolist() == plain["data"][0]["embedding"]
    bytes_too = await server.call("POST", "/v1/embeddings", body, headers={"accept": "application/octet-stream"})
    assert bytes_too.json()["data"][0]["embedding"] == reply


async def test_infinity_default_model() -> None:
    """Infinity's client sends a placeholder for the first model, and `dimensions` 0 for full length."""
    async with family(EMBEDDER) as server:
        unnamed = {"model": "default/not-specified", "input": TEXTS, "dimensions": 0, "modality": "text"}
        answer = await server.call("POST", "/embeddings", {**unnamed, "encoding_format": "float"})
        plain = await server.call("POST", "/embeddings", {"model": EMBEDDER, "input": TEXTS})
    assert answer.json() == plain.json()
    assert answer.json()["model"] == EMBEDDER


@pytest.mark.parametrize("form", ["float", "bytes_only"])
async def test_contradictory_encodings(form: str) -> None:
    """They are rejected: the server cannot know which one the caller reads."""
    body = {"model": MODEL, "input": "ab", "embedding_type": "base64", "encoding_format": form}
    answer = await serve().call("POST", "/v1/embeddings", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "encoding_format")
    assert "contradict each other" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("accept", "is_binary"),
    [
        ("application/octet-stream", True),
        ("application/octet-stream; q=0.5", True),
        ("Application/Octet-Stream;q=1.0, application/json;q=0.9", True),
        ("application/octet-stream;q=0, application/json", False),
        ("application/octet-stream;q=0.000", False),
        ("application/octet-stream;q=0.2, application/json;q=0.3", False),
        ("application/octet-stream;q=much", False),
        ("application/octet-stream2, */*", False),
        ("application/json", False),
    ],
)
async def test_accept_header(accept: str, is_binary: bool) -> None:
    """The answer is binary if `accept` names its type with a weight at least as high as JSON's."""
    answer = await serve().call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab"}, headers={"accept": accept})
    assert (answer.headers["content-type"] == "application/octet-stream") is is_binary


@pytest.mark.parametrize("fields", [{"truncate": "END", "truncation": True}, {"truncate": "NONE", "truncation": False}])
async def test_aliases_for_truncation(fields: dict[str, Any]) -> None:
    """A word and a flag that agree are accepted; if they differ, the request is rejected."""
    assert (await parse_task(fields)).truncate is fields["truncation"]
    other = {**fields, "truncation": not fields["truncation"]}
    answer = await serve().call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab", **other})
    assert (answer.status, "are aliases with different values" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("fields", "accept", "dtype"),
    [
        ({}, "application/octet-stream", "<f4"),
        ({"encoding_format": "bytes_only"}, "*/*", "<f4"),
        ({"encoding_format": "bytes_only", "embed_dtype": "float16"}, "*/*", "<f2"),
        ({"encoding_format": "bytes_only", "endianness": "big"}, "*/*", ">f4"),
    ],
)
async def test_bytes(fields: dict[str, Any], accept: str, dtype: str) -> None:
    """Only the numbers, vector after vector; headers give shape and type."""
    server = serve()
    texts = [f"text {at}" for at in range(200)]
    body = {"model": MODEL, "input": texts}
    answer = await server.call("POST", "/v1/embeddings", {**body, **fields}, headers={"accept": accept})
    plain = await server.call("POST", "/v1/embeddings", body)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (answer.headers["x-shoal-shape"], answer.headers["x-shoal-dtype"]) == ("200,4", dtype)
    expected = np.array([each["embedding"] for each in plain.json()["data"]])
    assert np.array_equal(np.frombuffer(answer.body, dtype).reshape(200, 4), expected)


async def test_binary_bytes() -> None:
    """One bit per dimension."""
    body = {"model": EMBEDDER, "input": TEXTS, "output_dtype": "ubinary"}
    async with family(EMBEDDER) as server:
        answer = await server.call("POST", "/v1/embeddings", body, headers={"accept": "application/octet-stream"})
    assert (answer.headers["x-shoal-shape"], answer.headers["x-shoal-dtype"], answer.body) == (
        "2,1",
        "uint8",
        b"\xf0\xf0",
    )


async def test_base64_of_other_floats() -> None:
    """vLLM's types and byte orders apply to base64, too."""
    fields = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    server = serve()
    reply = (await server.call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab", **fields})).json()
    plain = (await server.call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab"})).json()
    decoded = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), ">f2")
    assert decoded.tolist() == plain["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"late_chunking": True}, "late_chunking", "embed each chunk separately."),
        ({"add_special_tokens": False}, "add_special_tokens", "send token ids"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens", "own length (256)"),
        ({"dimensions": 2, "output_dimension": 3}, "dimensions", "are aliases with different values"),
        ({"normalize": True, "normalized": False}, "normalize", "are aliases with different values"),
        ({"output_dtype": "int8", "embedding_type": "uint8"}, "output_dtype", "are aliases with different values"),
        ({"output_dtype": "int8", "normalize": False}, "normalize", "normalized vectors"),
        ({"embedding_type": ["float", "int8"]}, "embedding_type", "POST /v2/embed accepts several"),
        ({"embedding_type": "float16"}, "embedding_type", "'embedding_type' is invalid"),
        ({"input": [{"image": "data:"}]}, "input", "accepts only text"),
        ({"input": ["a", {"title": "b"}]}, "input", "'input[1]' has no 'text'"),
        ({"input": [{"text": "a"}, 7]}, "input", "mixes"),
        ({"input": [{"text": ""}]}, "input", "'input[0]' is empty"),
        ({"embed_dtype": "bfloat16"}, "embed_dtype", "invalid enum value"),
    ],
)
async def test_refusals(fields: dict[str, Any], param: str, words: str) -> None:
    """OpenAI's nested error that names the field, whichever dialect defines it."""
    answer = await serve().call("POST", "/v1/embeddings", {"model": MODEL, "input": "ab", **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_many_objects() -> None:
    """2,048 texts in objects, in a body that is decoded in slices."""
    server = serve()
    texts = [f"text {at} " + "filler " * 6 for at in range(2048)]
    body = {"model": MODEL, "input": [{"text": each, "tags": [{}]} for each in texts]}
    assert (await server.call("POST", "/v1/embeddings", body)).status == 200
    assert server.runner.tasks[0].inputs == texts
    bad = await server.call("POST", "/v1/embeddings", {**body, "input": [*body["input"][:2000], {"text": 7}]})
    assert (bad.status, "'input[2000].text'" in bad.json()["error"]["message"]) == (400, True)


@asynccontextmanager
async def colbert() -> AsyncIterator[Server]:
    script = FakeScript(vectors="multi", dimension=4)
    registry = Registry()
    registry.add(model := Model(name=COLBERT))
    runner = LaneRunner(make_lane(script), facts_of(script), Words())
    model.mark_loaded(runner)
    gateway = Gateway(registry)
    any_runner: Any = runner
    try:
        yield Server(build_app(gateway, [each(Options()) for each in SURFACES], Options()), any_runner, gateway, model)
    finally:
        await runner.aclose()


async def test_late_interaction() -> None:
    """A list of vectors per input, like Infinity, even though OpenAI's client asks for base64 by default."""
    async with colbert() as server:
        body = {"model": COLBERT, "input": TEXTS}
        plain = (await server.call("POST", "/v1/embeddings", body)).json()
        packed = (await server.call("POST", "/v1/embeddings", {**body, "encoding_format": "base64"})).json()
        many = (await server.call("POST", "/v1/embeddings", {**body, "input": ["one two three"] * 2048})).json()
        refused = await server.call("POST", "/v1/embeddings", {**body, "output_dtype": "int8"})
        pooled = (await server.call("POST", "/pooling", {**body, "task": "token_embed"})).json()
    assert plain["data"] == packed["data"]
    for at, text in enumerate(TEXTS):
        words = np.stack([compute_vector([token], 4) for token in tokenize_item(text)])
        expected = words / np.linalg.norm(words, axis=1, keepdims=True)
        assert plain["data"][at]["index"] == at
        assert np.allclose(plain["data"][at]["embedding"], expected, atol=1e-6)
        assert pooled["data"][at]["data"] == plain["data"][at]["embedding"]
    assert [np.shape(each["embedding"]) for each in many["data"]] == [(3, 4)] * 2048
    assert (refused.status, "as JSON numbers" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "more", "name"),
    [
        ("/v1/embeddings", {"dimensions": 2}, "dimensions"),
        ("/v1/embeddings", {"output_dimension": 2}, "dimensions"),
        ("/v1/embeddings", {"normalize": False}, "normalize"),
        ("/pooling", {"dimensions": 2}, "dimensions"),
        ("/pooling", {"task": "token_embed", "dimensions": 2}, "dimensions"),
        ("/pooling", {"task": "token_embed", "use_activation": False}, "use_activation"),
    ],
)
async def test_late_interaction_rejects_unsupported_options(path: str, more: dict[str, Any], name: str) -> None:
    """Options that would have no effect are rejected by name."""
    async with colbert() as server:
        answer = await server.call("POST", path, {"model": COLBERT, "input": TEXTS, **more})
    assert (answer.status, answer.json()["error"]["param"]) == (400, name)


async def test_pooling_of_late_interaction() -> None:
    """The token vectors, also without a task: the model has no others."""
    async with colbert() as server:
        body = {"model": COLBERT, "input": TEXTS}
        plain = await server.call("POST", "/pooling", body)
        named = await server.call("POST", "/pooling", {**body, "task": "token_embed"})
    assert plain.status == 200
    assert plain.json()["data"] == named.json()["data"]


async def test_late_interaction_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in the answer are limited, whether or not their count is known beforehand."""
    monkeypatch.setattr(matrices, "MAX_NUMBERS", 40)
    async with colbert() as server:
        for texts in (["word " * 30] * 3, ["a " * 11]):
            answer = await server.call("POST", "/v1/embeddings", {"model": COLBERT, "input": texts})
            assert (answer.status, answer.json()["error"]["param"]) == (400, "input")
            assert "split the request" in answer.json()["error"]["message"]


async def test_a_sparse_model_names_its_route() -> None:
    """A model without dense vectors is rejected with the route that serves it."""
    async with family(SPLADE) as server:
        answer = await server.call("POST", "/v1/embeddings", {"model": SPLADE, "input": "a"})
    assert (answer.status, "POST /embed_sparse" in answer.json()["error"]["message"]) == (400, True)
