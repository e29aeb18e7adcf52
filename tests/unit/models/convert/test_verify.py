"""Verification: equal results pass, each kind of error in a graph fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from shoal.errors import VerificationFailed
from shoal.models.convert.convert import ConversionResult, convert
from shoal.models.convert.verify import (
    MIN_COSINE,
    PAIRS,
    SAMPLES,
    Verification,
    min_cosine,
    require,
    row_cosines,
    sample_inputs,
    verify,
)
from shoal.types import Array
from tests.unit.models import classifiers
from tests.unit.models.checkpoints import HIDDEN, KINDS, MEAN, checkpoint, vocabulary
from tests.unit.models.engines import onnxruntime_run


def converted(folder: Path, **options: Any) -> tuple[ConversionResult, Path]:
    target = folder / "out"
    target.mkdir()
    return convert(folder, target, **options), target


def judge(folder: Path, result: ConversionResult, target: Path) -> Verification:
    return verify(folder, result.contract, target, result.spec, onnxruntime_run(target / result.graph))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_built_graph_agrees_with_numpy(tmp_path: Path, kind: str, include_prompt: bool) -> None:
    """Every family passes, with and without a pooling mask."""
    folder = checkpoint(tmp_path, kind, pooling=MEAN | {"include_prompt": include_prompt})
    verification = judge(folder, *converted(folder))
    assert verification.passed
    assert verification.method == "reference"
    assert verification.min_cosine > 0.9999999
    assert verification.max_abs_diff < 1e-4
    assert "agrees with a numpy forward pass" in verification.text
    assert require(verification) is verification


@pytest.mark.parametrize(
    "tensor",
    [
        "encoder.layer.1.attention.self.key.weight",
        "encoder.layer.0.output.dense.bias",
        "embeddings.LayerNorm.weight",
        "embeddings.position_embeddings.weight",
    ],
)
def test_a_graph_with_a_wrong_tensor_fails(tmp_path: Path, tensor: str) -> None:
    """Any tensor that differs from the checkpoint's is detected."""
    folder = checkpoint(tmp_path)
    made, target = converted(folder)
    model = onnx.load(target / made.graph)
    changed = next(one for one in model.graph.initializer if one.name == tensor)
    values = numpy_helper.to_array(changed)
    changed.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[::-1]), tensor))
    onnx.save(model, target / made.graph)
    verification = judge(folder, made, target)
    assert not verification.passed
    assert verification.min_cosine < MIN_COSINE
    with pytest.raises(VerificationFailed, match="does not agree"):
        require(verification)


def test_a_graph_that_reads_padding_fails(tmp_path: Path) -> None:
    """The sample texts differ in length, so an ignored mask is detected."""
    folder = checkpoint(tmp_path)
    made, target = converted(folder)
    run = onnxruntime_run(target / made.graph)

    def careless(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return run(inputs | {"attention_mask": np.ones_like(inputs["input_ids"])}, outputs)

    assert not verify(folder, made.contract, target, made.spec, careless).passed


@pytest.mark.parametrize("wrong", ["pooled", "sentence_embedding"])
def test_both_outputs_are_compared(tmp_path: Path, wrong: str) -> None:
    """An error in either output fails."""
    folder = checkpoint(tmp_path)
    made, target = converted(folder)
    run = onnxruntime_run(target / made.graph)

    def odd(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        got = run(inputs, outputs)
        return got | {wrong: got[wrong][::-1]}

    assert not verify(folder, made.contract, target, made.spec, odd).passed


def test_values_that_are_not_finite_fail(tmp_path: Path) -> None:
    """NaN never agrees."""
    folder = checkpoint(tmp_path)
    made, target = converted(folder)

    def broken(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {name: np.full((len(inputs["input_ids"]), HIDDEN), np.nan, np.float32) for name in outputs}

    verification = verify(folder, made.contract, target, made.spec, broken)
    assert not verification.passed
    assert verification.min_cosine == -1.0


def test_another_dimension_fails(tmp_path: Path) -> None:
    """The message has both dimensions."""
    folder = checkpoint(tmp_path)
    made, target = converted(folder)

    def short(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {name: np.ones((len(inputs["input_ids"]), 3), np.float32) for name in outputs}

    verification = verify(folder, made.contract, target, made.spec, short)
    assert not verification.passed
    assert "returns 3 dimensions, but the model's files say 16" in verification.text


def lookup(width: int = HIDDEN) -> Any:
    """A stand-in for a shipped graph: the normalized mean of random token vectors."""
    table = np.random.default_rng(0).standard_normal((len(vocabulary("bert")), width)).astype(np.float32)

    def run(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        mask = inputs["attention_mask"][..., None].astype(np.float32)
        pooled = (table[inputs["input_ids"]] * mask).sum(1) / mask.sum(1)
        return {
            "token_embeddings": table[inputs["input_ids"]],
            "pooled": pooled,
            "sentence_embedding": pooled / np.linalg.norm(pooled, axis=-1, keepdims=True),
        }

    return run


def unknown(folder: Path) -> ConversionResult:
    """A model whose weights Shoal cannot read: its graph can only be compared with itself."""
    made, _ = converted(checkpoint(folder))
    (folder / "model.safetensors").unlink()
    return made


def test_a_graph_without_readable_weights_is_compared_with_itself(tmp_path: Path) -> None:
    """Each text alone and in a batch, and unit length."""
    result = unknown(tmp_path)
    verification = verify(tmp_path, result.contract, tmp_path / "out", result.spec, lookup())
    assert verification.passed
    assert verification.method == "itself"
    assert "each text alone and in a batch" in verification.text


def test_rows_that_depend_on_their_batch_fail(tmp_path: Path) -> None:
    """A graph that pools over padding gives other vectors in a batch."""
    made, run = unknown(tmp_path), lookup()

    def careless(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        got: dict[str, Array] = run(inputs | {"attention_mask": np.ones_like(inputs["input_ids"])}, outputs)
        return got

    assert not verify(tmp_path, made.contract, tmp_path / "out", made.spec, careless).passed


def test_a_graph_that_does_not_normalise_as_promised_is_seen(tmp_path: Path) -> None:
    """Direction alone is not enough if a Normalize ends the model: the difference counts too."""
    made, run = unknown(tmp_path), lookup()

    def longer(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        got: dict[str, Array] = run(inputs, outputs)
        return got | {"sentence_embedding": got["sentence_embedding"] * 3}

    verification = verify(tmp_path, made.contract, tmp_path / "out", made.spec, longer)
    assert not verification.passed
    assert "largest difference" in verification.text


def test_min_cosine() -> None:
    """The worst row counts; zero rows only agree with each other; NaN and other shapes never agree."""
    a = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], np.float32)
    b = np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]], np.float32)
    assert min_cosine(a, b) == pytest.approx(np.sqrt(0.5))
    assert min_cosine(a, a * 2) == pytest.approx(1.0)
    assert min_cosine(a[2:], a[:1]) == -1.0
    assert min_cosine(a, np.full_like(a, np.nan)) == -1.0
    assert min_cosine(a, a[:2]) == -1.0


def test_sample_inputs_are_the_graphs(tmp_path: Path) -> None:
    """Texts of several lengths, padded on the right, never cut by tokenizer.json's own truncation."""
    made, target = converted(checkpoint(tmp_path))
    inputs = sample_inputs(target, made.spec, SAMPLES)
    assert set(inputs) == {"input_ids", "attention_mask"}
    lengths = inputs["attention_mask"].sum(axis=1)
    assert len(set(lengths.tolist())) > 2
    assert lengths.max() == made.spec.max_tokens
    assert (inputs["input_ids"][inputs["attention_mask"] == 0] == made.spec.pad_id).all()


@pytest.mark.parametrize("include_prompt", [True, False])
def test_token_vectors_are_compared(tmp_path: Path, include_prompt: bool) -> None:
    """Only vectors of attended tokens; padding is ignored."""
    folder = checkpoint(tmp_path, pooling=MEAN | {"include_prompt": include_prompt})
    made, target = converted(folder)
    run = onnxruntime_run(target / made.graph)

    def changed(where: Any) -> Verification:
        def odd(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            got = run(inputs, outputs)
            got["token_embeddings"][where(inputs["attention_mask"])] *= -1
            return got

        return verify(folder, made.contract, target, made.spec, odd)

    assert changed(lambda mask: mask == 0).passed
    verification = changed(lambda mask: mask == 1)
    assert not verification.passed
    assert "token vectors do not agree" in verification.text


class TestScores:
    """Models that give logits."""

    @pytest.mark.parametrize("kind", classifiers.KINDS)
    @pytest.mark.parametrize("labels", [1, 3])
    def test_a_built_classifier_agrees_with_numpy(self, tmp_path: Path, kind: str, labels: int) -> None:
        """Over pairs and texts alone."""
        folder = classifiers.classifier(tmp_path, kind, labels=labels)
        verification = judge(folder, *converted(folder))
        assert (verification.passed, verification.method, verification.min_cosine) == (True, "reference", 1.0)
        assert verification.max_abs_diff < 1e-4
        assert "agrees with a numpy forward pass: largest difference of a logit" in verification.text

    @pytest.mark.parametrize(
        "tensor", ["head/classifier.weight", "head/bert.pooler.dense.bias", "embeddings.token_type_embeddings.weight"]
    )
    def test_a_graph_with_a_wrong_tensor_fails(self, tmp_path: Path, tensor: str) -> None:
        """Also in the head, and in tensors that only pairs use."""
        folder = classifiers.classifier(tmp_path, labels=2)
        made, target = converted(folder)
        model = onnx.load(target / made.graph)
        changed = next(one for one in model.graph.initializer if one.name == tensor)
        values = numpy_helper.to_array(changed)
        changed.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[::-1]), tensor))
        onnx.save(model, target / made.graph)
        verification = judge(folder, made, target)
        assert (verification.passed, verification.min_cosine) == (False, -1.0)
        with pytest.raises(VerificationFailed, match="does not agree"):
            require(verification)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_logits_that_are_not_finite_fail(self, tmp_path: Path, bad: float) -> None:
        """They never agree."""
        folder = classifiers.classifier(tmp_path)
        made, target = converted(folder)
        rows = np.full((len(PAIRS), 1), bad, np.float32)
        assert not verify(folder, made.contract, target, made.spec, lambda inputs, outputs: {"logits": rows}).passed

    def test_another_number_of_labels_fails(self, tmp_path: Path) -> None:
        """The message has both numbers."""
        folder = classifiers.classifier(tmp_path, labels=3)
        result, target = converted(folder)
        rows = np.ones((len(PAIRS), 2), np.float32)
        verification = verify(folder, result.contract, target, result.spec, lambda inputs, outputs: {"logits": rows})
        assert not verification.passed
        assert verification.text == "the graph returns scores of shape [4, 2], but the files name 3 labels"

    def test_without_weights_a_graph_is_compared_with_itself(self, tmp_path: Path) -> None:
        """A score that depends on the batch or on padding is detected."""
        folder = classifiers.classifier(tmp_path)
        result, target = converted(folder)
        (folder / "model.safetensors").unlink()
        run = onnxruntime_run(target / result.graph)
        verification = verify(folder, result.contract, target, result.spec, run)
        assert (verification.passed, verification.method) == (True, "itself")

        def careless(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            return run(inputs | {"attention_mask": np.ones_like(inputs["input_ids"])}, outputs)

        assert not verify(folder, result.contract, target, result.spec, careless).passed

    def test_pairs_have_segments(self, tmp_path: Path) -> None:
        """As the tokenizer sets them; a single text has one segment."""
        folder = classifiers.classifier(tmp_path)
        made, target = converted(folder)
        batch = sample_inputs(target, made.spec, [("fish", "a b"), "fish"])
        assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0] * 6]
        assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]


def test_the_cosine_of_each_row() -> None:
    """Zeros only agree with zeros, and values that are not finite never agree."""
    left = np.array([[1, 0], [0, 0], [0, 0], [2, 0], [np.nan, 0], [1, 1], [np.inf, 0]], np.float32)
    right = np.array([[3, 0], [0, 0], [1, 0], [0, 1], [1, 0], [-1, -1], [np.inf, 0]], np.float32)
    assert row_cosines(left, right) == pytest.approx([1, 1, -1, 0, -1, -1, -1])
    assert min_cosine(left[:2], right[:2]) == 1.0 and min_cosine(left, right) == -1.0
    assert min_cosine(left[:0], right[:0]) == 1.0 and min_cosine(left, right[:1]) == -1.0


def test_a_graph_with_quantized_activations_depends_on_the_batch(tmp_path: Path) -> None:
    """As ONNX Runtime quantizes a model: a text alone and in a batch have different vectors, so it does not serve."""
    from onnxruntime.quantization import quantize_dynamic

    result, target = converted(checkpoint(tmp_path / "exact", after=()))
    folder = checkpoint(tmp_path / "quantized", after=())
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    quantize_dynamic(target / result.graph, folder / "onnx" / "model.onnx")
    verification = judge(folder, *converted(folder))
    assert not verification.passed
    assert "does not agree with itself, each text alone and in a batch" in verification.text
