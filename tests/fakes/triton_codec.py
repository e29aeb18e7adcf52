"""The server's side of the codec: reads requests and writes answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from shoal.backends.triton.response import read_outputs
from shoal.kserve import codec
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array


def read_inputs(request: pb.ModelInferRequest) -> dict[str, Array]:
    """Return all tensors of a request by name."""
    answer = pb.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    for tensor in request.inputs:
        contents = tensor.contents if tensor.HasField("contents") else None
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, contents=contents)
    return read_outputs(answer)


def add_output(
    response: pb.ModelInferResponse, name: str, datatype: str, array: Array, *, typed: bool = False
) -> pb.ModelInferResponse.InferOutputTensor:
    """Append one tensor to an answer, with raw or typed contents."""
    tensor = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
    if typed:
        fill_contents(tensor.contents, datatype, array)
    else:
        response.raw_output_contents.append(codec.to_raw(datatype, array))
    return tensor


def fill_contents(contents: pb.InferTensorContents, datatype: str, array: Array) -> None:
    """Write an array as typed contents."""
    if datatype == "BYTES":
        values = [each if isinstance(each, bytes) else each.encode() for each in array.ravel().tolist()]
    else:
        values = array.astype(codec.DTYPES[datatype]).ravel().tolist()
    getattr(contents, codec.TYPED[datatype]).extend(values)


def get_parameter(parameters: Mapping[str, pb.InferParameter], name: str) -> codec.Parameter | None:
    """Return a parameter's value, or None if it is absent."""
    kind = parameters[name].WhichOneof("parameter_choice") if name in parameters else None
    return None if kind is None else cast(codec.Parameter, getattr(parameters[name], kind))
