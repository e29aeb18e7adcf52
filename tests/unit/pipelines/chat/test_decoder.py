"""Pieces of every kind to chunks: the joined result does not depend on the cuts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.protocols import Decoder, Piece
from shoal.pipelines.chat.decoder import AnswerDecoder, CumulativeText, DecodingOptions, Gives
from shoal.pipelines.chat.segments import AnswerFormat
from shoal.pipelines.chat.tools import ParserKind, tool_parser
from shoal.types import Chunk, TokenLogprob, Tool, ToolDelta
from tests.fixtures import tiny_llama
from tests.unit.pipelines.chat.chat_kit import PLACES, TEXTS, cut, vocabulary

WEATHER = Tool(name="get_weather", parameters={"type": "object"})
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
PLAIN_CALL = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
THINKS = AnswerFormat(reasoning=True)


def parser(kind: ParserKind) -> Any:
    return partial(tool_parser, kind, [WEATHER])


CALLS = AnswerFormat(parser=parser("hermes"))
BOTH = AnswerFormat(reasoning=True, parser=parser("hermes"))


@dataclass
class Answer:
    """The joined chunks of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        assert self.finish_reason is None, "nothing may follow the last chunk"
        assert chunk.index == 7
        assert chunk.finish_reason or chunk.text or chunk.reasoning or chunk.tools or chunk.logprobs
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        self.logprobs += chunk.logprobs
        for delta in chunk.tools:
            self._call(delta)
        self.finish_reason = chunk.finish_reason

    def _call(self, delta: ToolDelta) -> None:
        name, arguments = self.calls.setdefault(delta.index, ["", ""])
        self.calls[delta.index] = [name + delta.name, arguments + delta.arguments]

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.text, self.reasoning, self.calls, self.finish_reason


def run(decoder: Decoder, pieces: Sequence[Piece], reason: str = "stop") -> Answer:
    answer = Answer()
    for piece in pieces:
        for chunk in decoder.push(piece):
            answer.add(chunk)
        if decoder.stopped:
            break
    for chunk in decoder.flush(reason):
        answer.add(chunk)
    return answer


def decoder(gives: Gives = "delta", **changes: Any) -> AnswerDecoder:
    if gives == "ids":
        changes.setdefault("vocabulary", vocabulary())
    return AnswerDecoder(7, DecodingOptions(output_mode=gives, **changes))


def deltas(texts: Sequence[str]) -> list[Piece]:
    return [Piece(text=text) for text in texts]


def cumulative(texts: Sequence[str]) -> list[Piece]:
    return [Piece(text="".join(texts[: at + 1])) for at in range(len(texts))]


PARTS = ["<think>", "</think>", "\n\n", "so", CALL, "STOP", "ST", "{", "<tool", "東京", "🤗 ", "hello "]
ANSWERS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@given(
    text=ANSWERS,
    places=PLACES,
    reading=st.sampled_from(
        [AnswerFormat(), THINKS, AnswerFormat(reasoning=True, starts_in_reasoning=True), CALLS, BOTH]
    ),
    stops=st.sampled_from([[], ["STOP"], ["STOP", "so"], ["\n"]]),
    include=st.booleans(),
)
def test_any_pieces_of_any_kind_make_the_same_answer(
    text: str, places: list[int], reading: AnswerFormat, stops: list[str], include: bool
) -> None:
    """Deltas, cumulative texts and ids give the same answer for any cut."""
    make = partial(decoder, stops=stops, include_stop=include, answer_format=reading)
    expected = run(make(), deltas([text])).shape
    assert run(make(), deltas(cut(text, places))).shape == expected
    assert run(make(), deltas(list(text))).shape == expected
    assert run(make("cumulative"), cumulative(cut(text, places))).shape == expected
    ids = vocabulary().encode(text, special=False)
    for pieces in ([[token] for token in ids], cut(ids, places)):
        assert run(make("ids"), [Piece(ids=each) for each in pieces]).shape == expected


@given(text=TEXTS, places=PLACES)
def test_a_plain_answer_comes_as_it_is(text: str, places: list[int]) -> None:
    assert run(decoder(), deltas(cut(text, places)), "length").shape == (text, "", {}, "length")


@given(TEXTS, PLACES, st.sampled_from(["delta", "cumulative", "ids"]), st.booleans())
def test_absent_markers_change_nothing(text: str, places: list[int], gives: Gives, counted: bool) -> None:
    """An answer without any markers takes a shorter path to the same text and count."""
    make = deltas if gives == "delta" else cumulative
    pieces = (
        [Piece(ids=[id]) for id in vocabulary().encode(text, special=False)]
        if gives == "ids"
        else make(cut(text, places))
    )
    if counted:
        pieces = [msgspec.structs.replace(piece, tokens=2) for piece in pieces]
    plain, watched = decoder(gives), decoder(gives, stops=["\0 never said \0"])
    one, other = run(plain, pieces), run(watched, pieces)
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    assert (plain.tokens, plain.reasoning_tokens) == (watched.tokens, watched.reasoning_tokens)


def test_decodable_text_is_emitted_at_once() -> None:
    one = decoder(stops=["\n\n"])
    assert [chunk.text for chunk in one.push(Piece(text="Hel"))] == ["Hel"]
    assert [chunk.text for chunk in one.push(Piece(text="lo\n"))] == ["lo"]
    assert [chunk.text for chunk in one.push(Piece(text="x"))] == ["\nx"]
    assert one.push(Piece()) == []


def test_a_stop_text_ends_it() -> None:
    one = decoder(stops=["STOP"])
    chunks = one.push(Piece(text="one STOP two"))
    assert (chunks, one.stopped) == ([Chunk(index=7, text="one ")], True)
    assert one.push(Piece(text="three")) == []
    assert one.flush("length") == [Chunk(index=7, finish_reason="stop", stop="STOP")]
    assert run(decoder(stops=["STOP"], include_stop=True), deltas(["one STOP two"])).text == "one STOP"


@pytest.mark.parametrize("reading", [THINKS, AnswerFormat(reasoning=True, starts_in_reasoning=True)])
def test_stop_texts_mean_the_answer_and_not_the_thoughts(reading: AnswerFormat) -> None:
    """Stop texts apply to visible text; an answer that ends in its reasoning would be empty."""
    begin = "" if reading.starts_in_reasoning else "<think>"
    answer = run(decoder(stops=["\n"], answer_format=reading), deltas([f"{begin}a\nb</think>\n\nfour\nfive"]))
    assert answer.shape == ("four", "a\nb", {}, "stop")


@pytest.mark.parametrize("stop", ["\n", "}", "Köln"])
def test_stop_texts_do_not_cut_calls(stop: str) -> None:
    answer = run(decoder(stops=[stop], answer_format=CALLS), deltas(["Well: ", CALL]))
    assert answer.calls == {0: ["get_weather", '{"city": "Köln"}']}
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("whole", [True, False])
def test_no_call_follows_a_stop_text(whole: bool) -> None:
    text = f"one STOP {CALL}"
    answer = run(decoder(stops=["STOP"], answer_format=CALLS), deltas([text] if whole else list(text)))
    assert answer.shape == ("one ", "", {}, "stop")


@pytest.mark.parametrize("whole", [True, False])
def test_a_call_before_a_stop_text_stays(whole: bool) -> None:
    text = f"{CALL}one STOP two"
    answer = run(decoder(stops=["STOP"], answer_format=CALLS), deltas([text] if whole else list(text)))
    assert (answer.text.strip(), len(answer.calls), answer.finish_reason) == ("one", 1, "stop")


@pytest.mark.parametrize("pieces", [["xa", CALL, "b"], [f"xa{CALL}b"], ["xa" + CALL[:-1], CALL[-1] + "b"]])
def test_a_call_separates_the_text_around_it(pieces: list[str]) -> None:
    answer = run(decoder(stops=["ab"], answer_format=CALLS), deltas(pieces))
    assert (answer.text, answer.finish_reason) == ("xab", "tool_calls")


@pytest.mark.parametrize("pieces", [["a", CALL, "STO", "P"], [f"a{CALL}STO", "P"], [f"a{CALL}STOP"]])
def test_a_stop_text_behind_a_call_counts(pieces: list[str]) -> None:
    answer = run(decoder(stops=["STOP"], answer_format=CALLS), deltas(pieces))
    assert (answer.text, len(answer.calls), answer.finish_reason) == ("a", 1, "stop")


@pytest.mark.parametrize(("reason", "expected"), [("stop", "tool_calls"), ("length", "length")])
def test_how_an_answer_with_calls_ends(reason: str, expected: str) -> None:
    assert run(decoder(answer_format=CALLS), deltas([CALL]), reason).finish_reason == expected


def test_thoughts_may_be_hidden_and_are_counted() -> None:
    one = decoder(answer_format=THINKS, hidden_reasoning=True)
    answer = run(one, deltas(["<think>two and two", "</think>four"]))
    assert answer.shape == ("four", "", {}, "stop")
    assert 0 < one.reasoning_tokens < one.tokens


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("pieces", [[PLAIN_CALL], list(" " + PLAIN_CALL)])
def test_a_demanded_call_may_be_plain_json(opened: bool, pieces: list[str]) -> None:
    """A backend with guided decoding returns it so, even if the prompt opens the reasoning."""
    reading = replace(BOTH, starts_in_reasoning=opened, guided="{", plain=parser("llama3"))
    answer = run(decoder(answer_format=reading), deltas(pieces))
    assert answer.shape == ("", "", {0: ["get_weather", '{"city": "Köln"}']}, "tool_calls")


def test_a_demanded_call_may_be_in_the_models_own_form_as_well() -> None:
    reading = replace(BOTH, guided="{", plain=parser("llama3"))
    answer = run(decoder(answer_format=reading), deltas(["<think>hm</think>", CALL]))
    assert (answer.reasoning, answer.calls) == ("hm", {0: ["get_weather", '{"city": "Köln"}']})


@pytest.mark.parametrize("text", ["", "  \n", " <think>a</think>b"])
def test_nothing_that_was_waited_with_is_lost(text: str) -> None:
    reading = AnswerFormat(reasoning=True, guided="{[")
    assert (
        run(decoder(answer_format=reading), deltas(list(text))).shape
        == run(decoder(answer_format=THINKS), deltas([text])).shape
    )


def test_guided_json_has_no_thoughts() -> None:
    reading = AnswerFormat(reasoning=True, starts_in_reasoning=True, guided="{[")
    assert run(decoder(answer_format=reading), deltas(['{"a"', ": 1}"])).text == '{"a": 1}'
    assert run(decoder(answer_format=reading), deltas(["hm</think>", "{}"])).shape == ("{}", "hm", {}, "stop")


class TestIds:
    def test_ends_are_not_shown_and_end_it(self) -> None:
        ids = vocabulary().encode("the weather", special=False)
        one = decoder("ids", stop_ids=frozenset({tiny_llama.IM_END}))
        one.push(Piece(ids=[*ids, tiny_llama.IM_END, *ids]))
        assert one.stopped
        assert one.flush("length")[-1].finish_reason == "stop"
        assert one.tokens == len(ids) + 1

    def test_any_token_may_be_an_end(self) -> None:
        the, weather = vocabulary().encode(" the weather", special=False)
        one = decoder("ids", stop_ids=frozenset({weather}), skip_special_tokens=False)
        assert run(one, [Piece(ids=[the, weather, the])]).shape == (" the", "", {}, "stop")

    def test_an_end_after_calls_is_the_models_own(self) -> None:
        ids = [*vocabulary().encode(CALL, special=False), tiny_llama.IM_END]
        one = decoder("ids", stop_ids=frozenset({tiny_llama.IM_END}), answer_format=CALLS)
        assert run(one, [Piece(ids=ids)], "length").finish_reason == "tool_calls"

    def test_special_tokens(self) -> None:
        ids = [tiny_llama.IM_START, *vocabulary().encode("the", special=False)]
        assert run(decoder("ids"), [Piece(ids=ids)]).text == "the"
        assert run(decoder("ids", skip_special_tokens=False), [Piece(ids=ids)]).text == "<|im_start|>the"
        shown = frozenset({tiny_llama.IM_START})
        assert run(decoder("ids", visible_ids=shown), [Piece(ids=ids)]).text == "<|im_start|>the"

    def test_half_a_character_at_the_end(self) -> None:
        ids = vocabulary().encode("a🤗", special=False)
        one = decoder("ids")
        assert run(one, [Piece(ids=[token]) for token in ids[:-1]], "length").shape == ("a\ufffd", "", {}, "length")
        assert one.tokens == len(ids) - 1

    def test_an_answer_that_goes_on_keeps_its_first_space(self) -> None:
        vocab = vocabulary("byte_fallback")
        prompt, word = vocab.encode("the", special=True), vocab.encode("weather", special=False)
        assert run(decoder("ids", vocabulary=vocab, context=prompt), [Piece(ids=word)]).text == " weather"
        assert run(decoder("ids", vocabulary=vocab), [Piece(ids=word)]).text == "weather"

    def test_they_need_a_vocabulary(self) -> None:
        with pytest.raises(ValueError, match="vocabulary"):
            AnswerDecoder(0, DecodingOptions(output_mode="ids"))


class TestTokens:
    def test_the_backends_count_goes_first(self) -> None:
        one = decoder()
        run(one, [Piece(text="a b c", tokens=2), Piece(text="d e f", tokens=40)])
        assert one.tokens == 42

    def test_ids_are_counted(self) -> None:
        one = decoder("ids")
        run(one, [Piece(ids=[50, 51]), Piece(ids=[52])])
        assert one.tokens == 3

    @given(text=st.text(alphabet="the weather in 東京 ", max_size=200), places=PLACES)
    def test_a_text_is_counted_with_the_vocabulary(self, text: str, places: list[int]) -> None:
        one = decoder(vocabulary=vocabulary())
        for piece in deltas(cut(text, places)):
            one.push(piece)
        assert one.tokens == vocabulary().count(text)

    @pytest.mark.parametrize(("text", "expected"), [("", 0), ("abc", 1), ("abcde", 2), ("東京", 2)])
    def test_without_one_they_are_guessed_by_bytes(self, text: str, expected: int) -> None:
        one = decoder()
        run(one, deltas([text]))
        assert one.tokens == expected

    @given(text=st.text(alphabet="the weather in 東京 ", min_size=1), places=PLACES, limit=st.integers(1, 40))
    def test_tokens_over_the_limit_are_left_out(self, text: str, places: list[int], limit: int) -> None:
        """For a backend that neither counts tokens nor takes a limit, however it cuts its pieces."""
        for vocab in (vocabulary(), None):
            one = decoder(vocabulary=vocab, max_tokens=limit)
            shown = run(one, deltas(cut(text, places))).text
            assert text.startswith(shown)
            assert one.tokens == min(limit, one.tokens)
            assert one.tokens == limit or shown == text
            if vocab is not None:
                assert vocab.count(shown) <= limit

    def test_the_first_tokens_of_a_whole_answer(self) -> None:
        one = decoder(vocabulary=vocabulary(), max_tokens=3)
        assert run(one, deltas(["one two three four"]), "length").text == "one two th"
        assert one.tokens == 3

    def test_backend_counted_tokens_are_never_cut(self) -> None:
        one = decoder(max_tokens=2)
        assert run(one, [Piece(text="one two three", tokens=3)]).text == "one two three"

    @pytest.mark.parametrize("gives", ["delta", "ids"])
    def test_thoughts_by_their_tokens(self, gives: Gives) -> None:
        vocab = vocabulary()
        ids = vocab.encode("<think>one two three four</think>\n\nand then the answer", special=False)
        pieces = [Piece(ids=[t]) if gives == "ids" else Piece(text=vocab.decode([t]), tokens=1) for t in ids]
        one = decoder(gives, answer_format=THINKS)
        run(one, pieces)
        thoughts = vocab.count("<think>one two three four")
        assert one.tokens == len(ids)
        assert abs(one.reasoning_tokens - thoughts) <= 2

    def test_thoughts_in_one_piece_by_their_share(self) -> None:
        one = decoder(answer_format=THINKS)
        run(one, [Piece(text="<think>aaaaaaaa</think>bbbbbbbb", tokens=100)])
        assert (one.tokens, one.reasoning_tokens) == (100, 50)

    def test_thoughts_without_an_end(self) -> None:
        one = decoder(answer_format=THINKS, vocabulary=vocabulary())
        run(one, deltas(["<think>one two", " three"]), "length")
        assert one.reasoning_tokens == vocabulary().count("one two three")

    def test_backend_counts_are_not_counted_again_at_the_end(self) -> None:
        one = decoder("cumulative")
        run(one, [Piece(text="a\ufffd", tokens=2)])
        assert one.tokens == 2


class TestCumulative:
    @pytest.mark.parametrize(
        ("texts", "expected"),
        [
            (["a", "ab", "abc"], "abc"),
            (["caf\ufffd", "café"], "café"),
            (["a\ufffd\ufffd", "a🤗", "a🤗b"], "a🤗b"),
            (["a\ufffd"], "a\ufffd"),
            (["a\ufffd", "a\ufffdb"], "a\ufffdb"),
            (["abc", "ab", "abc", "abcd"], "abcd"),
            (["Hello , wo", "Hello, world"], "Hello , world"),
            (["don 't", "don't know"], "don 't know"),
            (["same length", "same lengtH too"], "same length too"),
            (["", "", "x"], "x"),
        ],
    )
    def test_emitted_text_stays_and_the_rest_follows_it(self, texts: list[str], expected: str) -> None:
        one = CumulativeText()
        assert "".join(map(one.push, texts)) + one.flush() == expected

    def test_the_last_text_holds_the_replaced_half_characters(self) -> None:
        whole = "東京🤗é"
        octets = whole.encode()
        texts = [octets[:size].decode("utf-8", "replace") for size in range(len(octets) + 1)]
        assert run(decoder("cumulative"), deltas(texts)).text == whole


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token=vocabulary().piece(token), logprob=-0.5, data=vocabulary().data(token))


def bytes_of(answer: Answer) -> bytes:
    return b"".join(each.data or b"" for each in answer.logprobs)


class TestLogprobs:
    def test_the_token_that_ends_it_has_none(self) -> None:
        """Nor if it comes in one piece with other tokens."""
        ids = [*vocabulary().encode("one two", special=False), tiny_llama.IM_END]
        one = decoder("ids", stop_ids=frozenset({tiny_llama.IM_END}))
        answer = run(one, [Piece(ids=ids, logprobs=[logprob(token) for token in ids])])
        assert (answer.text, bytes_of(answer)) == ("one two", b"one two")

    @given(text=TEXTS, places=PLACES)
    def test_every_token_comes_with_its_text(self, text: str, places: list[int]) -> None:
        ids = vocabulary().encode(text, special=False)
        pieces = [Piece(ids=each, logprobs=[logprob(token) for token in each]) for each in cut(ids, places)]
        answer = run(decoder("ids"), pieces)
        assert answer.text == text
        assert bytes_of(answer) == text.encode()

    @given(text=st.text(alphabet="ab STOP東", max_size=30), stop=st.sampled_from(["STOP", "b", "ab", "東"]))
    def test_no_token_behind_a_stop_text_is_emitted(self, text: str, stop: str) -> None:
        ids = vocabulary().encode(text, special=False)
        pieces = [Piece(ids=[token], logprobs=[logprob(token)]) for token in ids]
        answer = run(decoder("ids", stops=[stop]), pieces)
        assert answer.text == text.partition(stop)[0]
        data = bytes_of(answer)
        assert data.startswith(answer.text.encode())
        assert not data[: -len(answer.logprobs[-1].data or b"")].startswith(answer.text.encode()) if data else True

    def test_a_token_waits_for_a_text_that_comes_without_one(self) -> None:
        """Some backends send the probabilities of all tokens but the last."""
        half, rest = vocabulary().encode("ü", special=False)
        chat_decoder = decoder("ids")
        answer = run(chat_decoder, [Piece(ids=[half], logprobs=[logprob(half)]), Piece(ids=[rest])])
        assert (answer.text, answer.logprobs) == ("ü", [logprob(half)])

    def test_a_token_waits_with_its_text(self) -> None:
        the, weather = vocabulary().encode(" the weather", special=False)
        one = decoder("ids", stops=[" the weather!"])
        assert one.push(Piece(ids=[the], logprobs=[logprob(the)])) == []
        assert one.push(Piece(ids=[weather], logprobs=[logprob(weather)])) == []
        chunk = one.flush("length")[0]
        assert (chunk.text, chunk.logprobs) == (" the weather", [logprob(the), logprob(weather)])

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize(
        ("text", "reading", "content"),
        [
            ("<think>one two</think>\n\nthe answer", THINKS, "the answer"),
            (f"the answer{CALL}", CALLS, "the answer"),
            (f"<think>one</think>the answer{CALL}", BOTH, "the answer"),
            (CALL, CALLS, ""),
            ("<think>one two", THINKS, ""),
        ],
    )
    def test_only_those_of_the_content_are_emitted(
        self, whole: bool, text: str, reading: AnswerFormat, content: str
    ) -> None:
        ids = vocabulary().encode(text, special=False)
        pieces = [Piece(ids=[token], logprobs=[logprob(token)]) for token in ids]
        if whole:
            pieces = [Piece(ids=ids, logprobs=[logprob(token) for token in ids])]
        answer = run(decoder("ids", answer_format=reading), pieces)
        assert answer.text == content
        data = bytes_of(answer).decode()
        assert content in data
        assert len(data) <= len(content) + 12

    def test_the_end_of_the_answer_is_no_token_of_it(self) -> None:
        the = vocabulary().encode("the", special=False)
        pieces = [Piece(ids=[token], logprobs=[logprob(token)]) for token in [*the, tiny_llama.IM_END]]
        answer = run(decoder("ids", stop_ids=frozenset({tiny_llama.IM_END})), pieces)
        assert bytes_of(answer) == b"the"


@pytest.mark.parametrize("make", [decoder, lambda: decoder("ids"), lambda: decoder("cumulative")])
def test_an_answer_without_anything(make: Callable[[], AnswerDecoder]) -> None:
    one = make()
    assert one.flush("stop") == [Chunk(index=7, finish_reason="stop")]
    assert (one.tokens, one.reasoning_tokens, one.stopped) == (0, 0, True)


def test_arguments_are_streamed() -> None:
    one = decoder(answer_format=CALLS)
    chunks = [chunk for letter in CALL for chunk in one.push(Piece(text=letter))]
    fragments = [delta.arguments for chunk in chunks for delta in chunk.tools if delta.arguments]
    assert len(fragments) > 5
    assert json.loads("".join(fragments)) == {"city": "Köln"}
