"""The served tokenizer.json: the model's own, adjusted to tokenizer_config, or built from the vocabulary files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.tokenizer_file import write_tokenizer
from tests.unit.models.checkpoints import checkpoint, vocabulary, write_json

TEXT = "Fishing together, 42!"


def written(folder: Path) -> Tokenizer:
    target = folder / "served.json"
    write_tokenizer(folder, read_contract(folder), target)
    tokenizer = Tokenizer.from_file(str(target))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def test_the_models_own_file_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """A file that needs no changes is not rewritten."""
    folder = checkpoint(tmp_path)
    written(folder)
    assert (folder / "served.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("config", "lower"),
    [
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": False}, False),
        ({"tokenizer_class": "BertTokenizerFast", "do_lower_case": True}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"do_lower_case": False}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, True),
    ],
)
def test_tokenizer_config_decides_on_lower_case(tmp_path: Path, config: dict[str, Any], lower: bool) -> None:
    """transformers' BERT tokenizers prefer it if the two files differ; the generic class does not."""
    folder = checkpoint(tmp_path)
    write_json(folder / "tokenizer_config.json", config)
    written(folder)
    normalizer = json.loads((folder / "served.json").read_text())["normalizer"]
    assert normalizer["lowercase"] is lower


def test_settings_of_a_byte_level_tokenizer_are_followed(tmp_path: Path) -> None:
    """add_prefix_space of tokenizer_config.json replaces that of tokenizer.json."""
    folder = byte_level(tmp_path)
    written(folder)
    (folder / "served.json").rename(folder / "tokenizer.json")
    assert written(folder).encode("fi").tokens == ["<s>", "fi", "</s>"]
    write_json(folder / "tokenizer_config.json", {"add_prefix_space": True})
    assert written(folder).encode("fi").tokens == ["<s>", "Ġfi", "</s>"]


def test_a_vocabulary_of_word_pieces_is_enough(tmp_path: Path) -> None:
    """vocab.txt gives the same ids as the tokenizer.json made from it."""
    folder = checkpoint(tmp_path)
    expected = written(folder).encode(TEXT)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(vocabulary("bert")) + "\n")
    write_json(folder / "tokenizer_config.json", {"do_lower_case": True})
    got = written(folder).encode(TEXT)
    assert got.ids == expected.ids
    assert got.tokens[0] == "[CLS]"


def byte_level(folder: Path, **config: Any) -> Path:
    """A RoBERTa model with vocab.json and merges.txt only."""
    checkpoint(folder, "roberta")
    (folder / "tokenizer.json").unlink()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = [*special, *"abcdefghijklmnopqrstuvwxyz", "Ġ", "fi", "Ġa", "\u0120fi"]
    write_json(folder / "vocab.json", {word: index for index, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\nf i\nĠ a\nĠ fi\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)
    return folder


def test_a_byte_level_vocabulary_is_enough(tmp_path: Path) -> None:
    """vocab.json and merges.txt give RoBERTa's tokenizer with its special tokens."""
    folder = byte_level(tmp_path, mask_token={"content": "<mask>", "lstrip": True})
    assert written(folder).encode("fi fi a").tokens == ["<s>", "fi", "Ġfi", "Ġa", "</s>"]
    assert written(folder).encode("fi <mask>").ids == [0, 32, 4, 2]  # the mask takes the space before it along


def test_a_byte_level_vocabulary_may_start_with_a_space(tmp_path: Path) -> None:
    """add_prefix_space of tokenizer_config.json."""
    assert written(byte_level(tmp_path, add_prefix_space=True)).encode("fi").tokens == ["<s>", "Ġfi", "</s>"]


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert", "mpnet"])
def test_tokenizers_that_cannot_be_built_exactly_are_refused(tmp_path: Path, kind: str) -> None:
    """The message states how to get the file."""
    folder = checkpoint(tmp_path, kind)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(b"")
    with pytest.raises(ModelFileError, match="save it again, which writes this file") as caught:
        written(folder)
    assert caught.value.file == "tokenizer.json"


def test_a_vocabulary_without_its_special_tokens_is_refused(tmp_path: Path) -> None:
    """A tokenizer without [SEP] would give other ids than the model was trained with."""
    folder = checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[MASK]\na\n")
    with pytest.raises(ModelFileError, match="sep token") as caught:
        written(folder)
    assert caught.value.file == "vocab.txt"


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    """The file is named."""
    folder = checkpoint(tmp_path)
    write_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "Nothing"}})
    with pytest.raises(ModelFileError, match="not readable") as caught:
        written(folder)
    assert caught.value.file == "tokenizer.json"


def test_ids_past_the_models_table_are_refused(tmp_path: Path) -> None:
    """Another model's tokenizer has ids beyond the engine's embedding table."""
    folder = checkpoint(tmp_path, config={"vocab_size": 20})
    with pytest.raises(ModelFileError, match="embeddings end at 19"):
        written(folder)


def test_merges_without_a_vocabulary_are_refused(tmp_path: Path) -> None:
    """The error names the missing file."""
    folder = byte_level(tmp_path)
    (folder / "vocab.json").unlink()
    with pytest.raises(ModelFileError, match="is missing") as caught:
        written(folder)
    assert caught.value.file == "vocab.json"
