from __future__ import annotations

import pytest

from shoal.core.protocols import TextCodec, Token
from shoal.errors import InvalidValue, TooLong
from shoal.pipelines.text import codec as codec_module
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.tokenizer import TextTokenizer
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.tiny_tokenizers import KINDS, spec


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    folders = {kind: tiny_tokenizers.save(build(), tmp_path_factory.mktemp(kind)) for kind, build in KINDS.items()}
    return {kind: TextTokenizer(folder, "tokenizer.json") for kind, folder in folders.items()}


@pytest.fixture
def codec(tokenizers: dict[str, TextTokenizer]) -> TokenizerCodec:
    return TokenizerCodec(tokenizers["wordpiece"], spec())


async def test_tokens_have_their_text_and_place(codec: TokenizerCodec) -> None:
    """A token's text is its source characters; special tokens have their name and no offsets."""
    assert isinstance(codec, TextCodec)
    (tokens,) = await codec.tokenize(["The foxes"], add_special_tokens=True, prompt_name=None)
    assert [(t.text, t.special, t.start, t.stop) for t in tokens] == [
        ("[CLS]", True, None, None),
        ("The", False, 0, 3),
        ("fox", False, 4, 7),
        ("e", False, 7, 8),
        ("s", False, 8, 9),
        ("[SEP]", True, None, None),
    ]


async def test_special_tokens_can_be_left_out(codec: TokenizerCodec) -> None:
    """add_special_tokens=False shows the text's own tokens only."""
    (tokens,) = await codec.tokenize(["fox"], add_special_tokens=False, prompt_name=None)
    assert [t.text for t in tokens] == ["fox"]


async def test_offsets_count_characters(tokenizers: dict[str, TextTokenizer]) -> None:
    """Characters outside ASCII are one each, whatever their bytes."""
    codec = TokenizerCodec(tokenizers["unigram"], spec())
    (tokens,) = await codec.tokenize(["слово 🐟 fox"], add_special_tokens=False, prompt_name=None)
    assert tokens[-1].text.strip() == "fox"
    assert (tokens[-1].stop, tokens[-1].special) == (11, False)


async def test_requests_without_end_are_refused(tokenizers: dict[str, TextTokenizer]) -> None:
    """All texts and prompts of a request count; nothing is truncated, so the whole request is refused."""
    model = spec(prompts={"four": "fox "})
    codec = TokenizerCodec(tokenizers["wordpiece"], model)
    half = " " * (codec_module.MOST_CHARS // 2)
    assert await codec.tokenize([half, half], add_special_tokens=False, prompt_name=None) == [[], []]
    with pytest.raises(TooLong, match=rf"have {codec_module.MOST_CHARS + 8} characters.*send them in parts") as caught:
        await codec.tokenize([half, half], add_special_tokens=False, prompt_name="four")
    assert caught.value.param == "inputs"


async def test_prompts_are_part_of_the_text(tokenizers: dict[str, TextTokenizer]) -> None:
    """The named or default prompt is tokenized and counts in the offsets."""
    model = spec(prompts={"query": "query: ", "short": "x "}, default_prompt_name="short")
    codec = TokenizerCodec(tokenizers["wordpiece"], model)
    (named,) = await codec.tokenize(["fox"], add_special_tokens=False, prompt_name="query")
    assert [(t.text, t.start) for t in named] == [("query", 0), (":", 5), ("fox", 7)]
    (default,) = await codec.tokenize(["fox"], add_special_tokens=False, prompt_name=None)
    assert [t.text for t in default] == ["x", "fox"]
    with pytest.raises(InvalidValue, match="query, short"):
        await codec.tokenize(["fox"], add_special_tokens=True, prompt_name="nope")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_long_text_gives_the_tokens_of_its_parts(
    tokenizers: dict[str, TextTokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked in a thread or at once, tokens and offsets are equal."""
    codec = TokenizerCodec(tokenizers[kind], spec())
    text = "the quick brown fox, 東京! " * 60
    monkeypatch.setattr(codec_module, "CHUNK_CHARS", 10**9)
    (whole,) = await codec.tokenize([text], add_special_tokens=True, prompt_name=None)
    monkeypatch.setattr(codec_module, "CHUNK_CHARS", 50)
    (chunked,) = await codec.tokenize([text], add_special_tokens=True, prompt_name=None)
    assert chunked == whole
    assert all(text[t.start : t.stop] == t.text for t in whole if t.start is not None)


async def test_no_texts_give_no_lists(codec: TokenizerCodec) -> None:
    """One result per text: none for no texts, special tokens for an empty text."""
    assert await codec.tokenize([], add_special_tokens=True, prompt_name=None) == []
    (tokens,) = await codec.tokenize([""], add_special_tokens=True, prompt_name=None)
    assert all(isinstance(t, Token) and t.special for t in tokens)


@pytest.mark.parametrize("times", [1, 400])
async def test_decoding_gives_the_text_back(codec: TokenizerCodec, times: int) -> None:
    """Ids of a text decode to it, special tokens shown only when asked; small and large jobs agree."""
    (tokens,) = await codec.tokenize(["the quick fox"], add_special_tokens=True, prompt_name=None)
    ids = [t.id for t in tokens]
    assert await codec.decode([ids] * times, skip_special_tokens=True) == ["the quick fox"] * times
    assert await codec.decode([ids, []], skip_special_tokens=False) == ["[CLS] the quick fox [SEP]", ""]


@pytest.mark.parametrize("bad", [-1, 10**6, 2**70])
async def test_ids_outside_the_vocabulary_are_refused(codec: TokenizerCodec, bad: int) -> None:
    """An unknown id is not dropped silently."""
    with pytest.raises(InvalidValue, match=f"token id {bad} is outside") as caught:
        await codec.decode([[5], [5, bad]], skip_special_tokens=True)
    assert caught.value.param == "ids"
