"""200 sentence pairs rank in the same order as with the model's own library, through `shoal.open`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import SetupError
from shoal.types import Array
from tests.parity.families import ALL, CROSS, EXPORTED, LATES, MINILM, Answers, Family, opened
from tests.parity.sentence_pairs import GROUPS, PAIRS, TIE, agreement, order

# Warnings of the reference's libraries are not this project's; a large model may take a while to fetch.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

COSINE = 0.99999
TOLERANCE = 1e-5
"""Absolute for scores; relative for logits above 1."""

SPEARMAN = 0.9999
"""Minimum rank correlation of the default model in bf16."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: its threads spin while they wait for each other, so on a busy machine four take eight
    times as long for short texts as one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_family(
    family: Family, folder: Path, home: Path, *, engine: str = "openvino", precision: str = "f32"
) -> Answers:
    with opened(family, folder, home, engine=engine, precision=precision) as model:
        return family.ask(model)


@cache
def library(family: Family, folder: Path) -> Answers:
    """The answers of the family's library, computed once for the default model, which is always in the same folder."""
    return family.expect(folder)


def test_the_pairs_are_two_hundred() -> None:
    assert len(PAIRS) == len(set(PAIRS)) == sum(map(len, GROUPS.values())) == 200


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_pairs_are_ranked_as_by_the_models_library(tmp_path: Path, family: Family) -> None:
    """By cosine, dot product, MaxSim or score, with all values equal except for rounding. Models that PyTorch would
    have to export first run on its engine; export has its own tests."""
    folder = family.write(tmp_path)
    expected = library(family, folder)
    got = run_family(family, folder, tmp_path / "home", engine="torch" if family in EXPORTED else "openvino")
    assert got.keys() == expected.keys()
    for what, answer in expected.items():
        result = agreement(got[what], answer)
        if result.min_cosine is not None:
            assert result.min_cosine >= COSINE, what
        else:
            largest = max(float(np.abs(row).max()) for row in answer.rows)
            assert result.max_difference <= TOLERANCE * max(1.0, largest), what
        if answer.scores is not None:
            assert result.order is not None and result.order.apart == 0, (what, result.order)
            assert discriminate(answer.scores), what


def discriminate(scores: Array) -> bool:
    """Return whether most pairs have distinct scores [pairs, columns], so that a wrong order would show."""
    return all(len(np.unique(np.round(column, 5))) > 150 for column in scores.T)


@pytest.mark.parametrize("family", [MINILM, *LATES[:2], CROSS[0], CROSS[4]], ids=lambda family: family.name)
def test_documents_are_reranked_in_that_order(tmp_path: Path, family: Family) -> None:
    """Every first sentence as a query, its second sentences as documents."""
    folder = family.write(tmp_path)
    answers = library(family, folder)
    expected = answers.get("scores", next(iter(answers.values()))).scores
    assert expected is not None
    got: list[float] = []
    with opened(family, folder, tmp_path / "home", engine="openvino", precision="f32") as model:
        for query, documents in GROUPS.items():
            ranked = model.rerank(query, documents)
            assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
            assert [documents[one.index] for one in ranked] == [one.text for one in ranked]
            got += [one.score for one in sorted(ranked, key=lambda one: one.index)]
    assert order(np.array(got)[:, None], expected).apart == 0


def test_the_default_model_in_bf16_keeps_almost_all_of_the_order(tmp_path: Path) -> None:
    """If the processor has bf16 arithmetic; otherwise the error names the setting."""
    expected = library(MINILM, MINILM.write(tmp_path))["dense"]
    try:
        got = run_family(MINILM, tmp_path, tmp_path, precision="bf16")["dense"]
    except SetupError as error:
        assert "no bf16 arithmetic; use precision f32 or auto" in str(error)
        return
    result = agreement(got, expected)
    assert result.min_cosine is not None and result.min_cosine >= SPEARMAN
    assert result.order is not None and result.order.spearman >= SPEARMAN


def test_exchanges_are_detected_and_ties_ignored() -> None:
    expected = np.linspace(0.1, 0.9, 5, dtype=np.float32)[:, None]
    same = order(expected, expected)
    assert (same.exchanged, same.apart, round(same.spearman, 9)) == (0, 0, 1.0)
    exchanged = order(expected[[0, 2, 1, 3, 4]], expected)
    assert (exchanged.exchanged, exchanged.apart, round(exchanged.spearman, 9)) == (1, 1, 0.9)
    near = expected.astype(np.float64)
    near[1] = near[0] + TIE / 2
    tie = order(near[[1, 0, 2, 3, 4]], near)
    assert (tie.exchanged, tie.apart) == (1, 0)
    assert order(np.zeros((5, 1)) + near[:1], near).apart == 9, "equal where the reference tells them apart"
