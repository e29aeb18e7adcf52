"""The KServe v2 REST API: tensors in JSON and in binary, generate, repository, and errors."""

from __future__ import annotations

import struct
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import orjson
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item, word_id
from shoal.core.protocols import ModelFacts
from shoal.errors import Overloaded
from shoal.surfaces.shared import matrices
from shoal.types import VectorKind
from tests.surfaces.family_kit import add_family
from tests.surfaces.life_kit import OTHER, living
from tests.surfaces.surface_kit import DIMENSION, MODEL, Answer, RecordingRunner, Server, raising, serve, vector
from tests.surfaces.talk_kit import FakeRunner, data_of, serve_chat

INFER = f"/v2/models/{MODEL}/infer"
JSON_LENGTH = "inference-header-content-length"


def texts(*values: str, name: str = "text") -> dict[str, Any]:
    return {"name": name, "shape": [len(values), 1], "datatype": "BYTES", "data": list(values)}


async def infer(server: Server, *inputs: dict[str, Any], path: str = INFER, **fields: Any) -> Answer:
    return await server.call("POST", path, {"inputs": inputs, **fields})


async def error_of(server: Server, *inputs: dict[str, Any], status: int = 400, **fields: Any) -> str:
    answer = await infer(server, *inputs, **fields)
    assert answer.status == status, answer.body
    assert set(answer.json()) == {"error"}
    return str(answer.json()["error"])


def pack_texts(*values: str) -> bytes:
    return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in values)


async def test_texts_in_json() -> None:
    """The vectors are flat, with their shape; other outputs come beside them unless some are named."""
    server = serve()
    answer = await infer(server, texts("fish", "a shoal"), id="mine")
    assert answer.status == 200
    assert answer.json() == {
        "model_name": MODEL,
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {
                "name": "embeddings",
                "datatype": "FP32",
                "shape": [2, DIMENSION],
                "data": [*vector("fish"), *vector("a shoal")],
            },
            {"name": "token_count", "datatype": "INT32", "shape": [2, 1], "data": [4, 7]},
        ],
    }
    assert answer.headers["x-shoal-batch-size"] == "7"
    answer = await infer(server, texts("fish"), outputs=[{"name": "token_count"}])
    assert [each["name"] for each in answer.json()["outputs"]] == ["token_count"]
    flat = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    assert (await infer(server, flat)).json()["outputs"][0]["shape"] == [2, DIMENSION]


@pytest.mark.parametrize("path", [INFER, f"/v2/models/{MODEL}/versions/1/infer", "/v2/models/mini/infer"])
async def test_names_and_versions(path: str) -> None:
    answer = await infer(serve(), texts("fish"), path=path)
    assert answer.status == 200
    assert answer.json()["model_name"] == MODEL


async def test_binary_tensors() -> None:
    """In the request and in the answer, beside tensors in JSON."""
    blob = pack_texts("fish", "a shoal")
    tensor = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
    for asked in (
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": each, "parameters": {"binary_data": True}} for each in ("embeddings", "token_count")]},
    ):
        head = orjson.dumps({"inputs": [tensor], **asked})
        headers = {JSON_LENGTH: str(len(head)), "content-type": "application/octet-stream"}
        answer = await serve().call("POST", INFER, body=head + blob, headers=headers)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "application/octet-stream"
        end = int(answer.headers[JSON_LENGTH])
        described = orjson.loads(answer.body[:end])
        assert [each["parameters"] for each in described["outputs"]] == [
            {"binary_data_size": 2 * DIMENSION * 4},
            {"binary_data_size": 8},
        ]
        assert all("data" not in each for each in described["outputs"])
        vectors = np.frombuffer(answer.body[end : end + 2 * DIMENSION * 4], "<f4")
        assert vectors.tolist() == [*vector("fish"), *vector("a shoal")]
        assert np.frombuffer(answer.body[end + 2 * DIMENSION * 4 :], "<i4").tolist() == [4, 7]
    answer = await infer(
        serve(),
        texts("fish"),
        outputs=[{"name": "embeddings", "parameters": {"binary_data": True}}, {"name": "token_count"}],
    )
    described = orjson.loads(answer.body[: int(answer.headers[JSON_LENGTH])])
    assert ["data" in each for each in described["outputs"]] == [False, True]


@pytest.mark.parametrize(
    ("length", "size", "message"),
    [
        ("x", 9, "is not a number"),
        ("0", 9, "but the body has"),
        ("99999", 9, "but the body has"),
        (None, 99, "but 9 bytes are left"),
        (None, 5, "4 bytes of the body belong to no input"),
        (None, "9", "must be an integer"),
        (None, -1, "binary_data_size of -1"),
        (None, True, "must be an integer"),
        (None, 9, ""),
    ],
)
async def test_broken_binary_bodies(length: str | None, size: Any, message: str) -> None:
    blob = pack_texts("a fox")
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    head = orjson.dumps({"inputs": [tensor]})
    headers = {JSON_LENGTH: length or str(len(head))}
    answer = await serve().call("POST", INFER, body=head + blob, headers=headers)
    assert answer.status == (400 if message else 200), answer.body
    assert message in str(answer.json().get("error", ""))


async def test_bytes_of_no_tensor() -> None:
    head = orjson.dumps({"inputs": [texts("a")]})
    answer = await serve().call("POST", INFER, body=head + b"more", headers={JSON_LENGTH: str(len(head))})
    assert answer.status == 400 and "4 bytes of the body belong to no input" in answer.json()["error"]


async def test_token_ids() -> None:
    """The mask leaves out padding."""
    server = serve()
    ids = {"name": "input_ids", "shape": [2, 3], "datatype": "INT64", "data": [[5, 6, 7], [8, 9, 0]]}
    mask = {"name": "attention_mask", "shape": [2, 3], "datatype": "INT64", "data": [1, 1, 1, 1, 1, 0]}
    assert (await infer(server, ids, mask)).status == 200
    assert server.runner.tasks[-1].inputs == [[5, 6, 7], [8, 9]]
    assert (await infer(server, {**ids, "datatype": "INT32"})).status == 200
    assert server.runner.tasks[-1].inputs == [[5, 6, 7], [8, 9, 0]]
    assert "row without tokens" in await error_of(server, ids, {**mask, "data": [1, 1, 1, 0, 0, 0]})
    assert "send that of 'input_ids'" in await error_of(server, ids, {**mask, "shape": [3, 2]})
    assert "belongs to 'input_ids'" in await error_of(server, texts("a", "b"), mask)
    assert "exactly one of the inputs" in await error_of(server, texts("a", "b"), ids)


async def test_parameters() -> None:
    """Those of NIM, with the deadline in microseconds and the priority as a traffic class."""
    server = serve()
    given = {"normalize": False, "dimensions": 2, "input_type": "passage", "truncate": "START", "timeout": 5_000_000}
    assert (await infer(server, texts("a"), parameters={**given, "priority": 2})).status == 200
    task, context = server.runner.tasks[-1], server.runner.contexts[-1]
    assert (task.normalize, task.dimensions, task.input_type) == (False, 2, "document")
    assert (task.truncate, task.truncation_direction) == (True, "left")
    assert context.traffic == "bulk" and context.remaining() <= 5
    assert (await infer(server, texts("a"), parameters={"priority": 1, "truncate": False})).status == 200
    task, context = server.runner.tasks[-1], server.runner.contexts[-1]
    assert (context.traffic, task.truncate) == ("interactive", False)
    assert (await infer(server, texts("a"))).status == 200
    context = server.runner.contexts[-1]
    assert context.traffic is None
    assert 25 < context.remaining() <= 30, "an embedding has not the time of a generation"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sequence_id": 3}, "'sequence_id' is not supported"),
        ({"normalize": "yes"}, "'normalize' must be true or false"),
        ({"dimensions": 0}, "'dimensions' must be an integer from 1"),
        ({"dimensions": True}, "'dimensions' must be an integer from 1"),
        ({"truncate": "MIDDLE"}, "'truncate' must be true, false, NONE, START or END"),
        ({"truncate": 3}, "'truncate' must be true, false or a string"),
        ({"input_type": "poem"}, "'input_type' must be one of query, passage, document"),
        ({"prompt_name": 3}, "'prompt_name' must be a string"),
        ({"timeout": -1}, "'timeout' must be an integer from 0"),
        ({"priority": 1.5}, "'priority' must be an integer from 0"),
    ],
)
async def test_wrong_parameters(parameters: dict[str, Any], message: str) -> None:
    assert message in await error_of(serve(), texts("a"), parameters=parameters)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (texts("a", name="txt"), "the model has no input 'txt'; it has text, input_ids, attention_mask"),
        ({**texts("a"), "datatype": "FP32", "data": [1.5]}, "'text' must have the datatype BYTES"),
        ({**texts("a"), "shape": [1, 1, 1]}, "send [rows, 1]"),
        ({**texts("a"), "shape": [2, 1]}, "has 2 elements, not 1"),
        ({**texts("a"), "shape": [2**62, 2**62]}, "send [rows, 1]"),
        ({**texts("a"), "shape": [2**62, 1]}, "rows; the limit is 2048"),
        ({**texts("a"), "shape": [1] * 9}, "`array` of length <= 8"),
        ({**texts("a"), "data": [["a"], ["b", "c"]], "shape": [3, 1]}, "not nested as the shape [3, 1] says"),
        ({**texts("a"), "data": [3]}, "must be strings"),
        ({**texts("a"), "data": None}, "must have 'data' or binary_data_size"),
        ({**texts("a"), "datatype": "BF16"}, "must have the datatype BYTES"),
        (
            {**texts("a"), "parameters": {"shared_memory_region": "x"}},
            "'shared_memory_region' of 'text' is not supported",
        ),
        ({"name": "input_ids", "shape": [1, 1], "datatype": "INT64", "data": [1.5]}, "elements that are not INT64"),
        ({"name": "input_ids", "shape": [1, 1], "datatype": "INT64", "data": [True]}, "elements that are not INT64"),
        ({"name": "input_ids", "shape": [1, 1], "datatype": "INT8", "data": [300]}, "does not fit into INT8"),
        ({"name": "input_ids", "shape": [1, 1], "datatype": "FP32", "data": [3]}, "must have the datatype INT64"),
        ({"name": "input_ids", "shape": [1], "datatype": "INT64", "data": [3]}, "send [rows, length]"),
    ],
)
async def test_wrong_tensors(tensor: dict[str, Any], message: str) -> None:
    assert message in await error_of(serve(), tensor)


async def test_other_refusals() -> None:
    server = serve(max_inputs=2)
    assert "the limit is 2" in await error_of(server, texts("a", "b", "c"))
    assert "two tensors of the same name" in await error_of(server, texts("a"), texts("b"))
    assert "no output 'x'" in await error_of(server, texts("a"), outputs=[{"name": "x"}])
    asked = [{"name": "embeddings", "parameters": {"shared_memory_region": "x"}}]
    assert "'shared_memory_region' of 'embeddings' is not" in await error_of(server, texts("a"), outputs=asked)
    assert "does not exist" in await error_of(server, texts("a"), path="/v2/models/nobody/infer", status=404)
    path = f"/v2/models/{MODEL}/versions/7/infer"
    assert "has no version '7'" in await error_of(server, texts("a"), path=path, status=404)
    answer = await infer(raising(Overloaded("full", retry_after=2.0)), texts("a"))
    assert (answer.status, answer.headers["retry-after"], answer.json()) == (429, "2", {"error": "full"})


async def test_metadata_and_config() -> None:
    """They name the tensors; the configuration says which are optional."""
    server = serve()
    answer = (await server.call("GET", f"/v2/models/{MODEL}")).json()
    assert answer == (await server.call("GET", f"/v2/models/{MODEL}/versions/1")).json()
    assert answer["inputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
    ]
    assert answer["outputs"][0] == {"name": "embeddings", "datatype": "FP32", "shape": [-1, DIMENSION]}
    assert (answer["name"], answer["versions"]) == (MODEL, ["1"])
    config = (await server.call("GET", f"/v2/models/{MODEL}/config")).json()
    assert (config["max_batch_size"], config["model_transaction_policy"]) == (2048, {"decoupled": False})
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
    assert config["output"][0] == {"name": "embeddings", "data_type": "TYPE_FP32", "dims": [DIMENSION]}
    server_facts = (await server.call("GET", "/v2")).json()
    assert server_facts["name"] == "shoal" and "binary_tensor_data" in server_facts["extensions"]


@pytest.mark.parametrize(
    ("vectors", "outputs", "asked"),
    [
        (("dense",), [], ("dense",)),
        (("dense", "tokens", "sparse", "multi"), [], ("dense",)),
        (("sparse",), [], ("sparse",)),
        (("multi", "tokens"), [], ("multi",)),
        (("tokens", "dense"), ["token_count"], ("dense",)),
        (("dense", "sparse"), ["sparse_lengths"], ("sparse",)),
        (("dense", "tokens", "multi"), ["multi_vectors", "embeddings"], ("dense", "multi")),
        (("dense", "tokens"), ["token_embeddings", "token_count"], ("tokens",)),
    ],
)
async def test_only_requested_vectors_are_computed(
    vectors: tuple[VectorKind, ...], outputs: list[str], asked: tuple[VectorKind, ...]
) -> None:
    """Without a list of outputs, the model's main kind."""
    runner = RecordingRunner(facts=ModelFacts(source="x", backend="local", tasks=("embed",), vectors=vectors))
    assert (await infer(serve(runner), texts("a"), outputs=[{"name": name} for name in outputs])).status == 200
    assert runner.tasks[-1].outputs == asked


async def test_vectors_of_different_lengths() -> None:
    """They are padded to a batch axis, in the metadata and in the response; the lengths are an output of their own."""
    server = serve()
    async with AsyncExitStack() as stack:
        add_family(server.gateway, stack)
        metadata = (await server.call("GET", "/v2/models/splade")).json()["outputs"]
        assert metadata == [
            {"name": "sparse_indices", "datatype": "INT32", "shape": [-1, -1]},
            {"name": "sparse_values", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "sparse_lengths", "datatype": "INT32", "shape": [-1, 1]},
            {"name": "token_count", "datatype": "INT32", "shape": [-1, 1]},
        ]
        answer = (await infer(server, texts("a a b", "c"), path="/v2/models/splade/infer")).json()["outputs"]
        assert {each["name"]: each["shape"] for each in answer} == {
            "sparse_indices": [2, 2],
            "sparse_values": [2, 2],
            "sparse_lengths": [2, 1],
            "token_count": [2, 1],
        }
        found = {each["name"]: each["data"] for each in answer}
        weights = {word_id("a"): 2.0, word_id("b"): 1.0}
        assert found["sparse_indices"] == [*sorted(weights), word_id("c"), -1]
        assert found["sparse_values"] == [*(weights[each] for each in sorted(weights)), 1.0, 0.0]
        assert found["sparse_lengths"] == [2, 1]
        config = (await server.call("GET", "/v2/models/embedder/config")).json()["output"]
        assert config[-2:] == [
            {"name": "token_embeddings", "data_type": "TYPE_FP32", "dims": [-1, -1]},
            {"name": "token_lengths", "data_type": "TYPE_INT32", "dims": [1]},
        ]
        wanted = [{"name": "token_embeddings"}, {"name": "token_lengths"}]
        answer = (await infer(server, texts("a b", "c"), path="/v2/models/embedder/infer", outputs=wanted)).json()
        rows = [compute_vector([word_id(word)], 4).tolist() for word in ("a", "b", "c")]
        assert answer["outputs"][0]["shape"] == [2, 2, 4]
        assert answer["outputs"][0]["data"] == [*rows[0], *rows[1], *rows[2], 0, 0, 0, 0]
        assert answer["outputs"][1]["data"] == [2, 1]
        generated = await server.call("POST", "/v2/models/splade/generate", {"text": "c"})
        assert generated.json()["sparse_indices"] == word_id("c")
        assert generated.json()["sparse_values"] == 1.0


async def test_padding_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long text among many short ones would make a large tensor of few numbers."""
    server = serve()
    async with AsyncExitStack() as stack:
        add_family(server.gateway, stack)
        monkeypatch.setattr(matrices, "MAX_NUMBERS", 400)
        path, outputs = "/v2/models/embedder/infer", [{"name": "token_embeddings"}]
        assert (await infer(server, texts(*["a"] * 20), path=path, outputs=outputs)).status == 200
        refused = await infer(server, texts("a b c d e f", *["a"] * 19), path=path, outputs=outputs)
        assert refused.status in (400, 413) and "split the request" in refused.json()["error"]
        before = await infer(server, texts("abcdefgh" * 101), path=path, outputs=outputs)
        assert before.status in (400, 413) and "split the request" in before.json()["error"]


@pytest.mark.parametrize("parameters", [{"dimensions": 2}, {"normalize": False}])
async def test_options_of_dense_vectors(parameters: dict[str, Any]) -> None:
    """They are refused where they would have no effect."""
    runner = RecordingRunner(
        facts=ModelFacts(source="x", backend="local", tasks=("embed",), vectors=("dense", "sparse"), dimension=4)
    )
    sparse = [{"name": "sparse_values"}]
    message = await error_of(serve(runner), texts("a"), outputs=sparse, parameters=parameters)
    assert f"'{next(iter(parameters))}' is of 'embeddings'" in message
    both = [*sparse, {"name": "embeddings"}]
    assert (await infer(serve(runner), texts("a"), outputs=both, parameters=parameters)).status == 200


def classes(name: str, count: Any, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": {"classification": count, **parameters}}]


async def test_classification() -> None:
    """The largest elements of each row as Triton writes them: with six decimals, their index and their label."""
    server = serve()
    async with AsyncExitStack() as stack:
        add_family(server.gateway, stack)
        path = "/v2/models/classifier/infer"
        for count, shape in ((2, [2, 2]), (9, [2, 3])):
            [answer] = (await infer(server, texts("a", "b c"), path=path, outputs=classes("scores", count))).json()[
                "outputs"
            ]
            assert (answer["datatype"], answer["shape"]) == ("BYTES", shape)
            expected = []
            for text in ("a", "b c"):
                scores = compute_scores(tokenize_item(text), 3, raw=False)
                best = sorted(range(3), key=lambda at: -scores[at])[:count]
                expected += [f"{scores[at]:f}:{at}:LABEL_{at}" for at in best]
            assert answer["data"] == expected
    [answer] = (await infer(server, texts("fish"), outputs=classes("embeddings", 1))).json()["outputs"]
    row = vector("fish")
    assert answer["data"] == [f"{max(row):f}:{row.index(max(row))}"]
    [answer] = (await infer(server, texts("fish"), outputs=classes("token_count", 1))).json()["outputs"]
    assert answer["data"] == ["4:0"]
    plain = await infer(server, texts("fish"), outputs=classes("token_count", 0))
    assert plain.json()["outputs"][0]["data"] == [4]
    answer = await infer(server, texts("fish"), outputs=classes("token_count", 1, binary_data=True))
    assert answer.body.endswith(pack_texts("4:0"))


@pytest.mark.parametrize("count", [-1, 1.5, "2", True])
async def test_wrong_classification(count: Any) -> None:
    message = await error_of(serve(), texts("a"), outputs=classes("embeddings", count))
    assert "'classification' of 'embeddings' must be an integer from 0" in message


async def test_classification_of_texts() -> None:
    """Texts have no order, as Triton says; this costs no inference."""
    runner = FakeRunner()
    body = {"inputs": [texts("a", name="text_input")], "outputs": classes("text_output", 1)}
    answer = await serve_chat(runner).call("POST", "/v2/models/talker/infer", body)
    assert answer.status == 400
    assert "class result not available" in answer.json()["error"] and "'BYTES'" in answer.json()["error"]


async def test_classification_of_a_language_model() -> None:
    """Its outputs have no batch axis."""
    body = {"inputs": [texts("a b", name="text_input")], "outputs": classes("num_output_tokens", 5)}
    answer = await serve_chat(FakeRunner()).call("POST", "/v2/models/talker/infer", body)
    [output] = answer.json()["outputs"]
    assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [1], ["2:0"])


async def test_health_and_statistics() -> None:
    server = serve()
    for path, field in (
        ("/v2/health/live", "live"),
        ("/v2/health/ready", "ready"),
        (f"/v2/models/{MODEL}/ready", "ready"),
    ):
        answer = await server.call("GET", path)
        assert (answer.status, answer.json()) == (200, {field: True})
    server.runner.able = False
    for path in ("/v2/health/ready", f"/v2/models/{MODEL}/ready"):
        answer = await server.call("GET", path)
        assert (answer.status, answer.json()) == (503, {"ready": False})
    assert (await server.call("GET", "/v2/models/nobody/ready")).status == 404
    for path in ("/v2/models/stats", f"/v2/models/{MODEL}/stats"):
        [stats] = (await server.call("GET", path)).json()["model_stats"]
        assert stats["name"] == MODEL and stats["inference_stats"]["success"] == {"count": 0, "ns": 0}


async def test_models_that_score() -> None:
    """A reranker reads pairs, a classifier texts; the classifier's labels are in its configuration."""
    server = serve()
    async with AsyncExitStack() as stack:
        add_family(server.gateway, stack)
        pair = (texts("fish", "fish", name="query"), texts("a shoal", "bread", name="document"))
        answer = await infer(server, *pair, path="/v2/models/reranker/infer")
        assert answer.json()["outputs"][0]["shape"] == [2, 1]
        raw = await infer(server, *pair, path="/v2/models/reranker/infer", parameters={"raw_scores": True})
        assert raw.json()["outputs"][0]["data"] != answer.json()["outputs"][0]["data"]
        answer = await infer(server, texts("a", "b"), path="/v2/models/classifier/infer")
        labels = (await server.call("GET", "/v2/models/classifier/config")).json()["parameters"]["labels"]
        assert answer.json()["outputs"][0]["shape"] == [2, len(orjson.loads(labels["string_value"]))]


async def generate(runner: FakeRunner, path: str = "generate", **body: Any) -> Answer:
    return await serve_chat(runner).call("POST", f"/v2/models/talker/{path}", body)


async def test_generate() -> None:
    """Tensors and parameters by name. As Triton's vLLM backend does, an answer begins with its prompt by default."""
    runner = FakeRunner()
    answer = await generate(runner, text_input="one two", parameters={"stream": False, "temperature": 0.5})
    assert answer.json() == {"model_name": "talker", "model_version": "1", "text_output": "one twoone two"}
    assert runner.task.sampling.temperature == 0.5 and runner.task.prompts == ["one two"]
    asked: dict[str, Any] = {
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    answer = await generate(
        runner, text_input="one two", id="x", sampling_parameters={"max_tokens": 9, "n": 2}, **asked
    )
    assert answer.json() == {
        "model_name": "talker",
        "model_version": "1",
        "id": "x",
        "text_output": ["one two", "one two"],
        "finish_reason": ["stop", "stop"],
        "num_input_tokens": 7,
        "num_output_tokens": 4,
    }
    assert runner.task.sampling.max_tokens == 9
    for guide in ({"json": {"type": "object"}}, '{"json": {"type": "object"}}'):
        for name in ("guided_decoding", "structured_outputs"):
            await generate(runner, text_input="a", sampling_parameters={name: guide})
            assert runner.task.sampling.guide is not None
            assert orjson.loads(runner.task.sampling.guide.value) == {"type": "object"}
    await generate(runner, text_input="a", sampling_parameters={"lora_name": "loud"})
    assert runner.task.adapter == "loud"


async def test_generate_stream() -> None:
    """Pieces as events, without a marker at the end; an error is the last event."""
    answer = await generate(FakeRunner(), "generate_stream", text_input="one two", return_finish_reason=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = data_of(answer.body)
    assert [each["text_output"] for each in events] == ["one", " two", ""]
    assert [each["finish_reason"] for each in events] == ["None", "None", "stop"]
    answer = await generate(FakeRunner(error=Overloaded("too much"), fail_after=1), "generate_stream", text_input="a b")
    assert data_of(answer.body)[-1] == {"error": "too much"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("generate", {"text_input": "a", "stream": True}, "this call has one response"),
        ("generate_stream", {"text_input": "a", "stream": False}, "does not stream this request"),
        ("generate", {"text": "a"}, "no input 'text'"),
        ("generate", {}, "'text_input' is missing"),
        ("generate", {"text_input": ["a", "b"]}, "has the shape [2]; send [1]"),
        ("generate", {"text_input": "a", "parameters": {"temperture": 1}}, "unknown field `temperture`"),
        ("generate", {"text_input": "a", "sampling_parameters": "{"}, "'sampling_parameters' is invalid: "),
        ("generate", {"text_input": "a", "parameters": []}, "'parameters' must be an object"),
        ("generate_stream", {"text_input": "a", "exclude_input_in_output": False}, "cannot be false in a stream"),
        ("generate_stream", {"text_input": "a", "parameters": {"n": 2}}, "leave out 'n'"),
        ("generate", {"text_input": "a", "stream": "yes"}, "elements that are not BOOL"),
    ],
)
async def test_wrong_generations(path: str, body: dict[str, Any], message: str) -> None:
    answer = await serve_chat().call("POST", f"/v2/models/talker/{path}", body)
    assert answer.status == 400
    assert message in answer.json()["error"]


async def test_any_model_answers_generate() -> None:
    answer = await serve().call("POST", f"/v2/models/{MODEL}/generate", {"text": "fish"})
    assert answer.json()["embeddings"] == vector("fish")
    assert answer.json()["token_count"] == 4
    answer = await serve().call("POST", f"/v2/models/{MODEL}/generate_stream", {"text": "fish"})
    assert answer.status == 400 and "does not stream" in answer.json()["error"]


async def test_the_repository() -> None:
    """The index lists what can be loaded, too; a load returns once the model is ready."""
    async with living() as life:
        server = life.server

        async def states(**body: Any) -> dict[str, str]:
            entries = (await server.call("POST", "/v2/repository/index", body)).json()
            return {each["name"]: each["state"] for each in entries}

        assert (await states())[MODEL] == "READY"
        assert (await server.call("POST", f"/v2/repository/models/{OTHER}/load", {})).status == 200
        assert (await states())[OTHER] == "READY"
        assert (await server.call("POST", f"/v2/repository/models/{OTHER}/unload", {})).status == 200
        assert OTHER not in await states(ready=True)
        config = {"parameters": {"config": "{}"}}
        answer = await server.call("POST", f"/v2/repository/models/{OTHER}/load", config)
        assert answer.status == 400 and "leave out 'config'" in answer.json()["error"]
        assert (await server.call("POST", "/v2/repository/models/nobody/unload", {})).status == 404
