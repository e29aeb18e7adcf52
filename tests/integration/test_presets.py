"""`shoal serve --as NAME` as a drop-in for the originals: their published requests, verbatim, on a real Triton."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.server_kit import Server, ShoalServer, wait_until
from tests.integration.triton_kit import PATIENCE_S, Triton
from tests.integration.triton_models import MODELS, near_free_vector
from tests.unit.models.checkpoints import HIDDEN, checkpoint

pytestmark = pytest.mark.timeout(PATIENCE_S)

E5 = "intfloat/e5-small-v2"
COMMIT = "e5" * 20


def call(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, JSON)."""
    status, _, content = server.request(method, path, body)
    return status, json.loads(content)


@pytest.fixture
def environ(triton: Triton) -> dict[str, str]:
    """The variables that the original reads, for a Triton with a model under the original's default names."""
    folder = triton.repository / "model"
    if not folder.exists():
        shutil.copytree(triton.repository / "near_free" / "1", folder / "1")
        (folder / "config.pbtxt").write_text(MODELS["near_free"].config("model", triton.notes))
    triton.load("model")
    host, _, port = triton.url.partition(":")
    return {"TRITON_SERVER_URL": f"http://{host}", "TRITON_SERVER_GRPC_PORT": port}


class TestTritonGrpcProxy:
    """Requests of the README of kozistr/triton-grpc-proxy-rs."""

    QUERIES = ("asdf", "asdf asdf", "asdf asdf asdf", "asdf asdf asdf asdf")

    def test_its_requests(self, shoal_server: ShoalServer, environ: dict[str, str]) -> None:
        """GET /health and POST /v1/embedding answer as the original does; vectors equal the model's."""
        server = shoal_server([], "--as", "triton-grpc-proxy", env=environ)
        status, _, body = server.request("GET", "/health")
        assert (status, body) == (200, b"ok")
        status, rows = call(server, "POST", "/v1/embedding", [{"query": query} for query in self.QUERIES])
        assert status == 200, rows
        assert [set(row) for row in rows] == [{"embedding"}] * len(self.QUERIES)
        vectors = np.array([row["embedding"] for row in rows], np.float32)
        assert np.array_equal(vectors, np.stack([near_free_vector(query) for query in self.QUERIES]))

    def test_a_length_that_is_given_and_right(self, shoal_server: ShoalServer, environ: dict[str, str]) -> None:
        """A correct length changes nothing."""
        server = shoal_server([], "--as", "triton-grpc-proxy", env={**environ, "EMBEDDING_SIZE": "1024"})
        status, rows = call(server, "POST", "/v1/embedding", [{"query": "asdf"}])
        assert (status, len(rows[0]["embedding"])) == (200, 1024)

    def test_a_length_that_is_given_and_wrong(self, shoal_server: ShoalServer, environ: dict[str, str]) -> None:
        """The original splits the vectors in the wrong places; here it is an error at start that names both lengths."""
        wrong = {**environ, "EMBEDDING_SIZE": "384"}
        server = shoal_server([], "--as", "triton-grpc-proxy", env=wrong, wait=False)
        assert server.exit_code() == 1
        text = server.log.read_text()
        assert "384" in text
        assert "1024" in text
        assert "Traceback" not in text

    def test_triton_is_not_up_yet(self, shoal_server: ShoalServer) -> None:
        """The original exits; here the server stays up, reports that it is not ready, and why."""
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = str(closed.getsockname()[1])
        environ = {"TRITON_SERVER_URL": "http://127.0.0.1", "TRITON_SERVER_GRPC_PORT": port}
        server = shoal_server([], "--as", "triton-grpc-proxy", env=environ, wait=False)
        wait_until(lambda: "is not served yet: waiting for" in server.log.read_text(), server.process, server.log)
        assert port in server.log.read_text()
        assert server.request("GET", "/health/live")[0] == 200
        assert server.request("GET", "/health/ready")[0] == 503
        status, answer = call(server, "POST", "/v1/embedding", [{"query": "asdf"}])
        assert status == 503, answer

    def test_the_compose_file_s_misspelt_port(self, shoal_server: ShoalServer) -> None:
        """The original ignores it silently; here standard error names it."""
        misspelt = {"TRITON_SERVER_PORT_GRPC": "9001"}
        server = shoal_server(["fake:"], "--as", "triton-grpc-proxy", env=misspelt)
        assert "TRITON_SERVER_PORT_GRPC is ignored" in server.log.read_text()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A local hub that has a tiny model under the name of the examples; its address."""
    folder = checkpoint(tmp_path / "checkpoint")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            content = files.get(path.removeprefix(f"/{E5}/resolve/{COMMIT}/"))
            if path.startswith(f"/api/models/{E5}"):
                content = json.dumps({"id": E5, "modelId": E5, "sha": COMMIT, "siblings": siblings(files)}).encode()
            self.send_response(200 if content is not None else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content or b"")))
            self.send_header("etag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content or b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def siblings(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Files as a hub lists them: weights with their hash."""
    listed: list[dict[str, Any]] = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    for each in listed:
        if each["rfilename"].endswith(".safetensors"):
            content = files[each["rfilename"]]
            each["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return listed


class TestInferenceServer:
    """Requests of the README of OwenPendrighElliott/inference_server (those with images: test_infer_clip_example). Its
    loading example has one comma too many and is not valid JSON."""

    TEXTS = ("I am a sentence.", "I am another sentence.", "I am a third sentence.")

    @pytest.fixture
    def server(self, shoal_server: ShoalServer, triton: Triton, hub: str, tmp_path: Path) -> Server:
        environ = {
            "TRITON_GRPC_URL": triton.url,
            "HF_ENDPOINT": hub,
            "SHOAL_HOME": str(tmp_path / "home"),
            "SHOAL_TRITON_REPOSITORY": str(triton.repository),
        }
        return shoal_server([], "--as", "inference-server", env=environ)

    def test_nothing_is_loaded_at_the_start(self, server: Server) -> None:
        """The server is up and ready without a model, and rejects inference with the original's message."""
        assert call(server, "GET", "/loaded_models") == (200, {"models": []})
        status, answer = call(server, "POST", "/infer", {"model_name": E5, "text": [*self.TEXTS]})
        assert status == 400
        assert f"Model {E5}" in answer["detail"]
        assert "is not loaded. Load the model first using /load_model" in answer["detail"]

    def test_a_model_s_whole_life(self, server: Server, triton: Triton) -> None:
        """Load, infer, metrics, lists, unload, delete; each twice where a repeat matters."""
        named = {"model_name": E5}
        load = ("POST", "/load_sentence_transformer_model", named)
        assert call(server, *load) == (200, {"message": f"Model {E5} loaded successfully."}), server.log.read_text()
        assert call(server, *load) == (200, {"message": f"Model {E5} is already loaded."})
        assert call(server, "GET", "/loaded_models") == (200, {"models": [E5]})
        self._infers(server)
        self._counts(server)
        listed = {each["name"]: each for each in call(server, "GET", "/repository_models")[1]["models"]}
        assert listed[E5]["state"] == "READY"
        assert listed["near_free"].get("managed") is False
        unload = ("POST", "/unload_model", named)
        assert call(server, *unload)[1]["message"].endswith("unloaded successfully.")
        assert call(server, *unload)[1]["message"].endswith("is not loaded.")
        assert call(server, "GET", "/loaded_models") == (200, {"models": []})
        assert any("e5-small-v2" in path.name for path in triton.repository.iterdir())
        delete = ("POST", "/delete_model", named)
        assert call(server, *delete)[1]["message"].endswith("deleted successfully.")
        assert call(server, *delete)[1]["message"].endswith("deleted successfully.")
        assert not any("e5-small-v2" in path.name for path in triton.repository.iterdir())
        assert {path.name for path in triton.repository.iterdir()} >= set(MODELS)

    def _infers(self, server: Server) -> None:
        """Texts of different lengths in one request; the original's own example fails with them."""
        start = time.monotonic()
        status, answer = call(server, "POST", "/infer", {"model_name": E5, "text": [*self.TEXTS]})
        assert status == 200, answer
        assert set(answer) == {"text_embeddings", "processingTimeMs"}
        assert 0 < answer["processingTimeMs"] <= (time.monotonic() - start) * 1000
        vectors = np.array(answer["text_embeddings"])
        assert vectors.shape == (len(self.TEXTS), HIDDEN)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        status, answer = call(server, "POST", "/infer_text", {"model_name": E5, "text": self.TEXTS[1]})
        assert status == 200, answer
        assert np.allclose(answer["embedding"], vectors[1:2], atol=1e-5)

    def _counts(self, server: Server) -> None:
        """GET /metrics is JSON under this preset, with 64-bit numbers as strings and names as in Triton."""

        def counted() -> dict[str, Any]:
            status, headers, body = server.request("GET", "/metrics")
            assert (status, headers["content-type"].partition(";")[0]) == (200, "application/json"), body
            (stats,) = [one for one in json.loads(body)["model_stats"] if one["name"] == "intfloat_e5-small-v2"]
            return dict(stats)

        wait_until(lambda: int(counted()["inference_count"]) > len(self.TEXTS), server.process, server.log)
        stats = counted()
        assert isinstance(stats["inference_count"], str)
        parts = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit"}
        assert {*parts, "cache_miss"} <= set(stats["inference_stats"])
