from __future__ import annotations

import random
import re
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Tokenizer, models, normalizers, pre_tokenizers, processors

from shoal.errors import ModelFileError
from shoal.pipelines.text.tokenizer import CHARS_PER_TOKEN, DENSE, READ_CHARS, FittedText, TextTokenizer, most_chars
from shoal.types import Direction
from tests.unit.pipelines import tiny_tokenizers

Pair = tuple[TextTokenizer, Tokenizer]

FRAGMENTS = [
    *("the", "quick", "jumps", "over", "x", "tokens", "2024", "don't", "café", "слово", "東京", "東東京京東", "ﬁ", "Σ"),
    *(
        " ",
        "  ",
        "    ",
        "\n",
        "\t",
        "\u200b",
        "\x00",
        "\u0301",
        "\u3000",
        "\x85",
        "\x1c",
        " ' ",
        ", ",
        "!",
        "a.b",
        "🐟",
        "[SEP]",
    ),
    *("</s>", "w" * 30, "\u200b" * 40, " " * 50, "\u0301 ", "e\u0301 \u0301x "),
]


def long_text(seed: int, glue: str) -> str:
    """Enough fragments to force a cut, which lists drawn by hypothesis rarely have."""
    return glue.join(random.Random(seed).choices(FRAGMENTS, k=150))


TEXTS = st.one_of(
    st.builds(long_text, st.integers(0, 2**32), st.sampled_from([" ", "", " the "])),
    st.lists(st.sampled_from(FRAGMENTS), max_size=80).map(" ".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Each kind as read by Shoal and by the library."""
    tokenizers = {}
    for kind, build in {**tiny_tokenizers.KINDS, "unsplit": tiny_tokenizers.unsplit}.items():
        raw = build()
        folder = tiny_tokenizers.save(raw, tmp_path_factory.mktemp(kind))
        tokenizers[kind] = (TextTokenizer(folder, "tokenizer.json"), raw)
    return tokenizers


def truncated(raw: Tokenizer, text: str, max_tokens: int, direction: Direction) -> list[int]:
    """The library's truncation of a text tokenized whole."""
    raw.enable_truncation(max_tokens, direction=direction)
    ids: list[int] = raw.encode(text).ids
    raw.no_truncation()
    return ids


@pytest.mark.parametrize("kind", [*tiny_tokenizers.KINDS, "unsplit"])
@given(text=TEXTS, max_tokens=st.integers(3, 12), direction=st.sampled_from(["right", "left"]))
def test_cutting_by_characters_never_changes_the_tokens_kept(
    pairs: dict[str, Pair], kind: str, text: str, max_tokens: int, direction: Direction
) -> None:
    """Ids equal the library's truncation of the whole text; the count is exact or a lower bound."""
    ours, raw = pairs[kind]
    fitted = ours.fit([text], [direction], max_tokens)[0]
    whole = len(raw.encode(text).ids)
    assert fitted.ids == truncated(raw, text, max_tokens, direction)
    assert fitted.total == whole if fitted.exact else max_tokens < fitted.total <= whole


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@given(text=TEXTS, size=st.integers(1, 40))
def test_chunks_hold_the_text_and_its_tokens(pairs: dict[str, Pair], kind: str, text: str, size: int) -> None:
    """Chunks joined are the text; their tokens joined are its tokens."""
    ours, _ = pairs[kind]
    chunks = list(ours.chunks(text, size))
    assert "".join(chunks) == text
    joined = [i for ids in ours.encode(chunks, special=False) for i in ids]
    assert joined == ours.encode([text], special=False)[0]


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@pytest.mark.parametrize("direction", ["right", "left"])
def test_a_long_text_is_read_only_as_far_as_needed(pairs: dict[str, Pair], kind: str, direction: Direction) -> None:
    """Of a megabyte of words, the tokenizer gets little more than one piece."""
    ours, _ = pairs[kind]
    text = "the quick brown fox " * 50_000
    piece = ours.piece(text, direction, 64)
    assert 64 <= len(piece) < 100
    fitted = ours.fit([text], [direction], 16)[0]
    assert len(fitted.ids) == 16
    assert not fitted.exact
    assert fitted.total < 200


def test_ideographs_are_cut_between_where_each_stands_alone(pairs: dict[str, Pair]) -> None:
    """Chinese without spaces is cut for WordPiece, whose normalizer splits ideographs, but not for Unigram."""
    text = "東京" * 5_000
    assert len(pairs["wordpiece"][0].piece(text, "right", 80)) == 80
    assert len(pairs["wordpiece"][0].piece(text, "left", 80)) == 80
    assert pairs["unigram"][0].piece(text, "right", 80) is text


def test_a_tokenizer_that_sees_past_spaces_reads_everything(pairs: dict[str, Pair]) -> None:
    """Texts are not cut if words are not tokenized separately."""
    ours, _ = pairs["unsplit"]
    text = "the quick " * 1_000
    assert ours.piece(text, "right", 64) is text
    assert list(ours.chunks(text, 64)) == [text]
    assert ours.fit([text], ["right"], 8)[0].exact


def test_a_text_that_gives_few_tokens_is_read_further(pairs: dict[str, Pair]) -> None:
    """Pieces grow until they have enough tokens: thousands of dropped characters hide no word."""
    ours, raw = pairs["wordpiece"]
    text = "the" + " \x00" * 3_000 + " x " + "\u200b" * 50_000 + " quick brown fox" * 400
    assert ours.fit([text], ["right"], 8)[0].ids == truncated(raw, text, 8, "right")
    assert ours.fit([text[::-1]], ["left"], 8)[0].ids == truncated(raw, text[::-1], 8, "left")


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("unit", ["! ", "?! ", "(fox) ", "' ", "1. "])
def test_spaces_after_punctuation_part_words_too(
    pairs: dict[str, Pair], kind: str, direction: Direction, unit: str
) -> None:
    """Such megabytes are read only as far as prose, and are split into chunks."""
    ours, raw = pairs[kind]
    text = unit * 50_000
    assert len(ours.piece(text, direction, 64)) < 100
    assert ours.fit([text], [direction], 16)[0].ids == truncated(raw, text, 16, direction)
    assert max(map(len, ours.chunks(text, 1_000))) < 1_010


@pytest.mark.parametrize("kind", [*tiny_tokenizers.KINDS, "unsplit"])
@pytest.mark.parametrize("direction", ["right", "left"])
def test_no_text_is_read_without_end(pairs: dict[str, Pair], kind: str, direction: Direction) -> None:
    """Without word boundaries the cut can be anywhere; tokens far from it match those of the whole text."""
    ours, raw = pairs[kind]
    text = "fox!?" * 40_000
    assert len(ours.piece(text, direction, 64)) == READ_CHARS
    fitted = ours.fit([text], [direction], 16)[0]
    assert fitted.ids == truncated(raw, text, 16, direction)
    assert not fitted.exact
    assert 16 < fitted.total < READ_CHARS + 2


def test_many_long_texts_are_not_read_at_once(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text keeps its own result and position, however the batch is split."""
    ours, _ = pairs["byte_bpe"]
    texts = ["fox " * n for n in (1, 30, 2, 0, 3, 3, 40)]
    directions: list[Direction] = ["right", "left", "right", "left", "right", "left", "right"]
    whole = ours.fit(texts, directions, 12)
    assert [ours.fit([text], [end], 12)[0] for text, end in zip(texts, directions, strict=True)] == whole
    calls: list[list[str]] = []

    class Spy:
        def encode_batch_fast(self, pieces: list[str], add_special_tokens: bool) -> list[Encoding]:
            calls.append(pieces)
            return list(raw.encode_batch_fast(pieces, add_special_tokens=add_special_tokens))

    raw = ours.raw
    monkeypatch.setattr("shoal.pipelines.text.tokenizer.CHARS_AT_ONCE", 16)
    monkeypatch.setattr(ours, "raw", Spy())
    assert ours.fit(texts, directions, 12) == whole
    assert all(len(call) == 1 or sum(map(len, call)) <= 16 for call in calls)
    assert max(map(len, calls)) == 2


@pytest.mark.parametrize("direction", ["right", "left"])
def test_more_is_read_of_a_text_of_few_tokens(pairs: dict[str, Pair], direction: Direction) -> None:
    """Reading stops at the bound; a text with words beyond it counts as too long, with the tokens so far."""
    ours, _ = pairs["wordpiece"]
    limit = 1_000
    gap = "\u200b" * (limit * DENSE)
    text = f"the {gap} fox"
    whole = ours.encode([text])[0]
    assert ours.fit([text], [direction], limit)[0] == FittedText(whole, len(whole), True)
    text = f"the {gap * 10} fox" if direction == "right" else f"fox {gap * 10} the"
    assert ours.fit([text], [direction], limit)[0] == FittedText(ours.encode(["the"])[0], limit + 1, False)
    assert most_chars(limit) == limit * 250


def test_an_added_token_may_take_the_space_after_it(tmp_path: Path) -> None:
    """Texts are not cut at its end."""
    raw = tiny_tokenizers.byte_bpe()
    raw.add_tokens([AddedToken("<x>", rstrip=True)])
    tiny_tokenizers.save(raw, tmp_path)
    ours = TextTokenizer(tmp_path, "tokenizer.json")
    text = "<x> the! " * 100
    assert {chunk[-1] for chunk in [*ours.chunks(text, 10)][:-1]} == {"!"}
    joined = [i for ids in ours.encode([*ours.chunks(text, 10)], special=False) for i in ids]
    assert joined == ours.encode([text], special=False)[0]


def test_a_long_text_of_few_tokens_is_not_truncated(pairs: dict[str, Pair]) -> None:
    """Characters that the normalizer drops do not count: the text is whole and reported as whole."""
    ours, _ = pairs["wordpiece"]
    text = "the fox " * 3 + "\u200b" * 70 + " dog " + "\x00" * 500
    fitted = ours.fit([text], ["right"], 12)[0]
    assert (fitted.total, fitted.exact) == (len(fitted.ids), True)
    assert fitted.ids == ours.encode([text])[0]


def test_the_files_own_padding_and_truncation_are_off(pairs: dict[str, Pair]) -> None:
    """A tokenizer.json that pads to 9 and truncates to 7 gives unpadded, whole texts."""
    for ours, _ in pairs.values():
        short, long = ours.encode(["x", "x " * 20])
        assert len(short) < 7
        assert len(long) > 9


def test_special_tokens_frame_every_text(pairs: dict[str, Pair]) -> None:
    """Prefix and suffix are what the post-processor puts around a text; the empty text is just those."""
    ours, raw = pairs["wordpiece"]
    assert (ours.prefix, ours.suffix) == ([raw.token_to_id("[CLS]")], [raw.token_to_id("[SEP]")])
    assert ours.fit([""], ["right"], 8)[0].ids == [*ours.prefix, *ours.suffix]
    assert set(ours.prefix + ours.suffix) <= ours.special_ids


def test_no_room_beside_special_tokens_keeps_just_those(pairs: dict[str, Pair]) -> None:
    """A limit of two tokens keeps the special tokens, whichever end is cut."""
    ours, _ = pairs["byte_bpe"]
    fits = ours.fit(["the fox", "the fox"], ["right", "left"], 2)
    assert [f.ids for f in fits] == [[*ours.prefix, *ours.suffix]] * 2


def test_lower_case_is_put_before_the_own_normalizer(tmp_path: Path) -> None:
    """do_lower_case acts in the tokenizer, so that special tokens in a text keep their case."""
    raw = tiny_tokenizers.wordpiece()
    raw.normalizer = normalizers.BertNormalizer(lowercase=False)
    folder = tiny_tokenizers.save(raw, tmp_path)
    plain = TextTokenizer(folder, "tokenizer.json")
    lower = TextTokenizer(folder, "tokenizer.json", lower_case=True)
    unknown = raw.token_to_id("[UNK]")
    assert unknown in plain.encode(["THE FOX"])[0]
    assert lower.encode(["THE [SEP] FOX"]) == plain.encode(["the [SEP] fox"])
    assert raw.token_to_id("[SEP]") in lower.encode(["[SEP]"], special=False)[0]


def test_lower_case_twice_is_not_added(tmp_path: Path) -> None:
    """An existing Lowercase, alone or in a sequence, is not added again."""
    for i, own in enumerate(
        [normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])]
    ):
        raw = tiny_tokenizers.byte_bpe()
        raw.normalizer = own
        folder = tmp_path / str(i)
        folder.mkdir()
        tiny_tokenizers.save(raw, folder)
        assert type(TextTokenizer(folder, "tokenizer.json", lower_case=True).raw.normalizer) is type(own)


def test_lower_case_without_a_normalizer(tmp_path: Path) -> None:
    """do_lower_case works where the tokenizer normalises nothing."""
    folder = tiny_tokenizers.save(tiny_tokenizers.byte_bpe(), tmp_path)
    lower = TextTokenizer(folder, "tokenizer.json", lower_case=True)
    assert lower.encode(["The FOX"]) == lower.encode(["the fox"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No tokenizer.json: ModelFileError with the file's name."""
    with pytest.raises(ModelFileError, match="the file is missing"):
        TextTokenizer(tmp_path, "tokenizer.json")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """An invalid tokenizer raises ModelFileError, not the library's bare Exception."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="cannot be read"):
        TextTokenizer(tmp_path, "tokenizer.json")


def test_segment_ids_other_than_zero_are_refused(tmp_path: Path) -> None:
    """Shoal feeds zeros as segment ids, so segment 1 for a single text is refused."""
    raw = tiny_tokenizers.wordpiece()
    raw.post_processor = processors.TemplateProcessing(single="$A:1", special_tokens=[])
    tiny_tokenizers.save(raw, tmp_path)
    with pytest.raises(ModelFileError, match="segment ids"):
        TextTokenizer(tmp_path, "tokenizer.json")


def test_a_tokenizer_that_makes_nothing_of_words_is_refused(tmp_path: Path) -> None:
    """The special tokens are unknown if no probe gives a token."""
    raw = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.normalizer = normalizers.Replace("a", "")
    raw.normalizer = normalizers.Sequence([normalizers.Replace(c, "") for c in "a1the"])
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="special tokens"):
        TextTokenizer(tmp_path, "tokenizer.json")


def test_a_tokenizer_without_an_unknown_token_is_read_whole(tmp_path: Path) -> None:
    """Unreadable probes only disable cutting."""
    raw = Tokenizer(models.WordLevel({"the": 0, "fox": 1}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "the fox " * 100
    ours = TextTokenizer(tmp_path, "tokenizer.json")
    assert ours.piece(text, "right", 64) is text
    assert ours.fit([text], ["left"], 3)[0] == FittedText([1, 0, 1], 200, True)


def test_a_tokenizer_without_a_pre_tokenizer_is_read_whole(tmp_path: Path) -> None:
    """Without it, words are not known to be tokenized separately."""
    raw = tiny_tokenizers.unigram()
    raw.pre_tokenizer = None
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "the fox " * 100
    assert TextTokenizer(tmp_path, "tokenizer.json").piece(text, "right", 64) is text


@pytest.mark.parametrize("direction", ["right", "left"])
def test_a_search_for_a_space_gives_up(pairs: dict[str, Pair], direction: Direction) -> None:
    """Long runs of spaces are not searched one by one: the next piece is larger, and finally the text is read whole."""
    ours, _ = pairs["byte_bpe"]
    sea = "fox" + " " * 50_000 + "fox"
    assert ours.piece(sea, direction, 64) is sea
    assert ours.piece("x" * 5_000, direction, 64) == "x" * 5_000


def test_an_added_token_with_a_space_forbids_cutting(tmp_path: Path) -> None:
    """A cut could fall into the added token, so texts are read whole."""
    raw = tiny_tokenizers.wordpiece()
    raw.add_tokens(["quick brown"])
    tiny_tokenizers.save(raw, tmp_path)
    text = "the quick brown fox " * 100
    assert TextTokenizer(tmp_path, "tokenizer.json").piece(text, "right", 8 * CHARS_PER_TOKEN) is text


def test_threads_share_a_tokenizer(pairs: dict[str, Pair]) -> None:
    """Eight concurrent threads get the same results as one."""
    ours, _ = pairs["byte_bpe"]
    jobs = [[f"text {n} {m} " + "fox " * (n * m) for m in range(8)] for n in range(16)]
    alone = [ours.fit(job, ["right"] * 8, 12) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda job: ours.fit(job, ["right"] * 8, 12), jobs)) == alone


def letters(folder: Path) -> Path:
    """A tokenizer with one token per character."""
    words = {char: place for place, char in enumerate(["?", *map(chr, range(32, 127))])}
    raw = Tokenizer(models.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tiny_tokenizers.save(raw, folder)


@given(
    text=st.text(
        st.sampled_from([*"aB ,.-_'[]^\\!~", "\n", "\t", "\x1c", "\x1f", "\xa0", "\u3000", "\x85"]), max_size=30
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cleaning_is_that_of_siglips_tokenizer(tmp_path: Path, text: str) -> None:
    """transformers' canonicalize_text: lower case, no ASCII punctuation, one blank between words, none around them."""
    folder = letters(tmp_path)
    cleaned = text.lower().translate(str.maketrans("", "", string.punctuation))
    cleaned = re.sub(r"\s+", " ", cleaned).strip()
    plain = TextTokenizer(folder, "tokenizer.json")
    assert TextTokenizer(folder, "tokenizer.json", lower_case=True, cleaning="canonical").encode([text]) == (
        plain.encode([cleaned])
    )


def test_an_unknown_cleaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="unknown cleaning 'rinse'"):
        TextTokenizer(letters(tmp_path), "tokenizer.json", cleaning="rinse")
