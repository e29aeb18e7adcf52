"""Pickled weights: chosen only where no other file has them, converted before anything reads them, and not kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.backends import parse_address
from shoal.errors import Cancelled, ModelFileError
from shoal.models import prepare as module
from shoal.models.address import Address
from shoal.models.convert.convert import convert
from shoal.models.convert.pickles import convert_pickles
from shoal.models.manifest import check_files, write_manifest
from shoal.models.prepare import prepare
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access, FetchedModel
from shoal.models.space import stored_space
from shoal.models.store import Store, StoredModel
from tests.unit.models.checkpoints import HIDDEN, checkpoint, dense, write_json
from tests.unit.models.conftest import Hub, Recorder
from tests.unit.models.engines import openvino_run
from tests.unit.models.torch_files import Call, Global, archive, describe, save


def pickled(folder: Path) -> Path:
    """Turn all weights of a model into files of torch.save."""
    for path in folder.rglob("model.safetensors"):
        save(path.with_name("pytorch_model.bin"), load_file(path))
        path.unlink()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT with a Dense, and a stray checkpoint that no file names."""
    checkpoint_folder = checkpoint(tmp_path / "model", after=("Dense", "Normalize"))
    dense(checkpoint_folder, "2_Dense", HIDDEN, 6)
    (checkpoint_folder / "checkpoint-5").mkdir()
    (checkpoint_folder / "checkpoint-5" / "pytorch_model.bin").write_bytes(b"another")
    return pickled(checkpoint_folder)


@pytest.fixture
def address(folder: Path) -> Address:
    return parse_address(f"file:{folder}")


def leftovers(stored: StoredModel) -> list[str]:
    return [
        path.name
        for path in stored.path.rglob("*")
        if path.suffix in (".bin", ".pt") or path.name.startswith(".") or "index" in path.name
    ]


def test_they_are_turned_and_not_kept(store: Store, address: Address, folder: Path, recorder: Recorder) -> None:
    """The graph is built from the converted weights; the manifest keeps the hashes of the published files."""
    stored = prepare(address, store=store, engine=openvino_run, progress=recorder)
    manifest = stored.manifest
    assert (manifest.graph_source, manifest.text_spec.dimension) == ("built", 6)
    assert manifest.conversion == "built from config.json and safetensors; its pickles were converted to safetensors"
    assert manifest.verification is not None and "numpy" in manifest.verification.text
    assert {"source/model.safetensors", "source/2_Dense/model.safetensors"} < set(manifest.files)
    assert not leftovers(stored)
    published = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("pytorch_model.bin", "2_Dense/pytorch_model.bin")
    }
    assert manifest.weights == published
    assert (folder / "pytorch_model.bin").is_file(), "the folder is its owner's"
    assert ("read", 1.0) in recorder.steps


def test_the_space_outlives_another_conversion(store: Store, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer converter starts from the stored safetensors, and the weights still count as the published ones."""
    stored = prepare(address, store=store)
    older = msgspec.structs.replace(stored.manifest, converter=stored.manifest.converter - 1)
    write_manifest(stored.path, older)
    again = prepare(address, store=store)
    assert again.manifest.converter == stored.manifest.converter
    assert again.manifest.weights == stored.manifest.weights
    assert stored_space(again) == stored_space(stored)


def test_another_engine_finds_them_turned(store: Store, address: Address) -> None:
    """An engine that runs a model from its folder finds safetensors there."""
    stored = prepare(address, store=store)
    source = stored.path / module.SOURCE
    assert {path.name for path in source.glob("*.*")} >= {"config.json", "model.safetensors", "modules.json"}
    assert not (source / "checkpoint-5").exists()


def test_links_are_followed(store: Store, tmp_path: Path, folder: Path) -> None:
    """The hub's own cache consists of links."""
    linked = tmp_path / "linked"
    for path in folder.rglob("*"):
        if path.is_file():
            place = linked / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
    stored = prepare(parse_address(f"file:{linked}"), store=store)
    assert not [path for path in stored.path.rglob("*") if path.is_symlink()]
    assert check_files(stored.path, stored.manifest) == []


def test_from_the_hub(store: Store, hub: Hub, tmp_path: Path, folder: Path) -> None:
    """Only the pickles that the loader reads are fetched, and none remain in the source."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    hub.files = {name: (folder / name).read_bytes() for name in names}
    hub.lfs = frozenset({"pytorch_model.bin"})
    address = parse_address("hf:org/tiny")
    stored = prepare(address, store=store, access=Access(hub=hub.url))
    assert set(stored.manifest.weights) == {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}
    assert not leftovers(stored)
    assert not any("checkpoint" in path for path in hub.paths)


def test_heads_that_are_pickles(store: Store, tmp_path: Path) -> None:
    """bge-m3, as it is published: a graph, and two heads that are pickles."""
    folder = checkpoint(tmp_path / "model", "xlm-roberta", after=())
    graph = convert(folder, tmp_path)
    (folder / "onnx").mkdir()
    os.rename(tmp_path / graph.graph, folder / "onnx" / "model.onnx")
    random = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    save(folder / "pytorch_model.bin", load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    heads = {"sparse_linear.pt": 1, "colbert_linear.pt": 5}
    for name, size in heads.items():
        save(folder / name, {"weight": random[:size].astype("f2"), "bias": random[0, :size]})
    stored = prepare(parse_address(f"file:{folder}"), store=store, engine=openvino_run)
    assert stored.manifest.graph_source == "shipped"
    assert stored.manifest.text_spec.kinds == ("dense", "sparse", "multi", "tokens")
    assert set(stored.manifest.weights) == {"onnx/model.onnx", *heads}
    assert not leftovers(stored)


def test_shards_and_their_index(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    whole = prepare(parse_address(f"file:{folder}"), store=store, engine=openvino_run).graph.read_bytes()
    (folder / "model.safetensors").unlink()
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    names = sorted(tensors)
    for number, shard in enumerate(shards):
        save(folder / shard, {name: tensors[name] for name in names[number::2]})
    places = {name: shards[number % 2] for number, name in enumerate(names)}
    index = folder / "pytorch_model.bin.index.json"
    write_json(index, {"metadata": {"total_size": 1}, "weight_map": places})
    address = parse_address(f"file:{folder}")
    stored = prepare(address, store=store, engine=openvino_run)
    assert set(stored.manifest.weights) == set(shards)
    assert stored.graph.read_bytes() == whole
    assert {path.name for path in (stored.path / "source").glob("model*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    for wrong in ({}, {names[0]: "../pytorch_model.bin.safetensors"}, {names[0]: 1}):
        write_json(index, {"weight_map": wrong})
        with pytest.raises(ModelFileError, match=r"pytorch_model\.bin\.index\.json: weight_map: .*shards"):
            prepare(address, store=store, refresh=True)


def test_open_clip_weights(tmp_path: Path) -> None:
    """A training checkpoint: the tensors under `state_dict`, with DataParallel's prefix, beside other values."""
    tensors = {"visual.proj": np.ones((2, 3), np.float32)}
    (tmp_path / "source").mkdir()
    state = {"epoch": 3, "state_dict": {f"module.{name}": each for name, each in describe(tensors).items()}}
    archive(tmp_path / "source" / "open_clip_pytorch_model.bin", state, {"0": tensors["visual.proj"].tobytes()})
    fetched = FetchedModel(tmp_path / "source", parse_address("hf:org/tiny"))
    convert_pickles(fetched, tmp_path, Progress().report_work, Stop())
    (made,) = (tmp_path / "source").iterdir()
    assert made.name == "open_clip_model.safetensors"
    assert {name: each.tolist() for name, each in load_file(made).items()} == {"visual.proj": [[1.0] * 3] * 2}


def test_a_failure_leaves_nothing(store: Store, address: Address, folder: Path) -> None:
    """A malicious pickle or a cancellation leaves no entry, not even a partial one; the next attempt works."""
    good = (folder / "pytorch_model.bin").read_bytes()
    call = Call(Global("os", "system"), ("true",))
    archive(folder / "pytorch_model.bin", {"weight": call}, {})
    with pytest.raises(
        ModelFileError, match=r"pytorch_model\.bin: is not a pickle of tensors only: it names 'os.system'"
    ):
        prepare(address, store=store)
    (folder / "pytorch_model.bin").write_bytes(good)

    class Cancelling(Progress):
        def report_work(self, stage: str, fraction: float) -> None:
            stop.set()

    stop = Stop()
    with pytest.raises(Cancelled):
        prepare(address, store=store, stop=stop, progress=Cancelling())
    assert store.entries() == []
    assert not [path for path in store.home.rglob("*") if path.is_file() and "locks" not in path.parts]
    assert prepare(address, store=store).manifest.graph == "model.onnx"
