"""`shoal.open` with the default model: the examples of docs/python.md, run for real."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.backends import parse_address
from shoal.backends.local.open import prepare_local
from shoal.config.settings import Settings
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.types import Embedded

pytestmark = pytest.mark.timeout(600)

TEXTS = ["A shoal is a group of fish.", "Fish swim together in groups.", "Interest rates rose again."]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that holds the default model."""
    folder = str(tmp_path_factory.mktemp("home"))
    prepare_local(parse_address(DEFAULT_MODEL), Settings(home=folder))
    return folder


def test_the_default_model_in_this_process(home: str) -> None:
    """Unit vectors that rank related texts first, the same from an event loop and from the cache; nothing stays
    behind."""
    before = set(threading.enumerate())
    with shoal.open(home=home, offline=True, cache_mb=8) as s:
        vectors = s.embed(TEXTS)
        assert vectors.shape == (3, 384)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-3)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
        result = s.embed(TEXTS, outputs=["dense"])
        assert result.facts.cached == 3
        assert np.array_equal(result.vectors, vectors)
        assert result.space
        assert np.array_equal(asyncio.run(s.aembed(TEXTS)), vectors)
        ranked = s.rerank(TEXTS[0], TEXTS[1:], top_n=1)
        assert (ranked[0].index, ranked[0].text) == (0, TEXTS[1])
        assert s.embed(["cut " * 2000], outputs=["dense"]).truncated == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


def test_threads_that_ask_at_once_share_its_batches(home: str) -> None:
    """Forty threads with one text each get correct answers in fewer batches than texts."""
    with shoal.open(home=home, offline=True) as s, ThreadPoolExecutor(40) as pool:
        texts = [f"Sentence number {number} about fish." for number in range(40)]
        alone = s.embed(texts)

        def one(text: str) -> Embedded:
            return s.embed([text], outputs=["dense"])

        results = list(pool.map(one, texts))
    assert all(each.vectors[0] @ vector > 0.999 for each, vector in zip(results, alone, strict=True))
    assert max(each.facts.size for each in results) > 1


def test_rows_on_disk_outlive_the_process(home: str) -> None:
    """A second process answers from rows that the first one wrote, bit for bit."""
    program = (
        "import shoal, sys, time\n"
        "with shoal.open(cache_disk_mb=4, home=sys.argv[1], offline=True) as s:\n"
        "    time.sleep(float(sys.argv[2]))\n"
        "    found = s.embed(['a', 'b'], outputs=['dense'])\n"
        "    print(found.facts.cached, found.vectors.tobytes().hex())\n"
    )
    reports = []
    for patience in ("0", "3"):  # the background reads where rows are on disk
        run = subprocess.run([sys.executable, "-c", program, home, patience], capture_output=True, check=True)
        reports.append(run.stdout.split())
    (none, first), (all_of_them, second) = reports
    assert (int(none), int(all_of_them)) == (0, 2)
    assert first == second
    assert list(Path(home, "rows").glob("*/*.rows"))
