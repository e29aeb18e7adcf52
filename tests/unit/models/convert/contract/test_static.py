"""Static models: tables of sentence-transformers and of model2vec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Normalize, read_contract
from shoal.models.convert.contract.spec import text_spec
from shoal.models.convert.contract.static import MODEL2VEC_TOKENS, MOST_TOKENS
from shoal.types import Array
from tests.unit.models.checkpoints import ST, dense, tokenizer, vocabulary, write_json
from tests.unit.models.head_checkpoints import WIDTH, model2vec, modules, normal, static

SIZE = len(vocabulary("bert"))
UNKNOWN = vocabulary("bert")["[UNK]"]


def test_a_static_embedding(tmp_path: Path) -> None:
    """One row per id; every id counts, no default truncation, and no special tokens."""
    contract = read_contract(static(tmp_path))
    assert contract.table is not None and contract.encoder is None
    assert (contract.table.tensor, contract.table.stored, contract.table.width) == ("embedding.weight", SIZE, WIDTH)
    assert contract.table.dropped == ()
    assert (contract.dimension, contract.max_tokens, contract.vocab_size) == (WIDTH, MOST_TOKENS, SIZE)
    spec = text_spec(contract, tokenizer="tokenizer.json", inputs=("input_ids",), pooled="pooled", tokens="t")
    assert (spec.frame_tokens, spec.dropped, spec.kinds) == (False, (), ("dense", "tokens"))


def test_its_tokenizer_may_cut(tmp_path: Path) -> None:
    """sentence-transformers keeps the truncation of tokenizer.json."""
    folder = static(tmp_path)
    tiny_tokenizer = tokenizer("bert")
    tiny_tokenizer.enable_truncation(7)
    tiny_tokenizer.save(str(folder / "tokenizer.json"))
    assert read_contract(folder).max_tokens == 7


def test_modules_may_follow_it(tmp_path: Path) -> None:
    """A Dense and a Normalize work on the mean; the table may be in its own folder."""
    after = ((f"{ST}Dense", "1_Dense"), (f"{ST}Normalize", "2_Normalize"))
    folder = static(tmp_path, path="0_StaticEmbedding", after=after)
    dense(folder, "1_Dense", WIDTH, 3)
    contract = read_contract(folder)
    assert (contract.dimension, contract.ends_normalized, contract.encoder_path) == (3, True, "0_StaticEmbedding")


def test_prompts_and_truncate_dim(tmp_path: Path) -> None:
    """config_sentence_transformers.json applies to static models too."""
    folder = static(tmp_path, after=((f"{ST}Normalize", "1_Normalize"),))
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}, "truncate_dim": 4})
    contract = read_contract(folder)
    assert contract.prompts == {"query": "q: "}
    assert (contract.dimension, contract.ends_normalized) == (4, True)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_of_model2vec(tmp_path: Path, quantized: bool) -> None:
    """Unknown tokens are dropped; with a mapping there are more ids than rows."""
    contract = read_contract(model2vec(tmp_path, quantized=quantized))
    assert contract.table is not None
    assert (contract.table.ids, contract.table.stored) == (SIZE, 5 if quantized else SIZE)
    assert bool(contract.table.mapping) == bool(contract.table.weights) == quantized
    assert contract.table.dropped == (UNKNOWN,)
    assert contract.modules == (Normalize(),)
    assert contract.max_tokens == MODEL2VEC_TOKENS


@pytest.mark.parametrize(
    ("config", "tokens", "normalized"),
    [
        ({"max_length": 40}, 40, True),
        ({"max_length": None, "normalize": False}, MOST_TOKENS, False),
        ({"model_type": None, "architectures": ["StaticModel"]}, MODEL2VEC_TOKENS, True),
    ],
)
def test_settings_of_model2vec(tmp_path: Path, config: dict[str, Any], tokens: int, normalized: bool) -> None:
    """Maximum length, null for none, and normalization."""
    contract = read_contract(model2vec(tmp_path, config=config))
    assert (contract.max_tokens, contract.ends_normalized) == (tokens, normalized)


def test_with_modules_json(tmp_path: Path) -> None:
    """model2vec writes the path "." for its own folder."""
    folder = model2vec(tmp_path, config={"normalize": False})
    modules(folder, (f"{ST}StaticEmbedding", "."), (f"{ST}Normalize", "1_Normalize"))
    assert read_contract(folder).ends_normalized


def test_an_unknown_token_of_a_unigram_tokenizer(tmp_path: Path) -> None:
    """The tokenizer model states its id as a number."""
    folder = model2vec(tmp_path)
    pieces = [["<unk>", 0.0], *([f"p{i}", -1.0] for i in range(SIZE - 1))]
    write_json(folder / "tokenizer.json", {"model": {"type": "Unigram", "vocab": pieces, "unk_id": 0}})
    table = read_contract(folder).table
    assert table is not None and table.dropped == (0,)


BROKEN: list[tuple[dict[str, Array], str, str]] = [
    ({}, "embeddings", "missing"),
    ({"embeddings": normal(SIZE)}, "embeddings", "must be a matrix"),
    ({"embeddings": normal(3, 2), "mapping": np.arange(4)}, "mapping", "must refer to rows of embeddings, which has 3"),
    ({"embeddings": normal(3, 2), "mapping": np.array([-1])}, "mapping", "must refer to rows"),
    ({"embeddings": normal(3, 2), "weights": normal(2)}, "weights", "has shape [2]"),
]


@pytest.mark.parametrize(("tensors", "key", "why"), BROKEN, ids=[f"{key}-{why}" for _, key, why in BROKEN])
def test_tables_that_are_refused(tmp_path: Path, tensors: dict[str, Array], key: str, why: str) -> None:
    """Missing parts, invalid shapes, or ids beyond the table."""
    folder = model2vec(tmp_path)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    assert (caught.value.file, caught.value.key) == ("model.safetensors", key)
    assert why in caught.value.message


@pytest.mark.parametrize("kind", ["Pooling", "SpladePooling", "StaticEmbedding"])
def test_modules_that_cannot_follow(tmp_path: Path, kind: str) -> None:
    """There are no token vectors to pool."""
    folder = static(tmp_path, after=((f"{ST}{kind}", "1_Other"),))
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    assert (caught.value.file, caught.value.key) == ("modules.json", "[1].type")


def test_elsewhere_nothing_but_an_encoder_is_read(tmp_path: Path) -> None:
    """The weights of a remote model are not available."""
    with pytest.raises(ModelFileError, match="first module must be a Transformer"):
        read_contract(static(tmp_path), elsewhere=True)
