"""Detection of embedders on Triton, and how to call them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.triton.repository_entry import EntryOptions, EntrySpec, triton_models
from shoal.backends.triton.schema import Embedder, Port, TensorNames, detect_embedder
from shoal.errors import ConfigError, UpstreamFailed
from shoal.kserve.protocol_pb2 import (
    ModelConfig,
    ModelInstanceGroup,
    ModelMetadataResponse,
    ModelParameter,
    ModelSequenceBatching,
    ModelTransactionPolicy,
)
from shoal.specs import TextSpec
from tests.unit.backends.triton.schema_kit import (
    IDS,
    MASK,
    NUMBERS,
    SENTENCE,
    TEXT,
    Tensor,
    config,
    found,
    metadata,
    read,
    refusal,
    sent,
)


class TestTextModels:
    def test_the_ensemble_of_a_tokenizer_and_an_encoder(self) -> None:
        """bge-m3 behind an ensemble: text STRING [1] in, embedding FP32 [1024] out, up to 256 per call."""
        ensemble = config([TEXT], [("embedding", "FP32", [1024])], size=256, platform="ensemble")
        ensemble.ensemble_scheduling.SetInParent()
        embedder = detect_embedder(ensemble, metadata("1"))
        assert embedder == Embedder(
            name="m",
            style="text",
            inputs=(Port("text", "text", "BYTES", (1,), column=True),),
            outputs=(Port("embedding", "embedding", "FP32", (1024,)),),
            batch="config",
            max_batch_size=256,
            dimension=1024,
            ensemble=True,
            version="1",
        )

    def test_one_text_of_any_name_is_enough(self) -> None:
        """A python model with its own tensor names."""
        embedder = found([("QUERY", "BYTES", [-1])], [("OUT", "FP16", [-1])], backend="python")
        assert (sent(embedder), read(embedder)) == ({"text": "QUERY"}, {"embedding": "OUT"})
        assert (embedder.dimension, embedder.precision) == (None, "f16")

    def test_nim(self) -> None:
        """`text` in, `embeddings` and `token_count` out; the optional `modality` keeps its default."""
        modality: Tensor = ("modality", "BYTES", [1])
        outputs: list[Tensor] = [("token_count", "INT32", [1]), ("embeddings", "FP32", [2048])]
        embedder = found([TEXT, modality], outputs, optional=("modality",))
        assert (embedder.style, sent(embedder)) == ("nim", {"text": "text"})
        assert read(embedder) == {"embedding": "embeddings", "token_count": "token_count"}
        assert [port.axes for port in embedder.outputs] == [1, 0]

    def test_embeddings_without_a_count_are_not_nim(self) -> None:
        """Such a model does not know NIM's parameters."""
        assert found([TEXT], [("embeddings", "FP32", [8])]).style == "text"

    def test_litellm(self) -> None:
        """`input_text` without a batch limit: texts are sent as [n]."""
        embedder = found([("input_text", "BYTES", [-1])], [("embedding_output", "FP32", [-1, 768])], size=0)
        assert (embedder.style, embedder.batch, embedder.max_batch_size) == ("litellm", "free", 0)
        assert not embedder.inputs[0].column
        assert embedder.dimension == 768

    def test_the_named_output_of_several(self) -> None:
        """`embedding` before `sentence_embedding`; other outputs are not requested."""
        outputs: list[Tensor] = [("sentence_embedding", "FP32", [8]), ("embedding", "FP32", [4]), ("x", "FP32", [1])]
        assert read(found([TEXT], outputs)) == {"embedding": "embedding"}

    @pytest.mark.parametrize(
        ("size", "dims", "out", "batch", "column"),
        [
            (8, [1], [4], "config", True),
            (8, [-1], [4], "config", True),
            (8, [], [4], "config", False),
            (0, [-1], [-1, 4], "free", False),
            (0, [-1, 1], [-1, 4], "free", True),
            (0, [1], [4], "one", False),
            (0, [1], [1, 4], "one", False),
            (0, [1, 1], [1, 4], "one", True),
        ],
    )
    def test_shapes_of_texts(self, size: int, dims: list[int], out: list[int], batch: str, column: bool) -> None:
        """The position of the batch axis, and whether a text has its own axis."""
        embedder = found([("text", "BYTES", dims)], [("embedding", "FP32", out)], size=size)
        assert (embedder.batch, embedder.inputs[0].column, embedder.dimension) == (batch, column, 4)
        assert embedder.max_batch_size == (8 if size else 0 if batch == "free" else 1)

    @pytest.mark.parametrize("dims", [[2], [1, 1], [5, 1]])
    def test_other_shapes_of_texts_are_refused(self, dims: list[int]) -> None:
        """Such as two texts per item."""
        assert "not the shape of a batch of texts" in refusal([("text", "BYTES", dims)], [("embedding", "FP32", [4])])

    def test_token_vectors_of_a_text_are_refused(self) -> None:
        """Without the tokenizer Shoal cannot find the padding."""
        assert "token vectors" in refusal([TEXT], [("embedding", "FP32", [-1, 8])])


class TestTokenModels:
    def test_a_sentence_transformers_entry(self) -> None:
        """input_ids and attention_mask in, sentence_embedding out."""
        embedder = found([IDS, MASK], [SENTENCE], size=16, backend="onnxruntime")
        assert (embedder.style, embedder.level, embedder.dimension) == ("tokens", "sentence", 384)
        assert list(sent(embedder)) == ["input_ids", "attention_mask"]
        assert embedder.max_batch_size == 16
        assert embedder.has_mask

    def test_token_vectors_are_found_by_their_axes(self) -> None:
        """[-1, d] under a batch axis means one vector per token, under any name."""
        embedder = found([IDS, MASK], [("last_hidden_state", "FP32", [-1, 384])])
        assert (embedder.level, read(embedder)) == ("token", {"token_embeddings": "last_hidden_state"})

    def test_int32_ids_and_half_floats(self) -> None:
        """The engine casts to the model's types."""
        inputs: list[Tensor] = [(name, "INT32", [-1]) for name in ("input_ids", "attention_mask", "token_type_ids")]
        embedder = found(inputs, [("sentence_embedding", "BF16", [8])])
        assert [port.datatype for port in embedder.inputs] == ["INT32"] * 3
        assert (embedder.outputs[0].datatype, embedder.precision) == ("BF16", "bf16")

    @pytest.mark.parametrize(
        ("ids", "out", "batch", "level"),
        [
            ([-1, -1], [-1, 8], "free", "sentence"),
            ([-1, -1], [-1, -1, 8], "free", "token"),
            ([1, -1], [1, 8], "one", "sentence"),
            ([1, -1], [1, -1, 8], "one", "token"),
            ([-1], [8], "none", "sentence"),
            ([-1], [1, 8], "none", "sentence"),
            ([-1], [-1, 8], "none", "token"),
        ],
    )
    def test_without_a_batch_limit(self, ids: list[int], out: list[int], batch: str, level: str) -> None:
        """max_batch_size 0: a leading -1 takes any number of texts, all other shapes one at a time."""
        embedder = found([("input_ids", "INT64", ids)], [("output", "FP32", out)], size=0)
        assert (embedder.batch, embedder.level, embedder.dimension) == (batch, level, 8)
        assert embedder.max_batch_size == (0 if batch == "free" else 1)
        assert not embedder.has_mask

    @pytest.mark.parametrize(
        ("size", "dims", "length"), [(8, [128], 128), (8, [-1], 0), (0, [-1, 64], 64), (0, [32], 32)]
    )
    def test_a_fixed_length_is_reported(self, size: int, dims: list[int], length: int) -> None:
        """A TensorRT plan may take only one length."""
        out = [8] if size or len(dims) == 1 else [-1, 8]
        embedder = found([("input_ids", "INT32", dims)], [("output", "FP32", out)], size=size)
        assert embedder.length == length

    def test_our_own_outputs_come_both(self) -> None:
        """`pooled` beside `sentence_embedding`: the model's spec selects one."""
        outputs: list[Tensor] = [("pooled", "FP32", [384]), SENTENCE]
        assert list(read(found([IDS, MASK], outputs))) == ["sentence_embedding", "pooled"]

    def test_a_pooled_vector_alone_is_the_sentences(self) -> None:
        """Without another vector it is the sentence's, detected or configured."""
        for names in (None, TensorNames(outputs={"pooled": "pooled"})):
            assert read(found([IDS, MASK], [("pooled", "FP32", [8])], names)) == {"sentence_embedding": "pooled"}

    @pytest.mark.parametrize(
        ("names", "chosen"),
        [
            (("last_hidden_state", "pooler_output"), "last_hidden_state"),
            (("pooler_output",), "pooler_output"),
            (("token_embeddings", "sentence_embedding"), "sentence_embedding"),
            (("output", "token_embeddings"), "token_embeddings"),
            (("anything",), "anything"),
        ],
    )
    def test_which_output_is_taken(self, names: tuple[str, ...], chosen: str) -> None:
        """In the documented order; BERT's pooler_output is the last resort."""
        tokens = ("last_hidden_state", "token_embeddings")
        outputs: list[Tensor] = [(name, "FP32", [-1, 8] if name in tokens else [8]) for name in names]
        assert next(iter(read(found([IDS, MASK], outputs)).values())) == chosen

    def test_optional_inputs_are_left_to_the_model(self) -> None:
        """Except the masks and adapters: without them padding would count, and a task would not."""
        names = ("token_type_ids", "pooling_mask", "adapter_ids")
        more: list[Tensor] = [(name, "INT64", [-1]) for name in names]
        optional = ("attention_mask", *names)
        embedder = found([IDS, MASK, *more, ("extra", "FP32", [1])], [SENTENCE], optional=(*optional, "extra"))
        assert list(sent(embedder)) == ["input_ids", "attention_mask", "pooling_mask", "adapter_ids"]

    def test_optional_is_known_from_the_configuration_alone(self) -> None:
        """The same input, if required, must be filled."""
        types: Tensor = ("token_type_ids", "INT64", [-1])
        assert "token_type_ids" in sent(found([IDS, MASK, types], [SENTENCE]))


class TestNames:
    def test_a_model_with_words_of_its_own(self) -> None:
        """CLIP's text tower: `input` and `output`."""
        names = TensorNames(inputs={"input_ids": "input"}, outputs={"sentence_embedding": "output"})
        embedder = found([("input", "INT32", [77])], [("output", "FP32", [512])], names)
        assert (sent(embedder), read(embedder)) == ({"input_ids": "input"}, {"sentence_embedding": "output"})
        assert embedder.length == 77

    def test_an_output_of_several(self) -> None:
        """If the order of preference is wrong, or has none of them."""
        outputs: list[Tensor] = [("a", "FP32", [8]), ("b", "FP32", [-1, 8])]
        assert "name the output with the embedding" in refusal([IDS, MASK], outputs)
        assert read(found([IDS, MASK], outputs, TensorNames(outputs={"token_embeddings": "b"}))) == {
            "token_embeddings": "b"
        }
        assert read(found([IDS, MASK], outputs, TensorNames(outputs={"embedding": "a"}))) == {"sentence_embedding": "a"}

    def test_the_text_of_several(self) -> None:
        """Two texts are ambiguous until one is configured; the other must be optional."""
        inputs: list[Tensor] = [("a", "BYTES", [1]), ("b", "BYTES", [1])]
        assert "input_names" in refusal(inputs, [SENTENCE])
        assert sent(found(inputs, [SENTENCE], TensorNames(inputs={"text": "b"}), optional=("a",))) == {"text": "b"}
        assert "a (BYTES [1])" in refusal(inputs, [SENTENCE], TensorNames(inputs={"text": "b"}))

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (TensorNames(inputs={"ids": "input_ids"}), "input_names.ids"),
            (TensorNames(inputs={"input_ids": "nope"}), "it has input_ids, attention_mask"),
            (TensorNames(outputs={"sentence_embedding": "nope"}), "output_names.sentence_embedding"),
            (TensorNames(inputs={"input_ids": "input_ids", "token_type_ids": "input_ids"}), "twice"),
            (TensorNames(outputs={"token_embeddings": "sentence_embedding"}), "is not the shape of token_embeddings"),
        ],
    )
    def test_names_that_do_not_fit(self, names: TensorNames, message: str) -> None:
        """The error names the setting and the existing tensors."""
        assert message in refusal([IDS, MASK], [SENTENCE], names)


GENERATORS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "vLLM": (["text_input", "stream", "sampling_parameters"], {"backend": "vllm"}),
    "TensorRT-LLM": (["text_input", "max_tokens", "top_k"], {"platform": "ensemble"}),
    "TensorRT-LLM, token level": (["input_ids", "input_lengths", "request_output_len"], {"backend": "tensorrtllm"}),
    "TensorRT-LLM, LLM API": (["text_input", "streaming", "sampling_param_max_tokens"], {"backend": "python"}),
    "Dynamo": (["text_input", "streaming"], {"platform": "dynamo"}),
    "text_output": (["prompt"], {}),
}


class TestRefusals:
    @pytest.mark.parametrize("kind", GENERATORS)
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_models_that_generate_text(self, kind: str, decoupled: bool) -> None:
        """Each convention has a name, decoupled or not."""
        inputs, more = GENERATORS[kind]
        tensors: list[Tensor] = [(name, "INT32" if "input_" in name[:6] else "BYTES", [1]) for name in inputs]
        policy = ModelTransactionPolicy(decoupled=decoupled)
        message = refusal(tensors, [("text_output", "BYTES", [-1])], model_transaction_policy=policy, **more)
        assert message == f"Triton's model 'm' generates text ({kind}): it is not an embedder"

    @pytest.mark.parametrize(
        ("tensor", "size"), [(("pixel_values", "FP32", [3, 224, 224]), 8), (("input", "FP16", [-1, 3, -1, -1]), 0)]
    )
    def test_models_that_read_images(self, tensor: Tensor, size: int) -> None:
        """CLIP's image tower."""
        assert "reads images" in refusal([tensor], [("image_embeds", "FP32", [512])], size=size)

    def test_decoupled_models(self) -> None:
        """They can be called only in a stream."""
        policy = ModelTransactionPolicy(decoupled=True)
        assert "decoupled" in refusal([TEXT], [("embedding", "FP32", [8])], model_transaction_policy=policy)

    def test_stateful_models(self) -> None:
        """Each of their requests belongs to a sequence."""
        assert "sequence_batching" in refusal(
            [TEXT], [("embedding", "FP32", [8])], sequence_batching=ModelSequenceBatching()
        )

    @pytest.mark.parametrize(
        ("inputs", "outputs", "message"),
        [
            ([IDS, MASK, ("language", "INT32", [1])], [SENTENCE], "requires unknown inputs: language (INT32 [1])"),
            ([("features", "FP32", [4])], [SENTENCE], "takes features (FP32 [4])"),
            ([], [SENTENCE], "takes nothing"),
            ([("input_ids", "FP32", [-1])], [SENTENCE], "input_ids are INT64 or INT32"),
            ([("input_ids", "INT64", [-1, 2])], [SENTENCE], "which is not the shape of a batch of token ids"),
            ([IDS, ("attention_mask", "INT64", [-1, -1])], [SENTENCE], "one number per token"),
            ([IDS, MASK], [("label", "INT64", [1])], "no float output"),
            ([IDS, MASK], [], "returns nothing"),
            ([IDS, MASK], [("x", "FP32", [2, -1, 8])], "neither one vector nor one vector per token"),
        ],
    )
    def test_what_is_not_an_embedder(self, inputs: list[Tensor], outputs: list[Tensor], message: str) -> None:
        """The error names the tensor."""
        assert message in refusal(inputs, outputs)


class TestTheRest:
    def test_instances_are_counted_over_groups_and_gpus(self) -> None:
        """`count` applies to each GPU; groups without it count one, passive ones none."""
        groups = [ModelInstanceGroup(count=2, gpus=[0, 1]), ModelInstanceGroup(count=3), ModelInstanceGroup()]
        assert found([TEXT], [SENTENCE], instance_group=groups).instances == 8
        assert found([TEXT], [SENTENCE], instance_group=[ModelInstanceGroup(count=4, passive=True)]).instances == 1
        assert found([TEXT], [SENTENCE]).instances == 1

    def test_what_the_repository_writer_left_is_read_back(self) -> None:
        """Its parameters as plain strings; other parameters are ignored."""
        parameters = {
            "shoal_source": ModelParameter(string_value="hf:org/name"),
            "shoal_precision": ModelParameter(string_value="f16"),
            "FORCE_CPU": ModelParameter(string_value="yes"),
        }
        embedder = found([IDS, MASK], [SENTENCE], parameters=parameters)
        assert embedder.parameters == {"shoal_source": "hf:org/name", "shoal_precision": "f16"}
        assert embedder.precision == "f16"

    def test_the_newest_version_counts_as_a_number(self) -> None:
        """10 is newer than 9."""
        assert detect_embedder(config([TEXT], [SENTENCE]), metadata("9", "10", "2")).version == "10"
        assert detect_embedder(config([TEXT], [SENTENCE]), ModelMetadataResponse()).version == ""

    @pytest.mark.parametrize("size", [0, 8])
    def test_metadata_stands_in_where_the_configuration_is_silent(self, size: int) -> None:
        """Its shapes include the batch axis, the configuration's dims do not."""
        tensor = ModelMetadataResponse.TensorMetadata
        shapes = ModelMetadataResponse(
            name="m",
            inputs=[tensor(name="text", datatype="BYTES", shape=[-1, 1])],
            outputs=[tensor(name="embedding", datatype="FP32", shape=[-1, 16])],
        )
        embedder = detect_embedder(ModelConfig(max_batch_size=size), shapes)
        assert (embedder.name, embedder.dimension, embedder.inputs[0].dims) == ("m", 16, (1,))
        assert embedder.batch == ("config" if size else "free")

    def test_reshape_is_none_of_the_clients_business(self) -> None:
        """Clients send and receive dims; only the model sees the other shape."""
        reshaped = config([TEXT], [("embedding", "FP32", [8])])
        reshaped.input[0].reshape.SetInParent()
        reshaped.output[0].reshape.shape.extend([1, 1, 8])
        assert detect_embedder(reshaped, metadata()).dimension == 8

    def test_tensors_tell_whether_it_is_called_as_before(self) -> None:
        """The number of instances does not matter; the dimension does."""
        first = found([IDS, MASK], [SENTENCE])
        assert found([IDS, MASK], [SENTENCE], instance_group=[ModelInstanceGroup(count=4)]).tensors == first.tensors
        assert found([IDS, MASK], [("sentence_embedding", "FP32", [8])]).tensors != first.tensors


def test_what_shoal_writes_is_served(tmp_path: Path) -> None:
    """The encoder by token ids, the ensemble by text; the tokenizer part is not an embedder."""
    text = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), dimension=8, max_tokens=16)
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
    spec = EntrySpec(
        name="org/m",
        graph=tmp_path / "model.onnx",
        text=text,
        tokenizer=tmp_path / "tokenizer.json",
        source="hf:org/m",
        space="5ace",
        precision="f32",
        options=EntryOptions(text_in=True, max_batch_size=4, instances=2),
    )
    models = {model.config.parameters["shoal_part"].string_value: model.config for model in triton_models(spec)}
    ensemble, encoder = detect_embedder(models["model"], metadata()), detect_embedder(models["encoder"], metadata())
    assert (ensemble.style, ensemble.ensemble, ensemble.dimension) == ("text", True, 8)
    assert (encoder.style, encoder.level, encoder.instances, encoder.max_batch_size) == ("tokens", "sentence", 2, 4)
    assert set(read(encoder)) == {"sentence_embedding", "pooled"}
    assert encoder.precision == "f32"
    assert encoder.parameters["shoal_source"] == "hf:org/m"
    with pytest.raises(ConfigError, match="no float output"):
        detect_embedder(models["tokenizer"], metadata())


class TestShapes:
    @pytest.mark.parametrize(("dims", "shape"), [([1], (3, 1)), ([], (3,))])
    def test_texts_are_sent_as_the_model_takes_them(self, dims: list[int], shape: tuple[int, ...]) -> None:
        """As [n, 1] or [n]."""
        embedder = found([("text", "BYTES", dims)], [SENTENCE])
        assert embedder.shape_input(embedder.inputs[0], np.array(["a", "b", "c"], dtype=object)).shape == shape

    def test_without_a_batch_axis_one_item_is_sent_bare(self) -> None:
        """The response gets the axis back."""
        embedder = found([IDS], [("output", "FP32", [-1, 8])], size=0)
        assert embedder.shape_input(embedder.inputs[0], np.ones((1, 5), np.int64)).shape == (5,)
        assert embedder.shape_output(embedder.outputs[0], np.ones((5, 8)), 1).shape == (1, 5, 8)

    @pytest.mark.parametrize(("axes", "shape", "expected"), [
        (1, (3, 8), (3, 8)), (1, (3, 1, 8), (3, 8)), (2, (3, 5, 8), (3, 5, 8)), (0, (3, 1), (3,)), (0, (3,), (3,)),
        (1, (3, 0), (3, 0)),
    ])  # fmt: skip
    def test_answers_have_their_rows_first(self, axes: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Axes of size 1 in between are dropped."""
        port = Port("x", "x", "FP32", (), axes=axes)
        assert found([TEXT], [SENTENCE]).shape_output(port, np.zeros(shape), 3).shape == expected

    @pytest.mark.parametrize(("axes", "shape"), [(1, (2, 8)), (1, (3, 2, 8)), (2, (3,)), (0, (3, 2)), (1, ())])
    def test_answers_of_other_sizes_are_the_engines_fault(self, axes: int, shape: tuple[int, ...]) -> None:
        """Rows are never cut or joined silently."""
        with pytest.raises(UpstreamFailed, match="for 3 inputs"):
            found([TEXT], [SENTENCE]).shape_output(Port("x", "x", "FP32", (), axes=axes), np.zeros(shape), 3)


words = st.sampled_from([
    "text", "input_text", "input_ids", "attention_mask", "pixel_values", "token_count", "embedding", "embeddings",
    "sentence_embedding", "pooled", "last_hidden_state", "text_input", "max_tokens", "x", "", "logits", "scores",
    "query", "passage", "pair", "sparse_embedding", "token_embeddings",
])  # fmt: skip
tensors = st.lists(
    st.tuples(words, st.sampled_from(sorted(NUMBERS)), st.lists(st.integers(-1, 4), max_size=4)),
    max_size=4,
    unique_by=lambda one: one[0],
)
some_names = st.dictionaries(words, words, max_size=2)


@given(
    inputs=tensors, outputs=tensors, size=st.integers(-1, 4), given_inputs=some_names, given_outputs=some_names,
    optional=st.lists(words, max_size=2), scores=st.booleans(), decoupled=st.booleans(),
    versions=st.lists(st.text(max_size=3), max_size=3),
)  # fmt: skip
def test_detecting_never_fails_otherwise(
    inputs: list[Tensor],
    outputs: list[Tensor],
    size: int,
    given_inputs: dict[str, str],
    given_outputs: dict[str, str],
    optional: list[str],
    scores: bool,
    decoupled: bool,
    versions: list[str],
) -> None:
    """Any configuration yields an embedder that can be called, or a ConfigError with a reason."""
    policy = ModelTransactionPolicy(decoupled=decoupled)
    made = config(inputs, outputs, size=size, optional=optional, model_transaction_policy=policy)
    try:
        embedder = detect_embedder(
            made, metadata(*versions), TensorNames(inputs=given_inputs, outputs=given_outputs, scores=scores)
        )
    except ConfigError as error:
        assert re.match(r"Triton's model 'm' \w", error.message)
        return
    required = {name for name, _, _ in inputs if name not in optional}
    assert required <= {port.name for port in embedder.inputs}
    assert {port.name for port in embedder.outputs} <= {name for name, _, _ in outputs}
    assert embedder.max_batch_size >= 0
    assert embedder.dimension is None or embedder.dimension > 0
    batch = np.ones((2 if embedder.max_batch_size != 1 else 1, 3), np.int64)
    assert all(embedder.shape_input(port, batch).size <= batch.size for port in embedder.inputs)
