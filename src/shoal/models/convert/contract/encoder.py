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


_KINDS = {
    "bert": _Kind("bert", "bert.", 0),
    "roberta": _Kind("roberta", "roberta.", 1),
    "xlm-roberta": _Kind("roberta", "roberta.", 1),
    "camembert": _Kind("roberta", "roberta.", 1),
    "mpnet": _Kind("mpnet", "mpnet.", 1),
    "distilbert": _Kind("distilbert", "distilbert.", 0),
    "electra": _Kind("bert", "electra.", 0),
}
_STEMS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "Electra", "HF_ColBERT")
_NORM_EPS = 1e-12
_DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
"""DistilBERT's own names of keys."""
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
            f"{model_type!r} is not supported: Shoal builds graphs for {known}; use a repository that ships "
            "onnx/model.onnx",
        )
    _refuse_what_changes_the_vectors(config)
    family, pad_id = kind.family, _pad_id(config, kind)
    names = _DISTILBERT if family == "distilbert" else {}

    def number(key: str) -> int:
        return config.integer(names.get(key, key), least=1)

    hidden = number("hidden_size")
    if family != "distilbert" and config.integer("embedding_size", hidden) != hidden:
        raise config.refuse("embedding_size", f"must be the hidden_size, {hidden}: a projection is not supported")
    encoder = Encoder(
        family=family,
        prefix=kind.prefix,
        vocab_size=number("vocab_size"),
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=number("num_attention_heads"),
        intermediate=number("intermediate_size"),
        max_positions=number("max_position_embeddings"),
        norm_eps=_NORM_EPS if family == "distilbert" else config.number("layer_norm_eps", _NORM_EPS),
        activation=read_activation(config, names.get("hidden_act", "hidden_act")),
        pad_id=pad_id,
        position_offset=pad_id + 1 if family in ("roberta", "mpnet") else 0,
        token_types=config.integer("type_vocab_size", 2, least=1) if family in ("bert", "roberta") else 0,
    )
    _check(config, encoder, names.get("num_attention_heads", "num_attention_heads"))
    return encoder


def _pad_id(config: JsonFile, kind: _Kind) -> int:
    if kind.family == "mpnet":
        # transformers' MPNet derives positions from row 1, whatever pad_token_id says.
        if config.integer("pad_token_id", _MPNET_PAD) != _MPNET_PAD:
            raise config.refuse("pad_token_id", f"must be {_MPNET_PAD} for MPNet, whose positions depend on it")
        return _MPNET_PAD
    return config.integer("pad_token_id", kind.pad_id)


def read_activation(config: JsonFile, key: str) -> Activation:
    """Return the activation that a key names. Raises ModelFileError for an unknown one."""
    name = config.text(key, "gelu")
    if name not in ACTIVATIONS:
        raise config.refuse(key, f"unknown activation {name!r}; Shoal knows {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse_what_changes_the_vectors(config: JsonFile) -> None:
    if "auto_map" in config:
        raise config.refuse("auto_map", "the model contains custom code, which Shoal never runs")
    for architecture in config.texts("architectures"):
        if not architecture.startswith(_STEMS):
            raise config.refuse("architectures", f"{architecture!r} is not an architecture that Shoal builds")
    embedding = config.text("position_embedding_type", "absolute")
    if embedding != "absolute":
        raise config.refuse("position_embedding_type", f"{embedding!r} is not supported, only 'absolute' is")
    for key in ("is_decoder", "add_cross_attention"):
        if config.boolean(key, False):
            raise config.refuse(key, "must be false: Shoal builds encoders")
    if "quantization_config" in config:
        raise config.refuse("quantization_config", "quantized weights are not supported; use the unquantized model")
    if config.integer("relative_attention_num_buckets", _MPNET_BUCKETS) != _MPNET_BUCKETS:
        raise config.refuse("relative_attention_num_buckets", f"must be {_MPNET_BUCKETS}")


def _check(config: JsonFile, encoder: Encoder, heads_key: str) -> None:
    if encoder.hidden % encoder.heads:
        raise config.refuse(heads_key, f"{encoder.heads} heads do not divide {encoder.hidden} dimensions")
    if encoder.usable_positions < 1:
        raise config.refuse("max_position_embeddings", f"{encoder.max_positions} leaves no room for a token")
    if encoder.pad_id >= encoder.vocab_size:
        raise config.refuse("pad_token_id", f"{encoder.pad_id} is outside the vocabulary of {encoder.vocab_size}")
