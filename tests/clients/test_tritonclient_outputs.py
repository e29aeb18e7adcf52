"""NVIDIA's tritonclient: outputs of more than one vector an input, and Triton's classification extension."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item, word_id
from tests.clients.tritonclient_kit import (
    GRPC,
    HTTP,
    MADE,
    TRANSPORTS,
    Client,
    RunningServer,
    assert_vectors,
    connect,
    serving,
    stream,
    streamed,
    to_dict,
)

TEXTS = ["a a b", "c", "the sea a b"]
SPARSE = ("sparse_indices", "sparse_values", "sparse_lengths")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = ("kinds=fake:vectors=dense+sparse+multi+tokens", "splade=fake:vectors=sparse", "sorter=fake:labels=3")
    with serving(tmp_path_factory.mktemp("outputs"), *models) as started:
        yield started


@pytest.fixture(params=TRANSPORTS)
async def client(request: pytest.FixtureRequest, service: RunningServer) -> AsyncIterator[Client]:
    async with connect(request.param, service.address(request.param)) as made:
        yield made


async def request(client: Client, *names: str, model: str = "kinds", **options: Any) -> Any:
    outputs = [client.output(name) for name in names] or None
    return await client.infer(model, client.texts(TEXTS), outputs=outputs, **options)


def words_of(text: str) -> list[Any]:
    return [compute_vector([token], 32) for token in tokenize_item(text)]


def assert_sparse(result: Any) -> None:
    indices, values, lengths = (result.as_numpy(name) for name in SPARSE)
    assert (indices.dtype, values.dtype, lengths.tolist()) == (np.int32, np.float32, [[2], [1], [4]])
    assert indices.shape == values.shape == (3, 4)
    for row, text in enumerate(TEXTS):
        words = text.split()
        expected = {word_id(word): float(words.count(word)) for word in words}
        assert dict(zip(indices[row, : len(expected)], values[row, : len(expected)], strict=True)) == expected
        assert (indices[row, len(expected) :] == -1).all()
        assert (values[row, len(expected) :] == 0).all()


async def test_the_extension(client: Client) -> None:
    assert "classification" in to_dict(await client.call("get_server_metadata"))["extensions"]


async def test_sparse_vectors(client: Client) -> None:
    """By name, and as the default outputs of a model that has no other."""
    result = await request(client, *SPARSE)
    assert_sparse(result)
    assert result.as_numpy("embeddings") is None
    assert_sparse(await request(client, model="splade"))
    result = await client.infer("splade", client.texts(["b"]), outputs=[client.output("sparse_lengths")])
    assert result.as_numpy("sparse_lengths").tolist() == [[1]]


async def test_vectors_of_tokens(client: Client) -> None:
    """Of late interaction, which are normalized, and before pooling, beside the dense one."""
    names = ("embeddings", "multi_vectors", "multi_lengths", "token_embeddings", "token_lengths", "token_count")
    result = await request(client, *names)
    assert_vectors(result, TEXTS)
    for name, lengths, normalize in (
        ("multi_vectors", "multi_lengths", True),
        ("token_embeddings", "token_lengths", False),
    ):
        found = result.as_numpy(name)
        assert (found.dtype, found.shape) == (np.float32, (3, 4, 32))
        assert result.as_numpy(lengths).tolist() == [[3], [1], [4]]
        for row, text in zip(found, TEXTS, strict=True):
            expected = np.array(words_of(text))
            if normalize:
                expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            assert np.allclose(row[: len(expected)], expected, atol=1e-6)
            assert not row[len(expected) :].any()


async def test_defaults(client: Client) -> None:
    """A request that lists no outputs gets the dense vectors alone."""
    result = await client.infer("kinds", client.tensor("text", TEXTS))
    assert_vectors(result, TEXTS)
    assert {each["name"] for each in to_dict(result.get_response())["outputs"]} == {"embeddings", "token_count"}


async def test_classification(client: Client) -> None:
    """Of a classifier's scores, with labels, and of any numbers, without."""
    result = await client.infer("sorter", client.texts(TEXTS), outputs=[client.output("scores", class_count=2)])
    found = result.as_numpy("scores")
    assert found.shape == (3, 2)
    for row, text in zip(found, TEXTS, strict=True):
        scores = compute_scores(tokenize_item(text), 3, raw=False)
        best = np.argsort(-scores, kind="stable")[:2]
        assert [_text(each) for each in row] == [f"{scores[at]:f}:{at}:LABEL_{at}" for at in best]
    outputs = [client.output("embeddings", class_count=3), client.output("token_count")]
    result = await client.infer("kinds", client.texts(TEXTS), outputs=outputs)
    assert result.as_numpy("token_count").tolist() == [[3], [1], [4]]
    values = [[float(_text(each).split(":")[0]) for each in row] for row in result.as_numpy("embeddings")]
    plain = (await client.infer("kinds", client.texts(TEXTS))).as_numpy("embeddings")
    assert np.allclose(values, -np.sort(-plain, axis=1)[:, :3], atol=1e-6)


@pytest.mark.parametrize("transport", HTTP)
async def test_classification_in_json(service: RunningServer, transport: str) -> None:
    async with connect(transport, service.address(transport)) as client:
        outputs = [client.output("scores", class_count=1, binary_data=False)]
        result = await client.infer("sorter", client.texts(["a"]), outputs=outputs)
        assert _text(result.as_numpy("scores")[0, 0]).count(":") == 2


async def test_wrong_classifications(client: Client) -> None:
    outputs = [client.output("text_output", class_count=1)]
    message = await client.refuse_infer(400, "kinds", *client.prompt("a b"), outputs=outputs)
    assert "unsupported type 'BYTES'" in message
    outputs = [client.output("scores", class_count=-1)]
    assert "'classification'" in await client.refuse_infer(400, "sorter", client.texts(["a"]), outputs=outputs)


@pytest.mark.parametrize("transport", GRPC)
async def test_on_a_stream(service: RunningServer, transport: str) -> None:
    requests = [
        streamed("sorter", [MADE.texts(["a"])], "c", outputs=[MADE.output("scores", class_count=1)]),
        streamed("splade", [MADE.texts(TEXTS)], "s"),
    ]
    classified, sparse = await stream(service, transport, requests)
    assert _text(classified.result.as_numpy("scores")[0, 0]).endswith(("LABEL_0", "LABEL_1", "LABEL_2"))
    assert_sparse(sparse.result)


def test_the_examples_of_the_docs(service: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/kserve.md, but for the address and the models."""
    page = (Path(__file__).parents[2] / "docs" / "kserve.md").read_text()
    code = "\n".join(each.partition("```")[0] for each in page.split("```python\n")[1:])
    code = code.replace("localhost:8001", service.address("grpc")).replace("my/classifier", "sorter")
    code = code.replace("sentence-transformers/all-MiniLM-L6-v2", "kinds").replace("BAAI/bge-m3", "kinds")
    made: dict[str, Any] = {}
    exec(code, made)
    assert made["rows"] == [dict.fromkeys(map(word_id, text.split()), 1.0) for text in ("a fish", "a bird")]
    assert capsys.readouterr().out.count(":LABEL_") == 2


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
