"""`shoal bulk` as a process: the same shards after kills, every task, bad rows, refusals."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_vector, word_id
from tests.integration.server_kit import PATIENCE_S, Processes, environment, wait_until

ROWS = 6000
BAD = {3: "", 1500: "a reject-item", 2222: "a poison-item", 4000: "a nan-item"}
FLAGS = ("rows.jsonl", "--id-column", "id", "--shard-rows", "500")


def write_rows(folder: Path, count: int) -> Path:
    """Write a JSONL file of `count` texts, some of them BAD."""
    path = folder / "rows.jsonl"
    texts = [BAD.get(row, " ".join(["word"] * (row % 20) + [f"text{row}"])) for row in range(count)]
    path.write_text("".join(json.dumps({"id": f"id{row}", "text": text}) + "\n" for row, text in enumerate(texts)))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path, ROWS)


def bulk(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `shoal bulk` in a folder to its end."""
    command = [sys.executable, "-m", "shoal", "bulk", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.iterdir() if path.name != ".lock")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_killed_runs_end_equal(form: str, processes: Processes, tmp_path: Path) -> None:
    """A run that is killed after each of several shards, continued, writes the files of an uninterrupted one."""
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    flags = (*FLAGS, "--format", form)
    whole = bulk(tmp_path, "fake:", *flags, "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    for shard in (0, 3, 7):
        process, log = processes("-m", "shoal", "bulk", "fake:delay_ms=5", *flags, "--out", "killed")
        wanted = tmp_path / "killed" / f"shard-{shard:05}.{form}"
        wait_until(wanted.exists, process, log)
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    last = bulk(tmp_path, "fake:", *flags, "--out", "killed")
    assert last.returncode == 0, last.stderr
    assert "kept from before" in last.stderr
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "whole")


def test_vectors_and_bad_rows(rows: Path, tmp_path: Path) -> None:
    """Each row has its own vector, in order; bad rows are in errors.jsonl and nowhere else."""
    done = bulk(tmp_path, "fake:", *FLAGS, "--out", "out")
    assert done.returncode == 0, done.stderr
    found = [line for shard in range(12) for line in lines(tmp_path / "out" / f"shard-{shard:05}.jsonl")]
    vectors = np.concatenate([np.load(tmp_path / "out" / f"shard-{shard:05}.npy") for shard in range(12)])
    assert [line["row"] for line in found] == [row for row in range(ROWS) if row not in BAD]
    assert all(line["id"] == f"id{line['row']}" for line in found)
    texts = [line["text"] for line in lines(rows)]
    for place in range(0, len(found), 97):
        words = texts[found[place]["row"]].split()
        vector = compute_vector([word_id(word) for word in words], 32)
        assert np.allclose(vectors[place], vector / np.linalg.norm(vector), atol=1e-6)
    errors = lines(tmp_path / "out" / "errors.jsonl")
    assert [(line["row"], line["file_row"], line["id"]) for line in errors] == [(n, n + 1, f"id{n}") for n in BAD]
    assert "empty text" in errors[0]["reason"]


def test_interrupt_says_how_to_continue(rows: Path, processes: Processes, tmp_path: Path) -> None:
    """Ctrl-C ends with 130 and a line that names the folder."""
    process, log = processes("-m", "shoal", "bulk", "fake:delay_ms=50", *FLAGS, "--out", "out")
    wait_until((tmp_path / "out" / "shard-00000.npy").exists, process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert "finished shards in out are kept: the same command continues" in log.read_text()


def test_other_tasks(tmp_path: Path) -> None:
    """Pairs get scores, prompts get answers."""
    (tmp_path / "pairs.csv").write_text("query,document\nq,one\nq,\nq,two words\n")
    done = bulk(tmp_path, "fake:labels=1", "pairs.csv", "--task", "rerank", "--out", "scores")
    assert done.returncode == 0, done.stderr
    scores = lines(tmp_path / "scores" / "shard-00000.jsonl")
    assert [line["row"] for line in scores] == [0, 2]
    assert all(0 <= line["score"] <= 1 for line in scores)
    (tmp_path / "prompts.txt").write_text("say one\nsay two\n")
    done = bulk(tmp_path, "fake:", "prompts.txt", "--task", "generate", "--no-chat", "--out", "answers")
    assert done.returncode == 0, done.stderr
    answers = lines(tmp_path / "answers" / "shard-00000.jsonl")
    assert ["one" in answers[0]["answer"], "two" in answers[1]["answer"]] == [True, True]
    assert answers[0]["completion_tokens"] > 0


@pytest.mark.usefixtures("rows")
def test_refusals(tmp_path: Path) -> None:
    """Wrong usage is 2, a failure 1, each with the next step."""
    cases = [
        (1, "more than --max-errors 1", ("--out", "new", "--max-errors", "1")),
        (1, "name another column", ("--out", "other", "--column", "txt")),
        (2, "has no effect on embed", ("--out", "task", "--max-tokens", "3")),
        (2, "--format must be one of npy, parquet", ("--out", "form", "--format", "csv")),
    ]
    assert bulk(tmp_path, "fake:", *FLAGS, "--out", "out").returncode == 0
    for code, message, flags in cases:
        done = bulk(tmp_path, "fake:", *FLAGS, *flags)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert (tmp_path / "new" / "errors.jsonl").exists()
    done = bulk(tmp_path, "fake:", *FLAGS, "--out", "out", "--dimensions", "8")
    assert done.returncode == 2
    assert "dimensions was not set and is 8" in done.stderr
