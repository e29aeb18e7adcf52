"""The tensors of requests and responses, independent of their encoding: as arrays. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.errors import InvalidValue, TooManyInputs, Unsupported, WrongType
from shoal.kserve import codec
from shoal.surfaces.kserve.signature import Signature
from shoal.types import Array

Parameters = Mapping[str, bool | int | float | str]

CLASSIFICATION = "classification"
"""Parameter of a requested output: return its largest elements as texts."""

_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8")


MAX_IDS = 1_048_576
"""Token ids of a request: 2,048 rows of 512, which become lists in about 30 ms."""

_JSON_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
"""Kinds of numpy types to the types of their JSON values."""


class InputTensor(msgspec.Struct):
    """One input as it was sent: raw contents (bytes), JSON (a list) or typed contents (of protobuf). Its elements are
    decoded only once its datatype and shape have been checked."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: Any

    def decode(self) -> Array:
        """Return its elements; BYTES are an object array of bytes. Raises InvalidValue unless they match its shape."""
        try:
            if isinstance(self.contents, bytes):
                return codec.from_raw(self.datatype, self.shape, self.contents)
            if isinstance(self.contents, list):
                return decode_json(self.datatype, self.shape, self.contents)
            return codec.from_typed(self.datatype, self.shape, self.contents)
        except codec.InvalidTensor as error:
            raise InvalidValue(f"the input {self.name!r}: {error}", param=self.name) from None
        except Unsupported as error:
            raise InvalidValue(f"the input {self.name!r}: {error.message}", param=self.name) from None


def decode_json(datatype: str, shape: tuple[int, ...], data: list[Any]) -> Array:
    """Return JSON elements, nested as `shape` says or flat, as an array; BYTES as an object array of bytes.

    Raises InvalidTensor if they do not match the datatype and the shape, or if the datatype has no JSON form.
    """
    dtype = codec.DTYPES.get(datatype)
    if dtype is None and datatype != "BYTES":
        raise codec.InvalidTensor(f"{datatype[:20]!r} has no JSON form; send it in binary")
    size = codec.count_elements(shape)
    flat = _flatten(data, shape)
    if len(flat) != size:
        raise codec.InvalidTensor(f"the shape {list(shape)} has {size} elements, not {len(flat)}")
    kinds = set(map(type, flat))
    if dtype is None:
        if not kinds <= {str}:
            raise codec.InvalidTensor("the elements must be strings")
        return codec.to_objects([each.encode() for each in flat], shape)
    if not kinds <= _JSON_TYPES[dtype.kind]:
        raise codec.InvalidTensor(f"there are elements that are not {datatype}")
    try:
        return np.array(flat, dtype=dtype).reshape(shape)
    except OverflowError:
        raise codec.InvalidTensor(f"a number does not fit into {datatype}") from None


def _flatten(data: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return the elements of a flat list, or of lists as deep and as long as `shape` says."""
    if not any(isinstance(each, list) for each in data):
        return data
    for length in shape[1:]:
        if not all(isinstance(each, list) and len(each) == length for each in data):
            raise codec.InvalidTensor(f"the lists are not nested as the shape {list(shape)} says")
        data = list(chain.from_iterable(data))
    return data


class RequestedOutput(NamedTuple):
    """An output that a request names. `classes`: how many of its largest elements to return as texts; 0: the tensor."""

    name: str
    classes: int = 0


class InferRequest(msgspec.Struct, kw_only=True):
    """A request for one inference. `outputs`: the requested ones; empty: the model's defaults."""

    model: str
    version: str = ""
    id: str = ""
    parameters: Parameters = {}
    inputs: Mapping[str, InputTensor] = {}
    outputs: Sequence[RequestedOutput] = ()


def collect_inputs(tensors: Sequence[InputTensor]) -> dict[str, InputTensor]:
    """Return the inputs by name. Raises InvalidValue if two have the same name."""
    inputs = {each.name: each for each in tensors}
    if len(inputs) < len(tensors):
        raise InvalidValue("'inputs' has two tensors of the same name; send each once", param="inputs")
    return inputs


def check_tensor_parameters(name: str, parameters: Iterable[str], known: Collection[str] = ()) -> None:
    """Raise Unsupported for a parameter of a tensor outside `known`."""
    for each in parameters:
        if each not in known:
            raise Unsupported(
                f"the parameter {each[:200]!r} of {name[:200]!r} is not supported; leave it out", param=name
            )


def read_requested_output(name: str, parameters: Parameters, known: Collection[str] = ()) -> RequestedOutput:
    """Return a requested output with its parameters; the caller reads those in `known`.

    Raises Unsupported for others, and InvalidValue for a wrong number of classes.
    """
    check_tensor_parameters(name, parameters, (*known, CLASSIFICATION))
    classes = parameters.get(CLASSIFICATION, 0)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
        raise InvalidValue(
            f"the parameter {CLASSIFICATION!r} of {name[:200]!r} must be an integer from 0: how many classes to return",
            param=name,
        )
    return RequestedOutput(name, classes)


class Tensor(NamedTuple):
    """One output. BYTES are an object array of str."""

    name: str
    datatype: str
    array: Array


class InferResponse(msgspec.Struct, kw_only=True):
    """One response to an InferRequest. `final`: no other follows."""

    model: str
    id: str
    outputs: list[Tensor]
    final: bool = True


class Inputs:
    """Reads the inputs of a request and checks them against the model's. Errors name the tensor.

    Raises InvalidValue for tensors that the model does not have or that are missing, and for wrong datatypes and
    shapes; TooManyInputs.
    """

    def __init__(self, signature: Signature, tensors: Mapping[str, InputTensor]) -> None:
        specs = {each.name: each for each in signature.inputs}
        self._limit = signature.max_batch_size
        self._tensors = tensors
        for name in tensors:
            if name not in specs:
                raise InvalidValue(f"the model has no input {name[:200]!r}; it has {', '.join(specs)}", param="inputs")
        missing = [each.name for each in signature.inputs if not each.optional and each.name not in tensors]
        if missing:
            raise InvalidValue(f"the input {missing[0]!r} is missing; send it", param="inputs")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def is_json(self, name: str) -> bool:
        """Whether its elements came as JSON."""
        return isinstance(self._tensors[name].contents, list)

    def read_bytes(self, name: str) -> list[bytes]:
        """Return the elements of a BYTES tensor of shape [rows] or [rows, 1]."""
        tensor = self._find(name, ("BYTES",))
        if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ((), (1,)):
            raise _shape_error(tensor, "[rows, 1]")
        self._check_rows(tensor)
        return tensor.decode().ravel().tolist()

    def read_texts(self, name: str) -> list[str]:
        """Return the elements of a BYTES tensor as texts. Raises InvalidValue unless they are UTF-8."""
        return [_decode_text(name, each) for each in self.read_bytes(name)]

    def read_matrix(self, name: str) -> Array:
        """Return a tensor of integers of shape [rows, length]."""
        tensor = self._find(name, _INTEGERS)
        if len(tensor.shape) != 2:
            raise _shape_error(tensor, "[rows, length]")
        self._check_rows(tensor)
        if tensor.shape[0] * tensor.shape[1] > MAX_IDS:
            raise TooManyInputs(f"the input {name!r} has more than {MAX_IDS} elements: split the request", param=name)
        return tensor.decode()

    def read_flag(self, name: str) -> bool | None:
        """Return the only value of a BOOL tensor; None if it is absent."""
        return None if name not in self else bool(self._read_single(name, "BOOL"))

    def read_text(self, name: str) -> str | None:
        """Return the only text of a BYTES tensor; None if it is absent."""
        return None if name not in self else _decode_text(name, self._read_single(name, "BYTES"))

    def _read_single(self, name: str, datatype: str) -> Any:
        tensor = self._find(name, (datatype,))
        if tensor.shape not in ((), (1,), (1, 1)):
            raise _shape_error(tensor, "[1]")
        return tensor.decode().reshape(-1)[0]

    def _find(self, name: str, datatypes: Sequence[str]) -> InputTensor:
        tensor = self._tensors[name]
        if tensor.datatype not in datatypes:
            raise InvalidValue(f"the input {name!r} must have the datatype {datatypes[0]}", param=name)
        return tensor

    def _check_rows(self, tensor: InputTensor) -> None:
        if tensor.shape[0] > self._limit:
            raise TooManyInputs(
                f"the input {tensor.name!r} has {tensor.shape[0]} rows; the limit is {self._limit}: split the request",
                param=tensor.name,
            )


def select_outputs(signature: Signature, requested: Sequence[RequestedOutput]) -> set[str]:
    """Return the names of the outputs to send. Raises InvalidValue for one that the model does not have."""
    known = [each.name for each in signature.outputs]
    for name, _ in requested:
        if name not in known:
            raise InvalidValue(f"the model has no output {name[:200]!r}; it has {', '.join(known)}", param="outputs")
    return {each.name for each in requested} or set(signature.defaults)


class ParameterReader:
    """Reads the parameters of a request. `finish` raises Unsupported for those that nothing has read."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = dict(parameters)

    def read_flag(self, name: str) -> bool | None:
        value = self._parameters.pop(name, None)
        if value is not None and not isinstance(value, bool):
            raise WrongType(f"the parameter {name!r} must be true or false", param=name)
        return value

    def read_integer(self, name: str, low: int, high: int) -> int | None:
        value = self._parameters.pop(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidValue(f"the parameter {name!r} must be an integer from {low} to {high}", param=name)
        return value

    def read_text(self, name: str) -> str | None:
        value = self._parameters.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise WrongType(f"the parameter {name!r} must be a string", param=name)
        return value

    def read_either(self, name: str) -> bool | str | None:
        """Read a flag or a word."""
        value = self._parameters.pop(name, None)
        if value is not None and not isinstance(value, bool | str):
            raise WrongType(f"the parameter {name!r} must be true, false or a string", param=name)
        return value

    def take_all(self) -> dict[str, Any]:
        """Return the parameters that are left, and forget them."""
        left, self._parameters = self._parameters, {}
        return left

    def finish(self, known: Sequence[str]) -> None:
        for name in self._parameters:
            raise Unsupported(
                f"the parameter {name[:200]!r} is not supported in this request; use {', '.join(known)}", param=name
            )


def _decode_text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidValue(f"the input {name!r} has a text that is not UTF-8; encode it as UTF-8", param=name) from None


def _shape_error(tensor: InputTensor, expected: str) -> InvalidValue:
    shape = list(tensor.shape[: codec.MAX_DIMENSIONS])
    return InvalidValue(f"the input {tensor.name!r} has the shape {shape}; send {expected}", param=tensor.name)
