"""Texts to ids and back, and properties of single tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from shoal.errors import InvalidValue, ModelFileError
from shoal.pipelines.chat.vocabulary import CHARS_PER_TOKEN, DROPS, SMALLEST, Vocabulary, shrinkage
from tests.fixtures import tiny_llama
from tests.unit.pipelines.chat.chat_kit import KINDS, TEXTS, vocabulary
from tests.unit.pipelines.tiny_tokenizers import save


@pytest.mark.parametrize(
    ("kind", "form", "strip"),
    [
        ("byte_level", "byte_level", 0),
        ("byte_fallback", "byte_fallback", 1),
        ("wordpiece", "other", 0),
        ("unigram", "other", 0),
        ("undecoded", "other", 0),
        ("bytes_apart", "other", 0),
    ],
)
def test_the_decoder_defines_the_spelling_of_tokens(kind: str, form: str, strip: int) -> None:
    spelling = vocabulary(kind).spelling
    assert (spelling.form, spelling.strip) == (form, strip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_plain_texts_get_the_tokenizers_own_frame(kind: str) -> None:
    vocab = vocabulary(kind)
    assert vocab.encode("the weather", special=True)[0] == tiny_llama.BOS == vocab.bos_id
    assert tiny_llama.BOS not in vocab.encode("the weather", special=False)
    assert vocab.adds_bos


@pytest.mark.parametrize("special", [True, False])
def test_the_first_token_is_never_there_twice(special: bool) -> None:
    ids = vocabulary().encode("<s>the weather", special=special)
    assert ids[0] == tiny_llama.BOS
    assert ids.count(tiny_llama.BOS) == 1


def test_without_a_frame_nothing_is_added() -> None:
    assert not vocabulary("undecoded").adds_bos or vocabulary("undecoded").bos_id is not None
    assert vocabulary("unigram").bos_id == 0


def test_special_tokens_are_read_in_a_rendered_text() -> None:
    ids = vocabulary().encode("<|im_start|>user\nthe<|im_end|>\n", special=False)
    assert ids[0] == tiny_llama.IM_START
    assert tiny_llama.IM_END in ids


@given(text=TEXTS)
def test_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    vocab = vocabulary()
    ids = vocab.encode(text, special=False)
    assert b"".join(map(vocab.data, ids)) == text.encode()


def test_a_token_as_text_and_as_bytes() -> None:
    level, fallback = vocabulary(), vocabulary("byte_fallback")
    euro = level.encode("€", special=False)
    assert [level.piece(token) for token in euro] == ["\ufffd"] * len(euro)
    assert b"".join(map(level.data, euro)) == "€".encode()
    assert level.piece(tiny_llama.IM_END) == "<|im_end|>"
    octet, the = (fallback.raw.token_to_id(token) or 0 for token in ("<0xE6>", "▁the"))
    assert (fallback.data(octet), fallback.piece(octet)) == (b"\xe6", "\ufffd")
    assert fallback.piece(the) == " the"
    assert fallback.data(-1) == fallback.data(fallback.size) == b""


@pytest.mark.parametrize("ids", [[-1], [448], [3, 10**9], [1, 2, -5]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidValue, match="not a token of this model; ids are between 0 and 447") as caught:
        vocabulary().check(ids)
    assert caught.value.param == "prompt"


def test_ids_in_range_pass() -> None:
    vocabulary().check([0, 447])
    vocabulary().check([])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of characters in each tokenizer call."""
    lengths: list[int] = []
    encode = Vocabulary.encode

    def spy(self: Vocabulary, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        lengths.append(len(text))
        return encode(self, text, special=special, param=param)

    monkeypatch.setattr(Vocabulary, "encode", spy)
    return lengths


def test_a_text_that_is_surely_too_long_is_not_read_to_its_end(read: list[int]) -> None:
    vocab = vocabulary()
    ids, least = vocab.fit("the weather " * 1_000, special=True, limit=50)
    assert ids is None
    assert 50 < least <= len(vocab.encode("the weather " * 1_000, special=True))
    assert sum(read[:-1]) <= SMALLEST


@pytest.mark.parametrize("text", ["w" * 30_000_000, " " * 5_000_000, "東" * 5_000_000, "a b " * 5_000_000])
def test_more_letters_than_the_longest_tokens_have_are_not_read_at_all(read: list[int], text: str) -> None:
    ids, least = vocabulary().fit(text, special=False, limit=2048)
    assert ids is None
    assert 2048 < least <= len(text) * 3
    assert read == []


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("word", ["w", "the weather ", " ", "東京", "zebra"])
def test_memory_is_bounded_by_the_limit(read: list[int], kind: str, word: str) -> None:
    """Also without spaces, pieces are read only until they exceed the limit."""
    text = word * (400_000 // len(word))
    ids, tokens = vocabulary(kind).fit(text, special=False, limit=2048)
    if ids is None:
        assert tokens > 2048
        assert sum(read) <= 8 * SMALLEST * 4
        assert max(read, default=0) <= 2048 * CHARS_PER_TOKEN
    else:  # it drops blanks, or knows no such word
        assert tokens == len(ids) < 2048


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(text=st.one_of(TEXTS, st.builds(str.__mul__, TEXTS, st.integers(1, 400))), limit=st.integers(1, 400))
def test_refused_texts_exceed_the_limit(kind: str, text: str, limit: int) -> None:
    vocab = vocabulary(kind)
    try:
        whole = vocab.encode(text, special=True)
    except InvalidValue:
        return
    ids, tokens = vocab.fit(text, special=True, limit=limit)
    if ids is None:
        assert limit < tokens <= len(whole)
    else:
        assert (ids, tokens) == (whole, len(whole))


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("byte_level", 1),
        ("byte_fallback", 1),
        ("bytes_apart", 1),
        ("wordpiece", DROPS),
        ("unigram", DROPS),
        ("suffixed", DROPS),
    ],
)
def test_how_much_a_tokenizer_may_drop(kind: str, factor: int) -> None:
    assert shrinkage(vocabulary(kind).raw) == factor


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), 12),
        (normalizers.Replace("aaaa", "b"), 4),
        (normalizers.Replace("a", ""), DROPS),
        (normalizers.Replace(Regex(" +"), " "), DROPS),
        (normalizers.Strip(), DROPS),
        (normalizers.StripAccents(), DROPS),
    ],
)
def test_a_normalizer_may_shorten_a_text(normalizer: normalizers.Normalizer, factor: int) -> None:
    raw = tiny_llama.byte_level()
    raw.normalizer = normalizer
    assert shrinkage(raw) == factor


def test_other_parts_that_drop_letters() -> None:
    removed, stripped, lacking = (tiny_llama.byte_level() for _ in range(3))
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    stripped.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    lacking.pre_tokenizer = pre_tokenizers.Metaspace()
    assert [shrinkage(raw) for raw in (removed, stripped, lacking)] == [DROPS] * 3


@pytest.mark.parametrize("text", ["the weather " * 20, "x" * 9000, "", "a " * 5000])
def test_fully_read_texts_have_all_their_tokens(text: str) -> None:
    vocab = vocabulary()
    whole = vocab.encode(text, special=True)
    for limit in (None, 10, 1000, 100_000):
        ids, tokens = vocab.fit(text, special=True, limit=limit)
        assert (ids, tokens) == (whole, len(whole)) or (ids is None and limit is not None and len(whole) > limit)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    save(tiny_llama.byte_level(), tmp_path)
    assert Vocabulary(tmp_path).encode("a b c d e f g h i j", special=False) != []
    assert Vocabulary(tmp_path).count("the " * 40) > 9


def test_eos_is_the_models() -> None:
    assert vocabulary().eos_ids == {tiny_llama.EOS, tiny_llama.IM_END}


def test_a_named_first_token(tmp_path: Path) -> None:
    tiny_llama.write_tokenizer(tmp_path)
    assert Vocabulary(tmp_path, bos_token="<s>").adds_bos
    other = Vocabulary(tmp_path, bos_token="</s>")
    assert (other.bos_id, other.adds_bos) == (tiny_llama.EOS, False)


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_half_a_character_is_named(param: str) -> None:
    with pytest.raises(InvalidValue, match=r"half of a character, \\ud83e.*send the other half") as caught:
        vocabulary().encode("half a character: \ud83e", special=True, param=param)
    assert caught.value.param == param


def test_a_word_that_no_tokenizer_can_read(tmp_path: Path) -> None:
    raw = Tokenizer(models.WordLevel({"the": 0}, unk_token="<unk>"))
    save(raw, tmp_path)
    with pytest.raises(InvalidValue, match="tokenizer cannot read this text"):
        Vocabulary(tmp_path).encode("weather", special=True)


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "Unheard"}}'])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: the (file is missing|tokenizer cannot be read)"):
        Vocabulary(tmp_path)
