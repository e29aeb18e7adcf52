"""The whole embedding family on a real Triton: models that Shoal writes there give the same results as the local
engine, for many concurrent users, and again after a restart."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.errors import Unavailable, Unsupported
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.python.api import Shoal
from shoal.types import Embedded, SparseVector, VectorKind
from tests.integration.triton_app_kit import until
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton
from tests.unit.models.classifiers import classifier
from tests.unit.models.family_checkpoints import family_checkpoint
from tests.unit.models.head_checkpoints import m3, native, pylate, splade, static
from tests.unit.models.scoring_checkpoints import answering_checkpoint

pytestmark = pytest.mark.timeout(PATIENCE_S)

USERS = 32
TEXTS = ["fish", "to gether, a longer one that needs padding?", "Größe \N{FISH}", "a b c d e f g", "fishing. together!"]
QUERY = "what do fish do?"

MAKERS: dict[str, Callable[[Path], Path]] = {
    "cross": classifier,
    "saved-cross": lambda folder: classifier(folder, "roberta", saved={}),
    "three": lambda folder: classifier(folder, "distilbert", labels=3),
    "splade": splade,
    "m3": m3,
    "pylate": pylate,
    "native": native,
    "static": static,
    "tasks": lambda folder: family_checkpoint(folder, "jina-v3"),
    "answers": lambda folder: answering_checkpoint(folder, "qwen3"),
}
VECTORS: dict[str, tuple[VectorKind, ...]] = {
    "splade": ("sparse",),
    "m3": ("dense", "sparse", "multi", "tokens"),
    "pylate": ("multi",),
    "native": ("multi",),
    "static": ("dense",),
    "minilm": ("dense", "tokens"),
}


def configuration(folder: Path, triton: Triton, *names: str) -> Path:
    """A shoal.toml that has each model twice: NAME on Triton, NAME-here on the engine of this process."""
    lines = [
        f'triton_url = "{triton.url}"',
        f'triton_repository = "{triton.repository}"',
        f'home = "{folder / "home"}"',
        'triton_platform = "python"',
        'precision = "f32"',
    ]
    for name in names:
        address = f"file:{MAKERS[name](folder / name)}" if name in MAKERS else DEFAULT_MODEL
        for served, backend in ((name, "triton"), (f"{name}-here", "local")):
            lines += [f'[models."{served}"]', f'backends = ["{address}"]', f'backend = "{backend}"']
    path = folder / "shoal.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def family(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shoal]:
    folder = tmp_path_factory.mktemp("family")
    with shoal.open(config=configuration(folder, triton, *MAKERS, "minilm")) as client:
        yield client
    for name in (*MAKERS, "minilm"):
        triton.unload(name)
        shutil.rmtree(triton.repository / name)


def agree(here: Any, there: Any) -> None:
    """Whether two answers agree within 1e-5, kind by kind."""
    if isinstance(here, SparseVector):
        weights = [dict(zip(each.indices.tolist(), each.values.tolist(), strict=True)) for each in (here, there)]
        one, other = weights
        # A near-zero weight may be missing on one side.
        assert all(abs(one.get(index, 0.0) - other.get(index, 0.0)) < 1e-5 for index in one.keys() | other.keys())
        return
    assert here.shape == there.shape
    assert here.size
    np.testing.assert_allclose(there, here, atol=1e-5, rtol=1e-5)


def assert_same(here: Embedded, there: Embedded) -> None:
    """Assert that every vector of two answers agrees."""
    assert here.tokens == there.tokens
    if here.vectors.size or there.vectors.size:
        agree(here.vectors, there.vectors)
    for kind in ("sparse", "token_vectors", "multi_vectors"):
        for one, other in zip(getattr(here, kind), getattr(there, kind), strict=True):
            agree(one, other)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("role", ["query", "document"])
def test_vectors_of_every_kind(family: Shoal, name: str, role: str) -> None:
    """Alone and together: dense, sparse, late-interaction and token vectors."""
    kinds = VECTORS[name]
    for outputs in {*((kind,) for kind in kinds), kinds}:
        options = {} if role == "document" and name == "minilm" else {"input_type": role}
        here, there = (
            family.embed(TEXTS, outputs=outputs, model=model, **options)  # type: ignore[call-overload]
            for model in (f"{name}-here", name)
        )
        assert_same(here, there)
        by_kind = {
            "dense": there.vectors.size,
            "sparse": any(len(each.values) for each in there.sparse),
            "multi": there.multi_vectors,
        }
        assert {kind: bool(value) for kind, value in by_kind.items()} == {kind: kind in outputs for kind in by_kind}
        assert bool(there.token_vectors) == ("tokens" in outputs)


def test_a_task_of_jina_3_for_each_request(family: Shoal) -> None:
    """One loaded model gives other vectors for each task; users of all of them share its batches."""
    found = []
    for wish in ({"prompt_name": "text-matching"}, {"input_type": "query"}, {}):
        here, there = (family.embed(TEXTS, model=model, **wish) for model in ("tasks-here", "tasks"))  # type: ignore[call-overload]
        agree(here, there)
        found.append(there)
    for place in (0, 1):
        assert np.abs(found[place] - found[place + 1]).max() > 0.05


def test_an_instruction_for_a_reranker(family: Shoal) -> None:
    wishes = (None, "a b together")
    found = [
        [[each.score for each in family.rerank(QUERY, TEXTS, model=model, instruction=wish)] for wish in wishes]
        for model in ("answers-here", "answers")
    ]
    agree(np.array(found[0]), np.array(found[1]))
    assert found[1][0] != found[1][1]


@pytest.mark.parametrize("name", ["cross", "saved-cross", "three"])
@pytest.mark.parametrize("raw", [False, True])
def test_scores(family: Shoal, name: str, raw: bool) -> None:
    """Of pairs and of single texts, with the model's activation and without."""
    inputs: list[Any] = [*TEXTS, *((QUERY, text) for text in TEXTS)]
    here, there = (family.classify(inputs, raw_scores=raw, model=model) for model in (f"{name}-here", name))
    for one, other in zip(here, there, strict=True):
        assert len(one) == (3 if name == "three" else 1)
        scores = {each.label: each.score for each in other}
        agree(np.array([each.score for each in one]), np.array([scores[each.label] for each in one]))


@pytest.mark.parametrize("name", ["cross", "saved-cross", "pylate", "m3", "minilm"])
def test_ranking(family: Shoal, name: str) -> None:
    """A reranker ranks by its scores, an embedder by its vectors; a classifier of three labels does not rank."""
    here, there = (family.rerank(QUERY, TEXTS, model=model) for model in (f"{name}-here", name))
    assert [each.index for each in here] == [each.index for each in there]
    agree(np.array([each.score for each in here]), np.array([each.score for each in there]))
    with pytest.raises(Unsupported):
        family.rerank(QUERY, TEXTS, model="three")


def counts(triton: Triton, model: str) -> tuple[int, int, int]:
    """(requests, items, executions) that Triton has counted."""
    status, answer = triton.http("GET", f"/v2/models/{model}/stats")
    assert status == 200, answer
    (stats,) = answer["model_stats"]
    return (stats["inference_stats"]["success"]["count"], stats["inference_count"], stats["execution_count"])


@pytest.mark.parametrize("name", ["cross", "three", "splade", "m3", "pylate", "minilm"])
async def test_many_users_share_calls(family: Shoal, triton: Triton, name: str) -> None:
    """Each user sends a distinct request; Triton receives a few large calls."""
    kinds = VECTORS.get(name)

    async def user(number: int) -> None:
        text = f"a b {number} fish " * (1 + number % 3)
        if kinds is None:
            await family.aclassify([(QUERY, text)] if name == "cross" else [text], model=name)
        else:
            await family.aembed([text], outputs=kinds, model=name)

    before = await asyncio.to_thread(counts, triton, name)
    await asyncio.gather(*(user(number) for number in range(USERS)))

    def all_counted() -> bool:
        return counts(triton, name)[1] >= before[1] + USERS

    await asyncio.to_thread(until, all_counted, what="Triton's own count, which follows its answers")
    after = await asyncio.to_thread(counts, triton, name)
    requests, _, executions = (now - then for now, then in zip(after, before, strict=True))
    assert requests <= USERS // 4
    assert executions <= USERS // 4


def test_only_requested_outputs_are_transferred(family: Shoal, triton: Triton) -> None:
    """The entry names every output; Triton sends only requested ones. Their shapes are those of the graph."""
    _, config = triton.http("GET", "/v2/models/m3/config")
    assert {one["name"]: one["dims"] for one in config["output"]} == {
        "sentence_embedding": [16],
        "pooled": [16],
        "token_weights": [-1],
        "multi_vectors": [-1, 8],
        "token_embeddings": [-1, 16],
    }
    ids = {"datatype": "INT64", "shape": [1, 3], "data": [2, 10, 3]}
    mask = {"datatype": "INT64", "shape": [1, 3], "data": [1, 1, 1]}
    body = {
        "inputs": [{"name": "input_ids", **ids}, {"name": "attention_mask", **mask}],
        "outputs": [{"name": "token_weights"}],
    }
    status, answer = triton.http("POST", "/v2/models/m3/infer", body)
    assert status == 200, answer
    assert [(one["name"], one["shape"]) for one in answer["outputs"]] == [("token_weights", [1, 3])]


@pytest.mark.parametrize("name", ["saved-cross", "splade", "m3", "pylate", "static"])
def test_another_shoal_knows_them_by_their_entries(family: Shoal, triton: Triton, tmp_path: Path, name: str) -> None:
    """Its home is empty: the entry describes the model, and the tokenizer comes from the model's source. Its own
    settings add the prompts."""
    config = tmp_path / "shoal.toml"
    config.write_text(
        f'[models."{name}"]\nbackends = ["triton://{triton.url}#{name}"]\nprompts = {{"mine" = "a fish "}}\n'
    )
    with shoal.open(config=config, home=str(tmp_path / "home")) as other:
        if name not in VECTORS:
            assert family.rerank(QUERY, TEXTS, model=name) == other.rerank(QUERY, TEXTS, model=name)
            return
        kinds = VECTORS[name]
        here, there = (each.embed(TEXTS, outputs=kinds, model=name) for each in (family, other))
        prompted = other.embed(TEXTS, outputs=kinds, model=name, prompt_name="mine")
        meant = family.embed([f"a fish {text}" for text in TEXTS], outputs=kinds, model=name)
        assert_same(here, there)
        assert_same(meant, prompted)
        assert here.space != there.space


def when_available(ask: Callable[[], Embedded]) -> Embedded:
    """Retry until the model answers; return the answer."""
    end = time.monotonic() + 60
    while True:
        try:
            return ask()
        except Unavailable:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_after_a_restart(own_triton: OwnTriton, tmp_path: Path) -> None:
    """Triton dies and comes back without a model: Shoal loads it again, and its scores are unchanged. The same holds
    for a newly started Shoal."""
    triton = own_triton()
    config = configuration(tmp_path, triton, "cross", "m3")
    with shoal.open(config=config) as client:
        scores = client.rerank(QUERY, TEXTS, model="cross")
        weights = client.embed(TEXTS, outputs=("sparse", "multi"), model="m3")
        os.kill(triton.pid, signal.SIGKILL)
        assert client.rerank(QUERY, TEXTS, model="cross") == scores
        assert_same(weights, when_available(lambda: client.embed(TEXTS, outputs=("sparse", "multi"), model="m3")))
    with shoal.open(config=config) as client:
        assert client.rerank(QUERY, TEXTS, model="cross") == scores
