"""Ids in pieces give the text of all ids at once, and no released text is revised."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.pipelines.chat.detokenize import HELD_BYTES, HELD_TOKENS, Detokenizer
from shoal.pipelines.chat.vocabulary import Vocabulary
from tests.fixtures import tiny_llama
from tests.unit.pipelines.chat.chat_kit import KINDS, PLACES, TEXTS, cut, vocabulary

EXACT = sorted(KINDS.keys() - {"bytes_apart"})
"""Kinds whose decoder gives nothing but what is known here, or looks at each token with its neighbour alone."""


def pushed(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.push, pieces)) + detokenizer.flush()


@st.composite
def runs(draw: st.DrawFn, kind: str) -> list[int]:
    """Random ids, some of them invalid; runs of byte-fallback bytes with complete and partial characters."""
    vocab = vocabulary(kind)
    anything = st.integers(-2, vocab.size + 2)
    octets = TEXTS.map(lambda text: vocab.encode(text[:20], special=False))
    halves = octets.map(lambda ids: ids[1:-1])
    parts = draw(st.lists(st.one_of(st.lists(anything, max_size=6), octets, halves), max_size=5))
    # Past so many bytes of one run no one waits for its end, on purpose: see the test of that.
    return [token for part in parts for token in part][: HELD_BYTES if kind == "byte_fallback" else None]


@pytest.mark.parametrize("kind", EXACT)
@given(data=st.data(), places=PLACES, skip=st.booleans())
def test_pieces_give_the_text_of_the_whole(kind: str, data: st.DataObject, places: list[int], skip: bool) -> None:
    found, ids = vocabulary(kind), data.draw(runs(kind))
    known = [token for token in ids if token >= 0]
    whole = found.decode(known, skip_special_tokens=skip)
    assert pushed(Detokenizer(found, skip_special_tokens=skip), cut(ids, places)) == whole
    assert pushed(Detokenizer(found, skip_special_tokens=skip), [[token] for token in ids]) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "bytes_apart"])
@given(text=TEXTS, places=PLACES)
def test_texts_come_back_letter_by_letter(kind: str, text: str, places: list[int]) -> None:
    """The text is unchanged, including spaces, and the released part is always a prefix of it."""
    vocab = vocabulary(kind)
    ids = vocab.encode(text, special=False)
    whole = vocab.decode(ids)
    detokenizer, shown = Detokenizer(vocab), ""
    for piece in cut(ids, places):
        shown += detokenizer.push(piece)
        assert whole.startswith(shown)
    assert shown + detokenizer.flush() == whole
    if kind != "byte_fallback":
        assert whole == text


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(text=TEXTS, at=st.integers(0, 60))
def test_an_answer_goes_on_from_its_context(kind: str, text: str, at: int) -> None:
    """As in a completion: the text of both, without the prompt's text."""
    vocab = vocabulary(kind)
    ids = vocab.encode(text, special=False)
    before = ids[: at % (len(ids) + 1)]
    context, whole = vocab.decode(before), vocab.decode(ids)
    if not whole.startswith(context) or "\ufffd" in context:
        return
    if len(before) < 16 and before:
        detokenizer = Detokenizer(vocab, context=before)
        assert pushed(detokenizer, [[token] for token in ids[len(before) :]]) == whole[len(context) :]


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram"])
def test_the_space_before_a_word_stays_after_a_prompt_only(kind: str) -> None:
    vocab = vocabulary(kind)
    prompt, word = (vocab.encode(text, special=False) for text in ("the", "the"))
    assert pushed(Detokenizer(vocab), [word]) == "the"
    assert pushed(Detokenizer(vocab, context=prompt), [word]) == " the"


def test_half_a_character_is_kept_back() -> None:
    vocab = vocabulary()
    ids = vocab.encode("🤗!", special=False)
    detokenizer = Detokenizer(vocab)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🤗", "!"]
    assert Detokenizer(vocab).push(ids[:2]) == ""
    assert pushed(Detokenizer(vocab), [ids[:2]]) == "\ufffd"


def test_a_prompt_that_ends_in_half_a_character() -> None:
    vocab = vocabulary()
    ids = vocab.encode("🤗!", special=False)
    assert pushed(Detokenizer(vocab, context=ids[:2]), [ids[2:]]) == "🤗!"
    fallback = vocabulary("byte_fallback")
    ids = fallback.encode("x🤗🤗", special=False)
    assert pushed(Detokenizer(fallback, context=ids[:-2]), [ids[-2:]]) == "🤗"


def octet_tokens(data: bytes) -> list[int]:
    return [vocabulary("byte_fallback").raw.token_to_id(f"<0x{octet:02X}>") or 0 for octet in data]


def test_a_run_of_bytes_is_good_as_a_whole_or_not_at_all() -> None:
    vocab = vocabulary("byte_fallback")
    octets = octet_tokens("é".encode() + b"\xff")
    assert pushed(Detokenizer(vocab), [[token] for token in octets]) == "\ufffd" * 3 == vocab.decode(octets)


def test_long_byte_runs_are_not_held_back() -> None:
    found, text = vocabulary("byte_fallback"), "东" * 100
    octets = octet_tokens(text.encode())
    detokenizer = Detokenizer(found)
    parts = [detokenizer.push([token]) for token in octets]
    longest = max(len(part) for part in "".join("x" if one else "." for one in parts).split("x"))
    assert longest <= HELD_BYTES
    assert "".join(parts) + detokenizer.flush() == text


def test_special_tokens_are_left_out_but_those_to_be_shown() -> None:
    vocab = vocabulary()
    ids = [tiny_llama.IM_START, *vocab.encode("hi", special=False), tiny_llama.IM_END]
    assert pushed(Detokenizer(vocab), [ids]) == "hi"
    assert pushed(Detokenizer(vocab, shown=[tiny_llama.IM_START]), [ids]) == "<|im_start|>hi"
    assert pushed(Detokenizer(vocab, skip_special_tokens=False), [ids]) == "<|im_start|>hi<|im_end|>"


class Counting(Vocabulary):
    """Counts decoded tokens."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.__dict__ |= vars(vocab)
        self.decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)

    def part(self, token: int) -> int | str | bytes | None:
        self.decoded += 1
        return super().part(token)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("text", ["the weather in Paris ", "🤗", "\ufffd", " "])
def test_each_token_is_decoded_a_bounded_number_of_times(kind: str, text: str) -> None:
    vocab = Counting(vocabulary(kind))
    ids = ((vocab.encode(text, special=False) or [tiny_llama.EOS]) * 500)[:2000]
    detokenizer = Detokenizer(vocab)
    for token in ids:
        detokenizer.push([token])
    # Where each token gives a text, it is decoded when it comes, with the one before it, and once before the next.
    assert vocab.decoded <= len(ids) * (4 if "weather" in text else HELD_TOKENS * 4)


@pytest.mark.parametrize("kind", ["wordpiece", "bytes_apart"])
def test_half_characters_for_ever_are_decoded_no_more_often(kind: str) -> None:
    """Undecodable bytes are released as replacement characters after a while."""
    vocab = Counting(vocabulary("bytes_apart"))
    half = vocab.encode("🤗", special=False)[:1] if kind == "bytes_apart" else [tiny_llama.EOS]
    detokenizer = Detokenizer(vocab, skip_special_tokens=False)
    text = "".join(detokenizer.push(half) for _ in range(1000))
    assert vocab.decoded <= 1000 * HELD_TOKENS * 4
    assert len(text) >= 900
