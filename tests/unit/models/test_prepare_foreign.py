"""Architectures without a Shoal graph: exported, run by an engine that supports them, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.backends import parse_address
from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.address import Address
from shoal.models.convert import as_published
from shoal.models.convert.export import ExportResult
from shoal.models.prepare import Fallbacks, prepare
from shoal.models.progress import Progress, Stop
from shoal.models.store import Store
from tests.unit.models.checkpoints import HIDDEN, checkpoint
from tests.unit.models.conftest import Recorder
from tests.unit.models.engines import openvino_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT with another model_type."""
    return rename(checkpoint(tmp_path / "model"), "xlnet")


@pytest.fixture
def address(folder: Path) -> Address:
    return parse_address(f"file:{folder}")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def rename(folder: Path, model_type: str, **more: object) -> Path:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"model_type": model_type} | more))
    return folder


def exporting(folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop) -> ExportResult:
    """An exporter whose output can be converted."""
    progress("export", 0.5)
    shutil.copytree(folder, into, dirs_exist_ok=True)
    rename(into, "bert")
    return ExportResult(folder=str(into), kind="encoder", verification="agrees with PyTorch")


def test_without_a_way_it_is_refused(store: Store, address: Address) -> None:
    with pytest.raises(ModelFileError, match=r"^config.json: model_type: 'xlnet' .*pip install -e '\.\[convert\]'"):
        prepare(address, store=store)
    assert store.entries() == []


def test_it_is_exported_converted_and_verified(store: Store, address: Address, recorder: Recorder) -> None:
    """The manifest records it; no files of the exporter remain."""
    stored = prepare(address, store=store, engine=openvino_run, progress=recorder, ways=Fallbacks(exporting))
    manifest = stored.manifest
    assert (manifest.graph, manifest.graph_source) == ("model.onnx", "exported")
    assert manifest.conversion == "exported by PyTorch (agrees with PyTorch)"
    assert manifest.verification is not None
    assert manifest.text_spec.dimension == HIDDEN
    assert ("export", 0.5) in recorder.steps
    assert any("PyTorch exports it" in line for line in recorder.lines)
    assert not list(stored.path.glob(".export-*"))
    assert set(manifest.files) == {"model.onnx", "tokenizer.json"}


def test_an_export_that_fails_leaves_nothing(store: Store, address: Address) -> None:
    def fails(*_: object) -> ExportResult:
        raise VerificationFailed("the exported graph does not agree with PyTorch")

    with pytest.raises(VerificationFailed):
        prepare(address, store=store, ways=Fallbacks(fails))
    assert store.entries() == []


def never(*_: object) -> ExportResult:
    pytest.fail("it was exported")


@pytest.mark.parametrize("key", ["auto_map", "quantization_config"])
def test_code_and_quantised_weights_are_not_exported(store: Store, tmp_path: Path, key: str) -> None:
    """The exporter would load a different model under a known architecture's name."""
    folder = rename(checkpoint(tmp_path / "model"), "bert", **{key: {"AutoModel": "mine.Model"}})
    with pytest.raises(ModelFileError, match=key):
        prepare(parse_address(f"file:{folder}"), store=store, ways=Fallbacks(never, folders=True))


@pytest.mark.parametrize("file", ["modules.json", "model.safetensors"])
def test_other_faults_are_not_exported(store: Store, tmp_path: Path, file: str) -> None:
    """Errors in files other than config.json affect PyTorch as well."""
    folder = checkpoint(tmp_path / "model")
    (folder / file).write_bytes(b"[{}]")
    with pytest.raises(ModelFileError, match=file):
        prepare(parse_address(f"file:{folder}"), store=store, ways=Fallbacks(never, folders=True))


def test_a_known_family_with_unknown_parts_is_exported(store: Store, tmp_path: Path) -> None:
    """Shoal builds BERT, but not with relative positions; PyTorch does."""
    folder = rename(checkpoint(tmp_path / "model"), "bert", position_embedding_type="relative_key")

    def export(folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop) -> ExportResult:
        shutil.copytree(folder, into, dirs_exist_ok=True)
        rename(into, "bert", position_embedding_type="absolute")
        return ExportResult(folder=str(into), kind="encoder")

    stored = prepare(parse_address(f"file:{folder}"), store=store, ways=Fallbacks(export))
    assert stored.manifest.graph_source == "exported"


def test_an_engine_of_folders_gets_it_as_it_is(store: Store, address: Address) -> None:
    """Only the tokenizer is stored; another engine does not treat it as a graph."""
    stored = prepare(address, store=store, engine=openvino_run, ways=Fallbacks(exporting, folders=True))
    manifest, spec = stored.manifest, stored.manifest.text_spec
    assert manifest.graph_source == as_published.SOURCE
    assert manifest.parameters > 1000
    assert (spec.dimension, spec.inputs, spec.modules) == (HIDDEN, ("input_ids", "attention_mask"), ("normalize",))
    assert spec.outputs == ("sentence_embedding", "pooled", "token_embeddings")
    assert set(manifest.files) == {"tokenizer.json"}
    assert set(manifest.weights) == {"model.safetensors"}
    again = prepare(address, store=store, engine=openvino_run, ways=Fallbacks(folders=True))
    assert again.manifest.created == manifest.created
    with pytest.raises(ModelFileError, match="model_type"):
        prepare(address, store=store, engine=openvino_run)
    assert prepare(address, store=store, ways=Fallbacks(exporting)).manifest.graph_source == "exported"


def test_a_prompt_that_is_left_out_is_an_input(tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True, "include_prompt": False}
    folder = rename(checkpoint(tmp_path / "model", pooling=pooling), "xlnet")
    assert as_published.prepare_published(folder, tmp_path).spec.inputs == (
        "input_ids",
        "attention_mask",
        "pooling_mask",
    )


@pytest.mark.parametrize(("types", "names", "inputs"), [(2, None, 3), (1, None, 2), (2, ["input_ids"], 2)])
def test_a_classifier_runs_from_its_folder(
    folder: Path, tmp_path: Path, types: int, names: list[str] | None, inputs: int
) -> None:
    """Labels come from its files; segments are used if model and tokenizer have them."""
    rename(folder, "xlnet", architectures=["XForSequenceClassification"], id2label={"0": "x"}, type_vocab_size=types)
    (folder / "modules.json").unlink()
    if names is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_input_names": names, "model_max_length": 9}))
    spec = as_published.prepare_published(folder, tmp_path).spec
    assert spec.score is not None
    assert (spec.score.labels, spec.tasks, spec.outputs) == (("x",), ("rerank", "classify"), ("logits",))
    assert spec.inputs == ("input_ids", "attention_mask", "token_type_ids")[:inputs]


def test_splade_runs_from_its_folder(folder: Path, tmp_path: Path) -> None:
    """A masked language model, which has no token vectors."""
    rename(folder, "xlnet", architectures=["XForMaskedLM"], _name_or_path="org/splade-x")
    (folder / "modules.json").unlink()
    spec = as_published.prepare_published(folder, tmp_path).spec
    assert (spec.kinds, spec.outputs, spec.dimension) == (("sparse",), ("sparse_embedding",), 0)


def test_invalid_model_files_are_refused(folder: Path, tmp_path: Path) -> None:
    """Invalid labels and unreadable weights."""
    modules = (folder / "modules.json").read_bytes()
    (folder / "modules.json").unlink()
    rename(folder, "xlnet", architectures=["XForSequenceClassification"], id2label={"1": "x"})
    with pytest.raises(ModelFileError, match="id2label"):
        as_published.prepare_published(folder, tmp_path)
    (folder / "modules.json").write_bytes(modules)
    rename(folder, "xlnet", architectures=None)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        as_published.prepare_published(folder, tmp_path)


def test_progress_may_be_left_out(store: Store, address: Address) -> None:
    assert prepare(address, store=store, ways=Fallbacks(exporting), progress=Progress()).manifest.graph == "model.onnx"
