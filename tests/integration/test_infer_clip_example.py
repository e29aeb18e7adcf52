"""The example in the README of the original open CLIP inference server, unchanged except for the image host, with a
tiny model's real towers: with `shoal serve`, and with the preset as a drop-in on a real Triton."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.models.convert.verify import min_cosine
from shoal.types import Image, Item
from tests.integration.server_kit import Server, ShoalServer
from tests.integration.triton_kit import PATIENCE_S, Triton
from tests.unit.backends.local.dual_encoder_kit import expected, vit_b_32
from tests.unit.pipelines.image.image_kit import drawn, saved, turned

OTHER = "other=fake:"
"""Served from the start: without any named model, Shoal loads every table of a shoal.toml."""

PAIR = "ViT-B-32/laion2b_s34b_b79k"
NAMED = {"model_name": "ViT-B-32", "pretrained": "laion2b_s34b_b79k"}
TITLE = "Model ViT-B-32 with checkpoint laion2b_s34b_b79k"
TEXTS = ["I am a sentence.", "I am another sentence.", "I am a third sentence."]
FILES = {"/image1.jpg": turned(6), "/image2.jpg": saved(drawn(320, 240, 2), "JPEG", quality=90)}
IMAGES = [Image(data) for data in FILES.values()]


class Images(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = FILES.get(self.path)
        self.send_response(404 if data is None else 200)
        self.send_header("content-length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    """The host and port that serve the two images."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Images) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """The model's folder. A shoal.toml in the server's working directory gives the model the example's name."""
    folder = vit_b_32(tmp_path / "clip")
    (tmp_path / "shoal.toml").write_text(f'[models."{PAIR}"]\nbackends = ["file:{folder}"]\nprecision = "f32"\n')
    return folder


def call(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, _, content = server.request("POST", path, body)
    return status, json.loads(content)


def list_models(server: Server) -> list[str]:
    return list(json.loads(server.request("GET", "/loaded_models")[2])["models"])


def entries(triton: Triton) -> set[str]:
    return {path.name for path in triton.repository.iterdir()}


def agree(rows: list[list[float]], folder: Path, inputs: list[Item]) -> None:
    assert min_cosine(np.array(rows, np.float32), expected(folder, inputs)) >= 0.9999


def loads_and_infers(server: Server, folder: Path, host: str) -> None:
    """Send the example's first requests and check each answer."""
    urls = [f"http://{host}{path}" for path in FILES]
    both = {**NAMED, "text": TEXTS, "image": urls}
    status, answer = call(server, "/infer", **both)
    assert (status, answer["detail"].startswith(f"{TITLE} is not loaded.")) == (400, True)

    loaded = call(server, "/load_clip_model", **NAMED)
    assert loaded == (200, {"message": f"{TITLE} loaded successfully."}), server.log.read_text()
    assert call(server, "/load_clip_model", **NAMED) == (200, {"message": f"{TITLE} is already loaded."})
    assert list_models(server) == ["other", PAIR]

    status, answer = call(server, "/infer", **both)
    assert status == 200, answer
    assert set(answer) == {"text_embeddings", "image_embeddings", "processingTimeMs"}
    agree(answer["text_embeddings"], folder, [*TEXTS])
    agree(answer["image_embeddings"], folder, [*IMAGES])
    for rows in (answer["text_embeddings"], answer["image_embeddings"]):
        assert not np.allclose(rows[0], rows[1], atol=0.01)

    status, answer = call(server, "/infer_text", **NAMED, text=TEXTS[0])
    assert (status, set(answer)) == (200, {"embedding", "processingTimeMs"}), answer
    agree(answer["embedding"], folder, [TEXTS[0]])
    for image, images in ((urls[0], IMAGES[:1]), (urls, IMAGES)):
        status, answer = call(server, "/infer_image", **NAMED, image=image)
        assert (status, set(answer)) == (200, {"embedding", "processingTimeMs"}), answer
        agree(answer["embedding"], folder, [*images])
    status, answer = call(server, "/infer_image", **NAMED, image="http://example.com/image.jpg")
    assert (status, "image_hosts" in answer["detail"]) == (400, True)


def unloads(server: Server) -> None:
    assert call(server, "/unload_model", **NAMED) == (200, {"message": f"{TITLE} unloaded successfully."})
    assert list_models(server) == ["other"]
    assert call(server, "/infer", **NAMED, text=TEXTS)[0] == 400


def deletes(server: Server) -> None:
    assert call(server, "/delete_model", **NAMED) == (200, {"message": f"{TITLE} deleted successfully."})
    assert "Traceback" not in server.log.read_text()


def test_the_example(shoal_server: ShoalServer, configured: Path, host: str, tmp_path: Path) -> None:
    server = shoal_server([OTHER], "--home", str(tmp_path / "home"), "--image-hosts", host)
    loads_and_infers(server, configured, host)
    unloads(server)
    deletes(server)


@pytest.mark.timeout(PATIENCE_S)
def test_the_example_by_the_preset(
    shoal_server: ShoalServer, configured: Path, host: str, triton: Triton, tmp_path: Path
) -> None:
    """Both towers are written to the original's Triton, and are gone from its repository at the end."""
    environ = {
        "TRITON_GRPC_URL": triton.url,
        "SHOAL_HOME": str(tmp_path / "home"),
        "SHOAL_TRITON_REPOSITORY": str(triton.repository),
        "SHOAL_IMAGE_HOSTS": host,
    }
    server = shoal_server([OTHER], "--as", "inference-server", env=environ)
    loads_and_infers(server, configured, host)
    unloads(server)
    entry = PAIR.replace("/", "~")
    assert entries(triton) >= {entry, f"{entry}~~image"}
    deletes(server)
    assert not [name for name in entries(triton) if entry in name]
