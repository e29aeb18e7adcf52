"""Graphs of static, SPLADE and late-interaction models, compared with the formulas on both engines; and the same heads
after shipped graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.graphs.shipped import adapt_shipped_graph
from shoal.models.convert.graphs.text import build_text_graph, can_build, graph_inputs
from shoal.models.convert.verify import Run
from shoal.types import Array
from tests.unit.models.checkpoints import HIDDEN, ST, dense, vocabulary, write_json
from tests.unit.models.convert.graphs.test_shipped import IDS, MASK, TABLE, ship
from tests.unit.models.engines import RUNS
from tests.unit.models.head_checkpoints import (
    WIDTH,
    edit,
    m3,
    model2vec,
    normal,
    pylate,
    splade,
    static,
)

INPUTS = {"input_ids": IDS, "attention_mask": MASK}
SIZE = len(vocabulary("bert"))
KINDS = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert")


def unit(rows: Array) -> Array:
    scaled: Array = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return scaled


def near(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def built(folder: Path, engine: str = "onnxruntime") -> Run:
    contract = read_contract(folder)
    target = folder / "built.onnx"
    assert can_build(folder, contract)
    build_text_graph(folder, contract, target)
    model = onnx.load(target)
    assert tuple(port.name for port in model.graph.input) == graph_inputs(contract)
    return RUNS[engine](target)


def taken(folder: Path, engine: str = "onnxruntime") -> tuple[str, Run]:
    target = folder / "taken.onnx"
    kind = adapt_shipped_graph(folder, "onnx/model.onnx", read_contract(folder), target).kind
    return kind, RUNS[engine](target)


@pytest.mark.parametrize("engine", RUNS)
def test_a_static_model_is_the_mean_of_its_rows(tmp_path: Path, engine: str) -> None:
    """Over the tokens that the mask keeps; no tokens give zeros."""
    folder = static(tmp_path)
    table = load_file(folder / "model.safetensors")["embedding.weight"]
    mask = MASK.copy()
    mask[0] = 0
    got = built(folder, engine)({"input_ids": IDS, "attention_mask": mask}, ("sentence_embedding",))
    near(got["sentence_embedding"], np.stack([np.zeros(WIDTH, np.float32), table[IDS[1]].mean(0)]))


@pytest.mark.parametrize("engine", RUNS)
def test_mapping_and_factors_are_in_the_table(tmp_path: Path, engine: str) -> None:
    """An id's vector is its row times its factor, then the mean, then unit length."""
    folder = model2vec(tmp_path, quantized=True)
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["embeddings"][tensors["mapping"]] * tensors["weights"][:, None].astype(np.float32)
    means = np.stack([rows[ids[mask > 0]].mean(0) for ids, mask in zip(IDS, MASK, strict=True)])
    got = built(folder, engine)(INPUTS, ("sentence_embedding", "pooled"))
    near(got["pooled"], means)
    near(got["sentence_embedding"], unit(means))


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_tables_of_other_types(tmp_path: Path, dtype: str) -> None:
    """Values equal those in the file."""
    folder = model2vec(tmp_path, config={"normalize": False})
    table = (normal(SIZE, WIDTH) * 20).round().astype(dtype)
    save_file({"embeddings": table}, folder / "model.safetensors")
    got = built(folder)(INPUTS, ("pooled",))["pooled"]
    near(got[1], table[IDS[1]].astype(np.float32).mean(0))


def test_a_matryoshka_cut_stands_before_the_normalize(tmp_path: Path) -> None:
    """The truncated vector has unit length."""
    folder = static(tmp_path, after=((f"{ST}Normalize", "1_Normalize"),))
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 3})
    whole = load_file(folder / "model.safetensors")["embedding.weight"][IDS[1]].mean(0)
    got = built(folder)(INPUTS, ("sentence_embedding", "pooled"))
    near(got["pooled"][1], whole[:3])
    near(got["sentence_embedding"][1], unit(whole[:3]))


def logits(folder: Path, hidden: Array, kind: str) -> Array:
    """The formula of transformers' masked language model heads, [b, l, vocabulary]."""
    names = {
        "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
        "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    }
    dense_name, norm, last = names.get(kind, ("lm_head.dense", "lm_head.layer_norm", "lm_head"))
    tensors = load_file(folder / "model.safetensors")
    inner = hidden @ tensors[f"{dense_name}.weight"].T + tensors[f"{dense_name}.bias"]
    erf = np.vectorize(__import__("math").erf)
    inner = inner * 0.5 * (1 + erf(inner / np.sqrt(2)))
    centred = inner - inner.mean(-1, keepdims=True)
    inner = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    scale = tensors.get(f"{norm}.weight", tensors.get(f"{norm}.gamma"))
    shift = tensors.get(f"{norm}.bias", tensors.get(f"{norm}.beta"))
    assert scale is not None and shift is not None
    own = next((tensors[name] for name in tensors if name.endswith("decoder.weight")), None)
    words = next(tensors[name] for name in tensors if name.endswith("word_embeddings.weight")) if own is None else own
    bias = tensors.get(f"{last}.decoder.bias", tensors.get(f"{last}.bias"))
    assert bias is not None
    logit_values: Array = (inner * scale + shift) @ words.T + bias
    return logit_values


def weights_of(raw: Array, mask: Array, *, strategy: str = "max", twice: bool = False) -> Array:
    weighed = np.log1p(np.maximum(raw, 0)) * mask[..., None]
    weighed = np.log1p(weighed) if twice else weighed
    weights: Array = weighed.max(1) if strategy == "max" else weighed.sum(1)
    return weights


def hidden_of(folder: Path, kind: str) -> Array:
    """Token vectors of the same encoder from the graph of a plain dense model."""
    plain = folder / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (plain / name).write_bytes((folder / name).read_bytes())
    return built(plain)(INPUTS, ("token_embeddings",))["token_embeddings"]


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_splade_by_its_formula(tmp_path: Path, kind: str, engine: str) -> None:
    """log(1 + relu(logit)), the maximum over the text's own tokens, for every family."""
    folder = splade(tmp_path, kind)
    got = built(folder, engine)(INPUTS, ("sparse_embedding",))["sparse_embedding"]
    expected = weights_of(logits(folder, hidden_of(folder, kind), kind), MASK)
    assert (expected > 0).any() and (expected == 0).any()
    near(got, expected)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("options", [{"own": True}, {"old_norm": True}])
def test_splade_poolings(tmp_path: Path, strategy: str, activation: str, options: dict[str, Any]) -> None:
    """Sum or maximum, one logarithm or two; a separate last layer, and TensorFlow names."""
    folder = splade(tmp_path, pooling={"pooling_strategy": strategy, "activation_function": activation}, **options)
    got = built(folder)(INPUTS, ("sparse_embedding",))["sparse_embedding"]
    raw = logits(folder, hidden_of(folder, "bert"), "bert")
    near(got, weights_of(raw, MASK, strategy=strategy, twice=activation == "log1p_relu"))


@pytest.mark.parametrize(
    ("tied", "missing", "key"),
    [
        (True, "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.weight"),
        (True, "cls.predictions.bias", "cls.predictions.bias"),
        (False, "", "cls.predictions.decoder.weight"),
    ],
)
def test_heads_that_are_not_whole_are_refused(tmp_path: Path, tied: bool, missing: str, key: str) -> None:
    """A checkpoint without its head would return noise."""
    folder = splade(tmp_path)
    edit(folder / "config.json", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / "model.safetensors")
    with pytest.raises(ModelFileError) as caught:
        build_text_graph(folder, read_contract(folder), folder / "built.onnx")
    assert (caught.value.file, caught.value.key) == ("model.safetensors", key)


@pytest.mark.parametrize("engine", RUNS)
def test_all_heads_of_bge_m3(tmp_path: Path, engine: str) -> None:
    """One graph gives every kind of vector."""
    folder = m3(tmp_path)
    outputs = ("sentence_embedding", "token_weights", "multi_vectors", "token_embeddings")
    got = built(folder, engine)(INPUTS, outputs)
    hidden = got["token_embeddings"]
    one, many = (load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert"))
    near(got["sentence_embedding"], unit(hidden[:, 0]))
    near(got["token_weights"], np.maximum(hidden @ one["weight"][0] + one["bias"], 0))
    near(got["multi_vectors"], unit(hidden @ many["weight"].T + many["bias"]))


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_late_interaction_vectors(tmp_path: Path, layers: int, engine: str) -> None:
    """Each token's vector passes the layers and gets unit length; there is no other output."""
    folder = pylate(tmp_path, layers=layers)
    got = built(folder, engine)(INPUTS, ("multi_vectors",))["multi_vectors"]
    assert [port.name for port in onnx.load(folder / "built.onnx").graph.output] == ["multi_vectors"]
    vectors = hidden_of(folder, "bert")
    for index in range(1, layers + 1):
        vectors = vectors @ load_file(folder / f"{index}_Dense" / "model.safetensors")["linear.weight"].T
    near(got, unit(vectors))


@pytest.mark.parametrize("out", [HIDDEN, WIDTH])
def test_a_residual_layer(tmp_path: Path, out: int) -> None:
    """The input is added, through a matrix if the sizes differ."""
    folder = pylate(tmp_path)
    dense(folder, "1_Dense", HIDDEN, out, activation="Tanh")
    edit(folder / "1_Dense" / "config.json", use_residual=True)
    place = folder / "1_Dense" / "model.safetensors"
    tensors = load_file(place)
    if out != HIDDEN:
        tensors["residual.weight"] = normal(out, HIDDEN, seed=8)
        save_file(tensors, place)
    got = built(folder)(INPUTS, ("multi_vectors",))["multi_vectors"]
    hidden = hidden_of(folder, "bert")
    added = hidden if out == HIDDEN else hidden @ tensors["residual.weight"].T
    near(got, unit(np.tanh(hidden @ tensors["linear.weight"].T + tensors["linear.bias"]) + added))


def test_weights_that_are_missing_are_seen_before(tmp_path: Path) -> None:
    """A missing layer file fails before the build."""
    folder = pylate(tmp_path)
    (folder / "1_Dense" / "model.safetensors").unlink()
    assert not can_build(folder, read_contract(folder))


@pytest.mark.parametrize("opset", [13, 14, 20])
def test_heads_behind_a_shipped_encoder(tmp_path: Path, opset: int) -> None:
    """bge-m3 ships a graph that ends in token vectors: its heads are appended."""
    folder = m3(tmp_path, "bert")
    ship(folder, outputs=("token_embeddings", "sentence_embedding"), opset=opset)
    kind, run = taken(folder)
    got = run(INPUTS, ("token_weights", "multi_vectors", "pooled"))
    one, many = (load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert"))
    assert kind == "pooled"
    near(got["token_weights"], np.maximum(TABLE[IDS] @ one["weight"][0] + one["bias"], 0))
    near(got["multi_vectors"], unit(TABLE[IDS] @ many["weight"].T + many["bias"]))


def test_heads_need_token_vectors(tmp_path: Path) -> None:
    """A shipped graph with pooling has none."""
    folder = m3(tmp_path, "bert")
    ship(folder, outputs=("sentence_embedding",))
    with pytest.raises(ModelFileError, match="returns no token vectors"):
        taken(folder)


@pytest.mark.parametrize("half", [False, True])
def test_late_interaction_behind_a_shipped_encoder(tmp_path: Path, half: bool) -> None:
    """An architecture that Shoal does not build may ship its encoder."""
    folder = pylate(tmp_path)
    edit(folder / "config.json", model_type="xlnet")
    ship(folder, half=half, opset=12)
    kind, run = taken(folder)
    layer = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    table = TABLE.astype(np.float16).astype(np.float32) if half else TABLE
    assert kind == "multi"
    near(run(INPUTS, ("multi_vectors",))["multi_vectors"], unit(table[IDS] @ layer.T))


def test_shipped_vectors_that_were_projected_already_are_refused(tmp_path: Path) -> None:
    """Their size shows it."""
    folder = pylate(tmp_path)
    dense(folder, "1_Dense", HIDDEN * 2, WIDTH, activation="Identity", bias=False)
    edit(folder / "config.json", model_type="xlnet", hidden_size=HIDDEN * 2)
    ship(folder)
    with pytest.raises(ModelFileError, match="but 1_Dense expects 32"):
        taken(folder)
    ship(folder, outputs=("sentence_embedding",))
    with pytest.raises(ModelFileError, match="but no token vectors"):
        taken(folder)


def test_constants_in_files_of_their_own_are_taken_in(tmp_path: Path) -> None:
    """PyTorch's exporter writes them next to a large graph such as bge-m3's; engines would not find them."""
    folder = m3(tmp_path, "bert")
    ship(folder, outputs=("token_embeddings",))
    place = folder / "onnx" / "model.onnx"
    model = onnx.load(place)
    constant = numpy_helper.from_array(np.array([2.0], np.float32))
    (place.parent / "Constant_7_attr__value").write_bytes(constant.raw_data)
    onnx.external_data_helper.set_external_data(constant, "Constant_7_attr__value")
    constant.ClearField("raw_data")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["two"], value=constant))
    model.graph.node.append(helper.make_node("Mul", ["doubled", "two"], ["token_embeddings"]))
    model.graph.node[1].output[0] = "doubled"
    del model.graph.node[2]
    onnx.save(model, place)
    _, run = taken(folder)
    near(run(INPUTS, ("token_embeddings",))["token_embeddings"], TABLE[IDS] * 2)
    constant.external_data.add(key="offset", value="far")
    model.graph.node[0].attribute[0].t.CopyFrom(constant)
    onnx.save(model, place)
    with pytest.raises(ModelFileError, match="a constant that cannot be read"):
        taken(folder)
    (place.parent / "Constant_7_attr__value").unlink()
    with pytest.raises(ModelFileError, match="Constant_7_attr__value are missing"):
        taken(folder)


def ship_logits(folder: Path, *, opset: int = 14, words: int = SIZE, name: str = "logits") -> Array:
    """A graph of a masked language model: each token's logits are a row of a table."""
    table = normal(SIZE, words, seed=9)
    ports = [helper.make_tensor_value_info(port, TensorProto.INT64, ["b", "l"]) for port in INPUTS]
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "l", words])
    nodes = [helper.make_node("Gather", ["table", "input_ids"], [name])]
    graph = helper.make_graph(nodes, "g", ports, [output], [numpy_helper.from_array(table, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    (folder / "onnx").mkdir(exist_ok=True)
    onnx.save(model, folder / "onnx" / "model.onnx")
    return table


@pytest.mark.parametrize("opset", [12, 13, 18, 20])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_splade_behind_shipped_logits(tmp_path: Path, opset: int, strategy: str) -> None:
    """Only the pooling is appended."""
    folder = splade(tmp_path, pooling={"pooling_strategy": strategy})
    edit(folder / "config.json", model_type="xlnet")
    table = ship_logits(folder, opset=opset)
    kind, run = taken(folder)
    assert kind == "sparse"
    near(run(INPUTS, ("sparse_embedding",))["sparse_embedding"], weights_of(table[IDS], MASK, strategy=strategy))


@pytest.mark.parametrize("change", [{"name": "last_hidden_state"}, {"words": 7}])
def test_other_outputs_are_no_logits(tmp_path: Path, change: dict[str, Any]) -> None:
    """A SPLADE model needs one logit per vocabulary entry."""
    folder = splade(tmp_path)
    edit(folder / "config.json", model_type="xlnet")
    ship_logits(folder, **change)
    with pytest.raises(ModelFileError) as caught:
        taken(folder)
    assert caught.value.file == "onnx/model.onnx"
