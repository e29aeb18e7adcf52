"""From a dual-encoder repository to two verified graphs in the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.address import Address
from shoal.models.convert.convert_dual_encoder import convert_towers
from shoal.models.convert.verify import Run
from shoal.models.manifest import check_files
from shoal.models.prepare import prepare
from shoal.models.store import Store
from shoal.types import Array
from tests.unit.models.engines import RUNS
from tests.unit.models.tower_checkpoints import FAMILIES, SIZE, towers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return towers(tmp_path / "m")


@pytest.fixture
def address(folder: Path) -> Address:
    return parse_address(f"file:{folder}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.mark.parametrize("family", FAMILIES)
def test_both_towers_and_the_tokenizer(tmp_path: Path, family: str) -> None:
    """All files are reported, and progress reaches the end of each stage."""
    (tmp_path / "m").mkdir()
    source, target = towers(tmp_path / "m", family), tmp_path / "out"
    target.mkdir()
    steps: list[tuple[str, float]] = []
    result = convert_towers(source, target, progress=lambda stage, part: steps.append((stage, part)))
    assert sorted(result.files) == sorted(path.name for path in target.iterdir())
    assert {result.graph, result.image_graph, result.spec.tokenizer} <= set(result.files)
    assert result.image_spec.size == (SIZE, SIZE)
    assert result.spec.dimension == result.image_spec.dimension
    assert steps[0] == ("read", 0.0)
    assert steps[-1] == ("convert", 1.0)
    assert [part for stage, part in steps if stage == "convert"] == sorted(p for s, p in steps if s == "convert")


def test_the_manifest_has_both(store: Store, address: Address) -> None:
    """Each has its own verification; the second call uses the store."""
    stored = prepare(address, store=store, engine=RUNS["onnxruntime"])
    manifest = stored.manifest
    assert manifest.text is not None
    assert manifest.image is not None
    assert manifest.contrast is not None
    assert manifest.verification is not None
    assert manifest.image.verification is not None
    assert manifest.verification_summary == f"{manifest.verification.text}; {manifest.image.verification.text}"
    assert {manifest.graph, manifest.image.graph} <= set(manifest.files)
    assert check_files(stored.path, manifest, full=True) == []
    assert prepare(address, store=store, engine=RUNS["onnxruntime"]) == stored


def test_without_an_engine_nothing_is_verified_yet(store: Store, address: Address) -> None:
    """The first start with an engine verifies it."""
    first = prepare(address, store=store)
    assert first.manifest.verification_summary == ""
    assert prepare(address, store=store) == first
    assert prepare(address, store=store, engine=RUNS["onnxruntime"]).manifest.verification_summary


@pytest.mark.parametrize("wrong", ["model.onnx", "image.onnx"])
def test_a_wrong_graph_is_never_stored(store: Store, address: Address, wrong: str) -> None:
    """For either tower."""

    def engine(graph: Path) -> Run:
        run = RUNS["onnxruntime"](graph)

        def moved(inputs: dict[str, Array], outputs: object) -> dict[str, Array]:
            arrays = run(inputs, outputs)  # type: ignore[arg-type]
            return {name: np.roll(rows, 1, axis=1) for name, rows in arrays.items()} if graph.name == wrong else arrays

        return moved

    tower = "text" if wrong == "model.onnx" else "image"
    with pytest.raises(VerificationFailed, match=f"the {tower} tower does not agree"):
        prepare(address, store=store, engine=engine)
    assert store.entries() == []


def test_unreadable_models_are_refused_by_name(tmp_path: Path, store: Store) -> None:
    """The reader's error is raised, and nothing is stored."""
    (tmp_path / "n").mkdir()
    address = parse_address(f"file:{towers(tmp_path / 'n', config={'model_type': 'siglip2'})}")
    with pytest.raises(ModelFileError, match="NaFlex"):
        prepare(address, store=store)
    assert store.entries() == []
