"""How to call a model on Triton that embeds or scores: pure, and the only place for the conventions of embedding
models, rerankers and classifiers on Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import msgspec

from shoal.backends.triton.repository_entry import read_parameters
from shoal.backends.triton.tensors import Tensor, Tensors, count_instances, detect_family, newest_version, read_tensors
from shoal.decoding import json_decoder
from shoal.errors import UpstreamFailed
from shoal.kserve import SPARSE_VALUES
from shoal.kserve.protocol_pb2 import ModelConfig, ModelMetadataResponse
from shoal.specs import TextSpec
from shoal.types import Array

_SPEC = json_decoder(TextSpec)

Style: TypeAlias = Literal["tokens", "text", "nim", "litellm", "pairs", "pixels"]
Level: TypeAlias = Literal["sentence", "token"]
Batch: TypeAlias = Literal["config", "free", "one", "none"]

TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask", "adapter_ids")
TEXT, PAIR = "text", "pair"
SENTENCE, POOLED, TOKENS, EMBEDDING, COUNT = (
    "sentence_embedding",
    "pooled",
    "token_embeddings",
    "embedding",
    "token_count",
)
SPARSE, LOGITS = "sparse_embedding", "logits"
TOKEN_OUTPUTS = (
    SENTENCE,
    POOLED,
    "sentence_embeddings",
    "embeddings",
    EMBEDDING,
    TOKENS,
    "last_hidden_state",
    "output",
    "pooler_output",
)
"""Outputs of models that read token ids, the preferred one first. BERT's pooler_output was never trained as an
embedding, so it is the last resort."""

SCORE_OUTPUTS = (LOGITS, "scores", "score")
"""Output names that identify scores without any configuration."""

PAIRS = ((TEXT, PAIR), (TEXT, "text_pair"), ("query", "passage"), ("query", "document"))
"""Input names of models that read two texts together."""

TEXT_OUTPUTS = (EMBEDDING, "embeddings", SENTENCE, "sentence_embeddings", POOLED, "output")

_FLOATS = ("FP32", "FP16", "BF16", "FP64")
_INTEGERS = ("INT64", "INT32")
_PRECISIONS = {"FP16": "f16", "BF16": "bf16"}
_ALWAYS_FILLED = ("attention_mask", "pooling_mask", "adapter_ids")
"""Optional inputs that Shoal fills anyway: without them padding, or a prompt, would count, and a task would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of tensors from the configuration: canonical name to the model's own. `scores`: it returns scores, under
    any name."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that Shoal fills or reads. `dims` are those of one item, -1 for any size; `column`: texts are sent as
    [n, 1] and not as [n]; `axes`: number of axes of one item in a response (a vector 1, token vectors 2, a count 0).
    Scores are called "logits", with or without an activation."""

    canonical: str
    name: str
    datatype: str
    dims: tuple[int, ...]
    column: bool = False
    axes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """How to call a model on Triton that embeds or scores.

    `outputs`: the one to use is first. `batch`: "config" (max_batch_size is above 0), "free" (a leading -1: any size),
    "one" (a leading 1) or "none" (no batch axis). `max_batch_size`: items per call, 0 for any number. `instances`:
    calls that the server computes in parallel. `dimension`: of its first output (of scores, the number of labels);
    None: only a response shows it. `level` "token": it returns a vector per token and none for the text. `length`: the
    only sequence length that it takes, 0 for any. `has_mask`: padding does not count. `precision` "": unknown.
    `parameters`: those of Shoal's repository writer (`shoal_source`, ...). `version`: the newest loaded.
    """

    name: str
    style: Style
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batch: Batch
    max_batch_size: int
    instances: int = 1
    dimension: int | None = None
    level: Level = "sentence"
    length: int = 0
    precision: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    ensemble: bool = False
    version: str = ""

    @property
    def batch_axis(self) -> bool:
        """Whether tensors have a batch axis."""
        return self.batch != "none"

    @property
    def has_mask(self) -> bool:
        masks = any(port.canonical == "attention_mask" for port in self.inputs)
        # A graph that Shoal wrote without a mask reads nothing after a text's end, or always the same number of tokens.
        return masks or self.style != "tokens" or "shoal_text" in self.parameters

    @property
    def tensors(self) -> tuple[object, ...]:
        """Equal while the model can be called as before."""
        return (self.style, self.level, self.inputs, self.outputs, self.batch, self.dimension, self.length)

    def shape_input(self, port: Port, array: Array) -> Array:
        """Return a batch's array [n, ...] in the shape that the model takes."""
        if port.column and array.ndim == 1:
            array = array[:, None]
        return array if self.batch_axis else array[0]

    def shape_output(self, port: Port, array: Array, rows: int) -> Array:
        """Return a response's array as [rows, ...], without axes of size 1 that the model adds before or between them.

        Raises UpstreamFailed if it does not hold one item per row.
        """
        tail = array.shape[array.ndim - port.axes :]
        if array.ndim < port.axes or array.size != rows * math.prod(tail):
            raise UpstreamFailed(f"{self.name} returned {port.name} {list(array.shape)} for {rows} inputs")
        return array.reshape(rows, *tail)


def detect_embedder(config: ModelConfig, metadata: ModelMetadataResponse, names: TensorNames | None = None) -> Embedder:
    """Return how to call the model. Raises ConfigError, with the reason, if it cannot be served as an embedder, and for
    `names` that it does not have."""
    model = read_tensors(config, metadata)
    names = names or TensorNames()
    _check_names(model, names)
    _refuse_other_kinds(config, metadata, model)
    style, inputs = _pick_inputs(model, names)
    batch, length = _batch_layout(model, inputs[0], style)
    ports = tuple(_input_port(model, canonical, tensor, batch) for canonical, tensor in inputs)
    parameters = read_parameters(config)
    if style == "tokens":
        outputs = _written_outputs(model, batch, names, parameters) or _token_outputs(model, batch, names)
    else:
        style, outputs = _text_outputs(model, batch, names, style)
    first = outputs[0]
    return Embedder(
        name=model.name,
        style=style,
        inputs=ports,
        outputs=outputs,
        batch=batch,
        max_batch_size={"config": model.max_batch_size, "free": 0}.get(batch, 1),
        instances=count_instances(config),
        dimension=_dimension(first.dims),
        level="token" if first.canonical == TOKENS else "sentence",
        length=length,
        precision=parameters.get("shoal_precision") or _PRECISIONS.get(first.datatype, ""),
        parameters=parameters,
        ensemble=config.HasField("ensemble_scheduling"),
        version=newest_version(metadata),
    )


def _check_names(model: Tensors, names: TensorNames) -> None:
    for setting, configured, known, has in (
        ("input_names", names.inputs, (*TOKEN_INPUTS, TEXT, PAIR), model.inputs),
        ("output_names", names.outputs, (SENTENCE, POOLED, TOKENS, EMBEDDING, COUNT, LOGITS, SPARSE), model.outputs),
    ):
        for canonical, own in configured.items():
            if canonical not in known:
                raise model.refuse(f"cannot be served with {setting}.{canonical}: valid names are {', '.join(known)}")
            if own not in has:
                listed = ", ".join(has) or "none"
                raise model.refuse(f"has no tensor {own!r}, which {setting}.{canonical} names; it has {listed}")
        if len(set(configured.values())) != len(configured):
            raise model.refuse(f"cannot be served with {setting} that name one tensor twice")


def _refuse_other_kinds(config: ModelConfig, metadata: ModelMetadataResponse, model: Tensors) -> None:
    kind = detect_family(config, metadata, model)
    if kind:
        raise model.refuse(f"generates text ({kind}): it is not an embedder")
    if images := [str(one) for one in model.inputs.values() if not one.optional and _is_image(one)]:
        raise model.refuse(f"reads images ({images[0]}): load it through Shoal, which records their preprocessing")
    if config.model_transaction_policy.decoupled:
        raise model.refuse(
            "streams its responses (decoupled), which embeddings do not support: serve one that does not"
        )
    if config.HasField("sequence_batching"):
        raise model.refuse("keeps state between requests (sequence_batching), which embeddings do not support")


def _is_image(tensor: Tensor) -> bool:
    pixels = tensor.datatype in _FLOATS and len(tensor.dims) >= 3 and 3 in (tensor.dims[-3], tensor.dims[-1])
    return tensor.name == "pixel_values" or pixels


def _pick_inputs(model: Tensors, names: TensorNames) -> tuple[Style, list[tuple[str, Tensor]]]:
    """Return the style, and the inputs that Shoal fills by canonical name, the one that sets the shape first."""
    canonical_names = {own: canonical for canonical, own in names.inputs.items()}
    taken = set(names.inputs)
    for name in TOKEN_INPUTS:
        if name in model.inputs and name not in taken and name not in canonical_names:
            canonical_names[name] = name
    if "input_ids" not in taken and _takes_text_instead(model):
        canonical_names = {own: name for own, name in canonical_names.items() if name not in TOKEN_INPUTS}
    if "input_ids" in canonical_names.values():
        style: Style = "tokens"
        known = {
            canonical: model.inputs[own] for own, canonical in canonical_names.items() if canonical not in (TEXT, PAIR)
        }
        filled = [
            (name, known[name])
            for name in TOKEN_INPUTS
            if name in known and (not known[name].optional or name in ("input_ids", *_ALWAYS_FILLED, *taken))
        ]
    else:
        filled = _text_inputs(model, names)
        style = "pairs" if len(filled) > 1 else "litellm" if filled[0][1].name == "input_text" else "text"
    used = {tensor.name for _, tensor in filled}
    missing = [str(one) for one in model.inputs.values() if not one.optional and one.name not in used]
    if missing:
        raise model.refuse(
            f"requires unknown inputs: {', '.join(missing)}; if they belong to a text model, name them in `input_names`"
        )
    return style, filled


def _takes_text_instead(model: Tensors) -> bool:
    """Whether the model reads a text where the request has no token ids: both are optional, and it tokenizes itself."""
    ids, text = model.inputs.get("input_ids"), model.inputs.get(TEXT)
    return ids is not None and text is not None and ids.optional and text.datatype == "BYTES"


def _text_inputs(model: Tensors, names: TensorNames) -> list[tuple[str, Tensor]]:
    """Return the input of the text, or the two of the texts that a model reads together."""
    if own := {
        canonical: model.inputs[names.inputs[canonical]] for canonical in (TEXT, PAIR) if canonical in names.inputs
    }:
        if TEXT not in own:
            raise model.refuse(
                "cannot be served with input_names.pair alone: set input_names.text to the first of the two texts"
            )
        return list(own.items())
    texts = [one for one in model.inputs.values() if one.datatype == "BYTES"]
    required = [one for one in texts if not one.optional]
    for pair in PAIRS:
        if {one.name for one in required} == set(pair):
            return [(canonical, model.inputs[name]) for canonical, name in zip((TEXT, PAIR), pair, strict=True)]
    candidates = required or texts
    if len(candidates) != 1:
        listed = ", ".join(map(str, model.inputs.values())) or "nothing"
        raise model.refuse(f"takes {listed}: neither one text (BYTES) nor input_ids; name its tensors in `input_names`")
    return [(TEXT, candidates[0])]


def _batch_layout(model: Tensors, first: tuple[str, Tensor], style: Style) -> tuple[Batch, int]:
    """Return the position of the batch axis, and the only sequence length that is taken (0: any)."""
    tensor = first[1]
    dims = tensor.dims
    wrong = model.refuse(
        f"takes {tensor}, which is not the shape of a batch of {'token ids' if style == 'tokens' else 'texts'}"
    )
    if model.max_batch_size:
        batch: Batch = "config"
    elif style == "tokens" and len(dims) == 1:
        return "none", max(dims[0], 0)
    elif dims and dims[0] == -1:
        batch, dims = "free", dims[1:]
    elif dims and dims[0] == 1:
        batch, dims = "one", dims[1:]
    else:
        raise wrong
    if style != "tokens":
        if len(dims) > 1 or any(size not in (1, -1) for size in dims):
            raise wrong
        return batch, 0
    if len(dims) != 1 or dims[0] == 0:
        raise wrong
    return batch, max(dims[0], 0)


def _input_port(model: Tensors, canonical: str, tensor: Tensor, batch: Batch) -> Port:
    dims = tensor.dims if batch in ("config", "none") else tensor.dims[1:]
    if canonical in (TEXT, PAIR):
        if tensor.datatype != "BYTES":
            raise model.refuse(f"takes {tensor}, but a text is BYTES")
        return Port(canonical, tensor.name, tensor.datatype, dims, column=len(dims) == 1)
    if tensor.datatype not in _INTEGERS:
        raise model.refuse(f"takes {tensor}, but {canonical} are {' or '.join(_INTEGERS)}")
    if len(dims) != 1:
        raise model.refuse(f"takes {tensor}, but {canonical} have one number per token")
    return Port(canonical, tensor.name, tensor.datatype, dims)


def _written_outputs(
    model: Tensors, batch: Batch, names: TensorNames, parameters: Mapping[str, str]
) -> tuple[Port, ...]:
    """Return all outputs of an entry of Shoal's repository writer, by the names of its TextSpec; none for any other
    model, or if the operator names outputs. A TextSpec that cannot be read is reported where it is needed."""
    try:
        spec = _SPEC.decode(parameters.get("shoal_text", ""))
    except msgspec.MsgspecError:
        return ()
    if names.outputs:
        return ()
    tensors = [model.outputs[name] for name in spec.outputs if name in model.outputs]
    found = [(one.name, one.datatype, _item_dims(one, batch)) for one in tensors if one.datatype in _FLOATS]
    return tuple(Port(name, name, datatype, dims, axes=len(dims)) for name, datatype, dims in found)


def _token_outputs(model: Tensors, batch: Batch, names: TensorNames) -> tuple[Port, ...]:
    if (scores := _score_output(model, batch, names, TOKEN_OUTPUTS)) is not None:
        return (scores,)
    configured = {canonical: own for canonical, own in names.outputs.items() if canonical != COUNT}
    if configured:
        # A pooled vector alone is the sentence's: there is no normalized one to distinguish it from.
        alone = (EMBEDDING,) if SENTENCE in configured else (EMBEDDING, POOLED)
        own_words = {SENTENCE if canonical in alone else canonical: own for canonical, own in configured.items()}
        ports = [_output_port(model, canonical, model.outputs[own], batch) for canonical, own in own_words.items()]
        return tuple(sorted(ports, key=lambda port: (*TOKEN_OUTPUTS, SPARSE).index(port.canonical)))
    first = _pick_output(model, TOKEN_OUTPUTS)
    ports = [_output_port(model, "", first, batch)]
    if first.name == SENTENCE:
        beside = [(model.outputs[name], axes) for name, axes in ((POOLED, 1), (TOKENS, 2)) if name in model.outputs]
        found = [one for one, axes in beside if one.datatype in _FLOATS and len(_item_dims(one, batch)) == axes]
        ports += [_output_port(model, one.name, one, batch) for one in found]
    return tuple(ports)


def _text_outputs(model: Tensors, batch: Batch, names: TensorNames, style: Style) -> tuple[Style, tuple[Port, ...]]:
    scores = _score_output(model, batch, replace(names, scores=names.scores or style == "pairs"), TEXT_OUTPUTS)
    if scores is not None:
        return style, (scores,)
    own = next((names.outputs[name] for name in (EMBEDDING, SENTENCE, POOLED) if name in names.outputs), "")
    vectors = model.outputs[own] if own else _pick_output(model, TEXT_OUTPUTS)
    port = _output_port(model, EMBEDDING, vectors, batch)
    count = model.outputs.get(names.outputs.get(COUNT, COUNT))
    if count is None or count.datatype not in (*_INTEGERS, "UINT32", "UINT64"):
        return style, (port,)
    if style == "text" and vectors.name == "embeddings" and TEXT in model.inputs:
        style = "nim"
    return style, (port, Port(COUNT, count.name, count.datatype, (), axes=0))


def _score_output(model: Tensors, batch: Batch, names: TensorNames, vectors: Sequence[str]) -> Port | None:
    """Return the output with the scores of a model that scores; None for any other. `vectors`: output names that
    precede those of scores unless the configuration says that it scores."""
    own = names.outputs.get(LOGITS, "")
    if not own and names.outputs and not names.scores:
        return None
    order = (*SCORE_OUTPUTS, *vectors) if names.scores else (*vectors, *SCORE_OUTPUTS)
    tensor = model.outputs[own] if own else _pick_output(model, order)
    if not own and not names.scores and tensor.name not in SCORE_OUTPUTS:
        return None
    dims = _item_dims(tensor, batch)
    if tensor.datatype not in _FLOATS or len(dims) > 1 or 0 in dims:
        raise model.refuse(f"returns {tensor}, but scores are floats ({', '.join(_FLOATS)}), one per label")
    return Port(LOGITS, tensor.name, tensor.datatype, dims, axes=len(dims))


def _pick_output(model: Tensors, order: Sequence[str]) -> Tensor:
    """Return the only float output, else the first one in `order`."""
    floats = {name: each for name, each in model.outputs.items() if each.datatype in _FLOATS and name != SPARSE_VALUES}
    listed = ", ".join(map(str, model.outputs.values())) or "nothing"
    if not floats:
        raise model.refuse(f"returns {listed}: no float output ({', '.join(_FLOATS)}), so no embedding")
    if len(floats) == 1:
        return next(iter(floats.values()))
    for name in order:
        if name in floats:
            return floats[name]
    raise model.refuse(f"returns {listed}: name the output with the embedding, or the logits, in `output_names`")


def _output_port(model: Tensors, canonical: str, tensor: Tensor, batch: Batch) -> Port:
    """Return the port of an output. `canonical` "": by the shape of the output."""
    dims = _item_dims(tensor, batch)
    if tensor.datatype not in _FLOATS:
        raise model.refuse(f"returns {tensor}, but an embedding is one of {', '.join(_FLOATS)}")
    if len(dims) == 2 and dims[0] == 1:
        dims = dims[1:]
    if len(dims) not in (1, 2) or 0 in dims:
        raise model.refuse(f"returns {tensor}: neither one vector nor one vector per token")
    token = len(dims) == 2
    if canonical == EMBEDDING and token:
        raise model.refuse(f"returns {tensor} for a text: token vectors, which Shoal cannot pool without its tokenizer")
    if canonical in (SENTENCE, POOLED, TOKENS, SPARSE) and token != (canonical == TOKENS):
        raise model.refuse(f"returns {tensor}, which is not the shape of {canonical}")
    return Port(canonical or (TOKENS if token else SENTENCE), tensor.name, tensor.datatype, dims, axes=len(dims))


def _item_dims(tensor: Tensor, batch: Batch) -> tuple[int, ...]:
    """Return the dims without the batch axis, if the model has its own."""
    return tensor.dims[1:] if batch == "free" or (batch == "one" and len(tensor.dims) > 1) else tensor.dims


def _dimension(dims: tuple[int, ...]) -> int | None:
    """Return the size of one vector of a response, None if it is not fixed; a single number counts as 1."""
    size = dims[-1] if dims else 1
    return size if size > 0 else None
