"""`shoal serve --triton` with the default model, as `make serve-triton` runs it, beside the local engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.models.prepare import prepare
from shoal.models.sources import Access
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import Store
from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import (
    TINY,
    Traffic,
    ask,
    command,
    cosines,
    embeddings,
    hub_of,
    logged,
    serving,
    status_of,
    until,
    vectors,
)
from tests.integration.triton_kit import PATIENCE_S, triton_home

pytestmark = pytest.mark.timeout(PATIENCE_S)

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = [
    "hello world",
    "a longer text, of several words, that needs padding beside the others",
    "Größe 東京 naïve \N{FISH}",
    "x",
    "for i in range(10): print(i)\n" * 5,
    "word " * 1000,
]
TOKENS = [[101, 7592, 2088, 102], [101, 102], [101, *range(2000, 2090), 102]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the default model, and the machine's tritonserver."""
    folder = triton_home(tmp_path_factory.mktemp("home"))
    prepare(parse_address(DEFAULT_MODEL), store=Store(folder), access=Access(hub="http://127.0.0.1:9"))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with hub_of(tmp_path_factory.mktemp("hub")) as url:
        yield url


@pytest.fixture(scope="module")
def server(home: Path, hub: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No model is named: the default model, on its own Triton."""
    env = {"SHOAL_HOME": str(home), "HF_ENDPOINT": hub, "SHOAL_TOKEN_IDS": "accept"}
    with serving(tmp_path_factory.mktemp("triton"), [], "--triton", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def local(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model on the local engine: as `f32`, and as `fast` in this processor's best precision."""
    config = '[models.f32]\nprecision = "f32"\n[models.fast]\nprecision = "auto"\n'
    addresses = [f"f32={DEFAULT_MODEL}", f"fast={DEFAULT_MODEL}"]
    env = {"SHOAL_HOME": str(home), "SHOAL_TOKEN_IDS": "accept"}
    with serving(tmp_path_factory.mktemp("local"), addresses, env=env, config=config) as running:
        yield running


def test_every_surface_answers_with_one_vector(server: Server) -> None:
    """/v1/embedding, /v1/embeddings, /infer, /infer_text and /embed."""
    expected = vectors(server, MODEL, TEXTS[:2])
    requests: dict[str, Any] = {
        "/v1/embedding": [{"query": text} for text in TEXTS[:2]],
        "/infer": {"model_name": MODEL, "text": TEXTS[:2]},
        "/infer_text": {"model_name": MODEL, "text": TEXTS[:2]},
        "/embed": {"inputs": TEXTS[:2]},
    }
    for path, body in requests.items():
        status, _, answer = ask(server, "POST", path, body)
        assert status == 200, (path, answer)
        fields = {"/v1/embedding": "embedding", "/infer": "text_embeddings", "/infer_text": "embedding"}
        rows = answer[fields[path]] if isinstance(answer, dict) else answer
        if path == "/v1/embedding":
            rows = [each["embedding"] for each in answer]
        assert np.allclose(np.array(rows), expected, atol=1e-6), path


def test_it_runs_on_triton(server: Server) -> None:
    """The server reports it, and Triton's own statistics count each text once. They lag behind the answers, so up to
    ten texts of earlier requests may be included."""
    _, _, answer = ask(server, "GET", f"/v1/models/{MODEL}")
    assert (answer["backend"], answer["dimension"], answer["precision"]) == ("triton", 384, "f32"), answer
    before = counted(server)
    vectors(server, MODEL, [f"text number {number}" for number in range(64)])
    until(lambda: counted(server) >= before + 64, what="Triton's own count, which follows its answer")
    assert counted(server) <= before + 64 + 10


def counted(server: Server) -> int:
    _, _, answer = ask(server, "GET", "/metrics", headers={"accept": "application/json"})
    [stats] = [each for each in answer["model_stats"] if each["name"] == MODEL]
    assert int(stats["execution_count"]) <= int(stats["inference_count"])
    return int(stats["inference_count"])


def test_vectors_are_those_of_the_local_engine(server: Server, local: Server) -> None:
    """Texts of all lengths in one request, against both precisions."""
    rows = vectors(server, MODEL, TEXTS)
    assert rows.shape == (len(TEXTS), 384)
    assert cosines(rows, vectors(local, "f32", TEXTS)).min() >= 0.99999
    assert np.abs(rows - vectors(local, "f32", TEXTS)).max() < 1e-4
    assert cosines(rows, vectors(local, "fast", TEXTS)).min() >= 0.9999


@pytest.mark.parametrize(
    "more",
    [{"input": TOKENS}, {"dimensions": 100}, {"input": TEXTS[0]}, {"input": TEXTS[-1]}, {"encoding_format": "base64"}],
    ids=["tokens", "dimensions", "one", "too long", "base64"],
)
def test_options_work_as_on_the_local_engine(server: Server, local: Server, more: dict[str, Any]) -> None:
    """Usage, truncation, space and vectors."""
    body = {"input": TEXTS[:3]} | more
    status, headers, answer = ask(server, "POST", "/v1/embeddings", {"model": MODEL, **body})
    there, local_headers, reference = ask(local, "POST", "/v1/embeddings", {"model": "f32", **body})
    assert (status, there) == (200, 200), (answer, reference)
    assert answer["usage"] == reference["usage"]
    assert headers["x-shoal-space"] == local_headers["x-shoal-space"]
    assert headers["x-shoal-truncated"] == local_headers["x-shoal-truncated"] == str(int(body["input"] == TEXTS[-1]))
    assert cosines(decoded(answer), decoded(reference)).min() >= 0.99999


def decoded(answer: Any) -> Any:
    import base64

    rows = [each["embedding"] for each in answer["data"]]
    if isinstance(rows[0], str):
        rows = [np.frombuffer(base64.b64decode(row), np.float32) for row in rows]
    return np.array(rows, np.float32)


def test_vectors_that_are_not_normalised(server: Server, local: Server) -> None:
    """The vectors before the model's last step, which Triton's answer must therefore contain too."""
    rows, reference = (
        ask(one, "POST", "/embed", {"inputs": TEXTS[:3], "normalize": False, "model": name})[2]
        for one, name in ((server, MODEL), (local, "f32"))
    )
    assert np.abs(np.linalg.norm(np.array(rows), axis=1) - 1).min() > 0.01
    assert np.allclose(np.array(rows), np.array(reference), atol=1e-3)


def test_refusals_are_those_of_the_local_engine(server: Server, local: Server) -> None:
    """Errors of requests that never reach Triton."""
    bodies: tuple[dict[str, Any], ...] = (
        {"input": []},
        {"input": [[10**9]]},
        {"input": TEXTS[0], "dimensions": 4096},
        {"input": ""},
    )
    for body in bodies:
        found = ask(server, "POST", "/v1/embeddings", {"model": MODEL, **body})
        reference = ask(local, "POST", "/v1/embeddings", {"model": "f32", **body})
        assert (found[0], found[0] // 100 == 2) == (reference[0], reference[0] // 100 == 2), (body, found, reference)


def test_users_of_all_lengths_share_batches(server: Server) -> None:
    """Requests whose texts differ in length run as one batch, which Triton's own batcher cannot do."""
    texts = ["word " * (1 + number % 16) for number in range(64)]
    expected = vectors(server, MODEL, texts)
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda text: embeddings(server, MODEL, text), texts))
    assert {status for status, _, _ in replies} == {200}
    rows = np.array([answer["data"][0]["embedding"] for _, _, answer in replies])
    assert cosines(rows, expected).min() >= 0.99999
    assert max(int(headers["x-shoal-batch-size"]) for _, headers, _ in replies) > 1


class ManagementClient:
    """One API that loads, unloads and deletes models; each call asserts success."""

    def __init__(self, server: Server, home: Path) -> None:
        self.server = server
        self.home = home

    def load(self) -> None:
        raise NotImplementedError

    def unload(self) -> None:
        raise NotImplementedError

    def delete(self) -> None:
        raise NotImplementedError

    def done(self, method: str, path: str, body: Any = None) -> Any:
        status, _, answer = ask(self.server, method, path, body, {"content-type": "application/json"})
        assert status == 200, answer
        return answer


class InferClient(ManagementClient):
    def load(self) -> None:
        self.done("POST", "/load_sentence_transformer_model", {"model_name": TINY})

    def unload(self) -> None:
        self.done("POST", "/unload_model", {"model_name": TINY})

    def delete(self) -> None:
        self.done("POST", "/delete_model", {"model_name": TINY})


class RouterClient(ManagementClient):
    """This API answers at once; the list of models shows when a call is done."""

    def load(self) -> None:
        self.done("POST", "/models", {"model": f"hf:{TINY}"})
        until(lambda: status_of(self.server, TINY) == "unloaded", what="the download")
        self.done("POST", "/models/load", {"model": TINY})
        until(lambda: status_of(self.server, TINY) == "loaded", what="the load")

    def unload(self) -> None:
        self.done("POST", "/models/unload", {"model": TINY})
        until(lambda: status_of(self.server, TINY) == "unloaded", what="the unload")

    def delete(self) -> None:
        self.done("DELETE", f"/models?model={TINY}")


class OpenAIClient(ManagementClient):
    def load(self) -> None:
        self.done("POST", f"/v1/models/hf:{TINY}/load")

    def unload(self) -> None:
        self.done("POST", f"/v1/models/{TINY}/unload", {})

    def delete(self) -> None:
        self.done("DELETE", f"/v1/models/{TINY}")


class CommandLineClient(ManagementClient):
    def shoal(self, *arguments: str, **environ: str) -> str:
        result = command(self.server, *arguments, **environ)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def load(self) -> None:
        self.shoal("load", TINY, "--url", self.server.base_url)

    def unload(self) -> None:
        self.shoal("unload", TINY, "--url", self.server.base_url)

    def delete(self) -> None:
        self.shoal("rm", TINY, "--url", self.server.base_url)


class PullClient(CommandLineClient):
    """`shoal pull` writes to the repository and loads there, without a Shoal server."""

    def environ(self) -> dict[str, str]:
        sockets = re.findall(r"is ready at (/[^\s,]+)", logged(self.server))
        repository = self.home / "triton" / "repository"
        variables = {"SHOAL_HOME": str(self.home), "SHOAL_TRITON_URL": f"triton://{sockets[-1]}"}
        return {**variables, "SHOAL_TRITON_REPOSITORY": str(repository), "SHOAL_TRITON_PLATFORM": "python"}

    def load(self) -> None:
        from os import environ

        output = self.shoal("pull", TINY, "--to", "triton", **self.environ(), HF_ENDPOINT=environ["HF_ENDPOINT"])
        assert "loaded by Triton" in output
        self.shoal("load", TINY, "--url", self.server.base_url)

    def delete(self) -> None:
        self.unload()
        self.shoal("rm", TINY, "--from", "triton", **self.environ())
        self.shoal("rm", TINY, **self.environ())


@pytest.mark.parametrize("kind", [InferClient, RouterClient, OpenAIClient, CommandLineClient, PullClient])
def test_a_second_model_comes_and_goes_under_traffic(
    server: Server, home: Path, hub: str, kind: type[ManagementClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load, query, unload, reload and delete one model while another one serves traffic without errors."""
    monkeypatch.setenv("HF_ENDPOINT", hub)
    client = kind(server, home)
    with Traffic(server, MODEL, clients=2) as traffic:
        for again in (False, True):
            client.load()
            assert vectors(server, TINY, ["fish", "to gether"]).shape == (2, 16)
            assert status_of(server, TINY) == "loaded"
            if not again:
                client.unload()
                until(lambda: embeddings(server, TINY, "fish")[0] == 404, what="the unload")
                assert status_of(server, TINY) == "unloaded"
                traffic.more()
        client.delete()
        traffic.more()
    assert traffic.failures == []
    assert traffic.longest_s < 20
    assert status_of(server, TINY) == ""
    assert matching_files(home, "tiny") == []
    assert "Traceback" not in logged(server)


def matching_files(home: Path, word: str) -> list[str]:
    """Return the model folders in the store and the repository whose names contain `word`."""
    places = (home / "models", home / "triton" / "repository")
    return [str(path) for place in places for path in place.iterdir() if word in path.name]


BAD = ["", "..", ".", "a/../../b", "/etc/passwd", "a\0b", "x" * 300, "Größe", "file:/etc", "a b", "~", "org/..", "../x"]


def test_bad_names_are_refused_and_touch_nothing(server: Server, home: Path) -> None:
    """Load, unload and delete through every API."""
    before = everything(home)
    for name in BAD:
        for method, path, body in knocks(name):
            status, _, answer = ask(server, method, path, body, {"content-type": "application/json"})
            assert 400 <= status < 500, (name, path, status, answer)
    for name in ("", "..", "a/../../b", "/etc/passwd", "Größe"):
        for verb in ("load", "unload", "rm"):
            result = command(server, verb, "--url", server.base_url, "--", name)
            assert result.returncode != 0, (verb, name, result.stdout)
            assert "Traceback" not in result.stderr
    assert everything(home) == before
    assert "Traceback" not in logged(server)
    assert server.ready()


def knocks(name: str) -> list[tuple[str, str, Any]]:
    from urllib.parse import quote

    quoted = quote(name, safe="")
    return [
        *(("POST", f"/{verb}_model", {"model_name": name}) for verb in ("unload", "delete")),
        ("POST", "/load_sentence_transformer_model", {"model_name": name}),
        *(("POST", f"/models/{verb}", {"model": name}) for verb in ("load", "unload")),
        ("POST", "/models", {"model": name}),
        ("DELETE", f"/models?model={quoted}", None),
        *(("POST", f"/v1/models/{quoted}/{verb}", {}) for verb in ("load", "unload")),
        ("DELETE", f"/v1/models/{quoted}", None),
    ]


def everything(home: Path) -> list[tuple[str, int, int]]:
    """(path, size, time of change) of all files of models."""
    places = (home / "models", home / "triton" / "repository")
    files = sorted(path for place in places for path in place.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def test_its_log_is_json_lines(server: Server) -> None:
    """It covers everything above, Triton's start included."""
    for line in logged(server).splitlines():
        assert json.loads(line)["level"] in ("info", "warning"), line
