"""Pickled weights: selected only if they can be converted, converted before anything else reads them, and not kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.backends import parse_address
from shoal.errors import Cancelled, ModelFileError, SourceError
from shoal.models import prepare as module
from shoal.models.address import Address
from shoal.models.convert.export import ExportResult
from shoal.models.convert.pickles import convert_pickles
from shoal.models.manifest import check_files, write_manifest
from shoal.models.prepare import Fallbacks, prepare
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access, FetchedModel
from shoal.models.space import stored_space
from shoal.models.store import Store, StoredModel
from tests.unit.models.checkpoints import HIDDEN, checkpoint, dense, write_json
from tests.unit.models.conftest import Hub, Recorder
from tests.unit.models.engines import openvino_run

ACCESS = Access(pickles=True)
Report = Callable[[str, float], None]


class Turning:
    """Replaces the exporter: a "pickle" here is a renamed safetensors file. Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def __call__(self, folder: Path, into: Path, progress: Report, stop: Stop, *, graph: bool) -> ExportResult:
        converted = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            safe = name.replace("pytorch_model.bin", "model.safetensors").replace(".pt", ".safetensors")
            if safe == name or name.endswith(".json"):
                continue
            self.calls.append((name, graph))
            (into / safe).parent.mkdir(parents=True, exist_ok=True)
            (into / safe).write_bytes(path.read_bytes())
            converted.append(safe)
        progress("read", 1.0)
        return ExportResult(folder=str(into), kind="encoder", converted=tuple(converted))


def pickled(folder: Path) -> Path:
    """Rename all weights of a model to pickle names."""
    for path in folder.rglob("model.safetensors"):
        path.rename(path.with_name("pytorch_model.bin"))
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
    turning = Turning()
    stored = prepare(
        address, store=store, access=ACCESS, engine=openvino_run, ways=Fallbacks(turning), progress=recorder
    )
    manifest = stored.manifest
    assert turning.calls == [("2_Dense/pytorch_model.bin", False), ("pytorch_model.bin", False)]
    assert (manifest.graph_source, manifest.text_spec.dimension) == ("built", 6)
    assert manifest.conversion == "built from config.json and safetensors; PyTorch converted its pickles to safetensors"
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
    stored = prepare(address, store=store, access=ACCESS, ways=Fallbacks(Turning()))
    older = msgspec.structs.replace(stored.manifest, converter=stored.manifest.converter - 1)
    write_manifest(stored.path, older)
    again = prepare(address, store=store, access=ACCESS, ways=Fallbacks(None))
    assert again.manifest.converter == stored.manifest.converter
    assert again.manifest.weights == stored.manifest.weights
    assert stored_space(again) == stored_space(stored)


def test_another_engine_finds_them_turned(store: Store, address: Address) -> None:
    """An engine that runs a model from its folder uses the stored one."""
    stored = prepare(address, store=store, access=ACCESS, ways=Fallbacks(Turning()))
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
    stored = prepare(parse_address(f"file:{linked}"), store=store, access=ACCESS, ways=Fallbacks(Turning()))
    assert not [path for path in stored.path.rglob("*") if path.is_symlink()]
    assert check_files(stored.path, stored.manifest) == []


def test_without_the_extra_they_are_refused(store: Store, address: Address) -> None:
    """The error names the file and the install command."""
    with pytest.raises(SourceError, match=r"only .*pytorch_model\.bin.*pip install -e '\.\[convert\]'"):
        prepare(address, store=store)
    assert store.entries() == []


def test_from_the_hub(store: Store, hub: Hub, tmp_path: Path, folder: Path) -> None:
    """Pickles are fetched only if they will be converted, and none remain in the source."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    hub.files = {name: (folder / name).read_bytes() for name in names}
    hub.lfs = frozenset({"pytorch_model.bin"})
    address = parse_address("hf:org/tiny")
    with pytest.raises(SourceError, match="convert"):
        prepare(address, store=store, access=Access(hub=hub.url))
    assert not any(path.endswith(".bin") for path in hub.paths)
    stored = prepare(address, store=store, access=Access(hub=hub.url, pickles=True), ways=Fallbacks(Turning()))
    assert set(stored.manifest.weights) == {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}
    assert not leftovers(stored)
    assert not any("checkpoint" in path for path in hub.paths)


def test_heads_that_are_pickles(store: Store, tmp_path: Path, recorder: Recorder) -> None:
    """bge-m3: the exporter adds vector kinds; without it the model only embeds and reports the missing heads."""
    from safetensors.numpy import load_file, save_file

    folder = checkpoint(tmp_path / "model", "xlm-roberta")
    random = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    for name, size in (("sparse_linear", 1), ("colbert_linear", 5)):
        save_file({"weight": random[:size].copy(), "bias": random[0, :size].copy()}, folder / f"{name}.pt")
    address = parse_address(f"file:{folder}")
    plain = prepare(address, store=store, progress=recorder)
    assert plain.manifest.text_spec.kinds == ("dense", "tokens")
    assert any("sparse_linear.pt" in line and "'convert' extra" in line for line in recorder.lines)
    whole = prepare(address, store=store, access=ACCESS, ways=Fallbacks(Turning()), refresh=True)
    assert whole.manifest.text_spec.kinds == ("dense", "sparse", "multi", "tokens")
    assert set(whole.manifest.weights) == {"model.safetensors", "sparse_linear.pt", "colbert_linear.pt"}
    assert stored_space(whole) != stored_space(plain)


def test_shards_and_their_index_go(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(content)
    write_json(folder / "pytorch_model.bin.index.json", {"weight_map": {}})

    def export(folder: Path, into: Path, progress: Report, stop: Stop, *, graph: bool) -> ExportResult:
        assert (folder / "pytorch_model.bin.index.json").is_file()
        (into / "model.safetensors").write_bytes((folder / "pytorch_model-00001-of-00001.bin").read_bytes())
        return ExportResult(folder=str(into), kind="encoder", converted=("model.safetensors",))

    stored = prepare(parse_address(f"file:{folder}"), store=store, access=ACCESS, ways=Fallbacks(export))
    assert set(stored.manifest.weights) == {"pytorch_model-00001-of-00001.bin"}
    assert not leftovers(stored)


def test_code_of_its_own_is_refused_before_anything_runs(store: Store, address: Address, folder: Path) -> None:
    write_json(folder / "config.json", {"model_type": "bert", "auto_map": {"AutoModel": "mine.Model"}})
    turning = Turning()
    with pytest.raises(ModelFileError, match=r"auto_map.*never runs"):
        prepare(address, store=store, access=ACCESS, ways=Fallbacks(turning))
    assert turning.calls == []


@pytest.mark.parametrize(
    "error",
    [
        ModelFileError("is not a pickle of tensors only (Path.touch)", file="pytorch_model.bin"),
        ModelFileError("the export needs more than 9 MiB of memory", file="config.json"),
        Cancelled("nobody waits"),
    ],
)
def test_a_failure_leaves_nothing(store: Store, address: Address, error: Exception) -> None:
    """A malicious pickle, a limit or a cancellation leaves no entry, not even a partial one; the next attempt works."""

    def fails(*_: object, graph: bool) -> ExportResult:
        raise error

    with pytest.raises(type(error)):
        prepare(address, store=store, access=ACCESS, ways=Fallbacks(fails))
    assert store.entries() == []
    assert not [path for path in store.home.rglob("*") if path.is_file() and "locks" not in path.parts]
    assert prepare(address, store=store, access=ACCESS, ways=Fallbacks(Turning())).manifest.graph == "model.onnx"


def test_converted_paths_stay_inside_the_model(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"")
    fetched = FetchedModel(tmp_path / "source", parse_address("hf:org/tiny"))

    def leads_out(folder: Path, into: Path, progress: Report, stop: Stop, *, graph: bool) -> ExportResult:
        return ExportResult(folder=str(into), kind="encoder", converted=("../model.safetensors",))

    with pytest.raises(ModelFileError, match="is outside the model's folder"):
        convert_pickles(fetched, tmp_path, leads_out, Progress().report_work, Stop())
    with pytest.raises(ModelFileError, match="cannot be loaded without the convert extra"):
        convert_pickles(fetched, tmp_path, None, Progress().report_work, Stop())
