"""Vocabularies of every supported kind, and functions that cut sequences into pieces."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.pipelines.chat.vocabulary import Vocabulary
from tests.fixtures import tiny_llama
from tests.unit.pipelines import tiny_tokenizers

S = TypeVar("S", str, bytes, list[int])


def undecoded() -> Tokenizer:
    """A tokenizer without a decoder joins its tokens with spaces."""
    raw = tiny_tokenizers.wordpiece()
    raw.decoder = None
    return raw


def suffixed() -> Tokenizer:
    """Its decoder drops the space after the last token of a text."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.BPEDecoder()
    specials = list(tiny_llama.SPECIALS)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, end_of_word_suffix="</w>", show_progress=False
    )
    raw.train_from_iterator(tiny_llama.SENTENCES, trainer)
    return raw


def bytes_apart() -> Tokenizer:
    """Its decoder has known parts in an unknown order, so only the decoder itself can recognize partial characters."""
    raw = tiny_llama.byte_level()
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return raw


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": tiny_llama.byte_level,
    "byte_fallback": tiny_llama.byte_fallback,
    "wordpiece": tiny_tokenizers.wordpiece,
    "unigram": tiny_tokenizers.unigram,
    "undecoded": undecoded,
    "suffixed": suffixed,
    "bytes_apart": bytes_apart,
}


@functools.cache
def vocabulary(kind: str = "byte_level") -> Vocabulary:
    with tempfile.TemporaryDirectory() as folder:
        KINDS[kind]().save(str(Path(folder) / "tokenizer.json"))
        return Vocabulary(Path(folder), eos_ids=(tiny_llama.EOS, tiny_llama.IM_END))


def cut(whole: S, places: Sequence[int]) -> list[S]:
    """Cut `whole` at `places`; some pieces may be empty."""
    marks = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[start:stop] for start, stop in itertools.pairwise(marks)]


PLACES = st.lists(st.integers(0, 10_000), max_size=8)
LETTERS = "aZ 0.\n\t'é東京こ🤗👩‍🚀नमस्तेمرح\u0301\ufffd▁Ġ<0x>"
TEXTS = st.one_of(
    st.text(alphabet=LETTERS, max_size=60),
    st.text(max_size=40),
    st.sampled_from(tiny_llama.SENTENCES),
)
