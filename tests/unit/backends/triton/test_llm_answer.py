"""Model responses as pieces: deltas, cumulative text, token ids; counts, finish reasons, and broken responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.triton.llm_answer import MIN_LOGPROB, REPLACED, Answer
from shoal.backends.triton.llm_request import GenerationRequest, ModelTokenizer
from shoal.backends.triton.llm_schema import detect_llm
from shoal.core.protocols import Piece, Prompt
from shoal.errors import UpstreamFailed
from shoal.kserve import codec
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array, Sampling, TokenLogprob
from tests.fakes import triton_codec
from tests.fakes.triton_llm import Kind, talker_config, texts

WORDS = ModelTokenizer(encode=lambda text: [ord(letter) for letter in text], piece=chr)
PROMPT = Prompt(text="Say hello", ids=(5, 6, 7))


def answer(kind: Kind, *, stream: bool = True, model: dict[str, Any] | None = None, **sampling: Any) -> Answer:
    config = talker_config(kind, **model or {})
    schema = detect_llm(config, pb.ModelMetadataResponse(platform=config.platform))
    assert schema is not None
    request = GenerationRequest(id="i", prompt=PROMPT, sampling=Sampling(**sampling), stream=stream)
    return Answer(schema, request, WORDS)


def response(*, typed: bool = False, **tensors: Array) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name="llm")
    kinds = {dtype: name for name, dtype in codec.DTYPES.items()}
    for name, array in tensors.items():
        triton_codec.add_output(made, name, kinds.get(array.dtype, "BYTES"), array, typed=typed)
    return made


def say(*values: str | bytes, **more: Array) -> pb.ModelInferResponse:
    return response(typed=False, text_output=texts(*values), **more)


def pieces(reader: Answer, *responses: pb.ModelInferResponse) -> list[Piece]:
    found = [piece for each in responses if (piece := reader.read(each)) is not None]
    last = reader.end()
    return found if last is None else [*found, last]


def ids(*values: int, length: int | None = None) -> pb.ModelInferResponse:
    count = len(values) if length is None else length
    return response(output_ids=np.array([[values]], np.int32), sequence_length=np.array([[count]], np.int32))


def text_of(found: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in found)


def ids_of(found: Sequence[Piece]) -> list[int]:
    return [id for piece in found for id in piece.ids]


class TestDeltas:
    def test_counts_are_of_the_one_response(self) -> None:
        """vLLM's num_output_tokens is a delta; the prompt's tokens are reported once."""
        counts = [
            {"num_input_tokens": np.array(7, np.uint32), "num_output_tokens": np.array([n], np.uint32)} for n in (1, 2)
        ]
        found = pieces(answer("vllm"), say("Hello", **counts[0]), say(" you all", **counts[1]))
        assert [(each.text, each.tokens, each.prompt_tokens) for each in found] == [
            ("Hello", 1, 7),
            (" you all", 2, None),
            ("", None, None),
        ]

    @pytest.mark.parametrize("typed", [False, True])
    @pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint32, np.int64, np.uint64])
    def test_counts_of_every_kind(self, kind: Any, typed: bool) -> None:
        """Models send one number or several, raw or typed; the first counts."""
        counts: dict[str, Array] = {
            "num_input_tokens": np.array([200], kind),
            "num_output_tokens": np.array([3, 4], kind),
        }
        made = response(typed=typed, text_output=texts("a"), **counts)
        assert answer("vllm").read(made) == Piece(text="a", tokens=3, prompt_tokens=200)

    def test_counts_that_are_cut_short(self) -> None:
        made = say("a", num_output_tokens=np.array([1], np.uint32))
        made.raw_output_contents[1] = b"\x01\x00"
        with pytest.raises(UpstreamFailed, match="takes 4 bytes, not 2"):
            answer("vllm").read(made)

    def test_the_reason_comes_with_the_last_one(self) -> None:
        """Earlier responses have Python's None as text."""
        found = pieces(answer("vllm"), say("a", finish_reason=texts("None")), say("b", finish_reason=texts("length")))
        assert [each.finish_reason for each in found] == [None, "length"]

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [("stop", "stop"), ("eos", "stop"), ("STOP", "stop"), ("content_filter", "content_filter")],
    )
    def test_reasons(self, reason: str, expected: str) -> None:
        assert pieces(answer("dynamo"), say("a", finish_reason=texts(reason)))[-1].finish_reason == expected

    @pytest.mark.parametrize("reason", ["abort", "cancelled", "timeout", "error"])
    def test_a_reason_that_is_a_failure(self, reason: str) -> None:
        with pytest.raises(UpstreamFailed, match=reason):
            answer("vllm").read(say("a", finish_reason=texts(reason)))

    @pytest.mark.parametrize(("tokens", "expected"), [(1, "stop"), (2, "length"), (3, "length")])
    def test_without_a_reason_the_counts_decide(self, tokens: int, expected: str) -> None:
        found = pieces(answer("ensemble", max_tokens=2), say("a", num_output_tokens=np.array([[tokens]], np.int32)))
        assert [each.finish_reason for each in found] == [None, expected]

    def test_without_counts_it_is_a_stop(self) -> None:
        assert pieces(answer("text", max_tokens=1), say("a b c"))[-1].finish_reason == "stop"

    def test_nothing_at_all_is_an_answer(self) -> None:
        assert pieces(answer("vllm")) == [Piece(finish_reason="stop")]
        assert answer("vllm").read(response(other=np.zeros(3, np.float32))) is None
        assert answer("vllm").read(response(text_output=texts())) is None

    def test_the_first_of_several_sequences(self) -> None:
        assert text_of(pieces(answer("ensemble"), say("one", "two"))) == "one"
        both = response(text_output=texts("one", "two").reshape(1, 2))
        assert text_of(pieces(answer("gpt", stream=False), both)) == "one"

    def test_typed_contents(self) -> None:
        """As Dynamo sends them."""
        made = response(typed=True, text_output=texts("Hi"), finish_reason=texts("stop"))
        assert pieces(answer("dynamo"), made) == [Piece(text="Hi", finish_reason="stop")]

    def test_a_text_that_is_none(self) -> None:
        with pytest.raises(UpstreamFailed, match="numbers instead of a text"):
            answer("text").read(response(text_output=np.zeros(1, np.float32)))

    @pytest.mark.parametrize("numbers", [np.zeros(1, np.int32), np.ones(2, np.int32)])
    def test_a_reason_that_is_none(self, numbers: Array) -> None:
        with pytest.raises(UpstreamFailed, match="numbers instead of a text"):
            answer("vllm").read(say("Hi", finish_reason=numbers))

    def test_broken_contents(self) -> None:
        made = say("Hello")
        made.raw_output_contents[0] = made.raw_output_contents[0][:-1]
        with pytest.raises(UpstreamFailed, match="truncated"):
            answer("vllm").read(made)


class TestBytes:
    def test_a_character_in_two_responses(self) -> None:
        data = "東京".encode()
        found = pieces(answer("ensemble"), say(data[:2]), say(data[2:4]), say(data[4:]))
        assert [each.text for each in found] == ["東", "京", ""]

    def test_half_a_character_at_the_end(self) -> None:
        assert text_of(pieces(answer("ensemble"), say(b"ab\xe6\x9d"))) == "ab" + REPLACED
        last = say(b"ab\xe6\x9d", finish_reason=texts("length"))
        assert pieces(answer("vllm"), last) == [Piece(text="ab" + REPLACED, finish_reason="length")]

    def test_after_a_character_in_two_responses_comes_the_rest(self) -> None:
        data = "a東b".encode()
        found = pieces(answer("ensemble"), say(data[:3]), say(data[3:]), say("c"), say("d東"))
        assert [each.text for each in found] == ["a", "東b", "c", "d東", ""]

    def test_what_is_no_utf8_is_replaced(self) -> None:
        assert text_of(pieces(answer("ensemble"), say(b"a\xffb"))) == f"a{REPLACED}b"

    @given(text=st.text(alphabet=st.characters(codec="utf-8")), cuts=st.lists(st.integers(0, 40)))
    def test_cut_anywhere_it_is_the_same_text(self, text: str, cuts: list[int]) -> None:
        data = text.encode()
        borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        parts = [data[one:other] for one, other in pairwise(borders)]
        assert text_of(pieces(answer("ensemble"), *map(say, parts))) == text


class TestCumulative:
    def test_each_holds_all_so_far(self) -> None:
        found = pieces(answer("llmapi"), say("Hel"), say("Hello"), say("Hello!", finish_reason=texts("stop")))
        assert [each.text for each in found] == ["Hel", "Hello", "Hello!"]

    def test_half_a_character_waits_for_its_rest(self) -> None:
        """The server decodes all tokens so far, so an incomplete character may change later."""
        found = pieces(answer("llmapi"), say("a" + REPLACED), say("a東"))
        assert [each.text for each in found] == ["a", "a東", "a東"]

    def test_incomplete_characters_are_flushed_at_the_end(self) -> None:
        assert pieces(answer("llmapi"), say("a" + REPLACED))[-1] == Piece(text="a" + REPLACED, finish_reason="stop")
        last = say("a" + REPLACED, finish_reason=texts("length"))
        assert pieces(answer("llmapi"), last) == [Piece(text="a" + REPLACED, finish_reason="length")]


class TestPrompt:
    """Removing the prompt from a whole answer, if no input can exclude it."""

    @pytest.mark.parametrize(
        ("kind", "stream", "expected"),
        [
            ("old_vllm", False, " there"),
            ("old_vllm", True, "Say hello there"),
            ("gpt", True, " there"),
            ("vllm", False, "Say hello there"),
            ("text", False, "Say hello there"),
        ],
    )
    def test_it_is_taken_off_where_it_must_be_there(self, kind: Kind, stream: bool, expected: str) -> None:
        """Not if it was excluded: an answer may start with the same words."""
        assert text_of(pieces(answer(kind, stream=stream), say("Say hello there"))) == expected

    def test_its_tokens_are_not_counted(self) -> None:
        model = {"without": ["exclude_input_in_output"]}
        made = say("Say hello there", num_output_tokens=np.array([[4]], np.int32))
        found = pieces(answer("ensemble", stream=False, model=model, max_tokens=2), made)
        assert [(each.tokens, each.finish_reason) for each in found] == [(None, None), (None, "stop")]


class TestIds:
    def test_new_ones_alone(self) -> None:
        """Also if an answer repeats itself."""
        found = pieces(answer("tokens", max_tokens=4), ids(9), ids(9, 9), ids(8))
        assert [list(each.ids) for each in found] == [[9], [9, 9], [8], []]
        assert [each.tokens for each in found] == [1, 2, 1, None]
        assert found[-1].finish_reason == "length"

    def test_what_fills_up_is_no_token(self) -> None:
        assert ids_of(pieces(answer("tokens"), ids(9, 8, 0, 0, length=2), ids(7, -1, -1))) == [9, 8, 7]
        assert ids_of(pieces(answer("tokens"), response(output_ids=np.zeros((1, 1, 0), np.int32)))) == []

    def test_a_length_that_counts_what_came_before(self) -> None:
        assert ids_of(pieces(answer("tokens"), ids(9, length=4), ids(8, length=5))) == [9, 8]

    def test_the_first_of_several_beams(self) -> None:
        both = response(output_ids=np.array([[[9, 8], [7, 6]]], np.int32), sequence_length=np.array([[2, 2]], np.int32))
        assert ids_of(pieces(answer("tokens"), both)) == [9, 8]

    @pytest.mark.parametrize("stream", [True, False])
    def test_engines_of_before(self, stream: bool) -> None:
        """Engines without exclude_input_in_output may return the prompt and all ids so far."""
        model = {"without": ["exclude_input_in_output"]}
        whole = ids(5, 6, 7, 9, 8)
        assert ids_of(pieces(answer("tokens", stream=stream, model=model), whole)) == [9, 8]
        reader = answer("tokens", model=model)
        assert ids_of(pieces(reader, ids(5, 6, 7, 9), whole, ids(5, 6, 7, 9, 8, 8))) == [9, 8, 8]
        reader = answer("tokens", model=model)
        assert ids_of(pieces(reader, ids(9), ids(9), ids(9, 8))) == [9, 9, 9, 8]


class TestLogprobs:
    def test_of_vllm(self) -> None:
        """The chosen token first, then the most likely ones by rank; minus infinity is not valid JSON."""
        token = {
            "5": {"logprob": -2.0, "rank": 3, "decoded_token": "c"},
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "8": {"logprob": float("-inf"), "rank": 4, "decoded_token": None},
        }
        made = say("cd", logprobs=texts(json.dumps([token, {"8": token["8"]}, {}])))
        [piece, _] = pieces(answer("vllm", logprobs=2), made)
        first = TokenLogprob(
            token="c",
            logprob=-2.0,
            top=[TokenLogprob(token="a", logprob=-0.5), TokenLogprob(token="b", logprob=-1.0)],
        )
        none = TokenLogprob(token="", logprob=MIN_LOGPROB)
        assert list(piece.logprobs) == [first, TokenLogprob(token="", logprob=MIN_LOGPROB, top=[none])]
        [piece, _] = pieces(answer("vllm", logprobs=0), made)
        assert [each.top for each in piece.logprobs] == [[], []]

    @pytest.mark.parametrize("value", ["null", ""])
    def test_none(self, value: str) -> None:
        assert pieces(answer("vllm", logprobs=0), say("a", logprobs=texts(value)))[0].logprobs == []

    @pytest.mark.parametrize("value", ["{", '[{"5": {}}]', "[1]", '[{"5": 1}]'])
    def test_broken_ones(self, value: str) -> None:
        with pytest.raises(UpstreamFailed, match="invalid logprobs"):
            answer("vllm", logprobs=0).read(say("a", logprobs=texts(value)))

    def test_only_on_request(self) -> None:
        made = say("a", output_log_probs=np.full((1, 1), -0.5, np.float32))
        assert pieces(answer("ensemble"), made)[0].logprobs == ()

    def test_of_an_ensemble(self) -> None:
        """It reports no tokens: all text of a piece goes to its first token, and earlier values are not repeated."""
        count = np.array([[2]], np.int32)
        made = say("ab", num_output_tokens=count, output_log_probs=np.array([[-3.0, -1.0, -2.0]], np.float32))
        [piece, _] = pieces(answer("ensemble", logprobs=0), made)
        assert [(each.token, each.logprob) for each in piece.logprobs] == [("ab", -1.0), ("", -2.0)]

    def test_of_token_ids(self) -> None:
        made = ids(65, 66)
        triton_codec.add_output(made, "output_log_probs", "FP32", np.array([[[-1.0, -np.inf]]], np.float32))
        [piece, _] = pieces(answer("tokens", logprobs=0), made)
        assert [(each.token, each.logprob) for each in piece.logprobs] == [("A", -1.0), ("B", MIN_LOGPROB)]
