"""Read ALBERT (Lan et al. 2020): a BERT whose layers share their weights, with small word vectors that are projected to
the hidden size."""

from __future__ import annotations

import msgspec

from shoal.models.convert.contract.architecture import Attention, Encoder, FeedForward, Layer, Norm, Norms
from shoal.models.convert.contract.families.fields import (
    bert_tables,
    check_encoder,
    read_activation,
    read_layers,
    read_shape,
    refuse_relative_positions,
)
from shoal.models.convert.contract.json_file import JsonFile

_ATTENTION = Attention(query="attention.query", key="attention.key", value="attention.value", out="attention.dense")
_FEED_FORWARD = FeedForward(up="ffn", down="ffn_output")
_NORMS = Norms(after_attention="attention.LayerNorm", after_feed_forward="full_layer_layer_norm")


def read_albert(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    refuse_relative_positions(config)
    norm = Norm(eps=config.number("layer_norm_eps", 1e-12))
    shape = read_shape(config, norm, read_activation(config, "hidden_act", "gelu_new"))
    positions = config.integer("max_position_embeddings", 512, least=1)
    return check_encoder(
        config,
        Encoder(
            family="albert",
            prefix="albert.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=positions,
            pad_id=config.integer("pad_token_id", 0),
            shape=shape,
            embeddings=msgspec.structs.replace(
                bert_tables(
                    config.integer("embedding_size", 128, least=1),
                    positions=positions,
                    types=config.integer("type_vocab_size", 2, least=1),
                ),
                projection="encoder.embedding_hidden_mapping_in",
            ),
            layers=tuple(
                Layer(stem=stem, attention=_ATTENTION, feed_forward=_FEED_FORWARD, norms=_NORMS)
                for stem in _stems(config)
            ),
        ),
    )


def _stems(config: JsonFile) -> list[str]:
    """Return the place of each layer's weights: consecutive layers share a group, of one or several inner layers."""
    count, groups = read_layers(config), config.integer("num_hidden_groups", 1, least=1)
    inner = config.integer("inner_group_num", 1, least=1, most=8)
    if groups > count:
        raise config.refuse("num_hidden_groups", f"{groups} groups are more than {count} layers")
    return [
        f"encoder.albert_layer_groups.{int(layer / (count / groups))}.albert_layers.{place}."
        for layer in range(count)
        for place in range(inner)
    ]
