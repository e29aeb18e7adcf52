"""`shoal.open` with the default model and a tiny language model: the examples of docs/python.md, run for real."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.backends import parse_address
from shoal.backends.local.open import prepare_local
from shoal.config.settings import Settings
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.types import Embedded
from tests.fakes.openai_server import FakeUpstream, answer
from tests.unit.drawn import file_of

pytestmark = pytest.mark.timeout(600)

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "python.md").read_text()
OPEN = shoal.open  # read here: the first use imports the API, which reads files
CHAT = f"file:{TESTS / 'fixtures' / 'tiny_llama_ir'}"
SCHEMA = {
    "type": "object",
    "properties": {"fish": {"type": "integer", "minimum": 2, "maximum": 99}},
    "required": ["fish"],
    "additionalProperties": False,
}
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


def test_a_language_model_in_this_process(tmp_path: Path) -> None:
    """Whole and streamed answers agree, from a loop too; formats are kept; an early close stops the model."""
    with shoal.open(CHAT, home=str(tmp_path)) as s:
        whole = s.chat("one two three", max_tokens=8, temperature=0)
        assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 8)
        stream = s.chat([{"role": "user", "content": "one two three"}], max_tokens=8, temperature=0, stream=True)
        assert "".join(piece.text for piece in stream) == whole.text
        assert (stream.answer.text, stream.answer.finish_reason) == (whole.text, "length")
        assert asyncio.run(s.achat("one two three", max_tokens=8, temperature=0)).text == whole.text
        assert s.generate("one two", max_tokens=4, temperature=0).usage.prompt_tokens < whole.usage.prompt_tokens
        assert 2 <= json.loads(s.chat("fish", response_format=SCHEMA, seed=1).text)["fish"] <= 99
        with s.chat("one", max_tokens=200, ignore_eos=True, stream=True) as stream:
            next(stream)
        assert stream.answer.usage.completion_tokens == 0  # its usage never came
        (model,) = s._background.gateway.registry
        assert model.inflight == 0


async def test_the_examples_of_the_page(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs as it is written, with the tiny language model, a scripted vision model, and scripted ones in place of
    those that only the hub has."""
    told = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "A fish."}, "finish_reason": "stop"}]}
    examples = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    assert len(examples) > 10
    opened: list[str] = []

    def open_stand_in(*models: str, **settings: Any) -> shoal.Shoal:
        opened.extend(models)
        return OPEN(*(stand_ins[model] for model in models), home=home, offline=True, **settings)

    monkeypatch.setattr(shoal, "open", open_stand_in)
    monkeypatch.chdir(tmp_path)
    for name in ("fish.png", "house.jpg"):
        (tmp_path / name).write_bytes(file_of("red"))
    async with FakeUpstream("vision-model") as server:
        server.on("/chat/completions", answer(told))
        stand_ins = {
            "file:./chat-model": CHAT,
            "openai+http://127.0.0.1:8000/v1#vision-model": f"openai+{server.base}#vision-model",
            "hf:BAAI/bge-m3": "fake:vectors=dense+sparse+multi",
            "hf:cross-encoder/ms-marco-MiniLM-L6-v2": "fake:labels=1",
            "hf:distilbert/distilbert-base-uncased-finetuned-sst-2-english": "fake:labels=2",
            "hf:openai/clip-vit-base-patch32": "fake:images=1",
        }
        names: dict[str, Any] = {}
        for example in examples:
            await asyncio.to_thread(exec, compile(example, "docs/python.md", "exec"), names)
    assert set(opened) == set(stand_ins)
