"""Texts to ids and back, and what single tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from shoal.errors import InvalidValue, ModelFileError
from shoal.pipelines.chat.vocabulary import Vocabulary
from tests.fixtures import tiny_llama
from tests.unit.pipelines.chat.chat_kit import TEXTS, vocabulary
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
def test_the_decoder_tells_how_tokens_are_spelt(kind: str, form: str, strip: int) -> None:
    spelling = vocabulary(kind).spelling
    assert (spelling.form, spelling.strip) == (form, strip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_plain_texts_get_the_tokenizers_own_frame(kind: str) -> None:
    found = vocabulary(kind)
    assert found.encode("the weather", special=True)[0] == tiny_llama.BOS == found.bos_id
    assert tiny_llama.BOS not in found.encode("the weather", special=False)
    assert found.adds_bos


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
    found = vocabulary()
    ids = found.encode(text, special=False)
    assert b"".join(map(found.data, ids)) == text.encode()


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


def test_a_text_that_is_surely_too_long_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = vocabulary(), []
    encode = Vocabulary.encode

    def spy(self: Vocabulary, text: str, *, special: bool) -> list[int]:
        read.append(len(text))
        return encode(self, text, special=special)

    monkeypatch.setattr(Vocabulary, "encode", spy)
    assert len(found.fit("the weather " * 100_000, special=True, limit=50)) > 50
    assert sum(read) < 2000


@pytest.mark.parametrize("text", ["the weather " * 20, "x" * 9000, "", "a " * 5000])
def test_what_is_read_whole_has_the_tokens_of_the_whole(text: str) -> None:
    """A long word has no place to cut at, so that only the whole is sure."""
    found = vocabulary()
    whole = found.encode(text, special=True)
    for limit in (None, 10, 1000, 100_000):
        ids = found.fit(text, special=True, limit=limit)
        assert ids == whole or (limit is not None and len(whole) > limit < len(ids))


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    save(tiny_llama.byte_level(), tmp_path)
    assert Vocabulary(tmp_path).encode("a b c d e f g h i j", special=False) != []
    assert Vocabulary(tmp_path).count("the " * 40) > 9


def test_eos_is_what_the_model_says() -> None:
    assert vocabulary().eos_ids == {tiny_llama.EOS, tiny_llama.IM_END}


def test_a_named_first_token(tmp_path: Path) -> None:
    tiny_llama.write_tokenizer(tmp_path)
    assert Vocabulary(tmp_path, bos_token="<s>").adds_bos
    other = Vocabulary(tmp_path, bos_token="</s>")
    assert (other.bos_id, other.adds_bos) == (tiny_llama.EOS, False)


def test_a_text_that_no_tokenizer_can_read() -> None:
    with pytest.raises(InvalidValue, match="tokenizer cannot read this text") as caught:
        vocabulary().encode("half a character: \ud83e", special=True)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "Unheard"}}'])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: the (file is missing|tokenizer cannot be read)"):
        Vocabulary(tmp_path)
