"""Converts the messages of KServe v2 over gRPC."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from shoal.errors import BodyTooLarge, InvalidValue, Malformed
from shoal.kserve import EMPTY_FINAL, codec
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve.message_limits import MAX_OTHER_BYTES, check_infer_request
from shoal.surfaces.kserve.signature import VERSION
from shoal.surfaces.kserve.tensors import (
    InferRequest,
    InferResponse,
    InputTensor,
    check_tensor_parameters,
    collect_inputs,
    read_requested_output,
)


def parse(kind: Any, data: bytes) -> Any:
    """Return the message of a call. Raises Malformed for invalid bytes, TooManyInputs and BodyTooLarge for too much."""
    if kind is pb.ModelInferRequest:
        check_infer_request(data)
    elif len(data) > MAX_OTHER_BYTES:
        raise BodyTooLarge(f"the message is larger than {MAX_OTHER_BYTES} bytes; send a smaller one")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Malformed(f"the message is not a valid {kind.__name__}; use the .proto of KServe v2") from None


def read_request(message: Any) -> InferRequest:
    """Return a request of gRPC. Raises RequestErrors that name the tensor."""
    for each in message.inputs:
        check_tensor_parameters(each.name, each.parameters)
    raw, tensors = message.raw_input_contents, message.inputs
    if raw and (len(raw) != len(tensors) or any(each.HasField("contents") for each in tensors)):
        raise InvalidValue(
            f"there are {len(raw)} raw contents for {len(tensors)} inputs: send one for each, without typed contents",
            param="inputs",
        )
    inputs = [
        InputTensor(each.name, each.datatype, tuple(each.shape), raw[at] if raw else each.contents)
        for at, each in enumerate(tensors)
    ]
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters={name: read_parameter(value) for name, value in message.parameters.items() if name != EMPTY_FINAL},
        inputs=collect_inputs(inputs),
        outputs=[
            read_requested_output(each.name, {name: read_parameter(value) for name, value in each.parameters.items()})
            for each in message.outputs
        ],
    )


def read_parameter(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice") if parameter is not None else None
    return None if choice is None else getattr(parameter, choice)


def to_message(response: InferResponse) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(model_name=response.model, model_version=VERSION, id=response.id)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        message.raw_output_contents.append(codec.to_raw(tensor.datatype, tensor.array))
    return message
