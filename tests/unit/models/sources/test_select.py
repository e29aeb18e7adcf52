"""Which files are fetched."""

from __future__ import annotations

import pytest

from shoal.errors import SourceError
from shoal.models.sources.select import choose, module_folders

BASE = ["config.json", "tokenizer.json"]


def test_code_pickles_and_other_formats_stay_away() -> None:
    """Of a repository with everything, only what the loader reads is taken."""
    names = [
        *BASE, "modules.json", "vocab.txt", "sentencepiece.bpe.model", "model.safetensors", "1_Pooling/config.json",
        "2_Dense/model.safetensors", "2_Dense/config.json", "2_Dense/pytorch_model.bin", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "tf_model.h5", "rust_model.ot", "modeling.py", "README.md", "onnx/model.onnx",
        "onnx/model_O3.onnx", "onnx/model_qint8_avx512.onnx", "openvino/openvino_model.xml", "openvino/config.json",
        "adapter_model.safetensors", "checkpoint-5/model.safetensors", ".gitattributes",
    ]  # fmt: skip
    assert choose(names, ["1_Pooling", "2_Dense"]) == [
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json", "model.safetensors",
        "modules.json", "onnx/model.onnx", "sentencepiece.bpe.model", "tokenizer.json", "vocab.txt",
    ]  # fmt: skip


def test_folders_count_only_when_a_module_names_them() -> None:
    """A folder that modules.json does not name is another model's."""
    assert choose([*BASE, "model.safetensors", "3_Dense/config.json"]) == [*BASE[:1], "model.safetensors", BASE[1]]


def test_shards_come_with_their_index() -> None:
    """Weights in several files are taken whole."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(shards) < set(choose([*BASE, *shards]))


@pytest.mark.parametrize(
    "data",
    ["onnx/model.onnx_data", "onnx/model.onnx.data", "onnx/model.onnx_data_1", "onnx/Constant_7_attr__value"],
)
def test_external_tensors_come_with_their_graph(data: str) -> None:
    """A graph that keeps its tensors in a file beside it is fetched with that file."""
    assert data in choose([*BASE, "onnx/model.onnx", data])


def test_which_graph_is_taken() -> None:
    """onnx/model.onnx is preferred; model.onnx at the top is taken when nothing else is there."""
    assert choose([*BASE, "model.onnx"])[1] == "model.onnx"
    assert "model.onnx" not in choose([*BASE, "model.onnx", "onnx/model.onnx"])
    assert "model.onnx" not in choose([*BASE, "model.onnx", "model.safetensors"])


def test_pickled_weights_alone_are_refused_by_name() -> None:
    """A model without safe weights is refused before anything large is fetched."""
    with pytest.raises(SourceError, match=r"pytorch_model\.bin.*safetensors|safetensors.*pytorch_model\.bin"):
        choose([*BASE, "pytorch_model.bin"])


def test_something_else_is_refused() -> None:
    """Weights without a configuration are no model."""
    with pytest.raises(SourceError, match=r"config\.json"):
        choose(["model.safetensors"])


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        (b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense/"}]', ["1_Pooling", "2_Dense"]),
        (b'[{"path": "../x"}, {"path": "/etc"}, {"path": 3}, {}, 4]', ["etc"]),
        (b'{"path": "1_Pooling"}', []),
        (b"[", []),
    ],
)
def test_module_folders_stay_inside(text: bytes, folders: list[str]) -> None:
    """Folders are read leniently, and none leads out of the model."""
    assert module_folders(text) == folders


def test_without_weights_the_settings_are_left() -> None:
    """For a model that runs elsewhere: a tokenizer alone is enough, weights alone are nothing."""
    names = [*BASE, "model.safetensors", "onnx/model.onnx", "2_Dense/config.json", "2_Dense/model.safetensors"]
    assert choose(names, ["2_Dense"], weights=False) == ["2_Dense/config.json", *BASE]
    assert choose(["tokenizer.json", "pytorch_model.bin"], weights=False) == ["tokenizer.json"]
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        choose(["model.safetensors", "vocab.txt"], weights=False)


def test_heads_beside_an_encoder_are_taken() -> None:
    """bge-m3's, once they are safetensors; and the settings of a ColBERT of the Stanford library."""
    heads = ["sparse_linear.safetensors", "colbert_linear.safetensors"]
    names = [*BASE, "model.safetensors", *heads, "sparse_linear.pt", "artifact.metadata", "other.metadata"]
    assert choose(names) == sorted([*BASE, "model.safetensors", *heads, "artifact.metadata"])
    assert not set(heads) & set(choose(names, weights=False))
