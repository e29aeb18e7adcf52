"""A model folder to a served model: written files, spec, and choice of the graph."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shoal.errors import MissingExtra, ModelFileError, VerificationFailed
from shoal.models.convert.convert import ConversionResult, convert, convert_and_check
from shoal.models.convert.graphs.text import can_build
from shoal.models.convert.verify import require, verify
from shoal.specs import LayerSpec, PartsSpec, ScoreSpec, TextSpec
from shoal.types import pack, unpack
from tests.unit.models import classifiers
from tests.unit.models.checkpoints import HIDDEN, MEAN, checkpoint, dense, vocabulary, write_json
from tests.unit.models.convert.graphs.test_shipped import ship
from tests.unit.models.engines import RUNS, onnxruntime_run


def out(folder: Path) -> Path:
    target = folder / "out"
    target.mkdir(exist_ok=True)
    return target


def check(folder: Path, target: Path) -> list[str]:
    """A list of the texts of `convert_checked`, verified with the reference as an application does."""

    def run(result: ConversionResult) -> str:
        return require(
            verify(folder, result.contract, target, result.spec, onnxruntime_run(target / result.graph))
        ).text

    result, text = convert_and_check(folder, target, run)
    return [result.source, result.text, text]


def test_a_built_model(tmp_path: Path) -> None:
    """Two files, and a spec with everything that serving needs."""
    folder = checkpoint(tmp_path, "roberta", sentence={"max_seq_length": 20, "do_lower_case": True})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    result = convert(folder, out(folder))
    assert result.spec == TextSpec(
        tokenizer="tokenizer.json",
        inputs=("input_ids", "attention_mask"),
        dimension=HIDDEN,
        max_tokens=20,
        pad_id=1,
        vocab_size=len(vocabulary("roberta")),
        lower_case=True,
        prompts={"query": "q: "},
        pooling="mean",
        modules=("normalize",),
        tokens="token_embeddings",
        parts=PartsSpec(after=(LayerSpec(kind="normalize"),)),
    )
    assert (result.source, result.graph) == ("built", "model.onnx")
    assert sorted(result.files) == sorted(path.name for path in out(folder).iterdir())
    assert result.parameters > 1000
    assert unpack(pack(result.spec), TextSpec) == result.spec


def test_names_of_concatenated_poolings(tmp_path: Path) -> None:
    """Joined in their order; the dimension is their sum."""
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode": ["cls", "max"], "include_prompt": False}
    folder = checkpoint(tmp_path, pooling=pooling)
    spec = convert(folder, out(folder)).spec
    assert (spec.pooling, spec.dimension, spec.include_prompt) == ("cls+max", 2 * HIDDEN, False)
    assert spec.inputs == ("input_ids", "attention_mask", "pooling_mask")


def test_conversion_is_deterministic(tmp_path: Path) -> None:
    """Equal input gives equal files."""
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    convert(first, out(first))
    convert(second, out(second))
    for name in ("model.onnx", "tokenizer.json"):
        assert (first / "out" / name).read_bytes() == (second / "out" / name).read_bytes()


def test_progress_names_its_stages(tmp_path: Path) -> None:
    """Fractions of `read` and of `convert`, up to 1."""
    reports: list[tuple[str, float]] = []
    folder = checkpoint(tmp_path)
    convert(folder, out(folder), progress=lambda stage, fraction: reports.append((stage, fraction)))
    assert reports[0] == ("read", 0.0)
    assert reports[-1] == ("convert", 1.0)
    assert reports == sorted(reports, key=lambda one: (one[0] != "read", one[1]))


def test_a_shipped_graph_is_taken_first(tmp_path: Path) -> None:
    """It needs no weights in a readable format."""
    folder = checkpoint(tmp_path)
    ship(folder)
    (folder / "model.safetensors").unlink()
    result = convert(folder, out(folder))
    assert result.source == "shipped"
    assert result.text == "the model's own onnx/model.onnx (token-level)"
    assert check(folder, out(folder))[2].startswith("the graph agrees with itself")


def test_building_can_be_preferred(tmp_path: Path) -> None:
    """Unless the model cannot be built."""
    folder = checkpoint(tmp_path)
    ship(folder)
    assert convert(folder, out(folder), prefer="built").source == "built"
    (folder / "model.safetensors").unlink()
    assert convert(folder, out(folder), prefer="built").source == "shipped"


def test_a_shipped_graph_that_disagrees_gives_way(tmp_path: Path) -> None:
    """The weights are available, so the graph is built from them, and the text says why."""
    folder = checkpoint(tmp_path)
    ship(folder)
    source, text, verdict = check(folder, out(folder))
    assert source == "built"
    assert "the model's own graph was rejected (the graph does not agree with a numpy forward pass" in text
    assert verdict.startswith("the graph agrees with a numpy forward pass")


def test_a_shipped_graph_that_cannot_be_used_gives_way(tmp_path: Path) -> None:
    """Unknown outputs do not fail a model that can be built."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=("logits",))
    source, text, _ = check(folder, out(folder))
    assert source == "built"
    assert "neither sentence_embedding nor token vectors" in text


def test_no_second_chance_without_weights(tmp_path: Path) -> None:
    """The first error is raised."""
    folder = checkpoint(tmp_path)
    ship(folder, outputs=("logits",))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="neither sentence_embedding"):
        check(folder, out(folder))


def test_a_built_graph_that_disagrees_is_an_error(tmp_path: Path) -> None:
    """There is no other graph to try."""
    folder = checkpoint(tmp_path)

    def refuse(result: ConversionResult) -> None:
        raise VerificationFailed("no")

    with pytest.raises(VerificationFailed):
        convert_and_check(folder, out(folder), refuse)


def test_a_shipped_graph_of_an_unknown_architecture(tmp_path: Path) -> None:
    """The graph replaces an encoder that Shoal cannot build."""
    folder = checkpoint(tmp_path, config={"model_type": "xlnet", "pad_token_id": 3})
    ship(folder, outputs=("sentence_embedding",))
    result = convert(folder, out(folder))
    assert not can_build(folder, result.contract)
    assert (result.spec.pooled, result.spec.ends_normalized, result.spec.pad_id) == ("sentence_embedding", True, 3)


def test_an_encoder_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """0_Transformer holds the encoder, its tokenizer and its weights."""
    folder = checkpoint(tmp_path, pooling=MEAN, after=("Dense",))
    dense(folder, "2_Dense", HIDDEN, 8)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (folder / name).rename(inner / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write_json(folder / "modules.json", modules)
    source, text, verdict = check(folder, out(folder))
    assert (source, text) == ("built", "built from 0_Transformer/config.json and safetensors")
    assert "agrees" in verdict


@pytest.mark.parametrize("engine", RUNS)
def test_lower_precision_is_measured_not_assumed(tmp_path: Path, engine: str) -> None:
    """The built graph verifies on each engine in float32."""
    folder = checkpoint(tmp_path)
    result = convert(folder, out(folder))
    run = RUNS[engine](out(folder) / result.graph)
    assert verify(folder, result.contract, out(folder), result.spec, run).passed


def test_a_shipped_graph_does_not_need_the_modules_weights(tmp_path: Path) -> None:
    """A pooled graph contains its Dense; a pickled copy next to it is ignored."""
    folder = checkpoint(tmp_path, after=("Dense",))
    dense(folder, "2_Dense", HIDDEN, HIDDEN)
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    ship(folder, outputs=("sentence_embedding",))
    source, _, verdict = check(folder, out(folder))
    assert source == "shipped"
    assert "agrees with itself" in verdict


def test_a_graph_with_half_precision_weights(tmp_path: Path) -> None:
    """Where nothing else is published."""
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    ship(folder, half=True)
    (folder / "onnx" / "model.onnx").rename(folder / "onnx" / "model_fp16.onnx")
    source, text, verdict = check(folder, out(folder))
    assert (source, text) == ("shipped", "the model's own onnx/model_fp16.onnx (token-level)")
    assert "agrees with itself" in verdict


def test_without_the_onnx_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the install command."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"in your clone: pip install -e '\.\[local\]'"):
        convert(checkpoint(tmp_path), out(tmp_path))


@pytest.mark.parametrize(("kind", "segments"), [("bert", ("token_type_ids",)), ("roberta", ())])
def test_a_built_classifier(tmp_path: Path, kind: str, segments: tuple[str, ...]) -> None:
    """Its spec states the scoring, and that it has no vectors."""
    folder = classifiers.classifier(tmp_path, kind, labels=3)
    result = convert(folder, out(folder))
    assert result.spec.score == ScoreSpec(
        labels=("LABEL_0", "LABEL_1", "LABEL_2"), activation="softmax", output="logits", pairs=False
    )
    assert result.spec.inputs == ("input_ids", "attention_mask", *segments)
    assert (result.spec.dimension, result.spec.tokens, result.spec.max_tokens) == (0, "", 30)
    assert (result.spec.tasks, result.spec.kinds, result.spec.outputs) == (("classify",), (), ("logits",))
    assert result.source == "built"
    assert unpack(pack(result.spec), TextSpec) == result.spec
