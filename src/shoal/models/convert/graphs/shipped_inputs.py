"""Make the inputs of an ONNX graph that came with a model those that pipelines feed, int64 [b, l].

Segments get one name, positions start where the family's do, and a decoder's cache is empty: each text is read as a
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract
from shoal.models.convert.contract.json_file import read_object
from shoal.models.convert.graphs.builder import INT64

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FLOATS = {1, 10, 16}
_INTEGERS = {6, 7}
"""TensorProto's numbers: FLOAT, FLOAT16 and BFLOAT16; INT32 and INT64."""

_SEGMENTS = ("token_type_ids", "input_type")
_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_PAST, _CACHE_BRANCH = "past_key_values.", "use_cache_branch"
"""How names of a decoder's cache begin, and the input that chooses the half of a graph that reads it."""

_ROTARY = frozenset({"rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base"})
"""Keys of config.json of architectures whose positions are rotations, and so relative."""


class Port(NamedTuple):
    """An input or output: TensorProto's number of its type, and its axes, None for an axis of any size."""

    name: str
    type: int
    shape: tuple[int | None, ...]


def adapt_inputs(
    model: ModelProto, ports: Sequence[Port], contract: Contract, folder: Path, file: str
) -> tuple[str, ...]:
    """Change the inputs of `model`, read from `file` of the model's folder; return the names to feed.

    Raises ModelFileError for inputs that text embedding models do not have.
    """
    fed = list[str]()
    for port in ports:
        if port.name.startswith(_PAST) or port.name == _CACHE_BRANCH:
            _feed_nothing(model, port, file)
            continue
        name = "token_type_ids" if port.name in _SEGMENTS else port.name
        _check(port, name, file)
        first = _first_position(contract, folder, file) if name == "position_ids" else 0
        if (name, INT64, 0) != (port.name, port.type, first):
            _adapt(model, port, name, first)
        fed.append(name)
    for needed in ("input_ids", "attention_mask"):
        if needed not in fed:
            raise ModelFileError("the graph has no such input", file=file, key=needed)
    return tuple(fed)


def rename_value(model: ModelProto, old: str, new: str) -> None:
    """Rename a value wherever nodes read or write it."""
    for node in model.graph.node:
        node.input[:] = [new if value == old else value for value in node.input]
        node.output[:] = [new if value == old else value for value in node.output]


def _check(port: Port, name: str, file: str) -> None:
    if name not in _TOKENS:
        why = "is an input that text embedding models do not have"
    elif port.type not in _INTEGERS:
        why = "must be of integers"
    elif any(port.shape):
        why = f"has the fixed shape {list(port.shape)}; export it again with dynamic axes"
    else:
        return
    raise ModelFileError(why, file=file, key=port.name)


def _first_position(contract: Contract, folder: Path, file: str) -> int:
    """Return the position of the first token; pipelines count from 0."""
    if contract.encoder is not None:
        return contract.encoder.position_offset
    config = read_object(folder, contract.file("config.json"))
    if config is None or not _ROTARY & set(config.data):
        raise ModelFileError(
            "positions of this architecture may not start at 0; use a graph without this input, or safetensors",
            file=file,
            key="position_ids",
        )
    return 0


def _adapt(model: ModelProto, port: Port, name: str, first: int) -> None:
    """Let readers of `port` read the input `name` instead, plus `first`, in the type that they expect."""
    from onnx import helper

    inner = f"shoal/{port.name}"
    rename_value(model, port.name, inner)
    nodes = [helper.make_node("Cast", [f"{inner}/moved" if first else name], [inner], to=port.type)]
    if first:
        moved = helper.make_node("Add", [name, f"{inner}/first"], [f"{inner}/moved"])
        nodes = [helper.make_node("Constant", [], [f"{inner}/first"], value_int=first), moved, *nodes]
    _prepend(model, nodes)
    value = next(value for value in model.graph.input if value.name == port.name)
    value.name, value.type.tensor_type.elem_type = name, INT64


def _feed_nothing(model: ModelProto, port: Port, file: str) -> None:
    """Replace an input of the cache by a node of its name that gives an empty one."""
    from onnx import helper

    if port.name == _CACHE_BRANCH:
        no = helper.make_tensor("", port.type, [], [False])
        _prepend(model, [helper.make_node("Constant", [], [port.name], value=no)])
    else:
        _prepend(model, _empty_cache(port, file))
    model.graph.input.remove(next(value for value in model.graph.input if value.name == port.name))


def _empty_cache(port: Port, file: str) -> list[NodeProto]:
    """Return nodes that give [b, heads, 0, width] under the input's name."""
    from onnx import helper

    heads, width = (port.shape[1], port.shape[3]) if len(port.shape) == 4 else (None, None)
    if heads is None or width is None or port.type not in FLOATS:
        raise ModelFileError(
            f"has the shape {list(port.shape)}, not [batch, heads, past, width] with known heads and width; export the "
            "graph without a cache (optimum's task `feature-extraction`)",
            file=file,
            key=port.name,
        )
    inner = f"shoal/{port.name}"
    zero = helper.make_tensor("", port.type, [1], [0.0])
    return [
        helper.make_node("Shape", ["input_ids"], [f"{inner}/ids"]),
        helper.make_node("Constant", [], [f"{inner}/first"], value_ints=[0]),
        helper.make_node("Gather", [f"{inner}/ids", f"{inner}/first"], [f"{inner}/batch"], axis=0),
        helper.make_node("Constant", [], [f"{inner}/sizes"], value_ints=[heads, 0, width]),
        helper.make_node("Concat", [f"{inner}/batch", f"{inner}/sizes"], [f"{inner}/shape"], axis=0),
        helper.make_node("ConstantOfShape", [f"{inner}/shape"], [port.name], value=zero),
    ]


def _prepend(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    for place, node in enumerate(nodes):
        model.graph.node.insert(place, node)
