"""Image models without a Shoal graph: exported if possible, else refused with the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.errors import ModelFileError
from shoal.models.address import Address
from shoal.models.convert.export_dual_encoder import ExportedTowers
from shoal.models.manifest import Verdict
from shoal.models.prepare import Fallbacks, prepare
from shoal.models.progress import Progress, Stop
from shoal.models.store import Store
from shoal.specs import ContrastSpec, ImageSpec, ScoreSpec, TextSpec
from tests.unit.models.checkpoints import write_json
from tests.unit.models.open_clip_checkpoints import open_clip

IMAGES = ImageSpec(size=(8, 8), dimension=4, resize="squash")
SCORES = ImageSpec(size=(8, 8), dimension=0, score=ScoreSpec(labels=("a", "b"), activation="softmax", pairs=False))
TEXT = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids",), dimension=4, max_tokens=8)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def timm(folder: Path) -> Address:
    folder.mkdir()
    write_json(folder / "config.json", {"architecture": "mobilenetv3_small_050", "num_classes": 2})
    (folder / "model.safetensors").write_bytes(b"weights")
    return parse_address(f"file:{folder}")


class Exporter:
    """Replaces the exporter process: writes the given files and records the calls."""

    def __init__(self, exported: ExportedTowers) -> None:
        self.found = exported
        self.folders: list[Path] = []

    def __call__(self, folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop) -> ExportedTowers:
        self.folders.append(folder)
        for name in self.found.files:
            (into / name).write_bytes(b"made")
        progress("export", 1.0)
        return self.found


def test_a_classifier_of_timm_is_exported(tmp_path: Path, store: Store) -> None:
    """The model has one graph, no text, and the image's verification result."""
    address = timm(tmp_path / "m")
    verdict = Verdict("agrees with PyTorch", 1.0)
    exporter = Exporter(
        ExportedTowers(
            library="timm",
            image_graph="image.onnx",
            image=SCORES,
            image_verification=verdict,
            parameters=7,
            files=("image.onnx",),
        )
    )
    notes: list[str] = []

    class Noted(Progress):
        def report_note(self, line: str) -> None:
            notes.append(line)

    stored = prepare(address, store=store, ways=Fallbacks(towers=exporter), progress=Noted(), engine=refuse_engine)
    manifest = stored.manifest
    assert (manifest.graph, manifest.graph_source, manifest.text) == ("image.onnx", "exported", None)
    assert manifest.image is not None
    assert (manifest.image.graph, manifest.image.spec, manifest.parameters) == ("image.onnx", SCORES, 7)
    assert manifest.verification_summary == "agrees with PyTorch"
    assert "PyTorch" in notes[0]
    assert prepare(address, store=store, ways=Fallbacks(towers=exporter), engine=refuse_engine) == stored
    assert len(exporter.folders) == 1


def test_towers_of_open_clip_are_exported(tmp_path: Path, store: Store) -> None:
    """For another architecture: both graphs and the similarity."""
    (tmp_path / "m").mkdir()
    folder = open_clip(tmp_path / "m", vision={"timm_model_name": "convnext_base"})
    exporter = Exporter(
        ExportedTowers(
            library="open_clip",
            graph="model.onnx",
            image_graph="image.onnx",
            text=TEXT,
            image=IMAGES,
            contrast=ContrastSpec(scale=10.0),
            text_verification=Verdict("texts agree", 1.0),
            image_verification=Verdict("images agree", 1.0),
            files=("model.onnx", "image.onnx", "tokenizer.json"),
        )
    )
    manifest = prepare(parse_address(f"file:{folder}"), store=store, ways=Fallbacks(towers=exporter)).manifest
    assert (manifest.graph, manifest.text, manifest.contrast) == ("model.onnx", TEXT, ContrastSpec(scale=10.0))
    assert manifest.verification_summary == "texts agree; images agree"
    assert "open_clip" in manifest.conversion


@pytest.mark.parametrize("library", ["timm", "open_clip"])
def test_the_error_without_the_extra_names_it(tmp_path: Path, store: Store, library: str) -> None:
    """The error names the missing extra and how to install it."""
    if library == "timm":
        address = timm(tmp_path / "m")
    else:
        (tmp_path / "m").mkdir()
        folder = open_clip(tmp_path / "m", vision={"timm_model_name": "convnext_base"})
        address = parse_address(f"file:{folder}")
    with pytest.raises(ModelFileError, match="convert-images"):
        prepare(address, store=store)
    assert store.entries() == []


def test_broken_models_are_not_exported(tmp_path: Path, store: Store) -> None:
    """A plain ViT with contradictory settings is refused."""
    (tmp_path / "m").mkdir()
    folder = open_clip(tmp_path / "m", text={"heads": 5})

    def never(*_: Any) -> ExportedTowers:
        raise AssertionError("it was exported")

    with pytest.raises(ModelFileError, match="heads"):
        prepare(parse_address(f"file:{folder}"), store=store, ways=Fallbacks(towers=never))


def refuse_engine(graph: Path) -> Any:
    raise AssertionError("the exporter's process has compared it already")
