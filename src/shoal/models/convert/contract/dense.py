"""Read the Dense module of sentence-transformers and PyLate: a linear layer over a sentence's or each token's vector.

A Dense without an activation_function has Tanh in sentence-transformers and none in PyLate.
"""

from __future__ import annotations

from pathlib import Path

from shoal.models.convert.contract.entries import Entry, module_config
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.types import Activation, Dense

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
ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.Tanh": "tanh",
    "torch.nn.ReLU": "relu",
    "torch.nn.GELU": "gelu",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.SiLU": "silu",
    "torch.nn.Identity": "identity",
}


def read_dense(folder: Path, entry: Entry, *, of: str = SENTENCE, unsaid: str = SENTENCE) -> Dense:
    """Read the layer of an entry, which must work on `of`; `unsaid`: what it works on if its file does not say.

    Raises ModelFileError for unknown settings that change the vectors.
    """
    config = module_config(folder, entry)
    config.only(_KEYS)
    check_names(config, of=of, unsaid=unsaid)
    name = config.text("activation_function", f"torch.nn.{'Identity' if entry.pylate else 'Tanh'}")
    if name not in ACTIVATIONS:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in ACTIVATIONS}))
        raise config.refuse("activation_function", f"unknown activation {name!r}; Shoal knows torch's {known}")
    return Dense(
        path=entry.path,
        in_features=config.integer("in_features", least=1),
        out_features=config.integer("out_features", least=1),
        bias=config.boolean("bias", True),
        activation=ACTIVATIONS[name],
        residual=config.boolean("use_residual", False),
    )


def check_names(config: JsonFile, *, of: str = SENTENCE, unsaid: str = SENTENCE) -> None:
    """Reject a module that reads or writes other vectors than `of`."""
    read = config.text("module_input_name", unsaid)
    for key, name in (("module_input_name", read), ("module_output_name", config.text("module_output_name", read))):
        if name != of:
            raise config.refuse(key, f"only modules that work on {of!r} are supported here")
