"""Small tokenizers of the three supported kinds, saved as a tokenizer.json with padding and truncation."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from shoal.specs import TextSpec

CORPUS = [
    "the quick brown fox jumps over the lazy dog; don't you think so, in 2024?",
    "query: passage: embeddings of short texts are merged into batches, and 100 tokens fit well",
    "naïve café Größe слово 東京 it's   spaced\tout\nand wrapped",
]


def _framed(raw: Tokenizer, first: str, last: str) -> Tokenizer:
    pairs = [(token, raw.token_to_id(token)) for token in (first, last)]
    raw.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=pairs)
    return raw


def wordpiece() -> Tokenizer:
    words = {word for line in CORPUS for word in re.findall(r"\b[a-z]+\b", line.lower(), re.ASCII)}
    letters = string.ascii_lowercase + string.digits
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *sorted(words),
        *letters,
        *("##" + c for c in letters),
        *"東京,.;:?!'",
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=20))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return _framed(raw, "[CLS]", "[SEP]")


def byte_bpe() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<s>", "<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return _framed(raw, "<s>", "</s>")


def unigram(split: bool = True) -> Tokenizer:
    words = {"▁" + word for line in CORPUS for word in line.split()}
    pieces: list[tuple[str, float]] = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [
        ("▁", -4.0),
        *((c, -8.0) for c in string.ascii_letters + string.digits),
        *((w, -9.0) for w in sorted(words)),
    ]
    pieces += [("in", -7.0), ("er", -7.0), ("▁t", -7.5), ("東京", -9.0), ("東", -9.5)]
    raw = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    raw.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return _framed(raw, "<s>", "</s>")


def unsplit() -> Tokenizer:
    """A tokenizer whose words are not tokenized separately: long texts must not be cut."""
    return unigram(split=False)


KINDS: dict[str, Callable[[], Tokenizer]] = {"wordpiece": wordpiece, "byte_bpe": byte_bpe, "unigram": unigram}


def save(raw: Tokenizer, folder: Path) -> Path:
    """Save with padding and truncation, which Shoal must ignore."""
    raw.enable_padding(length=9)
    raw.enable_truncation(7)
    raw.save(str(folder / "tokenizer.json"))
    raw.no_padding()
    raw.no_truncation()
    return folder


def spec(**changes: Any) -> TextSpec:
    fields: dict[str, Any] = {
        "tokenizer": "tokenizer.json",
        "inputs": ("input_ids", "attention_mask"),
        "dimension": 8,
        "max_tokens": 16,
        "pooled": "pooled",
    }
    return TextSpec(**(fields | changes))
