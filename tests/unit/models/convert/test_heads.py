"""Conversion and verification of static, sparse and late-interaction models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from shoal.errors import ModelFileError
from shoal.models.convert.convert import ConversionResult, convert, convert_and_check
from shoal.models.convert.verify import Verification, require, verify
from shoal.specs import TextSpec
from shoal.types import Array, pack, unpack
from tests.unit.models.checkpoints import vocabulary
from tests.unit.models.convert.graphs.test_heads import ship_logits
from tests.unit.models.convert.graphs.test_shipped import ship
from tests.unit.models.engines import RUNS, onnxruntime_run
from tests.unit.models.head_checkpoints import (
    WIDTH,
    edit,
    m3,
    model2vec,
    native,
    pylate,
    splade,
    stanford,
    static,
)

Make = Callable[[Path], Path]
MAKES: dict[str, Make] = {
    "static": static,
    "model2vec": lambda folder: model2vec(folder, quantized=True),
    "splade": splade,
    "splade-sum": lambda folder: splade(folder, "roberta", pooling={"pooling_strategy": "sum"}),
    "m3": m3,
    "pylate": pylate,
    "native": native,
    "stanford": stanford,
}


def converted(folder: Path) -> tuple[ConversionResult, Path]:
    target = folder / "out"
    target.mkdir(exist_ok=True)
    return convert(folder, target), target


def judge(folder: Path, result: ConversionResult, target: Path, engine: str = "onnxruntime") -> Verification:
    return verify(folder, result.contract, target, result.spec, RUNS[engine](target / result.graph))


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("name", MAKES)
def test_a_built_graph_agrees_with_numpy(tmp_path: Path, name: str, engine: str) -> None:
    """Every output of every kind, on both engines; the spec survives the manifest."""
    folder = MAKES[name](tmp_path)
    result, target = converted(folder)
    verification = require(judge(folder, result, target, engine))
    assert (verification.method, result.source) == ("reference", "built")
    assert verification.min_cosine > 0.999999 and verification.max_abs_diff < 1e-4
    outputs = {port.name for port in onnx.load(target / result.graph).graph.output}
    assert set(result.spec.outputs) == outputs
    assert unpack(pack(result.spec), TextSpec) == result.spec


WRONG = [
    ("static", "table", "the graph does not agree"),
    ("splade", "head/bias", "the graph's sparse vectors do not agree"),
    ("splade", "head/matrix", "the graph's sparse vectors do not agree"),
    ("m3", "sparse_linear.safetensors.weight", "the graph's sparse vectors do not agree"),
    ("m3", "colbert_linear.safetensors.weight", "the graph's multi vectors do not agree"),
    ("pylate", "1_Dense.weight", "the graph's multi vectors do not agree"),
    ("stanford", "linear.weight", "the graph's multi vectors do not agree"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), WRONG, ids=[f"{name}-{tensor}" for name, tensor, _ in WRONG])
def test_a_head_with_a_wrong_tensor_fails(tmp_path: Path, name: str, tensor: str, message: str) -> None:
    """Each head is compared separately and named."""
    folder = MAKES[name](tmp_path)
    result, target = converted(folder)
    model = onnx.load(target / result.graph)
    changed = next(one for one in model.graph.initializer if one.name == tensor)
    values = numpy_helper.to_array(changed)
    changed.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[::-1]), tensor))
    onnx.save(model, target / result.graph)
    verification = judge(folder, result, target)
    assert not verification.passed
    assert verification.text.startswith(message)


@pytest.mark.parametrize("output", ["token_weights", "multi_vectors", "token_embeddings"])
def test_values_at_padding_mean_nothing(tmp_path: Path, output: str) -> None:
    """Values at padding never disagree; a wrong number of tokens does."""
    folder = m3(tmp_path)
    made, target = converted(folder)
    run = onnxruntime_run(target / made.graph)

    def noisy(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        got = run(inputs, outputs)
        padding = (inputs["attention_mask"] == 0).reshape(
            *inputs["attention_mask"].shape, *(1,) * (got[output].ndim - 2)
        )
        return got | {output: np.where(padding, 9, got[output]).astype(np.float32)}

    def short(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        got = run(inputs, outputs)
        return got | {output: got[output][:, :-1]}

    assert verify(folder, made.contract, target, made.spec, noisy).passed
    assert not verify(folder, made.contract, target, made.spec, short).passed


def test_another_size_of_vectors_fails(tmp_path: Path) -> None:
    """The message has both sizes."""
    folder = pylate(tmp_path)
    result, target = converted(folder)
    run = onnxruntime_run(target / result.graph)

    def narrow(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {name: got[..., :-1] for name, got in run(inputs, outputs).items()}

    verification = verify(folder, result.contract, target, result.spec, narrow)
    assert f"returns {WIDTH - 1} dimensions, but the model's files say {WIDTH}" in verification.text


def test_the_spec_of_each_kind(tmp_path: Path) -> None:
    """The values that pipelines read."""
    static_spec = converted(static(tmp_path / "static"))[0].spec
    assert (static_spec.frame_tokens, static_spec.kinds) == (False, ("dense",))
    words = vocabulary("bert")
    assert converted(model2vec(tmp_path / "m2v"))[0].spec.dropped == (words["[UNK]"],)
    sparse_spec = converted(splade(tmp_path / "splade"))[0].spec
    assert (sparse_spec.kinds, sparse_spec.dimension, sparse_spec.outputs) == (("sparse",), 0, ("sparse_embedding",))
    m3_spec = converted(m3(tmp_path / "m3"))[0].spec
    assert m3_spec.kinds == ("dense", "sparse", "multi", "tokens")
    late_spec = converted(pylate(tmp_path / "late"))[0].spec
    assert late_spec.multi is not None and late_spec.kinds == ("multi",)


@pytest.mark.parametrize("name", ["static", "splade", "pylate"])
def test_they_are_built_although_a_graph_is_shipped(tmp_path: Path, name: str) -> None:
    """Shipped graphs differ too much: some take offsets, some are already projected."""
    folder = MAKES[name](tmp_path)
    ship(folder)
    assert converted(folder)[0].source == "built"


def test_a_shipped_graph_with_heads_is_compared_with_itself(tmp_path: Path) -> None:
    """As bge-m3 is published: a graph, no readable weights, and heads converted from pickles."""
    folder = m3(tmp_path, "bert")
    (folder / "model.safetensors").unlink()
    ship(folder, outputs=("token_embeddings", "sentence_embedding"))
    # The graph of this test pools by the mean, whatever the files say.
    edit(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    result, target = converted(folder)
    verification = judge(folder, result, target)
    assert verification.passed and verification.method == "itself", verification.text
    assert result.source == "shipped"
    assert result.spec.kinds == ("dense", "sparse", "multi", "tokens")


def test_a_shipped_splade_is_compared_with_itself(tmp_path: Path) -> None:
    """For an unknown architecture."""
    folder = splade(tmp_path)
    edit(folder / "config.json", model_type="xlnet")
    ship_logits(folder)
    verification = judge(folder, *converted(folder))
    assert verification.passed and verification.method == "itself"


def test_a_model_that_cannot_be_built_names_the_missing_part(tmp_path: Path) -> None:
    """A SPLADE model without its head."""
    folder = splade(tmp_path)
    edit(folder / "config.json", model_type="xlnet")
    with pytest.raises(ModelFileError) as caught:
        convert_and_check(folder, folder, lambda result: None)
    assert caught.value.key == "model_type"


def test_a_tokenizer_that_knows_more_than_the_table(tmp_path: Path) -> None:
    """An id without a row would fail for some texts."""
    folder = static(tmp_path, rows=len(vocabulary("bert")) - 1)
    with pytest.raises(ModelFileError, match="the model's embeddings end at") as caught:
        converted(folder)
    assert caught.value.file == "tokenizer.json"
