"""NVIDIA's tritonclient: KServe v2 with Triton's extensions, over HTTP and gRPC, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as blocking_grpc
import tritonclient.grpc.aio as async_grpc
import tritonclient.http as blocking_http
import tritonclient.http.aio as async_http
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.types import Image, Item
from tests.integration.llm_kit import metric, running, until
from tests.integration.server_kit import Server

TRANSPORTS = {"grpc": blocking_grpc, "grpc.aio": async_grpc, "http": blocking_http, "http.aio": async_http}
GRPC, HTTP = ["grpc", "grpc.aio"], ["http", "http.aio"]
CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    504: "DEADLINE_EXCEEDED",
}
"""Statuses of HTTP to the codes of gRPC."""

MODELS = (
    "words=fake:images=1",
    "scorer=fake:labels=1",
    "sorter=fake:labels=3",
    "slow=fake:delay_ms=500:token_ms=20",
)
TEXTS = ["a group of fish", "bread", "water that is not deep"]
LONG = [f"word{number}" for number in range(600)]
DTYPES = {"BYTES": np.object_, "INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}
LISTENING = re.compile(r"listening for gRPC on \S+ port (\d+)")


@dataclass(frozen=True)
class Service:
    """A server with the addresses of its gRPC port and its gRPC socket."""

    server: Server
    grpc: str
    socket: str

    def address(self, transport: str) -> str:
        return self.grpc if transport in GRPC else f"127.0.0.1:{self.server.port}"

    def in_flight(self) -> float:
        return metric(self.server, "shoal_requests_in_flight")


@dataclass(frozen=True)
class Client:
    """One of the four clients behind the same methods."""

    transport: str
    api: Any
    raw: Any

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        made = getattr(self.raw, method)(*args, **options)
        return await made if inspect.isawaitable(made) else made

    async def infer(self, model: str, inputs: Sequence[Any], **options: Any) -> Any:
        return await self.call("infer", model, inputs, **options)

    async def refuse(self, code: int, method: str, *args: Any, **options: Any) -> str:
        """Return the message of a call that must fail with this status of HTTP, or its code of gRPC."""
        with pytest.raises(InferenceServerException) as caught:
            await self.call(method, *args, **options)
        expected = f"StatusCode.{CODES[code]}" if self.transport in GRPC else str(code)
        assert caught.value.status() == expected, caught.value
        return str(caught.value.message())

    def tensor(self, name: str, values: Any, datatype: str = "BYTES", *, binary: bool = True) -> Any:
        array = np.array(values, dtype=DTYPES[datatype])
        made = self.api.InferInput(name, list(array.shape), datatype)
        return made.set_data_from_numpy(array, **({} if self.transport in GRPC else {"binary_data": binary}))

    def texts(self, texts: Sequence[str | bytes], name: str = "text", *, binary: bool = True) -> Any:
        return self.tensor(name, [[each] for each in texts], binary=binary)

    def prompt(self, text: str, *, stream: bool | None = None, **sampling: Any) -> list[Any]:
        """Return the inputs of a request for a language model, which asks for all outputs."""
        flags = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
        inputs = [self.tensor("text_input", [text]), self.tensor("sampling_parameters", [json.dumps(sampling)])]
        inputs += [self.tensor(each, [True], "BOOL") for each in flags]
        return inputs if stream is None else [*inputs, self.tensor("stream", [stream], "BOOL")]


@contextmanager
def serving(folder: Path, *models: str, flags: tuple[str, ...] = ()) -> Iterator[Service]:
    socket = folder / "grpc.sock"
    with running(folder, *models, flags=("--grpc-port", "0", "--grpc-socket", str(socket), *flags)) as server:
        match = LISTENING.search(server.log.read_text())
        assert match
        yield Service(server, f"127.0.0.1:{match[1]}", f"unix:{socket}")


@asynccontextmanager
async def connect(transport: str, address: str) -> AsyncIterator[Client]:
    api = TRANSPORTS[transport]
    raw = api.InferenceServerClient(address)
    async with raw if hasattr(raw, "__aenter__") else nullcontext():
        yield Client(transport, api, raw)
    if not hasattr(raw, "__aenter__"):
        raw.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("kserve"), *MODELS) as started:
        yield started


@pytest.fixture(params=TRANSPORTS)
async def client(request: pytest.FixtureRequest, service: Service) -> AsyncIterator[Client]:
    async with connect(request.param, service.address(request.param)) as made:
        yield made


def vector(item: Item, dimensions: int = 32, *, normalize: bool = True) -> Any:
    cut = compute_vector(tokenize_item(item), 32)[:dimensions]
    return cut / np.linalg.norm(cut) if normalize else cut


def assert_vectors(result: Any, items: Sequence[Item]) -> None:
    found = result.as_numpy("embeddings")
    assert found.dtype == np.float32
    assert np.allclose(found, [vector(item) for item in items], atol=1e-6)
    assert result.as_numpy("token_count").tolist() == [[len(tokenize_item(item))] for item in items]


def to_dict(reply: Any) -> Any:
    return reply if isinstance(reply, dict | list) else json_format.MessageToDict(reply, preserving_proto_field_name=True)


async def test_health(client: Client) -> None:
    assert await client.call("is_server_live")
    assert await client.call("is_server_ready")
    assert await client.call("is_model_ready", "words")
    assert await client.call("is_model_ready", "words", "1")
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
    reply = await client.call("get_model_config", "sorter")
    config = reply.config if client.transport in GRPC else reply
    described = to_dict(config)
    assert (described["name"], described["max_batch_size"]) == ("sorter", 2048)
    assert [(each["name"], each["data_type"]) for each in described["input"]] == [("text", "TYPE_STRING")]
    assert [(each["name"], [*map(int, each["dims"])]) for each in described["output"]] == [("scores", [3])]
    assert json.loads(described["parameters"]["labels"]["string_value"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        assert "nobody" in await client.refuse(404, method, "nobody")


async def test_texts(client: Client) -> None:
    """Rows in order, in both shapes, more than a batch holds."""
    assert_vectors(await client.infer("words", [client.texts(TEXTS)]), TEXTS)
    assert_vectors(await client.infer("words", [client.tensor("text", TEXTS)]), TEXTS)
    many = [f"text number {at}" for at in range(300)]
    assert_vectors(await client.infer("words", [client.texts(many)]), many)
    assert_vectors(await client.infer("words", [client.texts(["Ünïcödé 魚"])], model_version="1"), ["Ünïcödé 魚"])


async def test_token_ids(client: Client) -> None:
    """Without a mask, with padding on either side, and with narrow integers."""
    rows: list[list[int]] = [[5, 6, 7], [8, 9, 10]]
    assert_vectors(await client.infer("words", [client.tensor("input_ids", rows, "INT64")]), rows)
    mask = client.tensor("attention_mask", [[1, 1, 0], [0, 0, 1]], "INT64")
    assert_vectors(await client.infer("words", [client.tensor("input_ids", rows, "INT64"), mask]), [[5, 6], [10]])
    assert_vectors(await client.infer("words", [client.tensor("input_ids", rows, "INT32")]), rows)


async def test_outputs_and_id(client: Client) -> None:
    outputs = [client.api.InferRequestedOutput("token_count")]
    result = await client.infer("words", [client.texts(TEXTS)], outputs=outputs, request_id="mine-1")
    assert result.as_numpy("embeddings") is None
    assert result.as_numpy("token_count").tolist() == [[4], [1], [5]]
    reply = to_dict(result.get_response())
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("mine-1", "words", "1")
    unknown = [client.api.InferRequestedOutput("logits")]
    assert "'logits'" in await client.refuse(400, "infer", "words", [client.texts(TEXTS)], outputs=unknown)


async def test_embedding_parameters(client: Client) -> None:
    async def embed(text: str, **parameters: Any) -> Any:
        result = await client.infer("words", [client.texts([text])], parameters=parameters)
        return result.as_numpy("embeddings")[0]

    assert np.array_equal(await embed("a b", normalize=False), vector("a b", normalize=False))
    assert np.allclose(await embed("a b", dimensions=8, input_type="query"), vector("a b", 8), atol=1e-6)
    for truncate in (True, "END"):
        assert np.allclose(await embed(" ".join(LONG), truncate=truncate), vector(" ".join(LONG[:512])), atol=1e-6)
    assert np.allclose(await embed(" ".join(LONG), truncate="START"), vector(" ".join(LONG[-512:])), atol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"normalize": "yes"}, "a"),
        ({"dimensions": 0}, "a"),
        ({"dimensions": 33}, "a"),
        ({"truncate": "MIDDLE"}, "a"),
        ({"truncate": "NONE"}, " ".join(LONG)),
        ({"truncate": False}, " ".join(LONG)),
        ({"input_type": "sentence"}, "a"),
        ({"prompt_name": 1}, "a"),
        ({"bogus": 1}, "a"),
    ],
)
async def test_wrong_parameters(client: Client, parameters: Mapping[str, Any], text: str) -> None:
    message = await client.refuse(400, "infer", "words", [client.texts([text])], parameters=parameters)
    assert next(iter(parameters)) in message or "600 tokens" in message


async def test_priority_and_timeout(client: Client, service: Service) -> None:
    """1 is interactive, above is bulk; the timeout is in microseconds."""
    for priority, name in ((1, "interactive"), (2, "bulk")):
        labels = {"model": "words", "task": "embed", "class": name}
        before = metric(service.server, "shoal_requests_received_total", **labels)
        text = f"{client.transport} {name}"
        result = await client.infer("words", [client.texts([text])], priority=priority, timeout=30_000_000)
        assert_vectors(result, [text])
        assert metric(service.server, "shoal_requests_received_total", **labels) == before + 1
    await client.refuse(504, "infer", "slow", [client.texts([client.transport])], timeout=100_000)
    until(lambda: service.in_flight() == 0)
    assert "sequence_id" in await client.refuse(400, "infer", "words", [client.texts(["a"])], sequence_id=7)


async def test_scores(client: Client) -> None:
    pairs = [("a shoal", text) for text in TEXTS]
    inputs = [client.texts([pair[0] for pair in pairs], "query"), client.texts(TEXTS, "document")]
    for raw in (False, True):
        expected = [compute_scores(tokenize_item(pair), 1, raw=raw) for pair in pairs]
        result = await client.infer("scorer", inputs, parameters={"raw_scores": raw})
        assert np.allclose(result.as_numpy("scores"), expected, atol=1e-6)
    result = await client.infer("sorter", [client.texts(TEXTS)])
    expected = [compute_scores(tokenize_item(text), 3, raw=False) for text in TEXTS]
    assert np.allclose(result.as_numpy("scores"), expected, atol=1e-6)


async def test_images(client: Client) -> None:
    """Any bytes, which are not UTF-8."""
    images = [b"\xff\xd8\x00first", bytes(range(256)) * 40]
    assert_vectors(await client.infer("words", [client.texts(images, "image")]), [Image(each) for each in images])


async def test_generation(client: Client) -> None:
    """The whole answer, behind the prompt unless the request excludes it."""
    exclude = client.tensor("exclude_input_in_output", [True], "BOOL")
    for more, prefix in (([], b"a b c"), ([exclude], b"")):
        result = await client.infer("words", [*client.prompt("a b c", max_tokens=2), *more])
        assert result.as_numpy("text_output").tolist() == [prefix + b"a b"]
        assert result.as_numpy("finish_reason").tolist() == [b"length"]
        assert result.as_numpy("num_input_tokens").tolist() == [3]
        assert result.as_numpy("num_output_tokens").tolist() == [2]
    result = await client.infer("words", [*client.prompt("a b", n=2), exclude])
    assert result.as_numpy("text_output").tolist() == [b"a b"] * 2
    await client.refuse(400, "infer", "words", client.prompt("a b", stream=True))
    assert "sampling_parameters" in await client.refuse(400, "infer", "words", client.prompt("a", temperature="hot"))


async def test_wrong_inputs(client: Client) -> None:
    async def refuse(code: int, *inputs: Any, model: str = "words", **options: Any) -> str:
        return await client.refuse(code, "infer", model, inputs, **options)

    text = client.texts(["a"])
    assert "nobody" in await refuse(404, text, model="nobody")
    assert "version" in await refuse(404, text, model_version="2")
    assert "'txt'" in await refuse(400, client.texts(["a"], "txt"))
    assert "exactly one" in await refuse(400, text, client.texts([b"x"], "image"))
    assert "same name" in await refuse(400, text, text)
    assert "BYTES" in await refuse(400, client.tensor("text", [[1]], "INT64"))
    assert "INT64" in await refuse(400, client.tensor("input_ids", [[1.0]], "FP32"))
    assert "[1, 2]" in await refuse(400, client.tensor("text", [["a", "b"]]))
    assert "[3]" in await refuse(400, client.tensor("input_ids", [1, 2, 3], "INT64"))
    ids, mask = client.tensor("input_ids", [[1, 2]], "INT64"), client.tensor("attention_mask", [[1]], "INT64")
    assert "attention_mask" in await refuse(400, ids, mask)
    assert "UTF-8" in await refuse(400, client.texts([b"\xff"]))
    assert "2048" in await refuse(400, client.texts(["a"] * 2049))
    pair = client.texts(["a"], "query"), client.texts(["b", "c"], "document")
    await refuse(400, *pair, model="scorer")
    assert "'document'" in await refuse(400, client.texts(["a"], "query"), model="scorer")
    assert_vectors(await client.infer("words", [client.texts(TEXTS)]), TEXTS)


async def test_a_message_that_is_too_large(client: Client) -> None:
    """More than max_body_bytes; the client stays usable."""
    await client.refuse(413, "infer", "words", [client.texts(["a" * (17 * 2**20)])])
    assert_vectors(await client.infer("words", [client.texts(TEXTS)]), TEXTS)


async def test_statistics_and_index(client: Client) -> None:
    async def count() -> tuple[int, int]:
        found = to_dict(await client.call("get_inference_statistics", "sorter"))["model_stats"][0]
        assert found["name"] == "sorter"
        return int(found.get("inference_count", 0)), int(found["inference_stats"]["success"].get("count", 0))

    before = await count()
    await client.infer("sorter", [client.texts([f"{client.transport} {text}" for text in TEXTS])])
    after = await count()
    assert (after[0] - before[0], after[1] - before[1]) == (3, 1)
    every = to_dict(await client.call("get_inference_statistics"))["model_stats"]
    assert {"words", "scorer", "sorter", "slow"} <= {each["name"] for each in every}
    index = to_dict(await client.call("get_model_repository_index"))
    models = index if isinstance(index, list) else index["models"]
    assert {(each["name"], each["state"]) for each in models} == {
        (name, "READY") for name in ("words", "scorer", "sorter", "slow")
    }


@pytest.mark.parametrize("transport", HTTP)
@pytest.mark.parametrize(("first", "second"), [(True, True), (False, False), (True, False), (False, True)])
async def test_binary_data(service: Service, transport: str, first: bool, second: bool) -> None:
    """Inputs and outputs, each in JSON or binary."""
    async with connect(transport, service.address(transport)) as client:
        ids = client.tensor("input_ids", [[5, 6], [7, 8]], "INT64", binary=first)
        mask = client.tensor("attention_mask", [[1, 1], [1, 0]], "INT64", binary=second)
        forms = {"embeddings": second, "token_count": first}
        outputs = [client.api.InferRequestedOutput(name, binary_data=binary) for name, binary in forms.items()]
        result = await client.infer("words", [ids, mask], outputs=outputs)
        assert_vectors(result, [[5, 6], [7]])
        sent = {each["name"]: "data" not in each for each in result.get_response()["outputs"]}
        assert sent == forms
        assert_vectors(await client.infer("words", [client.texts(TEXTS, binary=first)], outputs=outputs), TEXTS)


def test_async_infer_over_http(service: Service) -> None:
    """Several requests at once from the blocking client."""
    with blocking_http.InferenceServerClient(service.address("http"), concurrency=8) as raw:
        client = Client("http", blocking_http, raw)
        texts = [f"greenlet {at}" for at in range(40)]
        started = [raw.async_infer("words", [client.texts([text])], request_id=text) for text in texts]
        for text, each in zip(texts, started, strict=True):
            result = each.get_result()
            assert_vectors(result, [text])
            assert result.get_response()["id"] == text


def test_generate(service: Service) -> None:
    """Triton's generate extension, with any HTTP client."""
    path, body = "/v2/models/words", {"id": "g1", "text_input": "a b c", "return_finish_reason": True}
    body["parameters"] = {"max_tokens": 2, "exclude_input_in_output": True}
    status, _, reply = service.server.request("POST", f"{path}/generate", body)
    expected = {"model_name": "words", "model_version": "1", "id": "g1"}
    assert status == 200
    assert json.loads(reply) == expected | {"text_output": "a b", "finish_reason": "length"}
    del body["parameters"]
    status, headers, reply = service.server.request("POST", f"{path}/generate_stream", body)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [json.loads(each.removeprefix("data: ")) for each in reply.decode().split("\n\n") if each]
    assert "".join(each["text_output"] for each in events) == "a b c"
    assert [each["finish_reason"] for each in events] == ["None"] * (len(events) - 1) + ["stop"]
    assert len(events) == 3
    assert all(each.items() >= expected.items() for each in events)
    status, _, reply = service.server.request("POST", f"{path}/generate", {"text_in": "a"})
    assert status == 400
    assert "'text_in'" in json.loads(reply)["error"]


@dataclass(frozen=True)
class Answer:
    """A response on a stream. `text`: of a language model; `count`: the tensors; `error`: "" or its message."""

    id: str = ""
    final: bool = True
    text: str = ""
    count: int = 0
    error: str = ""
    result: Any = None

    @classmethod
    def read(cls, result: Any, error: Any) -> Answer:
        if error is not None:
            return cls(error=error.message())
        reply = result.get_response()
        output = result.as_numpy("text_output")
        text = "" if output is None else output[0].decode()
        return cls(reply.id, reply.parameters["triton_final_response"].bool_param, text, len(reply.outputs), "", result)


async def stream(service: Service, transport: str, requests: Sequence[dict[str, Any]], **options: Any) -> list[Answer]:
    """Send these requests on one stream, and return all responses in the order of their arrival."""

    async def send() -> AsyncIterator[dict[str, Any]]:
        for each in requests:
            yield each

    async with connect(transport, service.grpc) as client:
        if transport == "grpc.aio":
            return [Answer.read(*each) async for each in client.raw.stream_infer(send(), **options)]
        answers: list[Answer] = []
        client.raw.start_stream(lambda result, error: answers.append(Answer.read(result, error)), **options)
        for each in requests:
            client.raw.async_stream_infer(**each)
        client.raw.stop_stream()
        return answers


def call(model: str, inputs: Sequence[Any], id: str, **options: Any) -> dict[str, Any]:
    return {"model_name": model, "inputs": inputs, "request_id": id, **options}


MADE = Client("grpc", blocking_grpc, None)
"""Makes tensors for both clients of gRPC."""


@pytest.mark.parametrize("transport", GRPC)
async def test_streamed_pieces(service: Service, transport: str) -> None:
    """Several answers at once on one stream; the last response of each is marked, and empty only on request."""
    prompts = {f"s{at}": f"prompt {at} has six words" for at in range(8)}
    requests = [
        call("slow", MADE.prompt(text, stream=True), id, enable_empty_final_response=id > "s3")
        for id, text in prompts.items()
    ]
    answers = await stream(service, transport, requests)
    for id, text in prompts.items():
        own = [each for each in answers if each.id == id]
        empty = id > "s3"
        full = own[:-1] if empty else own
        assert [each.text for each in full] == [word if not at else f" {word}" for at, word in enumerate(text.split())]
        assert [each.final for each in own] == [False] * (len(own) - 1) + [True]
        assert not empty or own[-1].count == 0
        assert [each.result.as_numpy("finish_reason")[0] for each in full] == [b"None"] * (len(full) - 1) + [b"stop"]
        assert full[-1].result.as_numpy("num_input_tokens").tolist() == [len(text.split())]
    first = [each.id for each in answers].index("s7")
    assert any(each.id == "s0" for each in answers[first:]), "one after the other"


@pytest.mark.parametrize("transport", GRPC)
async def test_order_on_a_stream(service: Service, transport: str) -> None:
    """Single responses keep the order of their requests, also behind a slow one and an error; more than run at once."""
    texts = [f"streamed {at}" for at in range(600)]
    slow = call("slow", [MADE.texts([f"slow {transport}"])], "slow")
    bad = call("words", [MADE.texts(["a"], "txt")], "bad")
    requests = [call("words", [MADE.texts([text])], text) for text in texts]
    talk = call("words", MADE.prompt("a b", stream=True), "talk")
    answers = await stream(service, transport, [slow, talk, bad, *requests])
    talked = [each for each in answers if each.id == "talk"]
    assert [each.text for each in talked] == ["a", " b"]
    assert answers[0].id == "talk", "a streaming answer waits for nobody"
    rest = [each for each in answers if each.id != "talk"]
    assert rest[0].id == "slow"
    assert "'txt'" in rest[1].error
    assert [each.id for each in rest[2:]] == texts
    assert all(each.final for each in rest)
    for text, each in zip(texts, rest[2:], strict=True):
        assert_vectors(each.result, [text])


@pytest.mark.parametrize("transport", GRPC)
async def test_single_responses_are_final(service: Service, transport: str) -> None:
    """A model that is not decoupled sends no empty response."""
    inputs = [MADE.texts(["a"], "query"), MADE.texts(["b"], "document")]
    answers = await stream(service, transport, [call("scorer", inputs, "r1", enable_empty_final_response=True)])
    assert [(each.id, each.count, each.final) for each in answers] == [("r1", 1, True)]


def test_a_cancelled_stream(service: Service) -> None:
    """It ends its requests; the server stays usable."""
    answers: Queue[Answer] = Queue()
    with blocking_grpc.InferenceServerClient(service.grpc) as raw:
        for timeout in (None, 0.3):
            raw.start_stream(lambda result, error: answers.put(Answer.read(result, error)), stream_timeout=timeout)
            for id in ("c1", "c2"):
                raw.async_stream_infer("slow", MADE.prompt("word " * 500, stream=True), request_id=id)
            assert answers.get(timeout=30).text == "word"
            if timeout is None:
                assert service.in_flight() == 2
                raw.stop_stream(cancel_requests=True)
            until(lambda: service.in_flight() == 0)
            raw.stop_stream(cancel_requests=True)
        future = raw.async_infer("slow", [MADE.texts(["cancelled call"])], lambda result, error: None)
        until(lambda: service.in_flight() == 1)
        future.cancel()
        until(lambda: service.in_flight() == 0)
        assert_vectors(raw.infer("words", [MADE.texts(TEXTS)], compression_algorithm="gzip"), TEXTS)
    assert "Traceback" not in service.server.log.read_text()


async def test_a_cancelled_asynchronous_stream(service: Service) -> None:
    """By its iterator, and by closing the client."""

    async def send() -> AsyncIterator[dict[str, Any]]:
        yield call("slow", MADE.prompt("word " * 500, stream=True), "c3")
        await asyncio.sleep(60)

    for closes in (False, True):
        async with connect("grpc.aio", service.grpc) as client:
            answers = client.raw.stream_infer(send())
            assert Answer.read(*await anext(answers)).text == "word"
            assert service.in_flight() == 1
            if not closes:
                assert answers.cancel()
                until(lambda: service.in_flight() == 0)
                assert_vectors(await client.infer("words", [client.texts(TEXTS)]), TEXTS)
        until(lambda: service.in_flight() == 0)


def test_many_threads(service: Service) -> None:
    """64 threads that share a client."""
    with blocking_grpc.InferenceServerClient(service.grpc) as raw, ThreadPoolExecutor(64) as pool:

        def ask(thread: int) -> None:
            for at in range(20):
                text = f"thread {thread} text {at}"
                assert_vectors(raw.infer("words", [MADE.texts([text])], request_id=text), [text])

        for each in [pool.submit(ask, thread) for thread in range(64)]:
            each.result(timeout=120)


@pytest.mark.parametrize("transport", ["grpc.aio", "http.aio"])
async def test_many_tasks(service: Service, transport: str) -> None:
    async with connect(transport, service.address(transport)) as client:

        async def ask(task: int) -> None:
            for at in range(20):
                text = f"{transport} task {task} text {at}"
                assert_vectors(await client.infer("words", [client.texts([text])], request_id=text), [text])

        await asyncio.gather(*map(ask, range(64)))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_load_and_unload(tmp_path: Path, transport: str) -> None:
    """Without keys, by programs on this machine; over HTTP they have to say that they send JSON."""
    headers = {"content-type": "application/json"} if transport in HTTP else {}
    with serving(tmp_path, *MODELS[:2]) as service:
        async with connect(transport, service.address(transport)) as client:
            if transport in HTTP:
                assert "application/json" in await client.refuse(403, "unload_model", "scorer")
            await client.call("unload_model", "scorer", headers=headers)
            assert not await client.call("is_model_ready", "scorer")
            assert await client.call("is_model_ready", "words")
            index = to_dict(await client.call("get_model_repository_index"))
            states = {each["name"]: each["state"] for each in (index if isinstance(index, list) else index["models"])}
            assert states == {"words": "READY", "scorer": "UNAVAILABLE"}
            await client.call("load_model", "scorer", headers=headers)
            assert await client.call("is_model_ready", "scorer")
            await client.refuse(400, "load_model", "scorer", headers=headers, config="{}")
            for method in ("load_model", "unload_model"):
                assert "nobody" in await client.refuse(404, method, "nobody", headers=headers)
        assert "Traceback" not in service.server.log.read_text()


async def test_keys(tmp_path: Path) -> None:
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("K", "A"))
    with serving(tmp_path, *MODELS[:2], flags=("--api-key", "K", "--admin-key", "A")) as service:
        for transport in TRANSPORTS:
            async with connect(transport, service.address(transport)) as client:
                inputs = [client.texts(TEXTS)]
                assert await client.call("is_server_ready")
                await client.refuse(401, "infer", "words", inputs)
                await client.refuse(401, "infer", "words", inputs, headers={"authorization": "Bearer other"})
                await client.refuse(401, "get_server_metadata")
                assert_vectors(await client.infer("words", inputs, headers=dict(user)), TEXTS)
                await client.refuse(403, "unload_model", "scorer", headers=dict(user))
                assert await client.call("is_model_ready", "scorer", headers=dict(user))
                await client.call("unload_model", "scorer", headers=dict(admin))
                await client.call("load_model", "scorer", headers=dict(admin))
        for transport in GRPC:
            requests = [call("words", [MADE.texts(TEXTS)], "k1")]
            assert "API key" in (await stream(service, transport, requests))[0].error
            assert_vectors((await stream(service, transport, requests, headers=user))[0].result, TEXTS)


@pytest.mark.parametrize("transport", GRPC)
async def test_a_socket(service: Service, transport: str) -> None:
    async with connect(transport, service.socket) as client:
        assert await client.call("is_server_ready")
        assert_vectors(await client.infer("words", [client.texts(TEXTS)]), TEXTS)


def test_a_graceful_stop(tmp_path: Path) -> None:
    """Requests in flight are answered after SIGTERM, those of a stream too."""
    with serving(tmp_path, MODELS[-1]) as service, blocking_grpc.InferenceServerClient(service.grpc) as raw:
        answers: list[Answer] = []
        raw.start_stream(lambda result, error: answers.append(Answer.read(result, error)))
        raw.async_stream_infer("slow", MADE.prompt("word " * 40, stream=True), request_id="s1")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(raw.infer, "slow", [MADE.texts(TEXTS)])
            until(lambda: service.in_flight() == 2)
            service.server.process.send_signal(signal.SIGTERM)
            assert_vectors(waiting.result(timeout=30), TEXTS)
        raw.stop_stream()
        assert "".join(each.text for each in answers).split() == ["word"] * 40
        assert answers[-1].final
        assert service.server.exit_code() == 0
