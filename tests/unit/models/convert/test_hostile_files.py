"""Broken and hostile files: each is refused by a ModelFileError that names the file, before the model serves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.json_file import MAX_JSON_BYTES, is_there, read_json, read_lines
from shoal.models.convert.contract.lengths import LONGEST, LONGEST_QUERY
from shoal.models.convert.convert import convert
from tests.unit.models.checkpoints import ST, checkpoint, vocabulary, write_json
from tests.unit.models.classifiers import classifier
from tests.unit.models.head_checkpoints import WIDTH, edit, model2vec, modules, native, normal, pylate, stanford, static

SIZE = len(vocabulary("bert"))
Change = Callable[[Path], None]


def refused(folder: Path) -> ModelFileError:
    """Return the error of its conversion."""
    target = folder / "target"
    target.mkdir(parents=True)
    with pytest.raises(ModelFileError) as caught:
        convert(folder, target)
    return caught.value


def put(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def without(name: str, then: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        then(folder)

    return change


def edited(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        if not (folder / name).exists():
            write_json(folder / name, {})
        edit(folder / name, **changes)

    return change


def framed(single: str, pair: str, *special: tuple[str, int]) -> Change:
    """Write another post-processor."""

    def change(folder: Path) -> None:
        tiny_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tiny_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(special or (("[CLS]", 2), ("[SEP]", 3)))
        )
        tiny_tokenizer.save(str(folder / "tokenizer.json"))

    return change


def merged(merges: bytes, words: bytes = b'{"<s>":0,"</s>":1,"<unk>":2,"<pad>":3,"<mask>":4}') -> Change:
    """Replace tokenizer.json with the vocabulary files of a RoBERTa."""

    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "merges.txt").write_bytes(merges)
        (folder / "vocab.json").write_bytes(words)
        edited("tokenizer_config.json", tokenizer_class="RobertaTokenizer")(folder)

    return change


class TestUnreadable:
    """No file content ends in a traceback."""

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "modules.json"])
    def test_json_that_is_not_utf8(self, tmp_path: Path, name: str) -> None:
        """An invalid byte in any of them."""
        folder = checkpoint(tmp_path)
        (folder / name).write_bytes(b'{"a": "\xff"}')
        error = refused(folder)
        assert error.file == name and "not valid JSON" in error.message

    @pytest.mark.parametrize("content", [b"[PAD]\n\xff\xfe\n", b"\xe2\x82"])
    def test_a_vocabulary_that_is_not_utf8(self, tmp_path: Path, content: bytes) -> None:
        """A WordPiece vocabulary, read for the tokenizer and for the heads."""
        folder = checkpoint(tmp_path)
        without("tokenizer.json", put("vocab.txt", content))(folder)
        edited("tokenizer_config.json", tokenizer_class="BertTokenizer")(folder)
        assert refused(folder).file == "vocab.txt"

    @pytest.mark.parametrize(
        ("change", "file"),
        [
            (merged(b"\xff\xff b\n"), "merges.txt"),
            (merged(b"abc\n"), "merges.txt"),
            (merged(b"a b\n"), "vocab.json"),
            (merged(b"", b'{"<s>":"x","</s>":1}'), "vocab.json"),
            (merged(b"", b'{"<s>":-1,"</s>":1,"<unk>":2,"<pad>":3,"<mask>":4}'), "vocab.json"),
        ],
        ids=["not UTF-8", "one token", "tokens that are none", "no ids", "ids below zero"],
    )
    def test_merges_and_their_vocabulary(self, tmp_path: Path, change: Change, file: str) -> None:
        """The error names the file in one line."""
        folder = checkpoint(tmp_path, "roberta")
        change(folder)
        error = refused(folder)
        assert error.file == file and "\n" not in error.message

    @pytest.mark.parametrize("architectures", [5, {"0": "Bert"}, "BertModel", [None], [["x"]], True])
    @pytest.mark.parametrize("make", [checkpoint, classifier])
    def test_architectures(self, tmp_path: Path, make: Callable[[Path], Path], architectures: Any) -> None:
        """Anything but a list of strings."""
        folder = make(tmp_path)
        edit(folder / "config.json", architectures=architectures)
        error = refused(folder)
        assert (error.file, error.key) == ("config.json", "architectures")

    @pytest.mark.parametrize("names", [5, "token_type_ids", {"a": 1}, [1]])
    def test_input_names(self, tmp_path: Path, names: Any) -> None:
        """They determine whether a classifier gets segments."""
        folder = classifier(tmp_path)
        edit(folder / "tokenizer_config.json", model_input_names=names)
        error = refused(folder)
        assert (error.file, error.key) == ("tokenizer_config.json", "model_input_names")

    @pytest.mark.parametrize("name", [["x"], {"a": 1}, 5])
    def test_the_default_prompt(self, tmp_path: Path, name: Any) -> None:
        """An invalid name."""
        folder = checkpoint(tmp_path)
        write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "q"}, "default_prompt_name": name})
        assert refused(folder).key == "default_prompt_name"

    @pytest.mark.parametrize(
        "model",
        [
            {"type": "Unigram", "vocab": [[["a"], 0]]},
            {"type": "WordPiece", "vocab": {"a": "1"}},
            {"type": "WordPiece", "vocab": {"a": -1}},
            {"type": "WordPiece", "vocab": {"a": True}},
        ],
    )
    def test_a_vocabulary_of_other_things(self, tmp_path: Path, model: Any) -> None:
        """Markers are looked up before the tokenizers library reads it."""
        folder = pylate(tmp_path)
        edit(folder / "tokenizer.json", model=model)
        error = refused(folder)
        assert error.file == "tokenizer.json" and "not a tokenizer of the tokenizers library" in error.message

    def test_paths_that_no_folder_can_have(self, tmp_path: Path) -> None:
        """For a module after the encoder, the encoder, a table and a cross-encoder."""
        long = "a" * 5000
        for number, path in enumerate((long, "/".join(["b" * 99] * 60), "é" * 150)):
            folder = checkpoint(tmp_path / str(number))
            modules(folder, (f"{ST}Transformer", ""), (f"{ST}Pooling", path))
            assert refused(folder).key == "[1].path"
        for number, kind in enumerate(("Transformer", "StaticEmbedding")):
            folder = checkpoint(tmp_path / f"first{number}")
            modules(folder, (f"{ST}{kind}", long), (f"{ST}Pooling", "1_Pooling"))
            assert refused(folder).key == "[0].path"
        folder = classifier(tmp_path / "crossing", saved={})
        modules(folder, ("sentence_transformers.base.modules.transformer.Transformer", long))
        assert refused(folder).key == "[0].path"

    def test_a_shard_with_such_a_name(self, tmp_path: Path) -> None:
        """The weights index names files as well."""
        folder = checkpoint(tmp_path)
        (folder / "model.safetensors").unlink()
        write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "s" * 5000}})
        assert "too long for a file" in refused(folder).message
        assert not is_there(folder, "model.safetensors")

    @given(st.binary(max_size=60))
    def test_no_bytes_make_json_fail_otherwise(self, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
        """Bytes are decoded, or refused by name."""
        folder = tmp_path_factory.mktemp("any")
        (folder / "a.json").write_bytes(content)
        try:
            expected = json.loads(content)
        except ValueError:
            with pytest.raises(ModelFileError, match=r"a\.json"):
                read_json(folder, "a.json")
        else:
            assert read_json(folder, "a.json") == expected

    def test_a_line_ends_where_a_line_feed_is(self, tmp_path: Path) -> None:
        """Other Unicode line ends are tokens of some vocabularies; splitting there would shift all later ids."""
        (tmp_path / "vocab.txt").write_bytes("a\r\nb\u2028c\nd\x85e\n\nf".encode())
        assert read_lines(tmp_path, "vocab.txt") == ["a", "b\u2028c", "d\x85e", "", "f"]


class TestFrames:
    """Special tokens around texts must be in the model's tables and leave room for text."""

    @pytest.mark.parametrize("make", [checkpoint, classifier])
    def test_a_special_token_past_the_table(self, tmp_path: Path, make: Callable[[Path], Path]) -> None:
        """It would cause an IndexError or read invalid memory."""
        folder = make(tmp_path)
        framed("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ("[CLS]", 99999), ("[SEP]", 3))(folder)
        error = refused(folder)
        assert (error.file, error.key) == ("tokenizer.json", "post_processor") and "99999" in error.message

    def test_a_special_token_of_pairs_only(self, tmp_path: Path) -> None:
        """An embedder reads no pairs, so it does not matter."""
        change = framed("$A", "[X] $A $B:1", ("[X]", SIZE))
        change(classifier(tmp_path / "scores"))
        assert refused(tmp_path / "scores").key == "post_processor"
        change(checkpoint(tmp_path / "embeds"))
        (tmp_path / "target").mkdir()
        assert convert(tmp_path / "embeds", tmp_path / "target").spec.dimension

    @pytest.mark.parametrize(("segment", "passes"), [(1, True), (2, False), (7, False)])
    def test_a_segment_past_the_table(self, tmp_path: Path, segment: int, passes: bool) -> None:
        """A BERT has two segments."""
        folder = classifier(tmp_path)
        framed("[CLS] $A [SEP]", f"[CLS] $A [SEP] $B:{segment} [SEP]:{segment}")(folder)
        if passes:
            (tmp_path / "target").mkdir()
            assert convert(folder, tmp_path / "target").spec.score is not None
        else:
            assert "has 2 segments" in refused(folder).message

    def test_no_segments_where_the_model_has_none(self, tmp_path: Path) -> None:
        """For any segment ids of a RoBERTa's tokenizer."""
        folder = classifier(tmp_path, "roberta")
        framed("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ("<s>", 0), ("</s>", 2))(folder)
        (tmp_path / "target").mkdir()
        assert convert(folder, tmp_path / "target").spec.score is not None

    @pytest.mark.parametrize(("length", "key"), [(0.5, True), (0, True), (4, True), (5, False), (1e30, False)])
    def test_room_for_a_pair(self, tmp_path: Path, length: float, key: bool) -> None:
        """At least three special tokens and one token of each text."""
        folder = classifier(tmp_path)
        edit(folder / "tokenizer_config.json", model_max_length=length)
        if key:
            error = refused(folder)
            assert (error.file, error.key) == ("tokenizer_config.json", "model_max_length")
        else:
            (tmp_path / "target").mkdir()
            assert convert(folder, tmp_path / "target").spec.max_tokens >= 5

    @pytest.mark.parametrize(("length", "passes"), [(1, False), (2, False), (3, True)])
    def test_room_for_a_text(self, tmp_path: Path, length: int, passes: bool) -> None:
        """At least two special tokens and one text token."""
        folder = checkpoint(tmp_path, sentence={"max_seq_length": length})
        if passes:
            (tmp_path / "target").mkdir()
            assert convert(folder, tmp_path / "target").spec.max_tokens == length
        else:
            error = refused(folder)
            assert (error.file, error.key) == ("sentence_bert_config.json", "max_seq_length")

    @pytest.mark.parametrize("key", ["query_length", "document_length"])
    def test_room_beside_a_marker(self, tmp_path: Path, key: str) -> None:
        """The two sides of a late-interaction model have their own lengths and markers."""

        def with_length(name: str, length: int) -> Path:
            folder = pylate(tmp_path / name)
            edit(folder / "config_sentence_transformers.json", **{key: length})
            return folder

        error = refused(with_length("three", 3))
        assert (error.file, error.key) == ("config_sentence_transformers.json", key)
        (tmp_path / "target").mkdir()
        assert convert(with_length("four", 4), tmp_path / "target").spec.multi is not None


class TestEndless:
    """Excessive lengths, which would be allocated for a tiny request."""

    @pytest.mark.parametrize(
        ("make", "file", "key"),
        [
            (lambda p: pylate(p, query_length=LONGEST_QUERY + 1), "config_sentence_transformers.json", "query_length"),
            (lambda p: pylate(p, document_length=LONGEST + 1), "config_sentence_transformers.json", "document_length"),
            (lambda p: stanford(p, {"query_maxlen": 10**9}), "artifact.metadata", "query_maxlen"),
            (lambda p: stanford(p, {"doc_maxlen": 10**9}), "artifact.metadata", "doc_maxlen"),
            (lambda p: native(p, sentence={"query_length": 10**9}), "sentence_bert_config.json", "query_length"),
            (
                lambda p: native(p, sentence={"query_expansion": {"strategy": "fixed", "length": 5 * 10**8}}),
                "sentence_bert_config.json",
                "query_expansion.length",
            ),
            (lambda p: model2vec(p, config={"max_length": 10**9}), "config.json", "max_length"),
        ],
    )
    def test_a_length_is_refused(self, tmp_path: Path, make: Callable[[Path], Path], file: str, key: str) -> None:
        """The error names the file and the key."""
        error = refused(make(tmp_path))
        assert (error.file, error.key) == (file, key)

    @pytest.mark.parametrize("length", [-5, 0, 10**18, "long"])
    def test_truncation_length_of_a_static_models_tokenizer(self, tmp_path: Path, length: Any) -> None:
        """Its truncation is the model's own length."""
        folder = static(tmp_path)
        edit(folder / "tokenizer.json", truncation={"max_length": length})
        error = refused(folder)
        assert error.file == "tokenizer.json" and (error.key or "").startswith("truncation")

    def test_positions_of_a_model_that_is_not_built(self, tmp_path: Path) -> None:
        """The limit on lengths applies."""
        folder = checkpoint(tmp_path, sentence={"max_seq_length": LONGEST + 1})
        edit(folder / "config.json", model_type="weird", max_position_embeddings=LONGEST + 1)
        with pytest.raises(ModelFileError, match=f"must be 1 to {LONGEST} tokens"):
            read_contract(folder, foreign=True)
        edit(folder / "config.json", max_position_embeddings=LONGEST)
        contract = read_contract(folder, foreign=True)
        assert contract.max_tokens == LONGEST
        assert contract.max_tokens_at == ("config.json", "max_position_embeddings")


class TestTables:
    """A static model's mapping and factors are used or the model is refused: ignoring them gives other vectors."""

    @pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i2", "i4", "i8"])
    def test_integers_of_every_size_are_read(self, tmp_path: Path, dtype: str) -> None:
        """Signed and unsigned."""
        folder = model2vec(tmp_path, quantized=True)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"mapping": tensors["mapping"].astype(dtype)}, folder / "model.safetensors")
        table = read_contract(folder).table
        assert table is not None and (table.mapping, table.ids) == ("mapping", SIZE)

    @pytest.mark.parametrize(
        ("name", "tensor"),
        [
            ("mapping", np.zeros(SIZE, np.float32)),
            ("mapping", np.zeros((SIZE, 1), np.int64)),
            ("mapping", np.zeros(SIZE, np.bool_)),
            ("mapping", np.full(SIZE, 2**64 - 1, np.uint64)),
            ("weights", np.full(SIZE, 3, np.int64)),
            ("weights", np.ones(SIZE, np.bool_)),
            ("embeddings", np.ones((SIZE, WIDTH), np.uint8)),
        ],
    )
    def test_unreadable_tensors_are_refused(self, tmp_path: Path, name: str, tensor: Any) -> None:
        """The error names the tensor."""
        folder = model2vec(tmp_path, quantized=True)
        save_file(load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors")
        error = refused(folder)
        assert (error.file, error.key) == ("model.safetensors", name)

    def test_a_bias_that_cannot_be_read(self, tmp_path: Path) -> None:
        """An integer bias is not ignored."""
        folder = checkpoint(tmp_path)
        save_file({"weight": normal(1, 16), "bias": np.ones(1, np.int64)}, folder / "sparse_linear.safetensors")
        error = refused(folder)
        assert (error.file, error.key) == ("sparse_linear.safetensors", "bias")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modules.json"])
def test_a_huge_json_file_is_refused_unread(tmp_path: Path, name: str) -> None:
    """A wheel of a few kilobytes may unpack to one; it is not loaded into memory."""
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoint(folder)
    (folder / name).touch()
    os.truncate(folder / name, MAX_JSON_BYTES + 1)
    error = refused(folder)
    assert error.file == name
    assert f"may have {MAX_JSON_BYTES}" in error.message
