"""The tensors of requests and responses, independent of their encoding: as arrays. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal.errors import InvalidValue, TooManyInputs, Unsupported, WrongType
from shoal.surfaces.kserve.signature import Signature, TensorSpec
from shoal.types import Array

Parameters = Mapping[str, bool | int | float | str]


class InferRequest(msgspec.Struct, kw_only=True):
    """A request for one inference. `outputs`: the names of the requested ones; empty: all."""

    model: str
    version: str = ""
    id: str = ""
    parameters: Parameters = {}
    inputs: Mapping[str, Array] = {}
    outputs: Sequence[str] = ()


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

    Raises InvalidValue for tensors that the model does not have or that are missing, and for wrong shapes; Unsupported
    for a batch of several rows where the model has none; TooManyInputs.
    """

    def __init__(self, signature: Signature, arrays: Mapping[str, Array]) -> None:
        self._specs = {each.name: each for each in signature.inputs}
        self._batched = bool(signature.max_batch_size)
        self._limit = signature.max_batch_size
        self._arrays = arrays
        for name in arrays:
            if name not in self._specs:
                raise InvalidValue(
                    f"the model has no input {name[:200]!r}; it has {', '.join(self._specs)}", param="inputs"
                )
        missing = [each.name for each in signature.inputs if not each.optional and each.name not in arrays]
        if missing:
            raise InvalidValue(f"the input {missing[0]!r} is missing; send it", param="inputs")

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def read_bytes(self, name: str) -> list[bytes]:
        """Return the elements of a BYTES tensor of shape [rows] or [rows, 1]."""
        spec, array = self._specs[name], self._arrays[name]
        if array.dtype != object:
            raise _datatype_error(spec)
        if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 1):
            raise InvalidValue(f"the input {name!r} has the shape {list(array.shape)}; send [rows, 1]", param=name)
        self._check_rows(name, len(array))
        return array.ravel().tolist()

    def read_texts(self, name: str) -> list[str]:
        """Return the elements of a BYTES tensor as texts. Raises InvalidValue unless they are UTF-8."""
        elements = self.read_bytes(name)
        try:
            return [each.decode() for each in elements]
        except UnicodeDecodeError:
            raise _encoding_error(name) from None

    def read_matrix(self, name: str) -> Array:
        """Return a tensor of integers of shape [rows, length]."""
        spec, array = self._specs[name], self._arrays[name]
        if array.dtype.kind not in "iu":
            raise _datatype_error(spec)
        if array.ndim != 2:
            raise InvalidValue(f"the input {name!r} has the shape {list(array.shape)}; send [rows, length]", param=name)
        self._check_rows(name, len(array))
        return array

    def read_flag(self, name: str) -> bool | None:
        """Return the only value of a BOOL tensor; None if it is absent."""
        if name not in self._arrays:
            return None
        spec, array = self._specs[name], self._arrays[name]
        if array.dtype != np.bool_:
            raise _datatype_error(spec)
        if array.size != 1:
            raise _single_error(name)
        return bool(array.reshape(-1)[0])

    def read_text(self, name: str) -> str | None:
        """Return the only text of a BYTES tensor; None if it is absent."""
        if name not in self._arrays:
            return None
        array = self._arrays[name]
        if array.dtype != object:
            raise _datatype_error(self._specs[name])
        if array.size != 1:
            raise _single_error(name)
        try:
            return array.reshape(-1)[0].decode()  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            raise _encoding_error(name) from None

    def _check_rows(self, name: str, rows: int) -> None:
        if rows > self._limit:
            raise TooManyInputs(
                f"the input {name!r} has {rows} rows; the limit is {self._limit}: split the request", param=name
            )


def select_outputs(signature: Signature, names: Sequence[str]) -> set[str]:
    """Return the names of the outputs to send. Raises InvalidValue for one that the model does not have."""
    known = [each.name for each in signature.outputs]
    for name in names:
        if name not in known:
            raise InvalidValue(f"the model has no output {name[:200]!r}; it has {', '.join(known)}", param="outputs")
    return set(names or known)


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
                f"the parameter {name[:200]!r} is not supported for this model; use {', '.join(known)}", param=name
            )


def _datatype_error(spec: TensorSpec) -> InvalidValue:
    return InvalidValue(f"the input {spec.name!r} must have the datatype {spec.datatype}", param=spec.name)


def _encoding_error(name: str) -> InvalidValue:
    return InvalidValue(f"the input {name!r} has a text that is not UTF-8; encode it as UTF-8", param=name)


def _single_error(name: str) -> InvalidValue:
    return InvalidValue(f"the input {name!r} must have one element; send the shape [1]", param=name)
