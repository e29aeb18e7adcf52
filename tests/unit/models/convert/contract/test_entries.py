"""Known but unsupported modules, and small files next to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.dense import read_dense
from shoal.models.convert.contract.entries import Entry
from shoal.models.convert.contract.types import Truncate
from shoal.models.convert.contract.vocabulary import Vocabulary
from tests.unit.models.checkpoints import HIDDEN, ST, checkpoint, dense, vocabulary, write_json
from tests.unit.models.head_checkpoints import edit, modules


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("Router", "serve them under two names"),
        ("Asym", "serve them under two names"),
        ("WeightedLayerPooling", "reads every layer of the encoder"),
        ("SparseStaticEmbedding", "serve the model used for its documents"),
        ("SparseAutoEncoder", "serve the model without it"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_modules_that_are_refused_by_name(tmp_path: Path, kind: str, advice: str, first: bool) -> None:
    """The error names the module and the next step."""
    folder = checkpoint(tmp_path)
    listed = [(f"{ST}{kind}", "")] if first else [(f"{ST}Transformer", ""), (f"{ST}{kind}", "1_Pooling")]
    modules(folder, *listed)
    with pytest.raises(ModelFileError, match=advice) as caught:
        read_contract(folder)
    assert kind in caught.value.message
    assert (caught.value.file, caught.value.key) == ("modules.json", f"[{len(listed) - 1}].type")


def test_truncate_dim_is_the_models_own_dimension(tmp_path: Path) -> None:
    """It applies before a final Normalize, and never lengthens a vector."""
    folder = checkpoint(tmp_path)
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 5})
    contract = read_contract(folder)
    assert contract.dimension == 5
    assert contract.modules[0] == Truncate(dimension=5) and contract.ends_normalized
    edit(folder / "config_sentence_transformers.json", truncate_dim=HIDDEN + 1)
    assert read_contract(folder).dimension == HIDDEN
    edit(folder / "config_sentence_transformers.json", truncate_dim=0)
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    assert caught.value.key == "truncate_dim"
    edit(folder / "config_sentence_transformers.json", truncate_dim=5)
    assert read_contract(folder, elsewhere=True).dimension == HIDDEN


@pytest.mark.parametrize(("pylate", "activation"), [(False, "tanh"), (True, "identity")])
def test_a_dense_that_names_no_activation(tmp_path: Path, pylate: bool, activation: str) -> None:
    """The two libraries differ."""
    dense(tmp_path, "1_Dense", 4, 3, activation=None)
    assert read_dense(tmp_path, Entry("Dense", "1_Dense", "[1].type", pylate)).activation == activation


def test_a_residual_dense(tmp_path: Path) -> None:
    """Read as stated in the file."""
    dense(tmp_path, "1_Dense", 4, 3)
    edit(tmp_path / "1_Dense" / "config.json", use_residual=True)
    assert read_dense(tmp_path, Entry("Dense", "1_Dense", "[1].type")).residual


@pytest.mark.parametrize(
    ("content", "token", "unknown"),
    [
        ({"model": {"vocab": {"a": 3, "<u>": 1}, "unk_token": "<u>"}}, 3, 1),
        ({"model": {"vocab": [["<u>", 0], ["a", -1]], "unk_id": 0}}, 1, 0),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 7, "content": "a"}]}, 7, None),
        ({"model": {"vocab": 5}}, None, None),
    ],
)
def test_ids_of_tokens(tmp_path: Path, content: dict[str, Any], token: int | None, unknown: int | None) -> None:
    """From both vocabulary formats and from added tokens."""
    write_json(tmp_path / "tokenizer.json", content)
    read = Vocabulary(tmp_path)
    assert (read.id("a"), read.unknown, read.id("none")) == (token, unknown, None)


def test_special_tokens_by_their_roles(tmp_path: Path) -> None:
    """A string or an object, in either file; an unknown token has no id."""
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {"<m>": 4, "<c>": 5}}})
    write_json(tmp_path / "tokenizer_config.json", {"mask_token": {"content": "<m>"}, "unk_token": "<none>"})
    write_json(tmp_path / "special_tokens_map.json", {"cls_token": "<c>"})
    read = Vocabulary(tmp_path)
    assert [read.special(role) for role in ("mask", "cls", "unk", "eos")] == [4, 5, None, None]


def test_a_vocabulary_without_tokenizer_json(tmp_path: Path) -> None:
    """vocab.txt has one token per line; without either file there is no vocabulary."""
    assert Vocabulary(tmp_path).id("[MASK]") is None
    words = vocabulary("bert")
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    assert Vocabulary(tmp_path).id("[MASK]") == words["[MASK]"]


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"vocab": {}}, "added_tokens": [{"id": 1}]},
        {"model": {"vocab": {}}, "added_tokens": ["a"]},
        {"model": {"vocab": {}}, "truncation": {"max_length": "long"}},
        {"model": []},
    ],
)
def test_broken_tokenizers_are_named(tmp_path: Path, content: dict[str, Any]) -> None:
    """No file makes the reader raise another error."""
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelFileError) as caught:
        _ = Vocabulary(tmp_path).limit
    assert caught.value.file == "tokenizer.json"
