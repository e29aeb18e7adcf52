"""The four clients of the tritonclient package behind the same methods, and a server for them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.types import Array, Item
from tests.integration.llm_kit import metric, running
from tests.integration.server_kit import Server

TRANSPORTS = {
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
}
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

MODELS = ("words=fake:images=1", "scorer=fake:labels=1", "sorter=fake:labels=3", "slow=fake:delay_ms=500:token_ms=20")
TEXTS = ["a group of fish", "bread", "water that is not deep"]

_DTYPES: Mapping[str, type] = {
    "BYTES": np.object_,
    "INT64": np.int64,
    "INT32": np.int32,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
_LISTENING = re.compile(r"listening for gRPC on \S+ port (\d+)")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server with the addresses of its gRPC port and its gRPC socket."""

    server: Server
    grpc: str
    socket: str

    def address(self, transport: str) -> str:
        return self.grpc if transport in GRPC else f"127.0.0.1:{self.server.port}"

    def in_flight(self) -> float:
        return metric(self.server, "shoal_requests_in_flight")


@contextmanager
def serving(folder: Path, *models: str, flags: tuple[str, ...] = ()) -> Iterator[RunningServer]:
    """Run a server of these models that also listens for gRPC, as `running`."""
    socket = folder / "grpc.sock"
    with running(folder, *models, flags=("--grpc-port", "0", "--grpc-socket", str(socket), *flags)) as server:
        match = _LISTENING.search(server.log.read_text())
        assert match
        yield RunningServer(server, f"127.0.0.1:{match[1]}", f"unix:{socket}")


@dataclass(frozen=True, slots=True)
class Client:
    """One of the clients. `raw`: the client itself; None to only make tensors."""

    transport: str
    raw: Any = None

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the client, and await it if it is asynchronous."""
        made = getattr(self.raw, method)(*args, **options)
        return await made if inspect.isawaitable(made) else made

    async def infer(self, model: str, *inputs: Any, **options: Any) -> Any:
        return await self.call("infer", model, list(inputs), **options)

    async def refuse(self, status: int, method: str, *args: Any, **options: Any) -> str:
        """Return the message of a call that must fail with this status of HTTP, or with its code of gRPC."""
        with pytest.raises(InferenceServerException) as caught:
            await self.call(method, *args, **options)
        expected = f"StatusCode.{CODES[status]}" if self.transport in GRPC else str(status)
        assert caught.value.status() == expected, caught.value
        return str(caught.value.message())

    async def refuse_infer(self, status: int, model: str, *inputs: Any, **options: Any) -> str:
        return await self.refuse(status, "infer", model, list(inputs), **options)

    async def states(self) -> dict[str, str]:
        """Return the states of the models in the repository index."""
        index = to_dict(await self.call("get_model_repository_index"))
        models = index if isinstance(index, list) else index["models"]
        return {each["name"]: each["state"] for each in models}

    def tensor(self, name: str, values: Any, datatype: str = "BYTES", *, binary: bool = True) -> Any:
        array: Array = np.array(values, dtype=_DTYPES[datatype])
        made = TRANSPORTS[self.transport].InferInput(name, list(array.shape), datatype)
        return made.set_data_from_numpy(array, **({} if self.transport in GRPC else {"binary_data": binary}))

    def texts(self, texts: Sequence[str | bytes], name: str = "text", *, binary: bool = True) -> Any:
        """Return a tensor of the shape [n, 1]."""
        return self.tensor(name, [[each] for each in texts], binary=binary)

    def prompt(self, text: str, *, stream: bool | None = None, **sampling: Any) -> list[Any]:
        """Return the inputs of a request to a language model for all outputs."""
        flags = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
        inputs = [self.tensor("text_input", [text]), self.tensor("sampling_parameters", [json.dumps(sampling)])]
        inputs += [self.tensor(each, [True], "BOOL") for each in flags]
        return inputs if stream is None else [*inputs, self.tensor("stream", [stream], "BOOL")]

    def output(self, name: str, **options: Any) -> Any:
        return TRANSPORTS[self.transport].InferRequestedOutput(name, **options)


MADE = Client("grpc")
"""Makes tensors for both clients of gRPC."""


@asynccontextmanager
async def connect(transport: str, address: str) -> AsyncIterator[Client]:
    raw = TRANSPORTS[transport].InferenceServerClient(address)
    with raw if transport in ("grpc", "http") else nullcontext():
        async with raw if transport not in ("grpc", "http") else nullcontext():
            yield Client(transport, raw)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response on a stream. `text`: a language model's; `outputs`: how many it has; `error`: "" or its message."""

    id: str = ""
    final: bool = True
    text: str = ""
    outputs: int = 0
    error: str = ""
    result: Any = None

    @classmethod
    def read(cls, result: Any, error: Any) -> Answer:
        if error is not None:
            return cls(error=error.message())
        reply, output = result.get_response(), result.as_numpy("text_output")
        text = "" if output is None else output[0].decode()
        return cls(reply.id, reply.parameters["triton_final_response"].bool_param, text, len(reply.outputs), "", result)


def streamed(model: str, inputs: Sequence[Any], id: str, **options: Any) -> dict[str, Any]:
    """Return a request for `stream`."""
    return {"model_name": model, "inputs": list(inputs), "request_id": id, **options}


async def stream(
    service: RunningServer, transport: str, requests: Sequence[dict[str, Any]], **options: Any
) -> list[Answer]:
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


def vector(item: Item, dimensions: int = 32, *, normalize: bool = True) -> Any:
    """Return the vector of a scripted model for an item."""
    cut = compute_vector(tokenize_item(item), 32)[:dimensions]
    return cut / np.linalg.norm(cut) if normalize else cut


def assert_vectors(result: Any, items: Sequence[Item]) -> None:
    found = result.as_numpy("embeddings")
    assert found.dtype == np.float32
    assert np.allclose(found, [vector(item) for item in items], atol=1e-6)
    assert result.as_numpy("token_count").tolist() == [[len(tokenize_item(item))] for item in items]


def to_dict(reply: Any) -> Any:
    """Return a reply as HTTP's clients return it, but numbers of 64 bits from gRPC are strings."""
    return (
        reply if isinstance(reply, dict | list) else json_format.MessageToDict(reply, preserving_proto_field_name=True)
    )
