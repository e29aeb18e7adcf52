"""Batches of the `openai` package against a real `shoal serve`: results, kill -9, two users, overload, processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest

from tests.integration.server_kit import PATIENCE_S, Server, ShoalServer

EMBED: Literal["/v1/embeddings"] = "/v1/embeddings"
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
SLOW = "fake:delay_ms=20"


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0)


def line(custom_id: str, text: str, url: str = EMBED, **body: Any) -> str:
    asked = {"input": text} if url == EMBED else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}})


def begin(client: openai.OpenAI, lines: list[str], endpoint: Literal["/v1/embeddings", "/v1/chat/completions"]) -> str:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    return batch.id


def finished(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    end = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch_id)).status not in {"completed", "failed", "expired", "cancelled"}:
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "a request has two results"
    return by_id


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    yield {"SHOAL_HOME": str(tmp_path / "home")}


def test_the_whole_api(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """Every call of the client for batches and their files; a bad request fails alone, a bad file as a whole."""
    server = shoal_server(["fake:"], env=home)
    client = client_of(server)
    lines = [line(f"r{at}", f"text {at}", model="fake") for at in range(200)]
    batch_id = begin(client, [*lines, line("bad", "x", model="nobody")], EMBED)
    batch = finished(client, batch_id)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 201, 200, 1)
    output = results(client, batch.output_file_id)
    direct = client.embeddings.create(input="text 7", model="fake", encoding_format="float")
    assert output["r7"]["response"]["body"]["data"][0]["embedding"] == direct.data[0].embedding
    errors = results(client, batch.error_file_id)
    assert errors["bad"]["response"]["status_code"] == 404
    assert errors["bad"]["response"]["body"]["error"]["code"] == "model_not_found"
    chat = finished(client, begin(client, [line("a", "hello there", CHAT, model="fake")], CHAT))
    body = results(client, chat.output_file_id)["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    bad = finished(client, begin(client, [lines[0], lines[0]], EMBED))
    assert bad.status == "failed"
    assert bad.errors is not None
    assert [(each.code, each.line) for each in bad.errors.data or []] == [("duplicate_custom_id", 2)]
    assert [each.id for each in client.batches.list(limit=2)] == [bad.id, chat.id, batch_id]
    assert batch.output_file_id is not None
    names = [each.id for each in client.files.list(purpose="batch_output")]
    assert set(names) == {batch.output_file_id, batch.error_file_id, chat.output_file_id}
    assert client.files.retrieve(batch.output_file_id).filename == f"{batch_id}_output.jsonl"
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError, match="No such File"):
        client.files.content(batch.output_file_id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)
    with pytest.raises(openai.NotFoundError, match="No batch found"):
        client.batches.retrieve("batch_x")


def test_killed_and_started_again(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """A server that dies in the middle of a batch finishes it after its next start: each request has one result."""
    flags = ["--batch-concurrency", "4", "--max-batch-size", "4"]
    server = shoal_server([SLOW], *flags, env=home)
    client = client_of(server)
    batch_id = begin(client, [line(f"r{at}", f"text {at}", model="fake") for at in range(200)], EMBED)
    end = time.monotonic() + PATIENCE_S
    while (counts := client.batches.retrieve(batch_id).request_counts) is None or counts.completed < 40:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert counts.completed < 200
    os.kill(server.process.pid, signal.SIGKILL)
    server.exit_code()
    client = client_of(shoal_server([SLOW], *flags, env=home))
    batch = finished(client, batch_id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 200)
    assert set(results(client, batch.output_file_id)) == {f"r{at}" for at in range(200)}


def test_a_graceful_stop(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """SIGTERM ends the server soon, in the middle of a batch, and another server goes on."""
    flags = ["--batch-concurrency", "4", "--max-batch-size", "4"]
    server = shoal_server([SLOW], *flags, env=home)
    with client_of(server) as client:  # an open connection would prolong the drain
        batch_id = begin(client, [line(f"r{at}", f"t{at}", model="fake") for at in range(200)], EMBED)
    server.process.terminate()
    assert server.exit_code() == 0
    client = client_of(shoal_server([SLOW], *flags, env=home))
    assert len(results(client, finished(client, batch_id).output_file_id)) == 200


def test_two_users_and_a_cancellation(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """One user neither sees nor cancels another's batch."""
    server = shoal_server([SLOW], "--api-key", "one", "--api-key", "two", "--batch-concurrency", "2", env=home)
    one, two = client_of(server, "one"), client_of(server, "two")
    batch_id = begin(one, [line(f"r{at}", f"t{at}", model="fake") for at in range(2000)], EMBED)
    assert list(two.batches.list()) == []
    assert list(two.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        two.batches.cancel(batch_id)
    assert one.batches.cancel(batch_id).status == "cancelling"
    batch = finished(one, batch_id)
    assert batch.status == "cancelled"
    found = results(one, batch.error_file_id)
    assert {each["error"]["code"] for each in found.values()} == {"batch_cancelled"}
    counts = batch.request_counts
    assert counts is not None
    assert counts.completed + counts.failed == counts.total == 2000


def test_overload_is_waited_for(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """A queue that is too short for the batch fails no request."""
    flags = ["--max-queue-items", "4", "--max-batch-size", "2", "--batch-concurrency", "8"]
    server = shoal_server(["fake:delay_ms=2"], *flags, env=home)
    client = client_of(server)
    batch = finished(client, begin(client, [line(f"r{at}", f"t{at}", model="fake") for at in range(30)], EMBED))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)
    assert '"status":429' in server.log.read_text()


def test_several_processes(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """With `--workers`, whichever process a request meets, it finds the same files and batches; large files too."""
    server = shoal_server(["fake:"], "--workers", "2", env=home)
    lines = [line(f"r{at}", f"{at} " + "word " * 200, model="fake") for at in range(2000)]
    batch_id = begin(client_of(server), lines, EMBED)
    for _ in range(4):
        client = client_of(server)
        assert [each.id for each in client.batches.list()] == [batch_id]
        client.close()
    client = client_of(server)
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = finished(client, batch_id)
    assert batch.status == "cancelled"
    assert client.files.content(batch.input_file_id).text == "\n".join(lines)


def test_an_upload_does_not_stay_in_memory(shoal_server: ShoalServer, home: dict[str, str]) -> None:
    """A file of 64 MB is written to disk as it comes: the server grows by a part of that."""
    server = shoal_server(["fake:"], env=home)
    client = client_of(server)
    client.files.create(file=("small", b"{}\n"), purpose="batch")
    before = resident_bytes(server)
    content = b"x" * (64 << 20)
    file = client.files.create(file=("large", content), purpose="batch")
    assert file.bytes == len(content)
    assert resident_bytes(server) - before < 24 << 20


def resident_bytes(server: Server) -> int:
    """Return the most memory that the server has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (found,) = [each for each in status.splitlines() if each.startswith("VmHWM:")]
    return int(found.split()[1]) * 1024
