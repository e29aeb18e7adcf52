"""The commands of the guides and of the migration pages, run in order against real servers, as they are written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import processes_in, starting
from tests.integration.documentation_kit import NewReader, environ, reader
from tests.integration.server_kit import Server
from tests.unit.docs.blocks import ROOT, blocks_of

__all__ = ["environ", "reader"]  # pytest finds fixtures by name in this module

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of somebody else: TEI's routes and OpenAI's."""
    with processes_in(tmp_path_factory.mktemp("upstream")) as processes:
        yield starting(processes)(["org/name=fake:"])


def test_batches(reader: NewReader) -> None:
    """docs/batches.md: a file with its request, as a batch."""
    page = reader()
    request = next(block for block in blocks_of(ROOT / "docs" / "batches.md") if block.language == "json")
    (page.folder / "requests.jsonl").write_text(request.text)
    page.serve("shoal serve all-MiniLM-L6-v2=fake:")
    page.read("docs/batches.md")


def test_keys(reader: NewReader) -> None:
    """docs/keys.md: a user lists models, and an admin loads one."""
    assert "intfloat/e5-small-v2" in reader().read("docs/keys.md")


def test_from_tei(reader: NewReader) -> None:
    """docs/tei.md: TEI's command line, its clients, and several models."""
    assert "(1, 16)" in reader().read("docs/tei.md")  # the tiny model's dimensions


def test_from_infinity(reader: NewReader) -> None:
    """docs/migrate/infinity.md."""
    assert '"embedding"' in reader().read("docs/migrate/infinity.md")


def test_from_ollama(reader: NewReader) -> None:
    """docs/migrate/ollama.md: pull and embed."""
    assert '"embeddings"' in reader().read("docs/migrate/ollama.md")


def test_from_litellm(reader: NewReader, upstream: Server) -> None:
    """docs/migrate/litellm.md: an embedder of TEI and two replicas of a language model."""
    ours = f"http://127.0.0.1:{upstream.port}"
    places = {f"http://{theirs}": ours for theirs in ("a:8000", "b:8000", "c:8080")}
    printed = reader(places=places).read("docs/migrate/litellm.md")
    assert '"chat.completion"' in printed


def test_from_triton_grpc_proxy(reader: NewReader) -> None:
    """docs/migrate/triton-grpc-proxy.md, with a scripted model in place of Triton's (test_presets has one)."""
    assert '"embedding"' in reader(flags="minilm=fake:").read("docs/migrate/triton-grpc-proxy.md")


def test_from_inference_server(reader: NewReader) -> None:
    """docs/migrate/inference-server.md, without Triton (test_presets has one): load and infer."""
    printed = reader(flags="--backend local").read("docs/migrate/inference-server.md")
    assert "loaded successfully" in printed
    assert '"embedding"' in printed


def test_from_auto_batching_proxy(reader: NewReader, upstream: Server) -> None:
    """docs/migrate/auto-batching-proxy.md, before a server with TEI's routes."""
    page = "docs/migrate/auto-batching-proxy.md"
    assert '"embeddings"' in reader(ports={"8080": upstream.port}).read(page)
