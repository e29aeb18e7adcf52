"""One generation request in each convention: names, types and shapes, and values that must not be confused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.triton.llm_request import (
    DEFAULT_MAX_TOKENS,
    Adapter,
    GenerationRequest,
    ModelTokenizer,
    RequestBuilder,
)
from shoal.backends.triton.llm_schema import LlmSchema, detect_llm
from shoal.core.protocols import Prompt
from shoal.errors import ConfigError, InputRejected, InvalidValue
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Guide, Sampling
from tests.fakes import triton_codec
from tests.fakes.triton_llm import TENSORS, Kind, decode_inputs, talker_config

PROMPT = Prompt(text="Say hello", ids=(5, 6, 7), tokens=3)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


WORDS = ModelTokenizer(encode=encode, piece=chr, ends=(2, 4))


def schema(kind: Kind, **fields: Any) -> LlmSchema:
    config = talker_config(kind, **fields)
    found = detect_llm(config, pb.ModelMetadataResponse(name="llm", platform=config.platform))
    assert found is not None
    return found


def request(
    kind: Kind,
    *,
    stream: bool = True,
    prompt: Prompt = PROMPT,
    adapters: Mapping[str, Adapter] | None = None,
    adapter: str = "",
    model: dict[str, Any] | None = None,
    **sampling: Any,
) -> pb.ModelInferRequest:
    """Return the request for a sampling; `model` as talker_config takes it."""
    requests = RequestBuilder(schema(kind, **model or {}), "llm", "3", words=WORDS, adapters=adapters)
    generation = GenerationRequest(
        id="the id", prompt=prompt, sampling=Sampling(**sampling), stream=stream, adapter=adapter
    )
    return requests.build_generation(generation)


def sent(kind: Kind, **fields: Any) -> dict[str, Any]:
    return decode_inputs(request(kind, **fields))


def sent_sampling(kind: Kind = "vllm", **fields: Any) -> dict[str, Any]:
    """Return vLLM's sampling parameters."""
    found: dict[str, Any] = json.loads(sent(kind, **fields)["sampling_parameters"])
    return found


@pytest.mark.parametrize("kind", TENSORS)
def test_types_and_shapes_are_the_models(kind: Kind) -> None:
    """Every tensor matches the configuration: with a batch axis of 1 for ensembles, without one for vLLM."""
    config = {port.name: port for port in talker_config(kind).input}
    batched = talker_config(kind).max_batch_size > 0
    made = request(kind, max_tokens=9, temperature=0.5, seed=1, stop=["a", "bc"], top_k=3, bad_words=["x"])
    assert (made.model_name, made.model_version, made.id) == ("llm", "3", "the id")
    for tensor in made.inputs:
        port = config[tensor.name]
        datatype = pb.DataType.Name(port.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        assert tensor.datatype == datatype
        shape = list(tensor.shape)
        if batched:
            assert shape.pop(0) == 1
        assert len(shape) == len(port.dims)
        assert all(wanted in (-1, size) for wanted, size in zip(port.dims, shape, strict=True)), tensor
    assert {port.name for port in config.values() if not port.optional} <= {tensor.name for tensor in made.inputs}


class TestVllm:
    def test_sampling_goes_as_one_text(self) -> None:
        found = sent_sampling(
            max_tokens=9,
            min_tokens=1,
            temperature=0.0,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            seed=-5,
            stop=["END", "\n"],
            stop_token_ids=[7],
            include_stop=True,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            ignore_eos=True,
            skip_special_tokens=False,
            bad_words=["no"],
        )
        assert found == {
            "max_tokens": 9,
            "min_tokens": 1,
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "seed": -5,
            "stop": ["END", "\n"],
            "stop_token_ids": [7],
            "include_stop_str_in_output": True,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "bad_words": ["no"],
        }

    def test_nothing_set_is_an_empty_object(self) -> None:
        """It is always sent: without it the backend reads the request's parameters, and one of these is Triton's
        own."""
        assert sent_sampling() == {}

    def test_flags(self) -> None:
        """The prompt is never requested: vLLM rejects it in a stream, and prepends it by default otherwise."""
        for stream in (True, False):
            found = sent("vllm", stream=stream)
            assert (found["stream"], found["exclude_input_in_output"]) == (stream, True)
            assert {name for name in found if name.startswith("return_")} == {
                "return_finish_reason",
                "return_num_input_tokens",
                "return_num_output_tokens",
            }
        assert sent("vllm", logprobs=0)["return_logprobs"] is True
        assert sent_sampling(logprobs=3)["logprobs"] == 3

    def test_before_the_input_they_are_parameters(self) -> None:
        made = request("old_vllm", max_tokens=9, temperature=0.5, ignore_eos=True)
        found = {name: triton_codec.get_parameter(made.parameters, name) for name in made.parameters}
        assert found == {"max_tokens": 9, "temperature": 0.5, "ignore_eos": True}

    @pytest.mark.parametrize(
        ("guide", "expected"),
        [
            (Guide(kind="json_object"), {"json_object": True}),
            (Guide(kind="json_schema", value='{"type":"object"}'), {"json": '{"type":"object"}'}),
            (Guide(kind="regex", value="a+"), {"regex": "a+"}),
            (Guide(kind="grammar", value="root ::= x"), {"grammar": "root ::= x"}),
            (Guide(kind="choice", value='["yes","no"]'), {"choice": ["yes", "no"]}),
            (Guide(kind="structural_tag", value="{}"), {"structural_tag": "{}"}),
        ],
    )
    def test_guides(self, guide: Guide, expected: dict[str, Any]) -> None:
        """Under the name in the backend's release, as JSON within the JSON."""
        assert json.loads(sent_sampling(guide=guide)["structured_outputs"]) == expected
        older = sent_sampling(guide=guide, model={"without": ["embedding_request"]})
        assert json.loads(older["guided_decoding"]) == expected

    def test_a_lora_by_its_name_there(self) -> None:
        assert sent_sampling(adapters={"doll": "doll-v2", "2": 7}, adapter="doll")["lora_name"] == "doll-v2"
        assert sent_sampling(adapters={"doll": "doll-v2", "2": 7}, adapter="2")["lora_name"] == "7"
        assert "lora_name" not in sent_sampling(adapters={"doll": "doll-v2"})


class TestTensorRtLlm:
    def test_an_ensemble(self) -> None:
        found = sent(
            "ensemble",
            max_tokens=9,
            min_tokens=1,
            temperature=0.5,
            top_k=4,
            top_p=0.75,
            seed=3,
            stop=["END", "\n"],
            bad_words=["no"],
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.5,
            length_penalty=2.0,
        )
        assert found == {
            "text_input": "Say hello",
            "max_tokens": 9,
            "min_tokens": 1,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.75,
            "seed": 3,
            "stop_words": ["END", "\n"],
            "bad_words": "no",
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.5,
            "length_penalty": 2.0,
            "stream": True,
            "exclude_input_in_output": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }

    def test_what_ends_an_answer_is_not_what_must_not_be_in_it(self) -> None:
        """Stop texts are not sent as bad words too."""
        found = sent("ensemble", stop=["END"])
        assert found["stop_words"] == "END"
        assert "bad_words" not in found

    def test_what_must_be_filled_is(self) -> None:
        """The older ensembles also require the word lists, and always a length."""
        assert sent("gpt") == {
            "text_input": "Say hello",
            "max_tokens": DEFAULT_MAX_TOKENS,
            "stop_words": "",
            "bad_words": "",
        }
        found = sent("gpt", stop=["a", "b"], max_tokens=3, seed=1, min_tokens=2)
        assert (found["stop_words"], found["bad_words"], found["max_tokens"]) == (["a", "b"], "", 3)
        assert (found["random_seed"], found["min_length"]) == (1, 2)

    def test_streaming_is_requested_only_where_supported(self) -> None:
        """A model that is not decoupled rejects it."""
        assert sent("ensemble", stream=True)["stream"] is True
        assert sent("ensemble", stream=False)["stream"] is False
        assert sent("ensemble", stream=True, model={"decoupled": False})["stream"] is False

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"temperature": 0.0, "top_p": 0.9}, {"top_k": 1}),
            ({"temperature": 0.8}, {"temperature": 0.8, "top_k": 0, "top_p": 1.0}),
            ({"top_p": 0.5}, {"top_k": 0, "top_p": 0.5}),
            ({"temperature": 0.8, "top_k": -1}, {"temperature": 0.8, "top_k": 0, "top_p": 1.0}),
            ({"temperature": 0.8, "top_k": 40}, {"temperature": 0.8, "top_k": 40}),
            ({}, {}),
            ({"logprobs": 0}, {"temperature": 1.0}),
            ({"logprobs": 0, "top_k": 4}, {"top_k": 4}),
        ],
    )
    def test_a_temperature_enables_sampling(self, fields: dict[str, Any], expected: dict[str, Any]) -> None:
        """Without top_k or top_p the model ignores it; and not every version accepts 0."""
        found = sent("ensemble", **fields)
        assert {name: found[name] for name in ("temperature", "top_k", "top_p") if name in found} == pytest.approx(
            expected
        )

    @pytest.mark.parametrize(
        ("guide", "kind", "value"),
        [
            (Guide(kind="json_object"), "json", None),
            (Guide(kind="json_schema", value="{}"), "json_schema", "{}"),
            (Guide(kind="regex", value="a+"), "regex", "a+"),
            (Guide(kind="grammar", value="root ::= x"), "ebnf_grammar", "root ::= x"),
            (Guide(kind="choice", value='["a.b","c"]'), "regex", r"(a\.b)|(c)"),
        ],
    )
    def test_guides(self, guide: Guide, kind: str, value: str | None) -> None:
        found = sent("ensemble", guide=guide)
        assert (found["guided_decoding_guide_type"], found.get("guided_decoding_guide")) == (kind, value)

    def test_guides_that_it_does_not_know(self) -> None:
        with pytest.raises(InvalidValue, match="structural_tag"):
            sent("ensemble", guide=Guide(kind="structural_tag", value="{}"))
        with pytest.raises(InvalidValue, match="list of strings"):
            sent("ensemble", guide=Guide(kind="choice", value="{}"))

    def test_log_probabilities_of_the_chosen_token_alone(self) -> None:
        assert sent("ensemble", logprobs=0)["return_log_probs"] is True
        with pytest.raises(InvalidValue, match="only the probability of the chosen token"):
            sent("ensemble", logprobs=2)

    def test_a_lora_by_its_task(self) -> None:
        assert sent("ensemble", adapters={"doll": 7}, adapter="doll")["lora_task_id"] == 7
        assert "lora_task_id" not in sent("ensemble", adapters={"doll": 7})


class TestEngine:
    def test_tokens_in(self) -> None:
        found = sent("tokens", max_tokens=9, temperature=0.5, top_k=4, top_p=0.5, seed=1, length_penalty=1.5)
        assert found == {
            "input_ids": [5, 6, 7],
            "input_lengths": 3,
            "request_output_len": 9,
            "temperature": 0.5,
            "runtime_top_k": 4,
            "runtime_top_p": 0.5,
            "seed": 1,
            "len_penalty": 1.5,
            "end_id": 2,
            "pad_id": 2,
            "stop_words_list": [4, 1],
            "streaming": True,
            "exclude_input_in_output": True,
        }

    def test_word_lists(self) -> None:
        """Row 0 has all tokens, row 1 the end of each word, padded with -1; additional end tokens are words of their
        own."""
        found = sent("tokens", stop=["ab", "c", ""], stop_token_ids=[9], bad_words=["xyz"])
        assert found["stop_words_list"] == [[97, 98, 99, 4, 9], [2, 3, 4, 5, -1]]
        assert found["bad_words_list"] == [[120, 121, 122], [3, -1, -1]]
        [tensor] = [each for each in request("tokens", bad_words=["xyz"]).inputs if each.name == "bad_words_list"]
        assert list(tensor.shape) == [1, 2, 3]

    def test_an_end_that_is_ignored(self) -> None:
        """The engine has no end tokens of its own, so none are sent."""
        found = sent("tokens", ignore_eos=True)
        assert not {"end_id", "pad_id", "stop_words_list"} & found.keys()
        assert sent("tokens", ignore_eos=True, stop_token_ids=[9])["stop_words_list"] == [9, 1]

    def test_a_word_list_that_must_be_filled(self) -> None:
        model = {"without": ["bad_words_list"], "more": "bad_words_list INT32 2,-1"}
        assert sent("tokens", model=model)["bad_words_list"] == [0, -1]

    def test_a_prompt_without_tokens(self) -> None:
        with pytest.raises(InvalidValue, match="reads token ids"):
            request("tokens", prompt=Prompt(text="a"))

    def test_a_cancellation(self) -> None:
        """It has the same id and as few other inputs as allowed."""
        made = RequestBuilder(schema("tokens"), "llm", words=WORDS).build_cancellation("the id")
        assert made is not None
        assert made.id == "the id"
        assert decode_inputs(made) == {"input_ids": 0, "input_lengths": 0, "request_output_len": 0, "stop": True}


class TestLlmApi:
    def test_prefixed_names(self) -> None:
        found = sent("llmapi", max_tokens=9, temperature=0.0, top_k=-1, stop=["a", "b"], seed=1, presence_penalty=0.5)
        assert found == {
            "text_input": "Say hello",
            "streaming": True,
            "sampling_param_max_tokens": 9,
            "sampling_param_temperature": 0.0,
            "sampling_param_top_k": 0,
            "sampling_param_stop": ["a", "b"],
            "sampling_param_seed": 1,
            "sampling_param_presence_penalty": 0.5,
            "sampling_param_exclude_input_from_output": True,
            "return_finish_reason": True,
        }

    def test_a_lora_with_its_path(self) -> None:
        """All three inputs; the number is the same in every process, because the server caches by it."""
        found = sent("llmapi", adapters={"doll": "/loras/doll"}, adapter="doll")
        assert (found["lora_name"], found["lora_path"]) == ("doll", "/loras/doll")
        other = sent("llmapi", adapters={"a": "/a", "doll": "/loras/doll"}, adapter="doll")
        assert found["lora_id"] == other["lora_id"] > 0
        assert sent("llmapi", adapters={"doll": "/v2"}, adapter="doll")["lora_id"] != found["lora_id"]

    def test_a_lora_by_name_alone(self) -> None:
        model = {"without": ["lora_id", "lora_path"]}
        found = sent("llmapi", adapters={"doll": "doll-v2"}, adapter="doll", model=model)
        assert found["lora_name"] == "doll-v2"

    def test_a_cancellation(self) -> None:
        made = RequestBuilder(schema("llmapi"), "llm").build_cancellation("the id")
        assert made is not None
        assert decode_inputs(made) == {"text_input": "", "stop": True}


class TestOthers:
    def test_dynamo_gets_the_prompt_and_nothing_else(self) -> None:
        assert sent("dynamo") == {"text_input": "Say hello", "streaming": True}

    def test_a_model_of_texts(self) -> None:
        assert sent("text", max_tokens=3, temperature=0.0) == {
            "text_input": "Say hello",
            "max_tokens": 3,
            "temperature": 0.0,
        }

    def test_one_stop_text_where_there_is_room_for_one(self) -> None:
        """Shoal cuts the answer at the others; excess bad words are an error."""
        assert sent("text", stop=["a", "b"], model={"more": "stop? STRING 1"})["stop"] == "a"
        with pytest.raises(InvalidValue, match="takes at most 1 bad_words"):
            sent("text", bad_words=["a", "b"], model={"more": "bad_words? STRING 1"})

    def test_a_scalar_without_dims(self) -> None:
        config = talker_config("text")
        del config.input[1].dims[:]
        found = detect_llm(config, pb.ModelMetadataResponse())
        assert found is not None
        request = GenerationRequest(id="i", prompt=PROMPT, sampling=Sampling(max_tokens=3), stream=True)
        made = RequestBuilder(found, "llm").build_generation(request)
        assert [list(each.shape) for each in made.inputs if each.name == "max_tokens"] == [[]]

    def test_models_without_a_stop_input(self) -> None:
        assert RequestBuilder(schema("vllm"), "llm").build_cancellation("i") is None

    @pytest.mark.parametrize(
        ("kind", "adapters", "words"),
        [
            ("gpt", {"doll": 1}, "does not support LoRA"),
            ("ensemble", {"doll": "seven"}, "selects adapters by task id"),
            ("ensemble", {"doll": -1}, "selects adapters by task id"),
        ],
    )
    def test_adapters_that_cannot_be(self, kind: Kind, adapters: dict[str, Adapter], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            RequestBuilder(schema(kind), "llm", adapters=adapters)

    def test_a_number_that_does_not_fit(self) -> None:
        with pytest.raises(InputRejected, match="INT32"):
            sent("ensemble", top_k=2**40)


@given(seed=st.integers(-(2**63), 2**64 - 1))
def test_any_seed_fits_and_is_the_same_each_time(seed: int) -> None:
    """UINT64 takes no negative seed; a seed in range is sent unchanged."""
    made = request("ensemble", seed=seed)
    [found] = [triton_codec.read_inputs(made)["seed"].reshape(-1)[0]]
    assert found.dtype == np.uint64
    assert int(found) == seed % 2**64
    small = request("text", seed=seed, model={"more": "seed? INT32 1"})
    assert int(triton_codec.read_inputs(small)["seed"][0]) == (seed + 2**31) % 2**32 - 2**31


@given(words=st.lists(st.text(min_size=1, max_size=5, alphabet="abc"), max_size=6), extra=st.lists(st.integers(0, 9)))
def test_word_lists_can_be_read_back(words: list[str], extra: list[int]) -> None:
    """As TensorRT-LLM reads them: each word up to its end offset."""
    lists = triton_codec.read_inputs(request("tokens", stop=words, stop_token_ids=extra))["stop_words_list"][0].tolist()
    found, begin = [], 0
    for end in lists[1]:
        if end != -1:
            found.append(lists[0][begin:end])
            begin = end
    assert found == [*(encode(word) for word in words), [4], *([each] for each in extra)]


@given(
    sampling=st.builds(
        Sampling,
        temperature=st.none() | st.floats(0, 2),
        top_k=st.none() | st.integers(-1, 100),
        stop=st.lists(st.text(alphabet=st.characters(codec="utf-8")), max_size=3),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    ),
    kind=st.sampled_from(sorted(TENSORS)),
)
def test_whatever_is_sampled_can_be_sent(sampling: Sampling, kind: Kind) -> None:
    model = schema(kind)
    able = {name: getattr(sampling, name) for name in model.parameters}
    request = GenerationRequest(
        id="i", prompt=PROMPT, sampling=msgspec.structs.replace(Sampling(), **able), stream=True
    )
    made = RequestBuilder(model, "llm", words=WORDS).build_generation(request)
    assert len({tensor.name for tensor in made.inputs}) == len(made.inputs) == len(made.raw_input_contents)
