"""How to call image towers that Shoal wrote to Triton, from their configuration. Pure.

Only the parameters of an entry define how images are resized, cropped and scaled, so image models that Shoal did not
write cannot be called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from shoal.backends.triton.repository_entry import Tensor, image_tensors, max_images_per_call, read_parameters
from shoal.backends.triton.schema import Embedder, Port
from shoal.backends.triton.tensors import count_instances, newest_version, read_tensors
from shoal.decoding import json_decoder
from shoal.errors import ConfigError
from shoal.kserve.protocol_pb2 import ModelConfig, ModelMetadataResponse
from shoal.specs import ContrastSpec, ImageSpec

IMAGE, TEXT, CONTRAST = "shoal_image", "shoal_text", "shoal_contrast"

S = TypeVar("S", bound=msgspec.Struct)


def has_images(parameters: Mapping[str, str]) -> bool:
    """Return whether an entry is a text tower with an image tower beside it."""
    return IMAGE in parameters and TEXT in parameters


def read_image_spec(name: str, parameters: Mapping[str, str]) -> ImageSpec:
    """Return the ImageSpec that Shoal's repository writer left. Raises ConfigError if it is unreadable."""
    return _decode_parameter(name, IMAGE, parameters[IMAGE], ImageSpec)


def read_contrast_spec(name: str, parameters: Mapping[str, str]) -> ContrastSpec | None:
    """Return the ContrastSpec likewise, None for a model whose images and texts are not compared."""
    return _decode_parameter(name, CONTRAST, parameters[CONTRAST], ContrastSpec) if CONTRAST in parameters else None


def detect_pixels(config: ModelConfig, metadata: ModelMetadataResponse) -> Embedder | None:
    """Return how to call an image tower; None for any other model. Raises ConfigError for an entry unlike those Shoal
    writes."""
    parameters = read_parameters(config)
    if IMAGE not in parameters or TEXT in parameters:
        return None
    model = read_tensors(config, metadata)
    spec = read_image_spec(model.name, parameters)
    inputs, outputs = image_tensors(spec)
    there = {(one.name, one.datatype, one.dims) for one in (*model.inputs.values(), *model.outputs.values())}
    expected = {(one.name, one.datatype, one.dims) for one in (*inputs, *outputs)}
    if not model.max_batch_size or there != expected:
        takes = ", ".join(map(str, (*model.inputs.values(), *model.outputs.values())))
        raise model.refuse(f"has {takes}, which does not match its `{IMAGE}`: load it through Shoal again")
    return Embedder(
        name=model.name,
        style="pixels",
        inputs=_to_ports(inputs),
        outputs=_to_ports(outputs),
        batch="config",
        max_batch_size=min(model.max_batch_size, max_images_per_call(spec)),
        instances=count_instances(config),
        dimension=outputs[0].dims[0],
        precision=parameters.get("shoal_precision", ""),
        parameters=parameters,
        version=newest_version(metadata),
    )


def _decode_parameter(name: str, key: str, text: str, kind: type[S]) -> S:
    try:
        return json_decoder(kind).decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"Triton's model {name!r} has an invalid `{key}` ({error}): load it through Shoal again"
        ) from error


def _to_ports(tensors: tuple[Tensor, ...]) -> tuple[Port, ...]:
    return tuple(Port(one.name, one.name, one.datatype, one.dims, axes=len(one.dims)) for one in tensors)
