"""The tensors of served models, as another Shoal reads them with `triton://`."""

from __future__ import annotations

import msgspec
import pytest
from google.protobuf import json_format

from shoal.backends.triton.schema import Embedder, detect_embedder
from shoal.core.protocols import ModelFacts
from shoal.errors import ConfigError
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve.signature import build_config, build_metadata, describe_model
from shoal.types import VectorKind


def detect(*vectors: VectorKind) -> Embedder:
    facts = ModelFacts(source="x", backend="local", tasks=("embed",), vectors=vectors, dimension=384)
    signature = describe_model(facts, max_inputs=64)
    config = json_format.ParseDict(build_config("m", signature), pb.ModelConfig())
    metadata = msgspec.to_builtins(build_metadata("m", signature))
    return detect_embedder(config, json_format.ParseDict(metadata, pb.ModelMetadataResponse()))


@pytest.mark.parametrize(
    "vectors", [("dense",), ("tokens", "dense"), ("dense", "tokens", "sparse", "multi"), ("dense", "sparse")]
)
def test_dense_vectors_are_found_beside_others(vectors: tuple[VectorKind, ...]) -> None:
    found = detect(*vectors)
    assert [port.name for port in found.outputs] == ["embeddings", "token_count"]
    assert found.dimension == 384


@pytest.mark.parametrize("vectors", [("sparse",), ("multi",), ("multi", "tokens"), ("sparse", "tokens")])
def test_other_vectors_are_not_taken_for_dense_ones(vectors: tuple[VectorKind, ...]) -> None:
    with pytest.raises(ConfigError):
        detect(*vectors)
