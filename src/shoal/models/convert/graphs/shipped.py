"""Adapt ONNX graphs that came with the model: check inputs and outputs, and append nodes so that they end like Shoal's.

There are two families of exported embedders. A token-level graph ends in token vectors, to which pooling and modules
are appended. One that ends in `sentence_embedding` contains the whole pipeline and is never pooled again. A
classifier's graph ends in logits. The original file stays unchanged: a new graph is written, and weights in separate
files are copied beside it. Large weights inside the graph move to such a file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract
from shoal.models.convert.contract.types import Classifier, Late, Splade
from shoal.models.convert.graphs import builder
from shoal.models.convert.graphs.builder import FLOAT, INT64, Graph, describe
from shoal.models.convert.graphs.head import POOLED, SENTENCE, TOKENS, build_head, pooling_input
from shoal.models.convert.graphs.late import build_token_heads
from shoal.models.convert.graphs.mlm import OUTPUT as SPARSE
from shoal.models.convert.graphs.mlm import append_splade
from shoal.models.convert.graphs.shipped_inputs import FLOATS, Port, adapt_inputs, rename_value
from shoal.models.manifest import is_inside

if TYPE_CHECKING:
    from onnx import ModelProto

TOKEN_LEVEL = (TOKENS, "last_hidden_state")
_PRESENT = "present"
"""How names of a decoder's cache begin, as an output."""

_OLDEST_OPSET = 12
_MOST_INLINE = 16_000_000
"""Maximum bytes of a constant that is not a weight: at most a position table."""

Kind: TypeAlias = Literal["token-level", "pooled", "scores", "sparse", "multi"]


class _Shape(NamedTuple):
    """Inputs and outputs of a graph file. `data` are the paths of its external weights, relative to it."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    opset: int
    data: tuple[str, ...]

    @property
    def floats(self) -> list[Port]:
        return [port for port in self.outputs if port.type in FLOATS]

    @property
    def output_names(self) -> str:
        return ", ".join(port.name for port in self.outputs)

    def find(self, *names: str) -> Port | None:
        """Return the first output of floats that has one of the names, in their order."""
        return next((port for name in names for port in self.floats if port.name == name), None)


class ShippedGraph(NamedTuple):
    """A shipped graph, ready to serve.

    `inputs`: what to feed. `pooled`: the output before a final Normalize, or `sentence_embedding` if the graph has no
    such output. `tokens`: the output of token vectors ("": none). `data`: files written beside the graph. A graph of
    `kind` "scores" has neither, but a classifier's output.
    """

    inputs: tuple[str, ...]
    pooled: str
    tokens: str
    kind: Kind
    parameters: int
    data: tuple[str, ...]


Axes: TypeAlias = tuple[int | str | None, ...]
"""Axes of an output, after the batch: a size, a name, or None if unknown."""


class _GraphOutputs(NamedTuple):
    """The adapted outputs of a graph; `outputs` are (name, axes)."""

    kind: Kind
    outputs: tuple[tuple[str, Axes], ...]
    pooled: str = SENTENCE
    tokens: str = ""


def adapt_shipped_graph(
    folder: Path, name: str, contract: Contract, target: Path, *, progress: Callable[[float], None] | None = None
) -> ShippedGraph:
    """Write `target` from the graph `folder / name`, ending in `sentence_embedding` and, if possible, `pooled` and
    `token_embeddings`, or in a classifier's logits.

    Raises ModelFileError if the graph's inputs or outputs are not those of such a text model.
    """
    model = _load(folder / name, name)
    shape = _shape(model)
    if shape.opset < _OLDEST_OPSET:
        raise ModelFileError(f"opset {shape.opset} is older than {_OLDEST_OPSET}; export it again", file=name)
    adapter = _Adapter(folder, name, contract, model, shape)
    inputs = adapt_inputs(model, shape.inputs, contract, folder, name)
    ending = adapter.adapt_outputs()
    inputs = _finish(model, adapter.graph, contract, ending.outputs, inputs)
    _copy_data(folder / name, name, shape.data, target, progress)
    data, parameters = shape.data, _parameters(model)
    if not data and (folder / name).stat().st_size > builder.INLINE_BYTES:
        data = (f"{target.name}_data",)
        builder.move_constants(model, target.with_name(data[0]))
    target.write_bytes(model.SerializeToString(deterministic=True))
    _check(target, name)
    return ShippedGraph(inputs, ending.pooled, ending.tokens, ending.kind, parameters, data)


class _Adapter:
    """Changes one graph, in place, to end as its contract says; `graph` collects the nodes to append."""

    def __init__(self, folder: Path, name: str, contract: Contract, model: ModelProto, shape: _Shape) -> None:
        self.graph = Graph(shape.opset, prefix="shoal/")
        self._folder = folder
        self._name = name
        self._contract = contract
        self._model = model
        self._shape = shape

    def adapt_outputs(self) -> _GraphOutputs:
        """Append what is missing after the graph's own outputs."""
        contract = self._contract
        if contract.classifier is not None:
            return self._end_in_scores(contract.classifier)
        if contract.splade is not None:
            return self._end_in_weights(contract.splade)
        if contract.late is not None and not contract.dimension:
            return self._end_in_late(contract.late)
        return self._end_in_vectors()

    def _end_in_scores(self, classifier: Classifier) -> _GraphOutputs:
        """Expose the output `logits`, else the only output, as float32 [b, labels]."""
        floats, output, labels = self._shape.floats, classifier.spec.output, len(classifier.spec.labels)
        scores = self._shape.find(output) or (floats[0] if len(floats) == 1 else None)
        if scores is None or scores.name in (*TOKEN_LEVEL, "pooler_output"):
            raise self._refuse(
                f"returns {self._shape.output_names}, but a classifier must return {output}; export it again"
            )
        if scores.shape and (len(scores.shape) != 2 or scores.shape[1] not in (None, labels)):
            why = f"has the shape {list(scores.shape)}, but the configuration names {labels} labels"
            raise self._refuse(why, scores.name)
        self._expose(scores, output)
        return _GraphOutputs("scores", ((output, (labels,)),))

    def _end_in_weights(self, splade: Splade) -> _GraphOutputs:
        """Append SPLADE's pooling after the logits of a masked language model [b, l, vocabulary]."""
        logits, size = self._shape.find("logits"), self._contract.vocab_size
        if logits is None or (logits.shape and len(logits.shape) != 3):
            why = f"returns {self._shape.output_names}, but a SPLADE model needs the logits of every token"
            raise self._refuse(why)
        words = logits.shape[2] if logits.shape else None
        if size and words not in (None, size):
            raise self._refuse(f"has {words} entries, but the configuration says {size}", "logits")
        self._free(SPARSE)
        append_splade(self.graph, splade, self._as_float(logits))
        return _GraphOutputs("sparse", ((SPARSE, (words,)),))

    def _end_in_late(self, late: Late) -> _GraphOutputs:
        """Append the late-interaction layers after the encoder's token vectors."""
        tokens = self._shape.find(*TOKEN_LEVEL)
        if tokens is None:
            raise self._refuse(f"returns {self._shape.output_names}, but no token vectors ({' or '.join(TOKEN_LEVEL)})")
        width = tokens.shape[2] if len(tokens.shape) == 3 else None
        if width is not None and late.layers and width != late.layers[0].in_features:
            first = late.layers[0]
            why = f"has {width} dimensions, but {first.path or 'the projection'} expects {first.in_features}"
            raise self._refuse(why, tokens.name)
        return _GraphOutputs("multi", self._token_heads(self._as_float(tokens)))

    def _end_in_vectors(self) -> _GraphOutputs:
        contract = self._contract
        sentence, tokens = self._find_vectors()
        if tokens is not None and not contract.pooling.include_prompt:
            sentence = None  # its own pooling cannot exclude a prompt, Shoal's can
        if sentence is not None and not contract.pooling.include_prompt:
            raise self._refuse("includes the pooling and cannot exclude prompts, as include_prompt requires")
        if sentence is None and tokens is None:
            raise self._refuse(
                f"returns {self._shape.output_names}, but neither {SENTENCE} nor token vectors "
                f"({' or '.join(TOKEN_LEVEL)}); remove it so that Shoal builds the graph if it knows the architecture",
                "outputs",
            )
        self._free(POOLED)
        if sentence is None:
            self._free(SENTENCE)
        else:
            self._expose(sentence, SENTENCE)
        pooled = SENTENCE
        outputs: list[tuple[str, Axes]] = [(SENTENCE, (contract.dimension,))]
        if tokens is not None:
            self._expose(tokens, TOKENS)
            if sentence is None or contract.ends_normalized:
                own = SENTENCE if sentence is None else None
                build_head(self.graph, contract, self._folder, TOKENS, name=own)
                pooled = POOLED
                outputs.append((POOLED, (contract.dimension,)))
            outputs.append((TOKENS, ("l", tokens.shape[2] if tokens.shape else None)))
            outputs.extend(self._token_heads(TOKENS))
        elif contract.late is not None or contract.token_weights is not None:
            raise self._refuse(
                f"returns no token vectors ({' or '.join(TOKEN_LEVEL)}), which sparse and multi vectors require; "
                "export it again with them"
            )
        kind: Kind = "token-level" if sentence is None else "pooled"
        return _GraphOutputs(kind, tuple(outputs), pooled, TOKENS if tokens is not None else "")

    def _find_vectors(self) -> tuple[Port | None, Port | None]:
        """Return the output of the whole pipeline and the token vectors, None for a missing one."""
        shape, dimension = self._shape, self._contract.dimension
        sentence, tokens = shape.find(SENTENCE), shape.find(*TOKEN_LEVEL)
        only = shape.floats[0] if len(shape.outputs) == len(shape.floats) == 1 else None
        if sentence is None and tokens is None and only is not None and only.name not in ("logits", "pooler_output"):
            sentence = only if len(only.shape) == 2 else None
        for port, rank in ((sentence, 2), (tokens, 3)):
            if port is not None and len(port.shape) not in (0, rank):
                raise self._refuse(f"must have {rank} axes, not {len(port.shape)}", port.name)
        if sentence is not None and len(sentence.shape) == 2 and sentence.shape[1] not in (None, dimension):
            why = f"has {sentence.shape[1]} dimensions, but the model's files say {dimension}"
            raise self._refuse(why, sentence.name)
        return sentence, tokens

    def _token_heads(self, tokens: str) -> tuple[tuple[str, Axes], ...]:
        outputs = build_token_heads(self.graph, self._contract, self._folder, tokens)
        for name, _ in outputs:
            self._free(name)
        return tuple(outputs)

    def _expose(self, port: Port, name: str) -> None:
        """Rename the graph's value `port` to `name`, in float32."""
        if (port.name, port.type) == (name, FLOAT):
            return
        inner = f"shoal/{port.name}"
        rename_value(self._model, port.name, inner)
        self._free(name)
        self.graph.op("Cast", inner, name=name, to=FLOAT)

    def _free(self, name: str) -> None:
        """Rename the graph's own value of that name, if it has one."""
        rename_value(self._model, name, f"shoal/own_{name}")

    def _as_float(self, port: Port) -> str:
        return port.name if port.type == FLOAT else self.graph.cast_float(port.name)

    def _refuse(self, why: str, key: str | None = None) -> ModelFileError:
        return ModelFileError(why, file=self._name, key=key)


def _load(path: Path, name: str) -> ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError:
        raise ModelFileError("is not a readable ONNX file; fetch the model again", file=name) from None
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.external_data:
                _inline(attribute.t, path.parent, name)
    return model


def _inline(constant: Any, folder: Path, name: str) -> None:
    """Inline a small constant that PyTorch's exporter wrote to a separate file, which engines do not support."""
    from onnx import TensorProto, checker, external_data_helper

    for location in _locations(constant):
        _check_location(folder, location, name)
        if (folder / location).stat().st_size > _MOST_INLINE:
            raise ModelFileError(f"its constant {location} is too large; export it again", file=name)
    try:
        external_data_helper.load_external_data_for_tensor(constant, str(folder))
    except (ValueError, checker.ValidationError) as error:
        raise ModelFileError(
            f"has a constant that cannot be read ({error}); fetch the model again", file=name
        ) from None
    constant.data_location = TensorProto.DEFAULT
    del constant.external_data[:]


def _shape(model: ModelProto) -> _Shape:
    constants = {tensor.name for tensor in model.graph.initializer}
    return _Shape(
        tuple(_port(value) for value in model.graph.input if value.name not in constants),
        tuple(_port(value) for value in model.graph.output if not value.name.startswith(_PRESENT)),
        max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0),
        tuple(sorted({path for tensor in model.graph.initializer for path in _locations(tensor)})),
    )


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    dims = [axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim]
    return Port(value.name, kind.elem_type, tuple(dims))


def _locations(tensor: Any) -> list[str]:
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def _finish(
    model: ModelProto,
    graph: Graph,
    contract: Contract,
    outputs: tuple[tuple[str, Axes], ...],
    inputs: tuple[str, ...],
) -> tuple[str, ...]:
    """Append the new nodes and make `outputs` the graph's only ones, in float32; return the final inputs."""
    from onnx import helper

    body = model.graph
    body.node.extend(graph.nodes)
    for constant in graph.constants.values():
        tensor = body.initializer.add()
        describe(constant, tensor)
        tensor.raw_data = constant.load().tobytes()
    mask = pooling_input(contract.pooling)
    if any(mask in node.input for node in graph.nodes) and mask not in {value.name for value in body.input}:
        body.input.append(helper.make_tensor_value_info(mask, INT64, ["b", "l"]))
        inputs = (*inputs, mask)
    kept = [value for value in body.value_info if value.name not in dict(outputs)]
    del body.value_info[:], body.output[:]
    body.value_info.extend(kept)
    body.output.extend(helper.make_tensor_value_info(name, FLOAT, ["b", *axes]) for name, axes in outputs)
    return inputs


def _check(target: Path, name: str) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(target))
    except onnx.checker.ValidationError as error:
        reason = str(error).splitlines()[0]
        raise ModelFileError(f"cannot be completed ({reason}); remove it or export it again", file=name) from None


def _copy_data(
    source: Path, name: str, data: tuple[str, ...], target: Path, progress: Callable[[float], None] | None
) -> None:
    for index, location in enumerate(data):
        _check_location(source.parent, location, name)
        shutil.copyfile(source.parent / location, target.parent / location)
        if progress is not None:
            progress((index + 1) / len(data))


def _check_location(folder: Path, location: str, name: str) -> None:
    if not is_inside(location) or "/" in location or location.endswith((".json", ".onnx")):
        raise ModelFileError(f"{location!r} is not a valid path for weights: use a file beside the graph", file=name)
    if not (folder / location).is_file():
        raise ModelFileError(f"its weights {location} are missing; fetch the model again", file=name)


def _parameters(model: ModelProto) -> int:
    return sum(prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type in FLOATS and tensor.dims)
