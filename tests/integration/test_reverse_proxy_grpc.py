"""gRPC with TLS through the committed configurations of nginx and Caddy, by NVIDIA's tritonclient."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.integration.llm_kit import free_port, running, until
from tests.integration.proxy_kit import COMMANDS, Proxy, proxying
from tests.integration.server_kit import Server

KEY = {"authorization": "Bearer of-a-user"}
ADMIN_KEY = {"authorization": "Bearer of-an-admin"}
LIMIT = 16 * 1024 * 1024
"""`max_body_bytes`."""
TOKEN_MS = 30
MODELS = ("words=fake:", "slow=fake:delay_ms=5000", f"talker=fake:token_ms={TOKEN_MS}")


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shoal")
    (folder / "keys").write_text("of-a-user\n")
    (folder / "admin-keys").write_text("of-an-admin\n")
    for file in folder.iterdir():
        file.chmod(0o600)
    keys = ("--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin-keys"))
    flags = (*keys, "--grpc-port", str(grpc_port), "--log-format", "json", "--max-body-bytes", str(LIMIT))
    with running(folder, *MODELS, flags=flags) as started:
        yield started


@pytest.fixture(scope="module", params=COMMANDS)
def proxy(
    request: pytest.FixtureRequest, server: Server, grpc_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    with proxying(request.param, server, tmp_path_factory.mktemp(request.param), grpc_port=grpc_port) as found:
        yield found


@pytest.fixture
def client(proxy: Proxy) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(
        f"localhost:{proxy.port}", ssl=True, root_certificates=str(proxy.certificate)
    ) as made:
        yield made


@asynccontextmanager
async def connected(proxy: Proxy) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(
        f"localhost:{proxy.port}", ssl=True, root_certificates=str(proxy.certificate)
    ) as made:
        yield made


def tensor(name: str, values: Any, datatype: str = "BYTES") -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    return made.set_data_from_numpy(values)


def texts(*words: str) -> list[Any]:
    return [tensor("text", np.array(words, dtype=object)[:, None])]


def prompt(text: str) -> list[Any]:
    return [
        tensor("text_input", np.array([text], dtype=object)),
        tensor("stream", np.array([True]), "BOOL"),
    ]


async def of_prompts(*prompts: str) -> AsyncIterator[dict[str, Any]]:
    for at, each in enumerate(prompts):
        yield {"model_name": "talker", "inputs": prompt(each), "request_id": str(at)}


def logged(server: Server, request_id: str) -> list[dict[str, Any]]:
    """Return the lines of the access log with this id; a line is written once its answer has ended."""
    lines = (json.loads(line) for line in server.log.read_text().splitlines() if f'"{request_id}"' in line)
    return [line for line in lines if line.get("request_id") == request_id]


def read_text(result: Any) -> Any:
    return result.as_numpy("text_output")[0].decode()


def test_vectors_and_the_health(client: triton.InferenceServerClient) -> None:
    """A message of nearly the limit, and a small one; the key is in the metadata."""
    assert client.is_server_ready()
    assert client.infer("words", texts("one", "two"), headers=KEY).as_numpy("embeddings").shape == (2, 32)
    large = texts(*["a" * 1_000_000] * 16)  # 16 MB, as Shoal counts them
    assert client.infer("words", large, headers=KEY).as_numpy("embeddings").shape == (16, 32)


def test_a_message_above_the_limit(client: triton.InferenceServerClient, proxy: Proxy) -> None:
    """Shoal refuses it, not the proxy."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer("words", texts(*["a" * 1_000_000] * 17), headers=KEY)
    # Caddy may still be sending when gRPC refuses the message, and then ends the call itself.
    broken = {"StatusCode.INTERNAL"} if proxy.name == "caddy" else set()
    assert caught.value.status() in {"StatusCode.RESOURCE_EXHAUSTED"} | broken


def test_keys_and_ids(client: triton.InferenceServerClient, proxy: Proxy) -> None:
    """Shoal sees the client's key and its id of the request; without a key nothing is computed."""
    with pytest.raises(InferenceServerException, match="API key") as caught:
        client.infer("words", texts("one"))
    assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    mine = f"mine-{proxy.name}"
    client.infer("words", texts("one"), headers={**KEY, "x-request-id": mine})
    until(lambda: bool(logged(proxy.server, mine)))
    with pytest.raises(InferenceServerException, match="admin key") as caught:
        client.unload_model("words", headers=KEY)
    assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
    client.load_model("words", headers=ADMIN_KEY)


async def test_a_stream_in_both_directions(proxy: Proxy) -> None:
    """Each piece arrives when Shoal sends it, and an answer before the next request is sent."""
    async with connected(proxy) as client:
        answered = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "talker", "inputs": prompt("a b c d e f g h i j"), "request_id": "first"}
            await answered.wait()
            yield {"model_name": "talker", "inputs": prompt("last"), "request_id": "second"}

        times, answers = [], []
        async for result, error in client.stream_infer(requests(), headers=KEY):
            assert error is None
            times.append(time.monotonic())
            answers.append((result.get_response().id, read_text(result)))
            if result.get_response().parameters["triton_final_response"].bool_param:
                answered.set()
    assert answers[-1][0] == "second"
    first = [at for at, (id, _) in zip(times, answers, strict=True) if id == "first"]
    assert len(first) >= 8
    assert first[-1] - first[0] > 4 * TOKEN_MS / 1000


async def test_a_stream_larger_than_one_message(proxy: Proxy) -> None:
    """The limit is of a message: a stream may carry any number."""
    words = texts(*["a" * 1_000_000] * 8)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for at in range(3):
            yield {"model_name": "words", "inputs": words, "request_id": str(at)}

    async with connected(proxy) as client:
        found = [(result, error) async for result, error in client.stream_infer(requests(), headers=KEY)]
    assert [error for _, error in found] == [None] * 3
    assert [result.get_response().id for result, _ in found] == ["0", "1", "2"]


async def test_a_client_that_leaves_ends_its_generation(proxy: Proxy) -> None:
    """The answer would take two minutes."""
    leaving = f"leaving-{proxy.name}"
    async with connected(proxy) as client:
        answers = client.stream_infer(of_prompts("word " * 4000), headers={**KEY, "x-request-id": leaving})
        result, error = await anext(aiter(answers))
        assert error is None
        assert read_text(result)
        assert not logged(proxy.server, leaving)
        answers.cancel()
        await asyncio.to_thread(until, lambda: bool(logged(proxy.server, leaving)))
    assert logged(proxy.server, leaving)[0]["status"] == 499


async def test_a_canceled_call_is_not_computed_on(proxy: Proxy) -> None:
    """Of one answer: the deadline of the client, which the proxy passes on, or it leaves."""
    late = f"late-{proxy.name}"
    async with connected(proxy) as client:
        assert await client.is_server_ready()  # the deadline is not spent on connecting
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("slow", texts("one"), headers={**KEY, "x-request-id": late}, client_timeout=1)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    await asyncio.to_thread(until, lambda: bool(logged(proxy.server, late)))
    assert logged(proxy.server, late)[0]["status"] in (499, 504)


@pytest.mark.parametrize("program", COMMANDS)
def test_admin_calls_of_a_server_without_keys(program: str, tmp_path: Path) -> None:
    """They are for programs on the same machine, and a client cannot make the proxy one of these."""
    port, folder = free_port(), tmp_path / "proxy"
    folder.mkdir()
    with (
        running(tmp_path / "shoal", "words=fake:", flags=("--grpc-port", str(port))) as server,
        proxying(program, server, folder, grpc_port=port) as proxy,
        triton.InferenceServerClient(
            f"localhost:{proxy.port}", ssl=True, root_certificates=str(proxy.certificate)
        ) as client,
    ):
        for headers in ({}, {"x-real-ip": "", "x-forwarded-for": "", "forwarded": ""}):
            with pytest.raises(InferenceServerException) as caught:
                client.unload_model("words", headers=headers)
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
        assert client.is_model_ready("words")
