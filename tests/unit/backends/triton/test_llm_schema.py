"""Detection of language models on Triton, and their features."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.backends.triton.engine import detect_schema
from shoal.backends.triton.llm_schema import LlmSchema, detect_llm, find_parts
from shoal.backends.triton.schema import Embedder, TensorNames
from shoal.errors import ConfigError
from shoal.kserve import protocol_pb2 as pb
from tests.fakes.triton import embedder
from tests.fakes.triton_llm import TENSORS, Kind, talker_config

NUMBERS = {"max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"}


def metadata(config: pb.ModelConfig) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(name=config.name, versions=["1", "10", "9"], platform=config.platform)


def found(kind: Kind, **fields: Any) -> LlmSchema:
    config = talker_config(kind, **fields)
    schema = detect_llm(config, metadata(config))
    assert schema is not None
    return schema


@pytest.mark.parametrize(
    ("kind", "family", "batched", "gives", "streaming"),
    [
        ("vllm", "vllm", False, "delta", "stream"),
        ("old_vllm", "vllm", False, "delta", "stream"),
        ("ensemble", "trtllm", True, "delta", "stream"),
        ("bls", "trtllm", True, "delta", "stream"),
        ("gpt", "trtllm", True, "delta", ""),
        ("tokens", "tokens", True, "ids", "streaming"),
        ("llmapi", "llmapi", False, "cumulative", "streaming"),
        ("dynamo", "dynamo", False, "delta", "streaming"),
        ("text", "text", False, "delta", ""),
    ],
)
def test_each_kind(kind: Kind, family: str, batched: bool, gives: str, streaming: str) -> None:
    schema = found(kind)
    assert (schema.family, schema.batched, schema.output_mode, schema.streaming) == (family, batched, gives, streaming)
    assert schema.streams == (kind not in ("gpt", "text"))
    assert schema.style == schema.family
    assert (schema.version, schema.name) == ("10", "llm")


def test_every_kind_has_a_test() -> None:
    assert set(TENSORS) == {"vllm", "old_vllm", "ensemble", "gpt", "bls", "tokens", "llmapi", "dynamo", "text"}


class TestParameters:
    def test_vllm_takes_what_its_sampling_parameters_take(self) -> None:
        """Except logit_bias, whose keys become strings in JSON."""
        able = found("vllm").parameters
        assert able >= NUMBERS | {"min_p", "stop", "stop_token_ids", "bad_words", "logprobs", "guide", "ignore_eos"}
        assert not able & {"logit_bias", "length_penalty"}

    def test_a_vllm_of_before_takes_single_values_alone(self) -> None:
        able = found("old_vllm").parameters
        assert able >= NUMBERS
        assert not able & {"stop", "bad_words", "guide", "logprobs"}

    def test_the_name_of_vllms_guides_shows_in_its_other_inputs(self) -> None:
        assert found("vllm").guide == "structured_outputs"
        assert found("vllm", without=["embedding_request"]).guide == "guided_decoding"
        older = found("vllm", without=["embedding_request", "return_num_input_tokens"])
        assert (older.guide, "guide" in older.parameters) == ("", False)

    def test_an_ensemble_honours_the_inputs_that_it_has(self) -> None:
        expected = NUMBERS | PENALTIES | {"stop", "bad_words", "guide", "logprobs"}
        assert found("ensemble").parameters == expected
        lacking = found("ensemble", without=["frequency_penalty", "seed", "guided_decoding_guide", "stop_words"])
        assert lacking.parameters == expected - {"frequency_penalty", "seed", "guide", "stop"}

    def test_log_probabilities_want_pieces(self) -> None:
        """An ensemble reports no tokens, so in a whole answer they cannot be assigned to text."""
        assert "logprobs" not in found("ensemble", decoupled=False).parameters
        assert "logprobs" not in found("bls").parameters

    def test_older_names(self) -> None:
        schema = found("gpt")
        assert schema.fields["seed"] == "random_seed"
        assert schema.fields["min_tokens"] == "min_length"
        assert schema.parameters == NUMBERS | {"stop", "bad_words"}

    def test_the_newer_name_goes_first(self) -> None:
        assert found("gpt", more="seed? UINT64 1").fields["seed"] == "seed"

    def test_the_engine_has_names_of_its_own(self) -> None:
        schema = found("tokens")
        assert schema.fields["max_tokens"] == "request_output_len"
        assert schema.fields["top_k"] == "runtime_top_k"
        assert schema.fields["length_penalty"] == "len_penalty"
        assert schema.parameters >= {"stop_token_ids", "ignore_eos", "logprobs", "stop", "bad_words"}
        assert "stop_token_ids" not in found("tokens", without=["stop_words_list"]).parameters

    def test_the_llm_api_has_prefixed_ones(self) -> None:
        schema = found("llmapi")
        assert schema.parameters == NUMBERS - {"min_tokens"} | {"presence_penalty", "frequency_penalty", "stop"}
        assert schema.cancel == "stop"

    def test_dynamo_takes_none(self) -> None:
        assert found("dynamo").parameters == frozenset()

    def test_a_python_model_takes_what_it_names(self) -> None:
        schema = found("text", more="stop? STRING -1")
        assert schema.parameters == {"max_tokens", "temperature", "stop"}
        assert (schema.cancel, schema.fields["stop"]) == ("", "stop")

    def test_a_flag_called_stop_is_no_stop_text(self) -> None:
        assert "stop" not in found("text", more="stop? BOOL 1").parameters
        assert found("text", more="stop? BOOL 1").cancel == ""

    @pytest.mark.parametrize("more", ["seed? STRING 1", "ignore_eos? INT32 1", "bad_words? FP32 -1"])
    def test_an_input_of_another_type_is_another_thing(self, more: str) -> None:
        assert found("text", more=more).parameters == {"max_tokens", "temperature"}


class TestDetails:
    def test_who_ends_a_generation_by_its_id(self) -> None:
        assert [found(kind).cancel for kind in ("tokens", "llmapi", "ensemble", "vllm")] == ["stop", "stop", "", ""]

    def test_where_loras_go(self) -> None:
        kinds: tuple[Kind, ...] = ("vllm", "ensemble", "tokens", "llmapi", "gpt", "old_vllm")
        expected = ["sampling_parameters", "lora_task_id", "lora_task_id", "lora_name", "", ""]
        assert [found(kind).adapter for kind in kinds] == expected

    def test_who_repeats_the_prompt(self) -> None:
        """Only models without an input that excludes it; some models never repeat it."""
        assert [found(kind).includes_prompt for kind in ("old_vllm", "gpt", "ensemble", "llmapi", "text")] == [
            True,
            True,
            False,
            False,
            False,
        ]

    def test_a_bls_that_accumulates_gives_all_text_so_far(self) -> None:
        config = talker_config("bls")
        for value, gives in (("true", "cumulative"), ("True", "cumulative"), ("${accumulate_tokens}", "delta")):
            config.parameters["accumulate_tokens"].string_value = value
            schema = detect_llm(config, metadata(config))
            assert schema is not None
            assert schema.output_mode == gives

    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("max_seq_len", "4096", 4096),
            ("max_model_len", "2048", 2048),
            ("max_seq_len", "${max_seq_len}", None),
            ("max_seq_len", "0", None),
            ("max_tokens_in_paged_kv_cache", "2560", None),
        ],
    )
    def test_the_context_from_the_configuration(self, key: str, value: str, expected: int | None) -> None:
        config = talker_config("ensemble")
        config.parameters[key].string_value = value
        schema = detect_llm(config, metadata(config))
        assert schema is not None
        assert schema.context_tokens == expected

    def test_tensors_alone_by_the_metadata(self) -> None:
        """For a server that omits them from the configuration, as Dynamo may."""
        metadata = pb.ModelMetadataResponse(name="llm", platform="dynamo")
        metadata.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        metadata.inputs.add(name="stream", datatype="BOOL", shape=[1])
        metadata.outputs.add(name="text_output", datatype="BYTES", shape=[-1])
        schema = detect_llm(pb.ModelConfig(name="llm"), metadata)
        assert schema is not None
        assert (schema.family, schema.prompt, schema.decoupled) == ("dynamo", "text_input", False)

    def test_equal_while_it_is_called_as_before(self) -> None:
        assert found("vllm").tensors == found("vllm").tensors
        assert found("vllm").tensors != found("vllm", without=["image"]).tensors
        assert found("vllm").tensors != found("vllm", decoupled=False).tensors


class TestRefusals:
    @pytest.mark.parametrize("kind", ["ensemble", "text", "dynamo", "vllm"])
    def test_what_needs_more_than_a_prompt(self, kind: Kind) -> None:
        with pytest.raises(ConfigError, match=r"requires unknown inputs: pixels \(FP16 \[3, -1, -1\]\)"):
            found(kind, more="pixels FP16 3,-1,-1")

    def test_a_prompt_that_is_no_text(self) -> None:
        config = talker_config("text")
        config.input[0].data_type = pb.TYPE_FP32
        with pytest.raises(ConfigError, match="but a prompt is BYTES"):
            detect_llm(config, metadata(config))

    def test_an_embedder_is_none(self) -> None:
        config = embedder("emb")
        assert detect_llm(config, metadata(config)) is None
        assert isinstance(detect_schema(config, metadata(config)), Embedder)

    def test_text_from_another_input_is_refused_as_before(self) -> None:
        """The input is `text` and not `text_input`, so its purpose is unknown."""
        config = embedder("odd")
        config.output[0].CopyFrom(pb.ModelOutput(name="text_output", data_type=pb.TYPE_STRING, dims=[1]))
        with pytest.raises(ConfigError, match="generates text"):
            detect_schema(config, metadata(config))

    def test_named_tensors_are_an_embedders(self) -> None:
        """A configured embedding output means that it is not a language model."""
        config = talker_config("text", without=["max_tokens", "temperature"])
        config.output.add(name="vectors", data_type=pb.TYPE_FP32, dims=[-1, 4])
        names = TensorNames(inputs={"text": "text_input"}, outputs={"embedding": "vectors"})
        assert isinstance(detect_schema(config, metadata(config)), LlmSchema)
        with pytest.raises(ConfigError, match="generates text"):
            detect_schema(config, metadata(config), names)


class TestParts:
    def test_of_an_ensemble(self) -> None:
        config = talker_config("ensemble", "ensemble")
        for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
            config.ensemble_scheduling.step.add(model_name=name)
        assert find_parts(config) == {"preprocessing", "tensorrt_llm", "postprocessing"}

    def test_of_a_bls(self) -> None:
        config = talker_config("bls", "tensorrt_llm_bls")
        config.parameters["accumulate_tokens"].string_value = "false"
        assert find_parts(config) == {"preprocessing", "tensorrt_llm", "postprocessing"}
        config.parameters["tensorrt_llm_model_name"].string_value = "engine"
        config.parameters["tensorrt_llm_draft_model_name"].string_value = "${tensorrt_llm_draft_model_name}"
        config.parameters["multimodal_encoders_name"].string_value = "eyes"
        assert find_parts(config) == {"preprocessing", "engine", "postprocessing", "eyes"}

    def test_of_any_other_model(self) -> None:
        assert find_parts(talker_config("vllm")) == frozenset()
