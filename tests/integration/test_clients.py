"""The OpenAI and Hugging Face clients against the default model in its own server, and the cost of bad requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from shoal.backends import parse_address
from shoal.backends.local.open import prepare_local
from shoal.config.settings import Settings
from shoal.models.sources.pins import DEFAULT_MODEL
from tests.integration.llm_kit import running
from tests.integration.server_kit import Server, ShoalServer

NAME = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["A shoal turns as one.", "Nobody gave the order.", "été, 東京, \U0001f41f", "word " * 400]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def served_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the default model, downloaded, converted and verified as by `shoal pull`."""
    home = tmp_path_factory.mktemp("served")
    prepare_local(parse_address(DEFAULT_MODEL), Settings(home=str(home)))
    return home


@pytest.fixture(scope="module")
def real(served_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("real"), flags=("--offline", "--home", str(served_home))) as server:
        yield server


@pytest.fixture
def client(real: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def are_close(one: Any, other: Any, least: float = 0.9999) -> bool:
    """bf16 rounds differently in batches of different shapes; see docs/models.md."""
    a, b = np.asarray(one), np.asarray(other)
    return bool(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min() >= least)


def test_the_openai_client(client: openai.OpenAI) -> None:
    """base64 (the default) and float agree, for one text and for a list: in order, of unit length, with correct token
    counts."""
    together = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
    floats = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    vectors = np.array([entry.embedding for entry in together.data])
    assert [entry.index for entry in together.data] == [0, 1, 2, 3]
    assert vectors.shape == (4, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert are_close(vectors, [entry.embedding for entry in floats.data])
    for text, vector in zip(TEXTS, vectors, strict=True):
        alone = client.embeddings.create(model=NAME, input=text)
        assert are_close(alone.data[0].embedding, vector)
    assert together.usage.prompt_tokens == floats.usage.total_tokens
    assert client.embeddings.create(model=NAME, input="A shoal turns as one.").usage.prompt_tokens == 9
    assert together.model == NAME
    short = client.embeddings.create(model=NAME, input="a", dimensions=64).data[0].embedding
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-5)


def test_the_openai_client_sees_models(client: openai.OpenAI) -> None:
    """The model list and one model by its name, slashes included; extra fields are returned too."""
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "shoal"


@pytest.mark.parametrize(
    ("wrong", "error", "code"),
    [
        ({"input": ""}, openai.BadRequestError, "invalid_value"),
        ({"input": []}, openai.BadRequestError, "invalid_value"),
        ({"input": ["a"] * 2049}, openai.BadRequestError, "array_above_max_length"),
        ({"input": [[1, 2]]}, openai.BadRequestError, "unsupported_parameter"),
        ({"input": "a", "dimensions": 385}, openai.BadRequestError, "invalid_value"),
        (
            {"input": "word " * 400, "extra_body": {"truncate": False}},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"input": "a", "model": "other"}, openai.NotFoundError, "model_not_found"),
    ],
)
def test_the_openai_client_understands_refusals(
    client: openai.OpenAI, wrong: dict[str, Any], error: type[openai.APIStatusError], code: str
) -> None:
    """Each rejection raises the client's own exception with code, param and message; the server keeps serving."""
    with pytest.raises(error) as caught:
        client.embeddings.create(**{"model": NAME, **wrong})
    assert caught.value.code == code
    assert caught.value.body is not None
    assert client.embeddings.create(model=NAME, input="a").data


def test_the_hub_client_speaks_to_tei_routes(real: Server, client: openai.OpenAI) -> None:
    """huggingface_hub's InferenceClient gets the same vectors as the OpenAI client."""
    rows = InferenceClient(f"{real.base_url}/embed").feature_extraction(TEXTS[0])
    assert rows.shape == (1, 384)
    assert are_close(rows[0], client.embeddings.create(model=NAME, input=TEXTS[0]).data[0].embedding)


def test_bad_texts_fail_alone(shoal_server: ShoalServer) -> None:
    """Poisoned, rejected and NaN texts among forty concurrent callers fail, each with its own error; the others
    succeed."""
    server = shoal_server(["fake:delay_ms=20"])
    words = {7: "poison-item", 19: "reject-item", 31: "nan-item"}
    statuses = {7: 500, 19: 400, 31: 500}

    def ask(number: int) -> int:
        text = words.get(number, f"text {number}")
        return server.request("POST", "/v1/embeddings", {"model": "fake", "input": text})[0]

    with ThreadPoolExecutor(40) as callers:
        answers = list(callers.map(ask, range(40)))
    assert answers == [statuses.get(number, 200) for number in range(40)]


def test_disconnected_clients_are_counted_and_leave_no_work(shoal_server: ShoalServer) -> None:
    """One client disconnects while its batch runs, the others while queued: all are counted, nothing stays in flight or
    queued."""
    server = shoal_server(["fake:delay_ms=400:max_batch_size=1"])
    for number in range(5):
        body = json.dumps({"model": "fake", "input": f"gone {number}"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            caller.sendall(head + body)
            time.sleep(0.1)
    end = time.monotonic() + 20
    while "shoal_cancelled_total" not in (text := metrics(server)) or series(text, "shoal_cancelled_total") < 5:
        assert time.monotonic() < end, text
        time.sleep(0.05)
    assert series(text, "shoal_requests_in_flight") == 0
    assert "shoal_queue_items{" in text
    assert series(text, "shoal_queue_items") == 0
    assert server.request("POST", "/v1/embeddings", {"model": "fake", "input": "stays"})[0] == 200


def test_the_loop_stays_free_under_large_bodies_and_replies(shoal_server: ShoalServer) -> None:
    """Health checks are answered while 2,048 vectors of 1,024 numbers are serialized to JSON and 14 MB of texts are
    parsed. Serializing the reply in one step would block nearly all of them."""
    server = shoal_server(["fake:dimension=1024"])
    large = {"model": "fake", "input": [f"{number} {'x' * 7_000}" for number in range(2048)]}
    between = 0
    with ThreadPoolExecutor(1) as caller:
        answer = caller.submit(server.request, "POST", "/v1/embeddings", large)
        while not answer.done():
            assert server.request("GET", "/health/live")[0] == 200
            between += 1
        assert answer.result()[0] == 200
    assert between > 10


def metrics(server: Server) -> str:
    status, _, body = server.request("GET", "/metrics")
    assert status == 200
    return body.decode()


def series(text: str, name: str) -> float:
    """Return the sum over all labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
