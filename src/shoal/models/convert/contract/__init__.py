"""The loader contract: which files of a model determine its vectors, and what they say."""

from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.reader import read_contract, shipped_graph
from shoal.models.convert.contract.types import Contract, Dense, LayerNorm, Normalize, Pooling

__all__ = [
    "Contract",
    "Dense",
    "Encoder",
    "LayerNorm",
    "Normalize",
    "Pooling",
    "read_contract",
    "shipped_graph",
]
