"""Tokenized pairs of texts, compared with the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shoal.errors import InvalidValue, ModelFileError
from shoal.pipelines.probing import find_frame, find_pair_frame
from shoal.pipelines.text.pairing import FramedText, PairInput, PairTokenizer, longest_first
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.types import Direction
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.text.test_tokenizer import FRAGMENTS, TEXTS

Both = tuple[TextTokenizer, Tokenizer]
SHORT = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(" ".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
DIRECTIONS: tuple[Direction, ...] = ("right", "left")


def bert() -> Tokenizer:
    raw = tiny_tokenizers.wordpiece()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, raw.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return raw


def bert_of_old() -> Tokenizer:
    """The library's own BERT processor, which has no template."""
    raw = tiny_tokenizers.wordpiece()
    raw.post_processor = processors.BertProcessing(
        ("[SEP]", raw.get_vocab()["[SEP]"]), ("[CLS]", raw.get_vocab()["[CLS]"])
    )
    return raw


def roberta() -> Tokenizer:
    raw = tiny_tokenizers.byte_bpe()
    raw.post_processor = processors.RobertaProcessing(
        ("</s>", raw.get_vocab()["</s>"]), ("<s>", raw.get_vocab()["<s>"]), add_prefix_space=False
    )
    return raw


def xlnet() -> Tokenizer:
    """Special tokens at the end only, in a segment of their own."""
    raw = tiny_tokenizers.unigram()
    raw.post_processor = processors.TemplateProcessing(
        single="$A </s> <s>",
        pair="$A </s> $B:1 </s>:1 <s>:2",
        special_tokens=[(token, raw.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    return raw


def bare() -> Tokenizer:
    """No special tokens, and words that are not tokenized separately."""
    raw = tiny_tokenizers.unsplit()
    raw.post_processor = None
    return raw


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bert": bert,
    "bert_of_old": bert_of_old,
    "roberta": roberta,
    "xlnet": xlnet,
    "bare": bare,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    """Each kind as read by Shoal and by the library."""
    both = {}
    for kind, build in KINDS.items():
        raw = build()
        folder = tiny_tokenizers.save(raw, tmp_path_factory.mktemp(kind))
        both[kind] = (TextTokenizer(folder, "tokenizer.json"), raw)
    return both


def read(ours: TextTokenizer, max_tokens: int, *readings: PairInput) -> list[FramedText]:
    pairs = PairTokenizer(ours, "tokenizer.json", max_tokens).read(readings)
    assert all(isinstance(one, FramedText) for one in pairs)
    return [one for one in pairs if isinstance(one, FramedText)]


@given(first=st.integers(0, 40), second=st.integers(0, 40), limit=st.integers(0, 60))
def test_the_longer_text_is_cut_first(first: int, second: int, limit: int) -> None:
    """Tokens are removed from the longer text until both fit; an odd token goes to the longer text, else to the
    second."""
    lengths = longest_first(first, second, limit)
    left = [first, second]
    while sum(left) > limit:
        left[left[0] < left[1]] -= 1
    assert sorted(lengths) == sorted(left)
    if lengths[0] != lengths[1] and sum(lengths) < first + second:
        assert (lengths[0] > lengths[1]) == (first > second)


@pytest.mark.parametrize("kind", KINDS)
@given(first=SHORT, second=SHORT, max_tokens=st.integers(6, 24), direction=st.sampled_from(DIRECTIONS))
def test_pairs_are_those_of_the_library(
    tokenizers: dict[str, Both], kind: str, first: str, second: str, max_tokens: int, direction: Direction
) -> None:
    """Ids, segments and counts match for any two texts, whichever is longer and whichever end is cut."""
    ours, raw = tokenizers[kind]
    whole = len(raw.encode(first, second).ids)
    raw.enable_truncation(max_tokens, direction=direction, strategy="longest_first")
    expected = raw.encode(first, second)
    raw.no_truncation()
    pairs = PairTokenizer(ours, "tokenizer.json", max_tokens)
    (framed,) = pairs.read([PairInput(first, second, direction)])
    assert isinstance(framed, FramedText)
    assert framed.ids == expected.ids
    assert pairs.types(framed) == expected.type_ids
    assert framed.total == whole if framed.exact else max_tokens < framed.total <= whole
    assert framed.fits == (whole <= max_tokens) == (not framed.cut)


@pytest.mark.parametrize("kind", KINDS)
@given(first=TEXTS, second=TEXTS, max_tokens=st.integers(6, 24), direction=st.sampled_from(DIRECTIONS))
def test_long_texts_are_cut_as_if_they_had_been_read_whole(
    tokenizers: dict[str, Both], kind: str, first: str, second: str, max_tokens: int, direction: Direction
) -> None:
    """The library takes minutes to truncate such pairs, so the test truncates its tokens."""
    ours, raw = tokenizers[kind]
    left, right = (raw.encode(text, add_special_tokens=False).ids for text in (first, second))
    pairs = PairTokenizer(ours, "tokenizer.json", max_tokens)
    lengths = longest_first(len(left), len(right), max_tokens - pairs.frame.size)
    ends = [
        ids[:n] if direction == "right" else ids[len(ids) - n :] for ids, n in zip((left, right), lengths, strict=True)
    ]
    (framed,) = pairs.read([PairInput(first, second, direction)])
    assert isinstance(framed, FramedText)
    assert framed.ids == pairs.frame.ids(*ends)
    assert (framed.first, framed.second) == lengths


@pytest.mark.parametrize("kind", KINDS)
@given(text=SHORT, max_tokens=st.integers(4, 24), direction=st.sampled_from(DIRECTIONS))
def test_single_texts_are_those_of_the_library(
    tokenizers: dict[str, Both], kind: str, text: str, max_tokens: int, direction: Direction
) -> None:
    """A single text is framed as a text, not as half of a pair."""
    ours, raw = tokenizers[kind]
    raw.enable_truncation(max_tokens, direction=direction)
    expected = raw.encode(text)
    raw.no_truncation()
    pairs = PairTokenizer(ours, "tokenizer.json", max_tokens)
    (framed,) = pairs.read([PairInput(text, None, direction)])
    assert isinstance(framed, FramedText)
    assert (framed.ids, pairs.types(framed)) == (expected.ids, [0] * len(expected.ids))
    assert framed.fits == (not expected.overflowing)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [(900, 901), (901, 900), (900, 900), (60, 5_000), (5_000, 60)])
def test_which_of_two_far_too_long_texts_is_longer_is_found_out(
    tokenizers: dict[str, Both], lengths: tuple[int, int], direction: Direction
) -> None:
    """The longer text gets the odd token although neither is read to its end."""
    ours, _ = tokenizers["bert"]
    first, second = ("the fox " * length for length in lengths)
    (framed,) = read(ours, 14, PairInput(first, second, direction))
    assert (framed.first, framed.second) == ((6, 5) if lengths[0] > lengths[1] else (5, 6))
    assert not framed.exact


def test_partly_read_texts_are_compared_by_characters(
    tokenizers: dict[str, Both],
) -> None:
    """Beyond the part of a text that is read, characters are compared instead of tokens."""
    ours, _ = tokenizers["bert"]
    long, longer = "fox " * 20_000, "fox " * 20_001
    for first, second, lengths in ((long, longer, (5, 6)), (longer, long, (6, 5)), (long, long, (5, 6))):
        (framed,) = read(ours, 14, PairInput(first, second, "right"))
        assert (framed.first, framed.second) == lengths


@given(document=TEXTS, max_tokens=st.integers(1, 30), direction=st.sampled_from(DIRECTIONS))
def test_a_document_may_be_cut_by_itself_first(
    tokenizers: dict[str, Both], document: str, max_tokens: int, direction: Direction
) -> None:
    """The document's own tokens are counted, and the pair only sees the truncated document."""
    ours, raw = tokenizers["bert"]
    own = raw.encode(document, add_special_tokens=False).ids
    document_ids = own[:max_tokens] if direction == "right" else own[-max_tokens:]
    (framed,) = read(ours, 21, PairInput("the quick fox", document, direction, max_tokens))
    limit = 21 - 3
    first, second = longest_first(3, len(document_ids), limit)
    assert (framed.first, framed.second) == (first, second)
    end = framed.ids[5:-1] if first == 3 else []
    assert end == (document_ids[:second] if direction == "right" else document_ids[len(document_ids) - second :])
    assert framed.cut == (len(own) + 3 > first + second)
    assert framed.fits == (len(document_ids) + 3 <= limit)
    assert framed.total == 3 + 3 + len(document_ids) if framed.exact else framed.total > 21


def test_each_text_of_a_job_is_tokenised_once(tokenizers: dict[str, Both], monkeypatch: pytest.MonkeyPatch) -> None:
    """The query repeats for each document; documents may be equal too."""
    ours, _ = tokenizers["bert"]
    tokenized_texts: list[str] = []
    fit_each = ours.fit_each

    def spy(texts: list[str], *args: object, **fields: object) -> object:
        tokenized_texts.extend(texts)
        return fit_each(texts, *args, **fields)  # type: ignore[arg-type]

    pairs = PairTokenizer(ours, "tokenizer.json", 16)
    monkeypatch.setattr(ours, "fit_each", spy)
    readings = [PairInput("the fox", each, "right") for each in ("a dog", "a cat", "a dog", "the fox")]
    assert len(pairs.read([*readings, PairInput("a cat", None, "right")])) == 5
    assert sorted(tokenized_texts) == ["a cat", "a dog", "the fox"]


def test_far_too_long_queries_are_counted_once(tokenizers: dict[str, Both], monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is shared by any number of far too long documents."""
    ours, _ = tokenizers["bert"]
    counted: list[int] = []
    count = ours.count

    def spy(text: str, max_tokens: int) -> tuple[int, bool]:
        counted.append(len(text))
        return count(text, max_tokens)

    monkeypatch.setattr(ours, "count", spy)
    query = "fox " * 200
    read(ours, 14, *(PairInput(query, "dog " * (200 + n), "right") for n in range(4)))
    assert sorted(counted) == [800, 800, 804, 808, 812]


def test_no_room_beside_special_tokens_keeps_just_those(tokenizers: dict[str, Both]) -> None:
    """A limit below the special tokens of a pair keeps just those."""
    ours, raw = tokenizers["bert"]
    (framed,) = read(ours, 2, PairInput("the fox", "a dog", "left"))
    assert framed.ids == raw.encode("", "").ids
    assert not framed.fits


def test_a_text_that_cannot_be_read_fails_its_pairs_alone(tmp_path: Path) -> None:
    """Only pairs with this text fail, whichever side it is on."""
    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1, "the": 2, "fox": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tiny_tokenizers.save(raw, tmp_path)
    pairs = PairTokenizer(TextTokenizer(tmp_path, "tokenizer.json"), "tokenizer.json", 16)
    texts: list[tuple[str, str | None]] = [("a", "b"), ("c", "a"), ("a", "c"), ("c", None), ("b", None)]
    readings = [PairInput(first, second, "right") for first, second in texts]
    results = pairs.read(readings)
    assert [isinstance(one, InvalidValue) for one in results] == [False, True, True, True, False]


@pytest.mark.parametrize("pair", ["$B $A", "[CLS] $B [SEP] $A [SEP]"])
def test_frames_that_cannot_be_kept_are_refused(pair: str) -> None:
    """The second text must follow the first."""
    raw = tiny_tokenizers.wordpiece()
    specials = [(token, raw.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    raw.post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=specials)
    with pytest.raises(ModelFileError, match="post_processor"):
        find_pair_frame(raw, "tokenizer.json")


def template(single: str, pair: str) -> Tokenizer:
    raw = tiny_tokenizers.wordpiece()
    raw.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, raw.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    return raw


def knows_nothing(raw: Tokenizer) -> Tokenizer:
    """A tokenizer that maps every word to the unknown token."""
    known = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.post_processor = raw.post_processor
    return known


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(
    "pair",
    [
        "[CLS] $A [SEP] $B:1 $B:1 [SEP]:1",
        "[CLS] $A $A [SEP] $B:1 [SEP]:1",
        "[CLS] $B [SEP] $A:1 [SEP]:1",
        "[CLS] $A [SEP] $B:1 [SEP]:1 $A",
    ],
)
def test_a_processor_that_repeats_a_text_is_refused(pair: str, blind: bool) -> None:
    """The rest of a probe would be in every pair, even if the probe has unknown tokens only."""
    raw = template("[CLS] $A [SEP]", pair)
    with pytest.raises(ModelFileError, match="the second of two texts to the first"):
        find_pair_frame(knows_nothing(raw) if blind else raw, "t.json")


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("single", ["[CLS] $A $A [SEP]", "$A [SEP] $A", "$A $A"])
def test_a_processor_that_repeats_a_single_text_is_refused(single: str, blind: bool) -> None:
    """The same rule applies to single texts."""
    raw = template(single, "[CLS] $A [SEP] $B:1 [SEP]:1")
    with pytest.raises(ModelFileError) as caught:
        find_frame(knows_nothing(raw) if blind else raw, "t.json")
    assert (caught.value.file, caught.value.key) == ("t.json", "post_processor")


def test_a_tokenizer_that_knows_no_probe_is_framed_all_the_same() -> None:
    """Texts of different lengths show their positions."""
    raw = knows_nothing(template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"))
    assert find_frame(raw, "t.json")[0] and find_pair_frame(raw, "t.json").size == 3
