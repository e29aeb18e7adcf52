"""open_clip's tokenizers as tokenizer.json; tests/convert compares the ids with the original."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.tower_tokenizer import CLEANS
from shoal.models.open_clip_tokenizer import byte_pairs, check_options, with_cleaning, without_end

LETTERS = string.ascii_letters + string.digits + string.punctuation
WORDS = [*LETTERS, *(f"{each}</w>" for each in LETTERS), "ca", "cat</w>", "<start>", "<end>"]
VOCABULARY = {word: place for place, word in enumerate(WORDS)}
MERGES = [("c", "a"), ("ca", "t</w>")]


def made(clean: str = "lower") -> Tokenizer:
    return byte_pairs(VOCABULARY, MERGES, ["<start>", "<end>"], clean)


def tokens(text: str, clean: str = "lower") -> list[str]:
    words: list[str] = made(clean).encode(text).tokens
    return words


def test_words_digits_and_endings() -> None:
    """Letters together, each digit alone, punctuation together, and English endings separately."""
    assert tokens("CAT  cat's\t42?!") == [
        "<start>", "cat</w>", "cat</w>", "'", "s</w>", "4</w>", "2</w>", "?", "!</w>", "<end>",
    ]  # fmt: skip
    assert tokens(" \n ") == ["<start>", "<end>"]


def test_ways_of_cleaning() -> None:
    assert tokens("A_b, C!", "whitespace") == ["<start>", "A</w>", "_</w>", "b</w>", ",</w>", "C</w>", "!</w>", "<end>"]
    assert tokens("A_b, C!", "canonicalize") == ["<start>", "a</w>", "b</w>", "c</w>", "<end>"]
    assert tokens("A_b, C!") == ["<start>", "a</w>", "_</w>", "b</w>", ",</w>", "c</w>", "!</w>", "<end>"]


def test_the_end_stays_when_a_text_is_cut() -> None:
    tokenizer = made()
    tokenizer.enable_truncation(4)
    assert tokenizer.encode("a b c d e f").tokens == ["<start>", "a</w>", "b</w>", "<end>"]


@given(st.text(), st.sampled_from(CLEANS))
def test_blanks_are_single(text: str, clean: str) -> None:
    """No space at the ends, and none twice in a row, for any text."""
    step = with_cleaning(Tokenizer(models.BPE()), clean).normalizer
    once = step.normalize_str(text)
    assert "  " not in once
    assert once == once.strip(" ")
    if clean == "canonicalize":
        assert not set(once) & set(string.punctuation)


def test_cleaning_precedes_the_existing_normalizer() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace("a b", "x")
    assert with_cleaning(tokenizer, "lower").encode(" A \n b ").tokens == ["x"]


@pytest.mark.parametrize("frame", ["template", "bert"])
def test_another_id_in_the_place_of_an_end(frame: str) -> None:
    """CLIPA models treat it as padding. The token itself inside a text stays unchanged."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = (
        processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        if frame == "bert"
        else processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    )
    changed = without_end(tokenizer, "[SEP]", 0)
    assert changed.encode("a a").ids == [1, 3, 3, 0]
    changed.enable_truncation(3)
    assert changed.encode("a a a a").ids == [1, 3, 0]


def test_a_frame_that_is_not_known() -> None:
    for tokenizer in (Tokenizer(models.BPE()), made()):
        with pytest.raises(ModelFileError, match=r"post_processor: texts do not end in '\[SEP\]'"):
            without_end(tokenizer, "[SEP]", 0)


def test_options() -> None:
    def check(options: dict[str, Any]) -> str:
        return check_options(JsonFile("f", options, "model_cfg.text_cfg.tokenizer_kwargs"))

    assert check({}) == ""
    assert check({"clean": "lower", "strip_sep_token": True}) == "lower"
    for options in ({"trust_remote_code": True}, {"clean": "magic"}, {"reduction_mask": "random"}):
        with pytest.raises(ModelFileError, match=rf"f: model_cfg\.text_cfg\.tokenizer_kwargs\.{next(iter(options))}"):
            check(options)


def test_it_is_a_file_like_any_other() -> None:
    again = Tokenizer.from_str(made().to_str())
    assert again.encode("cat").ids == made().encode("cat").ids
    assert json.loads(made().to_str())["model"]["type"] == "BPE"
