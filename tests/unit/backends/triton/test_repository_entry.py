"""Specifications to Triton models: configurations, files, and rejected specifications."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.text_format import Parse

from shoal.backends.triton.repository_entry import PROGRAMS, EntryOptions, Tensor, TritonModel, triton_models
from shoal.errors import ConfigError, InvalidValue, ModelFileError
from shoal.kserve.protocol_pb2 import ModelConfig
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec, TextSpec
from tests.unit.backends.triton.entry_kit import SPEC, entry


def config_of(model: TritonModel) -> dict[str, Any]:
    """Return config.pbtxt parsed, without the fields that all models share."""
    parsed = Parse(model.config_text.decode(), ModelConfig())
    assert parsed == model.config
    config: dict[str, Any] = MessageToDict(parsed, preserving_proto_field_name=True)
    for name in ("parameters", "model_warmup", "input", "output"):
        config.pop(name, None)
    return config


def parameters(model: TritonModel) -> dict[str, str]:
    return {key: value.string_value for key, value in model.config.parameters.items()}


GOLDEN = """\
name: "mini"
max_batch_size: 64
input {
  name: "input_ids"
  data_type: TYPE_INT64
  dims: -1
}
input {
  name: "attention_mask"
  data_type: TYPE_INT64
  dims: -1
}
output {
  name: "sentence_embedding"
  data_type: TYPE_FP32
  dims: 4
}
output {
  name: "pooled"
  data_type: TYPE_FP32
  dims: 4
}
instance_group {
  count: 2
  kind: KIND_CPU
}
default_model_filename: "model.onnx"
dynamic_batching {
  default_queue_policy {
    max_queue_size: 9
  }
}
"""


def test_the_text_of_a_plain_configuration(tmp_path: Path) -> None:
    """Golden file: the text for ONNX Runtime, up to the parameters."""
    options = {"instances": 2, "kind": "cpu", "max_queue_size": 9, "warm_up": False}
    (model,) = triton_models(entry(tmp_path, "mini", options=options))
    text = model.config_text.decode("ascii")
    assert text.startswith(GOLDEN)
    assert text.endswith('backend: "onnxruntime"\n')


def test_parameters_say_what_the_model_is(tmp_path: Path) -> None:
    """Another Shoal needs only the configuration; the file is ASCII, whatever the prompts are."""
    for model in triton_models(entry(tmp_path, options={"text_in": True})):
        values = parameters(model)
        text = values.pop("shoal_text")
        assert msgspec.json.decode(text, type=TextSpec) == SPEC
        assert values == {
            "shoal_format": "1",
            "shoal_name": "org/mini",
            "shoal_part": model.part,
            "shoal_source": "hf:org/mini@main",
            "shoal_space": "5face",
            "shoal_precision": "f32",
            "shoal_tokenizer": "",
            "shoal_kind": "auto",
        }
        assert model.config_text.isascii()
        assert "größer" in Parse(model.config_text.decode(), ModelConfig()).parameters["shoal_text"].string_value


@pytest.mark.parametrize(
    ("platform", "main", "files"),
    [
        ("onnxruntime", "model.onnx", {"1/model.onnx"}),
        ("openvino", "model.onnx", {"1/model.onnx"}),
        ("tensorrt", "model.plan", {"1/model.plan"}),
        ("python", "model.py", {"1/model.onnx", "1/model.py"}),
    ],
)
def test_each_platform_opens_its_own_file(tmp_path: Path, platform: Any, main: str, files: set[str]) -> None:
    """Backend, main file and files of each platform; each file exists, with the graph under the right name."""
    spec = entry(tmp_path, options={"platform": platform, "warm_up": False})
    (model,) = triton_models(spec)
    assert (model.name, model.part) == ("org~mini", "model")
    assert config_of(model) == {
        "name": "org~mini",
        "backend": platform,
        "max_batch_size": 64,
        "default_model_filename": main,
        "instance_group": [{"count": 1}],  # KIND_AUTO is protobuf's default
        "dynamic_batching": {},
    }
    assert set(model.files) == files
    assert f"1/{main}" in files
    graph = next(content for name, content in model.files.items() if not name.endswith(".py"))
    assert graph == spec.graph


def test_external_weights_keep_their_paths(tmp_path: Path) -> None:
    """The graph names them relative to itself."""
    data = (tmp_path / "model.onnx_data", tmp_path / "more" / "part2")
    (model,) = triton_models(entry(tmp_path, data=data, options={"warm_up": False}))
    assert set(model.files) == {"1/model.onnx", "1/model.onnx_data", "1/more/part2"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"accelerator": "tensorrt", "kind": "gpu", "fp16": True},
            {"gpu_execution_accelerator": [{"name": "tensorrt", "parameters": {"precision_mode": "FP16"}}]},
        ),
        ({"accelerator": "tensorrt"}, {"gpu_execution_accelerator": [{"name": "tensorrt"}]}),
        ({"accelerator": "openvino", "kind": "cpu"}, {"cpu_execution_accelerator": [{"name": "openvino"}]}),
    ],
)
def test_accelerators(tmp_path: Path, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """In the form that the onnxruntime backend reads."""
    (model,) = triton_models(entry(tmp_path, options=options))
    assert config_of(model)["optimization"] == {"execution_accelerators": expected}


def test_tensors_may_be_given(tmp_path: Path) -> None:
    """For a graph with other datatypes."""
    fields: dict[str, Any] = {
        "inputs": (Tensor("input_ids", "INT32", (-1,)),),
        "outputs": (Tensor("pooled", "FP16", (4,)),),
    }
    (model,) = triton_models(entry(tmp_path, **fields))
    config = MessageToDict(model.config, preserving_proto_field_name=True)
    assert config["input"] == [{"name": "input_ids", "data_type": "TYPE_INT32", "dims": ["-1"]}]
    assert config["output"] == [{"name": "pooled", "data_type": "TYPE_FP16", "dims": ["4"]}]


def test_one_output_where_the_model_has_one(tmp_path: Path) -> None:
    """A graph that returns only normalized vectors has a single output under both names."""
    (model,) = triton_models(entry(tmp_path, text=msgspec.structs.replace(SPEC, pooled="sentence_embedding")))
    assert [output.name for output in model.config.output] == ["sentence_embedding"]


M3 = msgspec.structs.replace(
    SPEC,
    tokens="token_embeddings",
    sparse=SparseSpec(output="token_weights", per="token"),
    multi=MultiSpec(dimension=3),
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dimension": 0, "score": ScoreSpec(labels=("a", "b"), activation="softmax")}, {"logits": [2]}),
        ({"dimension": 0, "vocab_size": 30, "sparse": SparseSpec()}, {"sparse_embedding": [30]}),
        ({"dimension": 0, "sparse": SparseSpec()}, {"sparse_embedding": [-1]}),
        ({"dimension": 0, "multi": MultiSpec(dimension=3)}, {"multi_vectors": [-1, 3]}),
        (
            {"tokens": M3.tokens, "sparse": M3.sparse, "multi": M3.multi},
            {
                "sentence_embedding": [4],
                "pooled": [4],
                "token_weights": [-1],
                "multi_vectors": [-1, 3],
                "token_embeddings": [-1, 6],
            },
        ),
    ],
)
def test_every_head_is_an_output(tmp_path: Path, changes: dict[str, Any], expected: dict[str, list[int]]) -> None:
    """With the axes for one text: one number per label, word or token, or one vector per token."""
    (model,) = triton_models(entry(tmp_path, text=msgspec.structs.replace(SPEC, **changes), token_width=6))
    assert {output.name: list(output.dims) for output in model.config.output} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimension": 0, "sparse": SparseSpec()}, "org/mini returns no dense vectors"),
        ({"frame_tokens": False}, "org/mini frames texts in a way that the tokenizer on Triton does not support"),
    ],
)
def test_ensembles_are_over_encoders(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """The ensemble returns one vector of a text framed by the tokenizer; its encoder returns all outputs."""
    with pytest.raises(ConfigError, match=message) as caught:
        entry(tmp_path, text=msgspec.structs.replace(SPEC, **changes), options={"text_in": True})
    assert caught.value.param == "triton_text_in"
    encoder, _, whole = triton_models(entry(tmp_path, text=M3, options={"text_in": True}))
    assert [one.name for one in whole.config.output] == ["embedding"]
    assert {one.name for one in encoder.config.output} == set(M3.outputs)


def test_warm_up_runs_a_short_and_the_longest_text(tmp_path: Path) -> None:
    """Masks are ones, from a file of the size that Triton expects; other inputs are zeros."""
    (model,) = triton_models(entry(tmp_path))
    short, long = model.config.model_warmup
    assert (short.name, short.batch_size) == ("16 tokens", 1)
    assert list(long.inputs["input_ids"].dims) == [64]
    assert long.inputs["input_ids"].zero_data
    ones = model.files[f"warmup/{long.inputs['attention_mask'].input_data_file}"]
    assert ones == struct.pack("<64q", *[1] * 64)
    assert len(model.files["warmup/ones-int64-16"]) == 16 * 8  # type: ignore[arg-type]
    masks = (Tensor("attention_mask", "BOOL", (-1,)), Tensor("pooling_mask", "FP32", (-1,)))
    (other,) = triton_models(entry(tmp_path, inputs=masks))
    assert other.files["warmup/ones-bool-64"] == b"\1" * 64
    assert other.config.model_warmup[0].inputs["pooling_mask"].zero_data
    (tiny,) = triton_models(entry(tmp_path, text=msgspec.structs.replace(SPEC, max_tokens=8)))
    assert [one.name for one in tiny.config.model_warmup] == ["8 tokens"]


def test_text_in_makes_three_models(tmp_path: Path) -> None:
    """Encoder and tokenizer, then the ensemble under the model's own name: text [1] in, embedding [dimension] out."""
    options = {"platform": "python", "text_in": True, "max_batch_size": 8, "max_queue_size": 5}
    encoder, tokenizer, whole = triton_models(entry(tmp_path, options=options))
    names = ("org~mini~~encoder", "org~mini~~tokenizer", "org~mini")
    assert (encoder.name, tokenizer.name, whole.name) == names
    assert encoder.config.backend == tokenizer.config.backend == "python"
    assert set(tokenizer.files) == {"1/model.py", "1/tokenizer.json"}
    assert [(p.name, list(p.dims)) for p in tokenizer.config.input] == [("text", [1])]
    assert [p.name for p in tokenizer.config.output] == ["input_ids", "attention_mask"]
    config = MessageToDict(whole.config, preserving_proto_field_name=True)
    assert config["input"] == [{"name": "text", "data_type": "TYPE_STRING", "dims": ["1"]}]
    assert config["output"] == [{"name": "embedding", "data_type": "TYPE_FP32", "dims": ["4"]}]
    assert config_of(whole) == {
        "name": "org~mini",
        "platform": "ensemble",
        "max_batch_size": 8,
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": "org~mini~~tokenizer",
                    "model_version": "-1",
                    "input_map": {"text": "text"},
                    "output_map": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
                },
                {
                    "model_name": "org~mini~~encoder",
                    "model_version": "-1",
                    "input_map": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
                    "output_map": {"sentence_embedding": "embedding"},
                },
            ]
        },
    }
    assert list(whole.files) == ["1/ensemble"]


def test_without_dynamic_batching(tmp_path: Path) -> None:
    """Then the block is absent, and Triton runs each request alone."""
    (model,) = triton_models(entry(tmp_path, options={"dynamic_batching": False}))
    assert not model.config.HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"fp16": True}, "triton_fp16", "triton_accelerator tensorrt and triton_kind gpu"),
        ({"fp16": True, "accelerator": "tensorrt"}, "triton_fp16", "triton_kind gpu"),
        ({"fp16": True, "platform": "python"}, "triton_fp16", "a graph that is already fp16"),
        ({"accelerator": "tensorrt", "platform": "python"}, "triton_accelerator", "triton_platform onnxruntime"),
        ({"accelerator": "tensorrt", "kind": "cpu"}, "triton_accelerator", "choose triton_kind gpu"),
        ({"accelerator": "openvino", "kind": "gpu"}, "triton_accelerator", "choose triton_kind cpu"),
        ({"platform": "tensorrt", "kind": "cpu"}, "triton_kind", "choose triton_kind gpu"),
        ({"max_queue_size": 4, "dynamic_batching": False}, "triton_queue_size", "enable triton_dynamic_batching"),
        ({"max_batch_size": 0}, "max_batch_size", "at least 1"),
        ({"instances": 0}, "instances", "at least 1"),
        ({"max_queue_size": -1}, "max_queue_size", "at least 0"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, options: dict[str, Any], param: str, message: str
) -> None:
    """The error has the setting and the next step."""
    with pytest.raises(ConfigError, match=message) as caught:
        entry(tmp_path, options=options)
    assert caught.value.param == param


def test_a_graph_that_is_fp16_needs_no_accelerator(tmp_path: Path) -> None:
    spec = entry(tmp_path, precision="f16", options={"fp16": True, "platform": "tensorrt"})
    assert triton_models(spec)[0].config.optimization.ByteSize() == 0


def test_bad_specifications_are_refused(tmp_path: Path) -> None:
    """An invalid name, texts without a tokenizer, weights outside the folder."""
    with pytest.raises(InvalidValue, match="cannot name a model"):
        entry(tmp_path, "a/../../b")
    with pytest.raises(ModelFileError, match="load without text_in"):
        entry(tmp_path, tokenizer=None, options={"text_in": True})
    for data in (tmp_path.parent / "other", tmp_path / ".." / "other"):
        with pytest.raises(ModelFileError, match="outside"):
            entry(tmp_path, data=(data,))


def test_options_have_the_defaults_of_the_settings() -> None:
    """ONNX Runtime, one instance, dynamic batching on."""
    options = EntryOptions()
    assert (options.platform, options.instances, options.dynamic_batching) == ("onnxruntime", 1, True)


def test_the_programs_are_there() -> None:
    """The package contains them, and they are valid Python."""
    for name in ("encoder.py", "tokenizer.py"):
        compile((PROGRAMS / name).read_text(), name, "exec")
