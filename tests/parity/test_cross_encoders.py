"""The scores of sentence-transformers' CrossEncoder and of transformers' classifiers, from the same files, through the
whole serving path: prepared into a store, run by OpenVINO in float32, framed, cut and activated by the pair
pipeline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import LocalModel, open_local
from shoal.config.settings import Settings
from shoal.core.protocols import Prepared
from shoal.models.convert.convert import convert
from shoal.models.convert.verify import verify
from shoal.types import Array, BatchTask, Classify, Item, Rerank
from tests.parity.reference_models import CLASSIFIERS, CROSS_CASES, LONGEST, CrossCase, write_cross
from tests.unit.models.engines import RUNS

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TOLERANCE = 1e-5
"""Absolute for scores; relative for logits above 1."""

QUERY = "where can i renew my passport"
DOCUMENTS = [
    "Fish swim together",
    "a",
    "",
    "How long does it take to renew a passport, and where?",
    "MIXED Case And ÉTUDE, 東京 and 京",
    "[SEP] </s> <pad> [PAD] tokens as text",
    "harbour water tells fewer lies " * 3,
    "fish " * 3 * LONGEST,
    "unbroken" * LONGEST,
]
LONG = "harbour water " * LONGEST
PAIRS = [
    *((QUERY, document) for document in DOCUMENTS),
    (LONG, "fish"),
    (LONG, LONG[5:]),
    ("", "together"),
    ("passport " * (LONGEST // 2), "renew " * (LONGEST // 2)),
    ("passport " * (LONGEST // 2 - 2), "renew " * LONGEST),
]


def cross_encoder(folder: Path) -> Any:
    import torch
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def opened(folder: Path, home: Path) -> LocalModel:
    settings = Settings(home=str(home), offline=True, engine="openvino", precision="f32", truncate=True)
    return asyncio.run(open_local("m", [parse_address(f"file:{folder}")], settings))


def scores(local: LocalModel, task: BatchTask, items: Sequence[Item], size: int = 5) -> Array:
    """Scores [items, labels], in batches of `size` in a random order, so that lengths mix."""
    prepared = local.pipeline.prepare([(task, item) for item in items])
    order = list(range(len(items)))
    random.Random(5).shuffle(order)
    engine = local.engines[0]
    rows: dict[int, Array] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        batch = [one for place in places if isinstance(one := prepared[place], Prepared)]
        assert len(batch) == len(places)
        inputs = local.pipeline.collate(batch, engine.facts)
        outputs = asyncio.run(engine.infer(inputs, batch[0].outputs, {}, time.monotonic() + 60))
        for place, row in zip(places, local.pipeline.finish(outputs, batch), strict=True):
            assert isinstance(row, np.ndarray)
            rows[place] = row
    return np.stack([rows[place] for place in range(len(items))])


def close(got: Array, expected: Array) -> None:
    expected = expected.reshape(got.shape)
    assert np.abs(got - expected).max() <= TOLERANCE * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("case", CROSS_CASES, ids=lambda case: case.name)
def test_scores_equal_those_of_sentence_transformers(tmp_path: Path, case: CrossCase) -> None:
    """Activated and raw, for pairs of all lengths; both libraries read the same settings from the files."""
    import torch

    folder = write_cross(case, tmp_path)
    model, local = cross_encoder(folder), opened(folder, tmp_path / "home")
    assert local.facts.max_input_tokens == model.max_seq_length == LONGEST
    assert len(local.facts.labels) == model.num_labels
    assert "agrees with a numpy forward pass" in local.facts.verified
    assert local.facts.tasks == (("rerank", "classify") if case.labels == 1 else ("classify",))
    assert (local.facts.dimension, local.facts.vectors, local.facts.space) == (None, (), "")
    for raw in (False, True):
        expected = model.predict(PAIRS, activation_fn=torch.nn.Identity() if raw else None)
        close(scores(local, Classify(model="m", inputs=[], raw_scores=raw), PAIRS), expected)


def test_reranking_gives_the_order_of_sentence_transformers(tmp_path: Path) -> None:
    """One query, many documents."""
    folder = write_cross(CrossCase("rank"), tmp_path)
    ranked = cross_encoder(folder).rank(QUERY, DOCUMENTS)
    task = Rerank(model="m", queries=[QUERY], documents=DOCUMENTS)
    got = scores(opened(folder, tmp_path / "home"), task, task.items)[:, 0]
    assert np.argsort(-got, kind="stable").tolist() == [one["corpus_id"] for one in ranked]


@pytest.mark.parametrize("case", CLASSIFIERS, ids=lambda case: case.name)
def test_scores_equal_those_of_transformers(tmp_path: Path, case: CrossCase) -> None:
    """Single texts and pairs, by the rules of its pipeline for text classification."""
    import transformers

    folder = write_cross(case, tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    local = opened(folder, tmp_path / "home")
    names = list(model.config.id2label.values())
    assert local.facts.labels == tuple(names)
    # With one pair at a time, transformers ignores an empty second text; sentence-transformers does not.
    inputs: list[Item] = [*DOCUMENTS, *(pair for pair in PAIRS if pair[1])]
    formatted = [{"text": one[0], "text_pair": one[1]} if isinstance(one, tuple) else one for one in inputs]
    answers = [reference(one, top_k=None, truncation=True) for one in formatted]
    label_scores = [answer[0] if isinstance(answer[0], list) else answer for answer in answers]
    expected = [[{each["label"]: each["score"] for each in one}[name] for name in names] for one in label_scores]
    close(scores(local, Classify(model="m", inputs=[]), inputs), np.array(expected, np.float32))


@pytest.mark.parametrize("name", ["bert-1", "mpnet-3", "xlm-roberta-1"])
def test_both_engines_agree_with_numpy(tmp_path: Path, name: str) -> None:
    """Weights under transformers' names, on every engine that reads graphs."""
    folder = write_cross(next(case for case in CROSS_CASES if case.name == name), tmp_path)
    target = tmp_path / "served"
    target.mkdir()
    conversion = convert(folder, target)
    for engine, open_run in RUNS.items():
        verification = verify(folder, conversion.contract, target, conversion.spec, open_run(target / conversion.graph))
        assert verification.passed and verification.method == "reference", (engine, verification.text)
