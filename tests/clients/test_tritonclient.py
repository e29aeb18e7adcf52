"""NVIDIA's tritonclient: KServe v2 with Triton's extensions, over HTTP and gRPC, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf import json_format

from shoal.backends.fake.model import compute_scores, tokenize_item
from shoal.types import Image
from tests.clients.tritonclient_kit import (
    GRPC,
    HTTP,
    MADE,
    MODELS,
    TEXTS,
    TRANSPORTS,
    Answer,
    Client,
    RunningServer,
    assert_vectors,
    connect,
    serving,
    stream,
    streamed,
    to_dict,
    vector,
)
from tests.integration.llm_kit import metric, until

WORDS = [f"word{number}" for number in range(600)]
LONG = " ".join(WORDS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("kserve"), *MODELS) as started:
        yield started


@pytest.fixture(params=TRANSPORTS)
async def client(request: pytest.FixtureRequest, service: RunningServer) -> AsyncIterator[Client]:
    async with connect(request.param, service.address(request.param)) as made:
        yield made


async def test_health(client: Client) -> None:
    """Of the server, and of models: also an adapter's, none of an unknown version."""
    assert await client.call("is_server_live")
    assert await client.call("is_server_ready")
    assert await client.call("is_model_ready", "words")
    assert await client.call("is_model_ready", "words", "1")
    assert await client.call("is_model_ready", "words:loud")
    assert not await client.call("is_model_ready", "nobody")
    assert not await client.call("is_model_ready", "words", "2")


async def test_descriptions(client: Client) -> None:
    """The clients of gRPC return messages, those of HTTP the same as dictionaries."""
    server = to_dict(await client.call("get_server_metadata"))
    assert server["name"] == "shoal"
    assert {"binary_tensor_data", "generate", "model_repository", "statistics"} <= set(server["extensions"])
    metadata = {
        "name": "scorer",
        "versions": ["1"],
        "platform": "shoal",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("query", "document")],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1, 1]}],
    }
    reply = await client.call("get_model_metadata", "scorer")
    assert reply == (json_format.ParseDict(metadata, type(reply)()) if client.transport in GRPC else metadata)
    reply = to_dict(await client.call("get_model_config", "sorter"))
    config = reply["config"] if client.transport in GRPC else reply
    assert (config["name"], config["max_batch_size"]) == ("sorter", 2048)
    assert [(each["name"], each["data_type"]) for each in config["input"]] == [("text", "TYPE_STRING")]
    assert [(each["name"], [*map(int, each["dims"])]) for each in config["output"]] == [("scores", [3])]
    assert json.loads(config["parameters"]["labels"]["string_value"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        assert "nobody" in await client.refuse(404, method, "nobody")
        await client.refuse(404, method, "words", "2")


async def test_texts(client: Client) -> None:
    """Rows in order, in both shapes, more than a batch holds."""
    assert_vectors(await client.infer("words", client.texts(TEXTS)), TEXTS)
    assert_vectors(await client.infer("words", client.tensor("text", TEXTS)), TEXTS)
    many = [f"text number {at}" for at in range(300)]
    assert_vectors(await client.infer("words", client.texts(many)), many)
    assert_vectors(await client.infer("words", client.texts(["Ünïcödé 魚"]), model_version="1"), ["Ünïcödé 魚"])


async def test_token_ids(client: Client) -> None:
    """Without a mask, with padding on either side, and with narrow integers."""
    rows: list[list[int]] = [[5, 6, 7], [8, 9, 10]]
    ids, mask = client.tensor("input_ids", rows, "INT64"), [[1, 1, 0], [0, 0, 1]]
    assert_vectors(await client.infer("words", ids), rows)
    masked = await client.infer("words", ids, client.tensor("attention_mask", mask, "INT64"))
    assert_vectors(masked, [[5, 6], [10]])
    assert_vectors(await client.infer("words", client.tensor("input_ids", rows, "INT32")), rows)


async def test_outputs_and_id(client: Client) -> None:
    """Only the requested outputs; the request's id comes back."""
    outputs = [client.output("token_count")]
    result = await client.infer("words", client.texts(TEXTS), outputs=outputs, request_id="mine-1")
    assert result.as_numpy("embeddings") is None
    assert result.as_numpy("token_count").tolist() == [[4], [1], [5]]
    reply = to_dict(result.get_response())
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("mine-1", "words", "1")
    unknown = [client.output("logits")]
    assert "'logits'" in await client.refuse_infer(400, "words", client.texts(["a"]), outputs=unknown)


async def test_embedding_parameters(client: Client) -> None:
    async def embed(text: str, **parameters: Any) -> Any:
        result = await client.infer("words", client.texts([text]), parameters=parameters)
        return result.as_numpy("embeddings")[0]

    assert np.array_equal(await embed("a b", normalize=False), vector("a b", normalize=False))
    assert np.allclose(await embed("a b", dimensions=8, input_type="query"), vector("a b", 8), atol=1e-6)
    for truncate in (True, "END"):
        assert np.allclose(await embed(LONG, truncate=truncate), vector(" ".join(WORDS[:512])), atol=1e-6)
    assert np.allclose(await embed(LONG, truncate="START"), vector(" ".join(WORDS[-512:])), atol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "text", "message"),
    [
        ({"normalize": "yes"}, "a", "'normalize'"),
        ({"dimensions": 0}, "a", "'dimensions'"),
        ({"dimensions": 33}, "a", "dimensions"),
        ({"truncate": "MIDDLE"}, "a", "'truncate'"),
        ({"truncate": "NONE"}, LONG, "600 tokens"),
        ({"truncate": False}, LONG, "600 tokens"),
        ({"input_type": "sentence"}, "a", "'input_type'"),
        ({"prompt_name": 1}, "a", "'prompt_name'"),
        ({"bogus": 1.5}, "a", "'bogus'"),
    ],
)
async def test_wrong_parameters(client: Client, parameters: Mapping[str, Any], text: str, message: str) -> None:
    assert message in await client.refuse_infer(400, "words", client.texts([text]), parameters=parameters)


async def test_priority_and_timeout(client: Client, service: RunningServer) -> None:
    """Priority 1 is interactive, above is bulk; the timeout is in microseconds. Sequences are refused."""
    for priority, name in ((1, "interactive"), (2, "bulk")):
        labels = {"model": "words", "task": "embed", "class": name}
        before = metric(service.server, "shoal_requests_received_total", **labels)
        text = f"{client.transport} {name}"
        result = await client.infer("words", client.texts([text]), priority=priority, timeout=30_000_000)
        assert_vectors(result, [text])
        assert metric(service.server, "shoal_requests_received_total", **labels) == before + 1
    await client.refuse_infer(504, "slow", client.texts([client.transport]), timeout=100_000)
    until(lambda: service.in_flight() == 0)
    assert "'sequence_" in await client.refuse_infer(400, "words", client.texts(["a"]), sequence_id=7)


async def test_scores(client: Client) -> None:
    """Of a reranker, as probabilities and raw, and of a classifier."""
    inputs = [client.texts(["a shoal"] * 3, "query"), client.texts(TEXTS, "document")]
    for raw in (False, True):
        expected = [compute_scores(tokenize_item(("a shoal", text)), 1, raw=raw) for text in TEXTS]
        result = await client.infer("scorer", *inputs, parameters={"raw_scores": raw})
        assert np.allclose(result.as_numpy("scores"), expected, atol=1e-6)
    expected = [compute_scores(tokenize_item(text), 3, raw=False) for text in TEXTS]
    result = await client.infer("sorter", client.texts(TEXTS))
    assert np.allclose(result.as_numpy("scores"), expected, atol=1e-6)


async def test_images(client: Client) -> None:
    """Any bytes, which are not UTF-8."""
    images = [b"\xff\xd8\x00first", bytes(range(256)) * 40]
    assert_vectors(await client.infer("words", client.texts(images, "image")), [Image(each) for each in images])


async def test_generation(client: Client) -> None:
    """The whole answer, behind the prompt unless the request excludes it."""
    exclude = client.tensor("exclude_input_in_output", [True], "BOOL")
    for more, prefix in (([], b"a b c"), ([exclude], b"")):
        result = await client.infer("words", *client.prompt("a b c", max_tokens=2), *more)
        assert result.as_numpy("text_output").tolist() == [prefix + b"a b"]
        assert result.as_numpy("finish_reason").tolist() == [b"length"]
        assert result.as_numpy("num_input_tokens").tolist() == [3]
        assert result.as_numpy("num_output_tokens").tolist() == [2]
    result = await client.infer("words", *client.prompt("a b", n=2), exclude)
    assert result.as_numpy("text_output").tolist() == [b"a b"] * 2
    assert "stream" in await client.refuse_infer(400, "words", *client.prompt("a b", stream=True))
    assert "sampling_parameters" in await client.refuse_infer(400, "words", *client.prompt("a", temperature="hot"))


async def test_wrong_inputs(client: Client) -> None:
    async def refuse(*inputs: Any, model: str = "words") -> str:
        return await client.refuse_infer(400, model, *inputs)

    text = client.texts(["a"])
    assert "nobody" in await client.refuse_infer(404, "nobody", text)
    assert "version" in await client.refuse_infer(404, "words", text, model_version="2")
    assert "'txt'" in await refuse(client.texts(["a"], "txt"))
    assert "exactly one" in await refuse(text, client.texts([b"x"], "image"))
    assert "same name" in await refuse(text, text)
    assert "BYTES" in await refuse(client.tensor("text", [[1]], "INT64"))
    assert "INT64" in await refuse(client.tensor("input_ids", [[1.0]], "FP32"))
    assert "[1, 2]" in await refuse(client.tensor("text", [["a", "b"]]))
    assert "[3]" in await refuse(client.tensor("input_ids", [1, 2, 3], "INT64"))
    mask = client.tensor("attention_mask", [[1]], "INT64")
    assert "'attention_mask'" in await refuse(client.tensor("input_ids", [[1, 2]], "INT64"), mask)
    assert "no inputs" in await refuse(client.tensor("text", np.empty((0, 1), object)))
    assert "UTF-8" in await refuse(client.texts([b"\xff"]))
    assert "2048" in await refuse(client.texts(["a"] * 2049))
    await refuse(client.texts(["a", "b"], "query"), client.texts(TEXTS, "document"), model="scorer")
    assert "'document'" in await refuse(client.texts(["a"], "query"), model="scorer")
    assert_vectors(await client.infer("words", client.texts(TEXTS)), TEXTS)


async def test_a_message_that_is_too_large(client: Client) -> None:
    """More than max_body_bytes; the client stays usable."""
    await client.refuse_infer(413, "words", client.texts(["a" * (17 * 2**20)]))
    assert_vectors(await client.infer("words", client.texts(TEXTS)), TEXTS)


async def test_statistics(client: Client) -> None:
    async def count() -> tuple[int, int]:
        (found,) = to_dict(await client.call("get_inference_statistics", "sorter"))["model_stats"]
        assert (found["name"], found.get("version")) == ("sorter", "1")
        return int(found.get("inference_count", 0)), int(found["inference_stats"]["success"].get("count", 0))

    before = await count()
    await client.infer("sorter", client.texts([f"{client.transport} {text}" for text in TEXTS]))
    after = await count()
    assert (after[0] - before[0], after[1] - before[1]) == (3, 1)
    every = to_dict(await client.call("get_inference_statistics"))["model_stats"]
    assert {each["name"] for each in every} == {"words", "scorer", "sorter", "slow"}


async def test_repository_index(client: Client) -> None:
    assert await client.states() == dict.fromkeys(("words", "scorer", "sorter", "slow"), "READY")


@pytest.mark.parametrize("transport", HTTP)
@pytest.mark.parametrize(("first", "second"), [(True, True), (False, False), (True, False), (False, True)])
async def test_binary_data(service: RunningServer, transport: str, first: bool, second: bool) -> None:
    """Inputs and outputs, each in JSON or binary."""
    async with connect(transport, service.address(transport)) as client:
        ids = client.tensor("input_ids", [[5, 6], [7, 8]], "INT64", binary=first)
        mask = client.tensor("attention_mask", [[1, 1], [1, 0]], "INT64", binary=second)
        forms = {"embeddings": second, "token_count": first}
        outputs = [client.output(name, binary_data=binary) for name, binary in forms.items()]
        result = await client.infer("words", ids, mask, outputs=outputs)
        assert_vectors(result, [[5, 6], [7]])
        assert {each["name"]: "data" not in each for each in result.get_response()["outputs"]} == forms
        assert_vectors(await client.infer("words", client.texts(TEXTS, binary=first), outputs=outputs), TEXTS)


async def test_async_infer_over_http(service: RunningServer) -> None:
    """Several requests at once from the blocking client."""
    with tritonclient.http.InferenceServerClient(service.address("http"), concurrency=8) as raw:
        client, texts = Client("http", raw), [f"greenlet {at}" for at in range(40)]
        started = [raw.async_infer("words", [client.texts([text])], request_id=text) for text in texts]
        for text, each in zip(texts, started, strict=True):
            result = each.get_result()
            assert_vectors(result, [text])
            assert result.get_response()["id"] == text


def test_generate(service: RunningServer) -> None:
    """Triton's generate extension, with any HTTP client."""
    path, body = "/v2/models/words", {"id": "g1", "text_input": "a b c", "return_finish_reason": True}
    expected = {"model_name": "words", "model_version": "1", "id": "g1"}
    parameters = {"max_tokens": 2, "exclude_input_in_output": True}
    status, _, reply = service.server.request("POST", f"{path}/generate", body | {"parameters": parameters})
    assert (status, json.loads(reply)) == (200, expected | {"text_output": "a b", "finish_reason": "length"})
    status, headers, reply = service.server.request("POST", f"{path}/generate_stream", body)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [json.loads(each.removeprefix("data: ")) for each in reply.decode().split("\n\n") if each]
    assert [each["text_output"] for each in events if each["text_output"]] == ["a", " b", " c"]
    assert [each["finish_reason"] for each in events] == ["None"] * (len(events) - 1) + ["stop"]
    assert all(each.items() >= expected.items() for each in events)
    status, _, reply = service.server.request("POST", f"{path}/generate", {"text_in": "a"})
    assert status == 400
    assert "'text_in'" in json.loads(reply)["error"]


@pytest.mark.parametrize("transport", GRPC)
async def test_streamed_pieces(service: RunningServer, transport: str) -> None:
    """Several answers at once on one stream. The last response of each is marked; it is empty if the request says so,
    for which only the blocking client has an option."""
    prompts = {f"s{at}": f"prompt {at} has five words" for at in range(8)}
    with_empty = {"s4", "s5", "s6", "s7"} if transport == "grpc" else set()
    requests = [
        streamed("slow", MADE.prompt(text, stream=True), id, enable_empty_final_response=id in with_empty)
        for id, text in prompts.items()
    ]
    answers = await stream(service, transport, requests)
    for id, text in prompts.items():
        own = [each for each in answers if each.id == id]
        assert [each.final for each in own] == [False] * (len(own) - 1) + [True]
        assert [each.outputs == 0 for each in own] == [False] * (len(own) - 1) + [id in with_empty]
        full = [each for each in own if each.outputs]
        words = [each.text for each in full if each.text]
        assert words == [f" {word}" if at else word for at, word in enumerate(text.split())]
        assert [each.result.as_numpy("finish_reason")[0] for each in full] == [b"None"] * (len(full) - 1) + [b"stop"]
        assert full[-1].result.as_numpy("num_input_tokens").tolist() == [5]
        assert full[-1].result.as_numpy("num_output_tokens").tolist() == [5]
    assert {each.id for each in answers[:16]} == set(prompts), "one after the other"


@pytest.mark.parametrize("transport", GRPC)
async def test_order_on_a_stream(service: RunningServer, transport: str) -> None:
    """Single responses keep the order of their requests, also behind a slow one and an error; more than run at once."""
    texts = [f"streamed {at}" for at in range(600)]
    requests = [
        streamed("slow", [MADE.texts([f"slow {transport}"])], "slow"),
        streamed("words", MADE.prompt("a b", stream=True), "talk"),
        streamed("words", [MADE.texts(["a"], "txt")], "bad"),
        *(streamed("words", [MADE.texts([text])], text) for text in texts),
    ]
    answers = await stream(service, transport, requests)
    assert answers[0].id == "talk", "a streamed answer waits for no other"
    assert "".join(each.text for each in answers if each.id == "talk") == "a b"
    rest = [each for each in answers if each.id != "talk"]
    assert "'txt'" in rest.pop(1).error
    assert [each.id for each in rest] == ["slow", *texts]
    for text, each in zip([f"slow {transport}", *texts], rest, strict=True):
        assert each.final
        assert_vectors(each.result, [text])


@pytest.mark.parametrize("transport", GRPC)
async def test_single_responses_are_final(service: RunningServer, transport: str) -> None:
    """A model that is not decoupled sends no empty response."""
    inputs = [MADE.texts(["a"], "query"), MADE.texts(["b"], "document")]
    answers = await stream(service, transport, [streamed("scorer", inputs, "r1", enable_empty_final_response=True)])
    assert [(each.id, each.outputs, each.final) for each in answers] == [("r1", 1, True)]


def test_cancellation(service: RunningServer) -> None:
    """Of a stream, by its timeout, and of a call: it ends their requests, and the server stays usable."""
    answers: Queue[Answer] = Queue()
    with tritonclient.grpc.InferenceServerClient(service.grpc) as raw:
        for timeout in (None, 0.3):
            raw.start_stream(lambda result, error: answers.put(Answer.read(result, error)), stream_timeout=timeout)
            for id in ("c1", "c2"):
                raw.async_stream_infer("slow", MADE.prompt("word " * 500, stream=True), request_id=id)
            while answers.get(timeout=30).text != " word":
                pass
            if timeout is None:
                assert service.in_flight() == 2
                raw.stop_stream(cancel_requests=True)
            until(lambda: service.in_flight() == 0)
            raw.stop_stream(cancel_requests=True)
        future = raw.async_infer("slow", [MADE.texts(["cancelled"])], lambda result, error: None)
        until(lambda: service.in_flight() == 1)
        future.cancel()
        until(lambda: service.in_flight() == 0)
        assert_vectors(raw.infer("words", [MADE.texts(TEXTS)], compression_algorithm="gzip"), TEXTS)


def test_clients_that_leave_at_any_time(service: RunningServer) -> None:
    """A response that nobody reads is no error of the server. Half of the streams end by their timeout."""
    before = len(service.server.log.read_text())
    with tritonclient.grpc.InferenceServerClient(service.grpc) as raw:
        for count in range(16):
            answers: Queue[Any] = Queue()
            timeout = 0.3 if count % 2 else None
            raw.start_stream(lambda result, error, answers=answers: answers.put(error), stream_timeout=timeout)
            for _ in range(8):
                raw.async_stream_infer("slow", MADE.prompt("word " * 500, stream=True))
            if timeout:
                while answers.get(timeout=30) is None:
                    pass
            for _ in range(0 if timeout else count * 5):
                assert answers.get(timeout=30) is None
            raw.stop_stream(cancel_requests=True)
        until(lambda: service.in_flight() == 0)
        assert_vectors(raw.infer("words", [MADE.texts(TEXTS)]), TEXTS)
    log = service.server.log.read_text()[before:]
    assert "Traceback" not in log, log[log.index("Traceback") - 300 :][:3000]


async def test_cancellation_of_an_asynchronous_stream(service: RunningServer) -> None:
    """By its iterator, and by closing the client."""

    async def send() -> AsyncIterator[dict[str, Any]]:
        yield streamed("slow", MADE.prompt("word " * 500, stream=True), "c3")
        await asyncio.sleep(60)

    for cancels in (True, False):
        async with connect("grpc.aio", service.grpc) as client:
            answers = client.raw.stream_infer(send())
            assert Answer.read(*await anext(answers)).text == "word"
            assert service.in_flight() == 1
            if cancels:
                assert answers.cancel()
                until(lambda: service.in_flight() == 0)
                assert_vectors(await client.infer("words", client.texts(TEXTS)), TEXTS)
        until(lambda: service.in_flight() == 0)


def test_many_threads(service: RunningServer) -> None:
    """64 threads that share a client."""

    def ask(raw: Any, thread: int) -> None:
        for at in range(20):
            text = f"thread {thread} text {at}"
            result = raw.infer("words", [MADE.texts([text])], request_id=text)
            assert_vectors(result, [text])
            assert result.get_response().id == text

    with tritonclient.grpc.InferenceServerClient(service.grpc) as raw, ThreadPoolExecutor(64) as pool:
        for each in [pool.submit(ask, raw, thread) for thread in range(64)]:
            each.result(timeout=120)


@pytest.mark.parametrize("transport", ["grpc.aio", "http.aio"])
async def test_many_tasks(service: RunningServer, transport: str) -> None:
    async with connect(transport, service.address(transport)) as client:

        async def ask(task: int) -> None:
            for at in range(20):
                text = f"{transport} task {task} text {at}"
                assert_vectors(await client.infer("words", client.texts([text])), [text])

        await asyncio.gather(*map(ask, range(64)))


@pytest.mark.parametrize("transport", GRPC)
async def test_a_socket(service: RunningServer, transport: str) -> None:
    async with connect(transport, service.socket) as client:
        assert await client.call("is_server_ready")
        assert_vectors(await client.infer("words", client.texts(TEXTS)), TEXTS)


def test_the_example_of_the_docs(service: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/kserve.md, but for the address, the model and its dimension."""
    page = (Path(__file__).parents[2] / "docs" / "kserve.md").read_text()
    code = page.split("```python\n")[1].partition("```")[0]
    assert "localhost:8001" in code and "sentence-transformers/all-MiniLM-L6-v2" in code
    code = code.replace("localhost:8001", service.address("grpc"))
    exec(code.replace("sentence-transformers/all-MiniLM-L6-v2", "words"), {})
    assert capsys.readouterr().out == "(2, 32)\n"
