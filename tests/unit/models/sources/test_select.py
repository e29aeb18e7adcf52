"""The choice of files to fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SourceError
from shoal.models.sources.select import (
    MAX_MODULES_BYTES,
    choose_files,
    is_pickle,
    is_pickle_index,
    is_weights,
    module_folders,
    read_module_folders,
    safetensors_name,
)

BASE = ["config.json", "tokenizer.json"]


def test_code_pickles_and_other_formats_stay_away() -> None:
    """Only files that the loader reads are fetched."""
    names = [
        *BASE, "modules.json", "vocab.txt", "sentencepiece.bpe.model", "model.safetensors", "1_Pooling/config.json",
        "2_Dense/model.safetensors", "2_Dense/config.json", "2_Dense/pytorch_model.bin", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "tf_model.h5", "rust_model.ot", "modeling.py", "README.md", "onnx/model.onnx",
        "onnx/model_O3.onnx", "onnx/model_qint8_avx512.onnx", "openvino/openvino_model.xml", "openvino/config.json",
        "adapter_model.safetensors", "checkpoint-5/model.safetensors", ".gitattributes",
    ]  # fmt: skip
    assert choose_files(names, ["1_Pooling", "2_Dense"]) == [
        "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "config.json", "model.safetensors",
        "modules.json", "onnx/model.onnx", "sentencepiece.bpe.model", "tokenizer.json", "vocab.txt",
    ]  # fmt: skip


def test_folders_count_only_when_a_module_names_them() -> None:
    """A folder that modules.json does not name belongs to another model."""
    assert choose_files([*BASE, "model.safetensors", "3_Dense/config.json"]) == [
        *BASE[:1],
        "model.safetensors",
        BASE[1],
    ]


def test_shards_come_with_their_index() -> None:
    """All shards are fetched."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(shards) < set(choose_files([*BASE, *shards]))


@pytest.mark.parametrize(
    "data",
    ["onnx/model.onnx_data", "onnx/model.onnx.data", "onnx/model.onnx_data_1", "onnx/Constant_7_attr__value"],
)
def test_external_tensors_come_with_their_graph(data: str) -> None:
    """A graph's external data file is fetched with it."""
    assert data in choose_files([*BASE, "onnx/model.onnx", data])


def test_which_graph_is_taken() -> None:
    """onnx/model.onnx is preferred; a top-level model.onnx is the fallback."""
    assert choose_files([*BASE, "model.onnx"])[1] == "model.onnx"
    assert "model.onnx" not in choose_files([*BASE, "model.onnx", "onnx/model.onnx"])
    assert "model.onnx" not in choose_files([*BASE, "model.onnx", "model.safetensors"])


def test_pickles_are_chosen_where_nothing_else_holds_the_weights() -> None:
    """In each folder only if its weights exist in no other form: shards with their index, else one file, heads
    separately; never next to a graph or safetensors."""
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    index = "pytorch_model.bin.index.json"
    modules = ["2_Dense/config.json", "2_Dense/pytorch_model.bin"]
    others = ["optimizer.pt", "training_args.bin", "checkpoint-5/pytorch_model.bin", "3_Dense/pytorch_model.bin"]

    def taken(*names: str) -> set[str]:
        return set(choose_files([*BASE, *modules, *others, *names], ["2_Dense"])) - {*BASE, *modules}

    assert taken("pytorch_model.bin") == {"pytorch_model.bin"}
    assert taken(*shards, index) == {*shards, index}
    assert taken(*shards, index, "pytorch_model.bin") == {"pytorch_model.bin"}
    assert taken("model.safetensors", "pytorch_model.bin", *shards, index) == {"model.safetensors"}
    assert taken("onnx/model.onnx", "pytorch_model.bin") == {"onnx/model.onnx"}
    heads = ["sparse_linear.pt", "colbert_linear.pt", "colbert_linear.safetensors"]
    assert taken("model.safetensors", *heads) == {"model.safetensors", heads[0], heads[2]}
    assert taken("2_Dense/model.safetensors", "pytorch_model.bin") - {"2_Dense/model.safetensors"} == {
        "pytorch_model.bin"
    }


def test_shards_without_an_index_are_nothing() -> None:
    with pytest.raises(SourceError, match="safetensors"):
        choose_files([*BASE, "pytorch_model-00001-of-00002.bin"])


def test_pickles_are_weights_and_no_settings() -> None:
    names = [*BASE, "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "sparse_linear.pt"]
    assert choose_files(names, weights=False) == BASE
    assert [name for name in names if is_weights(name)] == [name for name in names if is_pickle(name)]
    assert [name for name in names if is_pickle_index(name)] == ["pytorch_model.bin.index.json"]
    assert not any(map(is_pickle, ("openvino_tokenizer.bin", "optimizer.pt", "model.safetensors")))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("pytorch_model/pytorch_model-00001-of-00002.bin", "pytorch_model/model-00001-of-00002.safetensors"),
        ("2_Dense/pytorch_model.bin.index.json", "2_Dense/model.safetensors.index.json"),
        ("sparse_linear.pt", "sparse_linear.safetensors"),
        ("open_clip_pytorch_model.bin", "open_clip_model.safetensors"),
    ],
)
def test_names_of_converted_pickles(name: str, safe: str) -> None:
    assert safetensors_name(name) == safe
    assert is_pickle(name) or is_pickle_index(name)


def test_a_pickled_language_model_is_not_fetched_to_be_refused() -> None:
    with pytest.raises(SourceError, match="OpenVINO IR or GGUF"):
        choose_files([*BASE, "generation_config.json", "pytorch_model.bin"])


def test_half_precision_graphs_are_the_last_resort() -> None:
    others = ["onnx/model_quantized.onnx", "onnx/model_int8.onnx", "onnx/model_q4.onnx", "onnx/model_q4f16.onnx"]
    half = ["onnx/model_fp16.onnx", "onnx/model_fp16.onnx_data", "onnx/model_fp16.onnx_data_1"]
    assert choose_files([*BASE, *others, *half]) == sorted([*BASE, *half])
    assert choose_files([*BASE, *others, "model_fp16.onnx"]) == sorted([*BASE, "model_fp16.onnx"])
    for better in ("onnx/model.onnx", "model.onnx", "model.safetensors", "pytorch_model.bin"):
        assert choose_files([*BASE, *others, *half, better]) == sorted([*BASE, better])
    assert all(map(is_weights, half))


def test_only_quantized_graphs_are_refused_with_the_wanted_names() -> None:
    """The error names what is there, what is wanted, and how to try it anyway."""
    words = (
        r"neither onnx/model\.onnx nor onnx/model_fp16\.onnx, only onnx/model_int8\.onnx, onnx/model_quantized\.onnx: "
    )
    with pytest.raises(SourceError, match=words + r".*shoal serve file:FOLDER"):
        choose_files([*BASE, "onnx/model_quantized.onnx", "onnx/model_int8.onnx", "other/model.onnx"])


def test_other_formats_are_refused_by_name() -> None:
    """Before a large download."""
    with pytest.raises(SourceError) as caught:
        choose_files([*BASE, "tf_model.h5"])
    assert "tf_model.h5" in caught.value.message
    assert "convert" not in caught.value.message


def test_something_else_is_refused() -> None:
    """Weights without a configuration are not a model."""
    with pytest.raises(SourceError, match=r"config\.json"):
        choose_files(["model.safetensors"])


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
    """Folders are parsed leniently, but none may be outside of the model."""
    assert module_folders(text) == folders


@pytest.mark.parametrize(("size", "folders"), [(MAX_MODULES_BYTES, ["1_Pooling"]), (MAX_MODULES_BYTES + 1, [])])
def test_a_huge_modules_json_names_no_folder(tmp_path: Path, size: int, folders: list[str]) -> None:
    (tmp_path / "modules.json").write_bytes(b'[{"path": "1_Pooling"}]'.ljust(size))
    assert read_module_folders(tmp_path) == folders


def test_without_weights_the_settings_are_left() -> None:
    """For a remote model a tokenizer is enough; weights alone are not."""
    names = [*BASE, "model.safetensors", "onnx/model.onnx", "2_Dense/config.json", "2_Dense/model.safetensors"]
    assert choose_files(names, ["2_Dense"], weights=False) == ["2_Dense/config.json", *BASE]
    assert choose_files(["tokenizer.json", "pytorch_model.bin"], weights=False) == ["tokenizer.json"]
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        choose_files(["model.safetensors", "vocab.txt"], weights=False)


def test_heads_beside_an_encoder_are_taken() -> None:
    """bge-m3's heads once they are safetensors, and the settings of a Stanford ColBERT."""
    heads = ["sparse_linear.safetensors", "colbert_linear.safetensors"]
    names = [*BASE, "model.safetensors", *heads, "sparse_linear.pt", "artifact.metadata", "other.metadata"]
    assert choose_files(names) == sorted([*BASE, "model.safetensors", *heads, "artifact.metadata"])
    assert not set(heads) & set(choose_files(names, weights=False))


class TestOpenClip:
    """Repositories in open_clip's layout, alone or beside another."""

    OWN = ("open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json", "vocab.json", "merges.txt")

    def test_alone(self) -> None:
        assert set(choose_files([*self.OWN, "open_clip_pytorch_model.bin", "README.md"])) == set(self.OWN)
        assert "open_clip_model.safetensors" not in choose_files(self.OWN, weights=False)
        assert choose_files(["open_clip_config.json"], weights=False) == ["open_clip_config.json"]
        assert is_weights("open_clip_model.safetensors")

    def test_beside_transformers_whose_weights_are_taken(self) -> None:
        """Gigabytes of weights are fetched only once."""
        theirs = ["config.json", "preprocessor_config.json", "model.safetensors"]
        chosen = choose_files([*self.OWN, *theirs, "pytorch_model.bin"])
        assert set(chosen) == {*self.OWN, *theirs} - {"open_clip_model.safetensors"}

    def test_beside_transformers_pickles(self) -> None:
        theirs = ["config.json", "preprocessor_config.json", "pytorch_model.bin"]
        chosen = choose_files([*self.OWN, *theirs])
        assert set(chosen) == {*self.OWN, *theirs} - {"pytorch_model.bin"}

    def test_beside_timms_image_tower(self) -> None:
        """Without a transformers processor, config.json and model.safetensors belong to timm."""
        chosen = choose_files([*self.OWN, "config.json", "model.safetensors"])
        assert set(chosen) == {*self.OWN, "config.json"}

    def test_a_pickle_alone(self) -> None:
        """Beside transformers' own, those of transformers are taken."""
        own = ["open_clip_config.json", "open_clip_pytorch_model.bin"]
        assert choose_files(own) == own
        theirs = ["config.json", "preprocessor_config.json", "pytorch_model.bin"]
        assert set(choose_files([*own, *theirs])) == {own[0], *theirs}
        assert set(choose_files([*own, "config.json", "pytorch_model.bin"])) == {*own, "config.json"}


def test_the_folder_of_two_towers_is_fetched() -> None:
    """sentence-transformers' older layout keeps everything in its single module's folder."""
    own = ["config.json", "model.safetensors", "preprocessor_config.json", "vocab.json", "merges.txt"]
    names = ["modules.json", *(f"0_CLIPModel/{name}" for name in (*own, "pytorch_model.bin"))]
    assert choose_files(names, ["0_CLIPModel"]) == sorted(["modules.json", *(f"0_CLIPModel/{name}" for name in own)])
