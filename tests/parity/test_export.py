"""Models without a graph in Shoal, exported by PyTorch in a separate process and served from ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.convert import convert
from shoal.models.convert.export import ExportResult, export
from shoal.models.convert.verify import verify
from tests.parity.family_models import other
from tests.parity.test_reference import TEXTS
from tests.parity.test_torch import close, feeds, reference
from tests.unit.models.engines import RUNS

# Warnings of the reference's libraries are not this project's; importing them takes seconds in every process.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def exported(folder: Path, into: Path, **options: Any) -> ExportResult:
    into.mkdir()
    return export(folder, into, **options)


@pytest.mark.parametrize("name", ["t5", "megatron-bert"])
def test_an_exported_model_embeds_as_sentence_transformers_does(tmp_path: Path, name: str) -> None:
    """Encoders with relative and absolute positions, in batches of all sizes on both engines; the
    exported folder is converted, pooled and verified like a published one."""
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


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    """Neither a model's own code, nor a file named like a package."""
    folder = other("megatron-bert", tmp_path)
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

    folder = other("megatron-bert", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    missing = next(name for name in tensors if "query" in name)
    save_file({name: each for name, each in tensors.items() if name != missing}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="fetch the model again"):
        exported(folder, tmp_path / "exported")
