"""Read what the families' configurations have in common: activations, sizes, refusals."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.models.convert.contract.architecture import Activation, Embeddings, Encoder, Layer, Norm, Shape
from shoal.models.convert.contract.json_file import JsonFile

MAX_LAYERS = 1000
MAX_HEADS = 4096
MAX_HEAD_SIZE = 65_536
"""Far above any model's: what is built for each must not take the memory of a machine before weights are read."""

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
"""Transformers' names of hidden_act; gelu_new, gelu_fast and gelu_pytorch_tanh are one formula."""


def read_activation(
    config: JsonFile, key: str, default: str = "gelu", known: Mapping[str, Activation] = ACTIVATIONS
) -> Activation:
    """Return the activation that a key names. Raises ModelFileError for one that is not `known`."""
    name = config.text(key, default)
    if name not in known:
        raise config.refuse(key, f"unknown activation {name!r}; Shoal knows {', '.join(known)}")
    return known[name]


def read_shape(config: JsonFile, norm: Norm, activation: Activation, *, grouped: bool = False) -> Shape:
    """Read the sizes under transformers' usual keys. `grouped`: `num_key_value_heads` and `head_dim` count.

    Raises ModelFileError for heads that do not divide the hidden size, or groups of unequal size.
    """
    hidden, heads = config.integer("hidden_size", least=1), read_heads(config)
    kv_heads = config.integer("num_key_value_heads", heads, least=1) if grouped else heads
    size = config.integer("head_dim", 0, most=MAX_HEAD_SIZE) if grouped else 0
    if not size and hidden % heads:
        raise config.refuse("num_attention_heads", f"{heads} heads do not divide {hidden} dimensions")
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"{kv_heads} heads do not divide {heads}")
    size = size or hidden // heads
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        intermediate=config.integer("intermediate_size", least=1),
        activation=activation,
        norm=norm,
        scale=size**-0.5,
    )


def read_layers(config: JsonFile, key: str = "num_hidden_layers") -> int:
    """Return the number of layers."""
    return config.integer(key, least=1, most=MAX_LAYERS)


def read_heads(config: JsonFile, key: str = "num_attention_heads") -> int:
    """Return the number of attention heads."""
    return config.integer(key, least=1, most=MAX_HEADS)


def repeat_layer(layer: Layer, count: int) -> tuple[Layer, ...]:
    """Return as many layers like this one, whose stem their numbers complete: "encoder.layer" becomes
    "encoder.layer.0.", and so on."""
    return tuple(msgspec.structs.replace(layer, stem=f"{layer.stem}.{index}.") for index in range(count))


def bert_tables(width: int, *, positions: int = 0, types: int = 0, norm: str = "embeddings.LayerNorm") -> Embeddings:
    """Return tables under BERT's names: words, and as many `positions` and `types` as there are."""
    return Embeddings(
        words="embeddings.word_embeddings",
        width=width,
        positions="embeddings.position_embeddings" if positions else "",
        position_rows=positions,
        types="embeddings.token_type_embeddings" if types else "",
        type_rows=types,
        norm=norm,
    )


def refuse_relative_positions(config: JsonFile) -> None:
    """Raise ModelFileError if positions are not those of a table."""
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.refuse("position_embedding_type", f"{kind!r} is not supported, only 'absolute' is")


def require_values(config: JsonFile, **values: object) -> None:
    """Raise ModelFileError naming the first key whose value is neither absent nor the supported one."""
    for key, value in values.items():
        if key in config and config.data[key] != value:
            raise config.refuse(key, f"{config.data[key]!r} is not supported, only {value!r} is")


def check_encoder(config: JsonFile, encoder: Encoder) -> Encoder:
    """Return the encoder. Raises ModelFileError if it has no room for a token, or padding outside the vocabulary."""
    if encoder.usable_positions < 1:
        raise config.refuse("max_position_embeddings", f"{encoder.max_positions} leaves no room for a token")
    if encoder.pad_id >= encoder.vocab_size:
        raise config.refuse("pad_token_id", f"{encoder.pad_id} is outside the vocabulary of {encoder.vocab_size}")
    return encoder
