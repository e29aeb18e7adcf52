"""Read the Dense module of sentence-transformers and PyLate: a linear layer over a sentence's or each token's vector.

A Dense without an activation_function has Tanh in sentence-transformers and none in PyLate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from shoal.models.convert.contract.architecture import Activation
from shoal.models.convert.contract.entries import Entry, module_config
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.types import Dense

T = TypeVar("T")

SENTENCE = "sentence_embedding"
TOKENS = "token_embeddings"
_KEYS = frozenset(
    {
        "in_features",
        "out_features",
        "bias",
        "activation_function",
        "module_input_name",
        "module_output_name",
        "use_residual",
    }
)
_ACTIVATIONS: dict[str, Activation] = {
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Identity": "identity",
}
_PACKAGES = ("torch.nn", "torch.nn.modules.activation", "torch.nn.modules.linear")


def read_dense(folder: Path, entry: Entry, *, of: str = SENTENCE, unsaid: str = SENTENCE) -> Dense:
    """Read the layer of an entry, which must work on `of`; `unsaid`: what it works on if its file does not say.

    Raises ModelFileError for unknown settings that change the vectors.
    """
    config = module_config(folder, entry)
    config.only(_KEYS)
    check_names(config, of=of, unsaid=unsaid)
    name = config.text("activation_function", f"torch.nn.{'Identity' if entry.pylate else 'Tanh'}")
    return Dense(
        path=entry.path,
        in_features=config.integer("in_features", least=1),
        out_features=config.integer("out_features", least=1),
        bias=config.boolean("bias", True),
        activation=find_torch_activation(config, "activation_function", name, _ACTIVATIONS),
        residual=config.boolean("use_residual", False),
    )


def find_torch_activation(config: JsonFile, key: str, path: str, known: Mapping[str, T]) -> T:
    """Return what `known` has for a class of PyTorch, given by its full path. Raises ModelFileError if it has none."""
    package, _, name = path.rpartition(".")
    if package not in _PACKAGES or name not in known:
        names = ", ".join(sorted(known))
        raise config.refuse(key, f"unknown activation {path!r}; Shoal knows torch's {names}")
    return known[name]


def check_names(config: JsonFile, *, of: str = SENTENCE, unsaid: str = SENTENCE) -> None:
    """Reject a module that reads or writes other vectors than `of`."""
    read = config.text("module_input_name", unsaid)
    for key, name in (("module_input_name", read), ("module_output_name", config.text("module_output_name", read))):
        if name != of:
            raise config.refuse(key, f"only modules that process {of!r} are supported here")
