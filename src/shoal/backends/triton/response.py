"""Reads the tensors of a model's response; invalid ones are the server's fault."""

from __future__ import annotations

from shoal.errors import UpstreamFailed
from shoal.kserve import codec
from shoal.kserve.protocol_pb2 import ModelInferResponse
from shoal.types import Array


def read_outputs(response: ModelInferResponse) -> dict[str, Array]:
    """Return all tensors by name, as `codec.read_tensors` does. Raises UpstreamFailed if they are invalid."""
    try:
        return codec.read_tensors(response.outputs, response.raw_output_contents)
    except codec.InvalidTensor as error:
        raise UpstreamFailed(f"the model's response is invalid: {error}") from error


def read_raw(datatype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return raw contents as `codec.from_raw` does. Raises UpstreamFailed if they are invalid."""
    try:
        return codec.from_raw(datatype, shape, data)
    except codec.InvalidTensor as error:
        raise UpstreamFailed(f"the model's response is invalid: {error}") from error
