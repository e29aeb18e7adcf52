"""Describes a served model as a KServe v2 model: its tensors, by the tasks that it supports. Pure.

Sources: the KServe v2 protocol with Triton's model configuration. Names of tensors are those of NVIDIA NIM for
embedders (`text`, `embeddings`, `token_count`) and of Triton's vLLM backend for language models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from shoal.core.protocols import ModelFacts
from shoal.kserve import SPARSE_VALUES
from shoal.surfaces.kserve import wire
from shoal.types import VectorKind

PLATFORM = "shoal"
VERSION = "1"
"""The only version of every model."""

TEXT, IDS, MASK, IMAGE = "text", "input_ids", "attention_mask", "image"
QUERY, DOCUMENT = "query", "document"
EMBEDDINGS, TOKEN_COUNT, SCORES = "embeddings", "token_count", "scores"
SPARSE_INDICES, SPARSE_LENGTHS = "sparse_indices", "sparse_lengths"
MULTI_VECTORS, MULTI_LENGTHS = "multi_vectors", "multi_lengths"
TOKEN_EMBEDDINGS, TOKEN_LENGTHS = "token_embeddings", "token_lengths"
PROMPT, STREAM, SAMPLING, EXCLUDE = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
WANTS_REASON, WANTS_PROMPT_TOKENS, WANTS_TOKENS = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
ANSWER, REASON, PROMPT_TOKENS, TOKENS = "text_output", "finish_reason", "num_input_tokens", "num_output_tokens"


class TensorSpec(NamedTuple):
    """A tensor; `dims` omit the batch axis, -1 is any length."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


class Signature(NamedTuple):
    """The tensors of a model. `max_batch_size` 0: they have no batch axis. `labels`: those of its scores. `vectors`:
    the kinds of an embedder, its default first. `defaults`: names of the outputs of a request that lists none."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    defaults: tuple[str, ...]
    max_batch_size: int = 0
    decoupled: bool = False
    labels: tuple[str, ...] = ()
    vectors: tuple[VectorKind, ...] = ()


_ROWS = (-1, -1)
VECTOR_OUTPUTS: Mapping[VectorKind, tuple[TensorSpec, ...]] = {
    "dense": (TensorSpec(EMBEDDINGS, "FP32", (-1,)),),
    "sparse": (
        TensorSpec(SPARSE_INDICES, "INT32", (-1,)),
        TensorSpec(SPARSE_VALUES, "FP32", (-1,)),
        TensorSpec(SPARSE_LENGTHS, "INT32", (1,)),
    ),
    "multi": (TensorSpec(MULTI_VECTORS, "FP32", _ROWS), TensorSpec(MULTI_LENGTHS, "INT32", (1,))),
    "tokens": (TensorSpec(TOKEN_EMBEDDINGS, "FP32", _ROWS), TensorSpec(TOKEN_LENGTHS, "INT32", (1,))),
}
"""The outputs of each kind of vectors. Those of different lengths are padded, and their lengths are an output."""


_GENERATOR = Signature(
    inputs=(
        TensorSpec(PROMPT, "BYTES", (1,)),
        TensorSpec(STREAM, "BOOL", (1,), True),
        TensorSpec(SAMPLING, "BYTES", (1,), True),
        *(TensorSpec(name, "BOOL", (1,), True) for name in (EXCLUDE, WANTS_REASON, WANTS_PROMPT_TOKENS, WANTS_TOKENS)),
    ),
    outputs=(
        TensorSpec(ANSWER, "BYTES", (-1,)),
        TensorSpec(REASON, "BYTES", (-1,)),
        TensorSpec(PROMPT_TOKENS, "UINT32", (1,)),
        TensorSpec(TOKENS, "UINT32", (-1,)),
    ),
    defaults=(ANSWER,),
    decoupled=True,
)


def describe_model(facts: ModelFacts, max_inputs: int, sent: Collection[str] = ()) -> Signature:
    """Return the tensors of a model. Of several tasks, the first of generate, embed, rerank and classify counts; but a
    model that generates and embeds does what the tensors `sent` are for."""
    embeds = "embed" in facts.tasks and sent and PROMPT not in sent
    if "generate" in facts.tasks and not embeds:
        return _GENERATOR
    if "embed" in facts.tasks:
        return _describe_embedder(facts, max_inputs)
    if "rerank" in facts.tasks:
        inputs = tuple(TensorSpec(name, "BYTES", (1,)) for name in (QUERY, DOCUMENT))
        width = 1
    else:
        inputs = _text_and_image(facts)
        width = len(facts.labels) or -1
    return Signature(inputs, (TensorSpec(SCORES, "FP32", (width,)),), (SCORES,), max_inputs, labels=facts.labels)


def _describe_embedder(facts: ModelFacts, max_inputs: int) -> Signature:
    inputs = _text_and_image(facts)
    if "text" in facts.modalities:
        ids = (TensorSpec(IDS, "INT64", (-1,), True), TensorSpec(MASK, "INT64", (-1,), True))
        inputs = (*(each._replace(optional=True) for each in inputs), *ids)
    kinds = sorted(facts.vectors, key=lambda kind: kind != "dense")
    first, *others = ([_with_width(each, facts) for each in VECTOR_OUTPUTS[kind]] for kind in kinds)
    main = (*first, TensorSpec(TOKEN_COUNT, "INT32", (1,)))
    return Signature(
        inputs,
        outputs=(*main, *(each for kind in others for each in kind)),
        defaults=tuple(each.name for each in main),
        max_batch_size=max_inputs,
        vectors=tuple(kinds),
    )


def _with_width(output: TensorSpec, facts: ModelFacts) -> TensorSpec:
    return output._replace(dims=(facts.dimension or -1,)) if output.name == EMBEDDINGS else output


def _text_and_image(facts: ModelFacts) -> tuple[TensorSpec, ...]:
    several = len(facts.modalities) > 1
    names = [each for each in (TEXT, IMAGE) if each in facts.modalities]
    return tuple(TensorSpec(each, "BYTES", (1,), several) for each in names)


def build_metadata(name: str, signature: Signature) -> wire.ModelMetadata:
    """Return a model's metadata. Shapes begin with the batch axis, if there is one."""
    batch = [-1] if signature.max_batch_size else []

    def describe(tensors: tuple[TensorSpec, ...]) -> list[wire.TensorMetadata]:
        return [
            wire.TensorMetadata(name=each.name, datatype=each.datatype, shape=[*batch, *each.dims]) for each in tensors
        ]

    return wire.ModelMetadata(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=describe(signature.inputs),
        outputs=describe(signature.outputs),
    )


def build_config(name: str, signature: Signature) -> dict[str, Any]:
    """Return the ModelConfig, as JSON has it. Dims have no batch axis."""
    config: dict[str, Any] = {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": signature.max_batch_size,
        "input": [{**_tensor_config(each), "optional": each.optional} for each in signature.inputs],
        "output": [_tensor_config(each) for each in signature.outputs],
        "model_transaction_policy": {"decoupled": signature.decoupled},
    }
    if signature.labels:
        config["parameters"] = {"labels": {"string_value": msgspec.json.encode(signature.labels).decode()}}
    return config


def _tensor_config(tensor: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if tensor.datatype == "BYTES" else tensor.datatype
    return {"name": tensor.name, "data_type": f"TYPE_{datatype}", "dims": list(tensor.dims)}
