"""`shoal serve --workers 2` with models that have a tokenizer: the fronts tokenize, and answers do not tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import prepare_local
from shoal.config.settings import Settings
from tests.integration.server_kit import Server, ShoalServer, wait_until
from tests.integration.test_workers import WORKERS, ask, comparable, connect_to_each
from tests.unit.models.checkpoints import checkpoint
from tests.unit.models.classifiers import classifier
from tests.unit.models.head_checkpoints import edit, m3

pytestmark = pytest.mark.timeout(300)

SETTINGS = {"SHOAL_LOG_LEVEL": "debug", "SHOAL_TOKEN_IDS": "accept", "SHOAL_MAX_BATCH_SIZE": "1"}
"""Which items share a batch depends on measured times, and an engine rounds differently in batches of another size."""

OPENED = "this front process tokenizes for"
LONG = "together fishing to fish. " * 40
VERY_LONG = LONG * 60
"""More than a front tokenizes."""
TEXTS = ["fish", "Größe 東京 🐟 \u0301e\u200b", " \t\n ", "\x00", LONG, "fish"]

EQUAL: list[tuple[str, Any]] = [
    *(("/v1/embeddings", {"model": "embedder", "input": text}) for text in (*TEXTS, VERY_LONG)),
    ("/v1/embeddings", {"model": "embedder", "input": ""}),
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS, "encoding_format": "base64", "dimensions": 3}),
    ("/v1/embeddings", {"model": "embedder", "input": [*TEXTS, VERY_LONG]}),
    ("/v1/embeddings", {"model": "embedder", "input": ["fish"] * 300}),
    ("/v1/embeddings", {"model": "embedder", "input": [LONG] * 20}),
    ("/v1/embeddings", {"model": "embedder", "input": ["a", LONG], "truncate": False}),
    ("/v1/embeddings", {"model": "embedder", "input": VERY_LONG, "truncate": False}),
    ("/v1/embeddings", {"model": "embedder", "input": LONG, "truncate": "START", "input_type": "query"}),
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS, "input_type": "query", "normalize": False}),
    ("/v1/embeddings", {"model": "embedder", "input": "fish", "prompt_name": "nobody"}),
    ("/v1/embeddings", {"model": "embedder", "input": "fish", "dimensions": 4000}),
    ("/v1/embeddings", {"model": "embedder", "input": [5, 6, 7]}),
    ("/v1/embeddings", {"model": "embedder", "input": [[5, 6], [7]], "input_type": "query"}),
    ("/v1/embeddings", {"model": "embedder", "input": [[5], [4000]]}),
    ("/v1/embeddings", {"model": "embedder", "input": "\udcff"}),
    ("/v1/embeddings", {"model": "embedder", "input": ["a", "\udcff"]}),
    ("/v1/embeddings", {"model": "ranker", "input": "fish"}),
    ("/embed", {"inputs": ["fish", [5, 6], LONG], "truncate": True}),
    ("/embed", {"inputs": LONG, "truncate": False}),
    ("/embed_all", {"inputs": TEXTS, "model": "many", "truncate": True}),
    ("/embed_sparse", {"inputs": ["fish", "to gether"], "model": "many"}),
    ("/rerank", {"query": "fish", "texts": TEXTS, "truncate": True, "model": "ranker"}),
    ("/v1/rerank", {"model": "ranker", "query": "fish", "documents": TEXTS, "max_tokens_per_doc": 4}),
    ("/v1/rerank", {"model": "ranker", "query": LONG, "documents": ["a", LONG], "truncate": False}),
    ("/v1/rerank", {"model": "ranker", "query": "fish", "documents": ["a"], "instruction": "b"}),
    ("/v1/rerank", {"model": "ranker", "query": "fish", "documents": []}),
    ("/v1/rerank", {"model": "embedder", "query": "fish", "documents": TEXTS[:3]}),
    ("/predict", {"inputs": [["fish", "to"], ["gether"]], "model": "ranker"}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Addresses of an embedder with prompts that pooling leaves out, a reranker, and a model with all kinds of vectors;
    each costs nothing."""
    folder = tmp_path_factory.mktemp("models")
    embedder = checkpoint(folder / "embedder")
    edit(embedder / "1_Pooling" / "config.json", include_prompt=False)
    prompts = {"prompts": {"query": "to fish: ", "document": "a"}, "default_prompt_name": "document"}
    (embedder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return [
        f"embedder=file:{embedder}",
        f"ranker=file:{classifier(folder / 'ranker')}",
        f"many=file:{m3(folder / 'm3')}",
    ]


@pytest.fixture(scope="module")
def home(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, converted: on a busy machine that takes longer than a server may take to start."""
    folder = tmp_path_factory.mktemp("home")
    for model in models:
        prepare_local(parse_address(model.partition("=")[2]), Settings(home=str(folder)))
    return folder


@pytest.fixture(scope="module")
def single(shared_server: ShoalServer, models: list[str], home: Path) -> Server:
    return shared_server(models, env={**SETTINGS, "SHOAL_HOME": str(home)})


@pytest.fixture(scope="module")
def several(shared_server: ShoalServer, models: list[str], home: Path) -> Server:
    """A server whose two fronts have opened the three tokenizers."""
    server = shared_server(models, *WORKERS, env={**SETTINGS, "SHOAL_HOME": str(home)})
    wait_until(
        lambda: server.log.read_text().count("this front process tokenizes for") == 6, server.process, server.log
    )
    return server


@pytest.mark.parametrize(("path", "body"), EQUAL, ids=lambda value: str(value)[:70])
def test_an_answer_is_that_of_a_single_process(single: Server, several: Server, path: str, body: Any) -> None:
    """Vectors and scores are equal to the bit, counts and errors too, whichever front answers."""
    expected = comparable(single.request("POST", path, body))
    for _ in range(2):
        assert comparable(several.request("POST", path, body)) == expected


def test_another_model_of_the_same_name_gets_its_own_tokens(
    shoal_server: ShoalServer, tmp_path: Path, home: Path
) -> None:
    """After a load of a model whose tokenizer has changed, no front uses the old one."""
    folder = checkpoint(tmp_path / "embedder")
    prepare_local(parse_address(f"file:{folder}"), Settings(home=str(home)))
    server = shoal_server([f"m=file:{folder}"], *WORKERS, env={**SETTINGS, "SHOAL_HOME": str(home)})
    body = {"model": "m", "input": "fish"}
    before = server.request("POST", "/v1/embeddings", body)
    wait_until(lambda: server.log.read_text().count(OPENED) == 2, server.process, server.log)
    assert comparable(server.request("POST", "/v1/embeddings", body)) == comparable(before)
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["fish"], vocabulary["to"] = vocabulary["to"], vocabulary["fish"]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert server.request("POST", "/models/unload", {"model": "m"})[0] == 200
    wait_until(lambda: server.request("GET", "/v1/models/m")[0] == 404, server.process, server.log)
    assert server.request("POST", "/models/load", {"model": "m"})[0] == 200
    wait_until(lambda: b'"loaded"' in server.request("GET", "/v1/models/m")[2], server.process, server.log)
    answers = set()
    with connect_to_each(server) as both:
        for connection in both.values():
            for _ in range(3):
                status, answer = ask(connection, "/v1/embeddings", {"model": "m", "input": "to"})
                assert status == 200
                answers.add(json.dumps(answer["data"][0]["embedding"]))
    assert answers == {json.dumps(json.loads(before[2])["data"][0]["embedding"])}
