"""Read config.json of the families that Shoal builds; reject anything unknown that would change the vectors."""

from __future__ import annotations

from typing import NamedTuple

from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.types import Activation, Encoder, Family

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""transformers' names of hidden_act; gelu_new, gelu_fast and gelu_pytorch_tanh are one formula."""


class _Kind(NamedTuple):
    family: Family
    prefix: str
    pad_id: int
    norm_eps: float


_KINDS = {
    "bert": _Kind("bert", "bert.", 0, 1e-12),
    "roberta": _Kind("roberta", "roberta.", 1, 1e-12),
    "xlm-roberta": _Kind("roberta", "roberta.", 1, 1e-12),
    "camembert": _Kind("roberta", "roberta.", 1, 1e-12),
    "mpnet": _Kind("mpnet", "mpnet.", 1, 1e-12),
    "distilbert": _Kind("distilbert", "distilbert.", 0, 1e-12),
    "electra": _Kind("bert", "electra.", 0, 1e-12),
}
_STEMS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "Electra", "HF_ColBERT")
_MPNET_PAD = 1
_MPNET_BUCKETS = 32


def read_encoder(config: JsonFile) -> Encoder:
    """Read the encoder from config.json. Raises ModelFileError naming the key for an unknown one."""
    model_type = config.text("model_type")
    kind = _KINDS.get(model_type)
    if kind is None:
        known = ", ".join(_KINDS)
        raise config.refuse(
            "model_type",
            f"{model_type!r} has no graph in Shoal, which builds {known}; use a repository that ships onnx/model.onnx",
        )
    _refuse_what_changes_the_vectors(config)
    if kind.family == "distilbert":
        return _distilbert(config, kind)
    hidden, heads = config.integer("hidden_size", least=1), config.integer("num_attention_heads", least=1)
    if config.integer("embedding_size", hidden) != hidden:
        raise config.refuse("embedding_size", f"must be the hidden_size, {hidden}: a projection is not supported")
    encoder = Encoder(
        family=kind.family,
        prefix=kind.prefix,
        vocab_size=config.integer("vocab_size", least=1),
        hidden=hidden,
        layers=config.integer("num_hidden_layers", least=1),
        heads=heads,
        intermediate=config.integer("intermediate_size", least=1),
        max_positions=config.integer("max_position_embeddings", least=1),
        norm_eps=config.number("layer_norm_eps", kind.norm_eps),
        activation=read_activation(config, "hidden_act"),
        pad_id=_pad_id(config, kind),
        position_offset=0 if kind.family == "bert" else _pad_id(config, kind) + 1,
        token_types=0 if kind.family == "mpnet" else config.integer("type_vocab_size", 2, least=1),
    )
    return _sound(config, encoder, "num_attention_heads")


def _distilbert(config: JsonFile, kind: _Kind) -> Encoder:
    encoder = Encoder(
        family="distilbert",
        prefix=kind.prefix,
        vocab_size=config.integer("vocab_size", least=1),
        hidden=config.integer("dim", least=1),
        layers=config.integer("n_layers", least=1),
        heads=config.integer("n_heads", least=1),
        intermediate=config.integer("hidden_dim", least=1),
        max_positions=config.integer("max_position_embeddings", least=1),
        norm_eps=kind.norm_eps,
        activation=read_activation(config, "activation"),
        pad_id=_pad_id(config, kind),
    )
    return _sound(config, encoder, "n_heads")


def _pad_id(config: JsonFile, kind: _Kind) -> int:
    if kind.family == "mpnet":
        # transformers' MPNet derives positions from row 1, whatever pad_token_id says.
        if config.integer("pad_token_id", _MPNET_PAD) != _MPNET_PAD:
            raise config.refuse("pad_token_id", f"must be {_MPNET_PAD} for MPNet, whose positions depend on it")
        return _MPNET_PAD
    return config.integer("pad_token_id", kind.pad_id)


def read_activation(config: JsonFile, key: str, default: str = "gelu") -> Activation:
    """Return the activation that a key names. Raises ModelFileError for an unknown one."""
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        raise config.refuse(key, f"unknown activation {name!r}; Shoal knows {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse_what_changes_the_vectors(config: JsonFile) -> None:
    if "auto_map" in config:
        raise config.refuse("auto_map", "the model brings its own code, which Shoal never runs")
    for architecture in config.texts("architectures"):
        if not architecture.startswith(_STEMS):
            raise config.refuse("architectures", f"{architecture!r} is none of the architectures that Shoal builds")
    embedding = config.text("position_embedding_type", "absolute")
    if embedding != "absolute":
        raise config.refuse("position_embedding_type", f"{embedding!r} is not supported, only 'absolute' is")
    for key in ("is_decoder", "add_cross_attention"):
        if config.boolean(key, False):
            raise config.refuse(key, "must be false: Shoal builds encoders")
    if "quantization_config" in config:
        raise config.refuse("quantization_config", "quantised weights cannot be read; use the unquantised model")
    if config.integer("relative_attention_num_buckets", _MPNET_BUCKETS) != _MPNET_BUCKETS:
        raise config.refuse("relative_attention_num_buckets", f"must be {_MPNET_BUCKETS}")


def _sound(config: JsonFile, encoder: Encoder, heads_key: str) -> Encoder:
    if encoder.hidden % encoder.heads:
        raise config.refuse(heads_key, f"{encoder.heads} heads do not divide {encoder.hidden} dimensions")
    if encoder.usable_positions < 1:
        raise config.refuse("max_position_embeddings", f"{encoder.max_positions} leaves no room for a token")
    if encoder.pad_id >= encoder.vocab_size:
        raise config.refuse("pad_token_id", f"{encoder.pad_id} is outside the vocabulary of {encoder.vocab_size}")
    return encoder
