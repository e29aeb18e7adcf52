"""Models without a graph in Shoal, exported by PyTorch in a separate process and served from ONNX."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.convert import convert
from shoal.models.convert.export import ExportResult, export
from shoal.models.convert.verify import verify
from tests.parity.reference_models import CASES, write
from tests.parity.test_reference import TEXTS
from tests.parity.test_torch import OTHERS, close, feeds, other, reference
from tests.unit.models.engines import RUNS

# Warnings of the reference's libraries are not this project's; importing them takes seconds in every process.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def exported(folder: Path, into: Path, **options: Any) -> ExportResult:
    into.mkdir()
    return export(folder, into, **options)


@pytest.mark.parametrize("name", OTHERS)
def test_an_exported_model_embeds_as_sentence_transformers_does(tmp_path: Path, name: str) -> None:
    """Encoders with relative positions, and a decoder with last-token pooling, in batches of all sizes on both engines;
    the exported folder is converted, pooled and verified like a published one."""
    folder = other(name, tmp_path)
    reports: list[str] = []
    export = exported(folder, tmp_path / "exported", progress=lambda stage, _: reports.append(stage))
    assert export.kind == "encoder"
    assert "agrees with PyTorch" in export.verification
    assert list(dict.fromkeys(reports)) == ["read", "load", "export", "verify"]
    target = tmp_path / "served"
    target.mkdir()
    converted = convert(tmp_path / "exported", target)
    model = reference(folder)
    texts = [text for text in TEXTS if text.strip()]
    expected = model.encode(texts, convert_to_numpy=True)
    for open_run in RUNS.values():
        run = open_run(target / converted.graph)
        close(run(feeds(model, texts), ("sentence_embedding",))["sentence_embedding"], expected)
        alone = [run(feeds(model, [text]), ("sentence_embedding",))["sentence_embedding"] for text in texts]
        close(np.concatenate(alone), expected)
        assert verify(tmp_path / "exported", converted.contract, target, converted.spec, run).passed


def pickled(folder: Path, *, shards: int = 1) -> Path:
    """The same model with all its weights pickled by PyTorch."""
    import torch
    from safetensors.torch import load_file

    for place in folder.rglob("model.safetensors"):
        state = load_file(place)
        place.unlink()
        if shards == 1 or place.parent != folder:
            torch.save(state, place.with_name("pytorch_model.bin"))
            continue
        names = sorted(state)
        places: dict[str, str] = {}
        for number in range(shards):
            file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
            part = names[number::shards]
            torch.save({name: state[name] for name in part}, folder / file)
            places |= dict.fromkeys(part, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_become_safetensors(tmp_path: Path, shards: int) -> None:
    """Those of the encoder and of modules; no graph is exported if Shoal builds it itself."""
    folder = write(next(case for case in CASES if case.name == "bert-two-dense"), tmp_path)
    expected = reference(folder).encode(TEXTS, convert_to_numpy=True)
    model = reference(folder)
    export = exported(pickled(folder, shards=shards), tmp_path / "exported", graph=False)
    assert export.graph == ""
    assert len(export.converted) == 2 + shards + (shards > 1), "each, and the index of shards"
    assert not list((tmp_path / "exported").rglob("*.bin"))
    target = tmp_path / "served"
    target.mkdir()
    converted = convert(tmp_path / "exported", target)
    assert converted.source == "built"
    run = RUNS["openvino"](target / converted.graph)
    close(run(feeds(model, TEXTS), ("sentence_embedding",))["sentence_embedding"], expected)


def test_heads_of_bge_m3_become_safetensors(tmp_path: Path) -> None:
    """sparse_linear.pt and colbert_linear.pt, by their tensor names; other pickles are left in place."""
    import torch
    from safetensors.torch import load_file

    folder = write(CASES[0], tmp_path)
    heads = {"sparse_linear": torch.nn.Linear(32, 1), "colbert_linear": torch.nn.Linear(32, 12)}
    for name, layer in heads.items():
        torch.save(layer.state_dict(), folder / f"{name}.pt")
    torch.save({}, folder / "optimizer.pt")
    export = exported(folder, tmp_path / "exported", graph=False)
    assert sorted(export.converted) == ["colbert_linear.safetensors", "sparse_linear.safetensors"]
    for name, layer in heads.items():
        tensors = load_file(tmp_path / "exported" / f"{name}.safetensors")
        assert set(tensors) == {"weight", "bias"}
        assert torch.equal(tensors["weight"], layer.weight)
    assert not list((tmp_path / "exported").glob("*.pt"))


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = write(CASES[0], tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil(tmp_path / "ran")}, protocol=2))
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin.*not a pickle of tensors"):
        exported(folder, tmp_path / "exported")
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    """Neither a model's own code, nor a file named like a package."""
    folder = other("modernbert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("mine.py", "torch.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelFileError, match="PyTorch cannot export this model"):
        exported(folder, tmp_path / "exported")
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "exported").glob("*.py"))


@pytest.mark.parametrize(("head", "kind"), [("classifier", "classifier"), ("masked", "masked")])
def test_heads_that_end_in_logits(tmp_path: Path, head: str, kind: str) -> None:
    """A classifier with its segments, and a masked language model for SPLADE."""
    import torch
    import transformers

    torch.manual_seed(2)
    folder = tmp_path / "model"
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=3,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    make = transformers.BertForSequenceClassification if head == "classifier" else transformers.BertForMaskedLM
    model = make(config).eval()
    model.save_pretrained(folder)
    if head == "masked":
        package = "sentence_transformers.sparse_encoder.models"
        listed = [
            {"type": f"{package}.{name}", "path": at} for name, at in (("MLMTransformer", ""), ("SpladePooling", "1"))
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1").mkdir()
        (folder / "1" / "config.json").write_text("{}")
    export = exported(folder, tmp_path / "exported")
    assert export.kind == kind
    assert ("token_type_ids" in export.inputs) == (head == "classifier")
    inputs = {name: np.array([[5, 9, 11, 0], [7, 0, 0, 0]], np.int64) for name in export.inputs}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).astype(np.int64)
    if head == "classifier":
        inputs["token_type_ids"] = np.array([[0, 1, 1, 0], [0, 0, 0, 0]], np.int64)
    with torch.inference_mode():
        right = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits.numpy()
    for open_run in RUNS.values():
        got = open_run(tmp_path / "exported" / export.graph)(inputs, ("logits",))["logits"]
        mask = slice(None) if head == "classifier" else inputs["attention_mask"] > 0
        np.testing.assert_allclose(got[mask], right[mask], atol=1e-4)


def test_missing_weights_are_not_randomized(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = other("modernbert", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    missing = next(name for name in tensors if "Wqkv" in name)
    save_file({name: each for name, each in tensors.items() if name != missing}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="fetch the model again"):
        exported(folder, tmp_path / "exported")
