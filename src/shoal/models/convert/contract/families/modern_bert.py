"""Read ModernBERT (Warner et al. 2024): norms before the parts, rotary positions, gated feed-forward, and layers that
attend to near tokens only."""

from __future__ import annotations

from shoal.models.convert.contract.architecture import (
    Attention,
    Embeddings,
    Encoder,
    FeedForward,
    Layer,
    Norm,
    Norms,
    Rotary,
)
from shoal.models.convert.contract.families.fields import check_encoder, read_activation, read_layers, read_shape
from shoal.models.convert.contract.families.rotary import read_rotary
from shoal.models.convert.contract.json_file import JsonFile

FULL, SLIDING = "full_attention", "sliding_attention"
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
_PAD_ID = 50283


def read_modern_bert(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    norm = Norm(eps=config.number("norm_eps", 1e-5), bias=config.boolean("norm_bias", False))
    shape = read_shape(config, norm, read_activation(config, "hidden_activation"))
    kinds = _read_kinds(config)
    rotations = {kind: _rotary(config, kind, shape.head_size) for kind in dict.fromkeys(kinds)}
    windows = {FULL: None, SLIDING: config.integer("local_attention", 128, least=1) // 2}
    return check_encoder(
        config,
        Encoder(
            family="modernbert",
            prefix="model.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("max_position_embeddings", 8192, least=1),
            pad_id=config.integer("pad_token_id", _PAD_ID),
            shape=shape,
            embeddings=Embeddings(words="embeddings.tok_embeddings", width=shape.hidden, norm="embeddings.norm"),
            layers=tuple(_layer(config, index, windows[kind], rotations[kind]) for index, kind in enumerate(kinds)),
            final_norm="final_norm",
        ),
    )


def _read_kinds(config: JsonFile) -> list[str]:
    every = config.integer("global_attn_every_n_layers", 3, least=1)
    count = read_layers(config)
    return read_layer_kinds(config, [SLIDING if index % every else FULL for index in range(count)])


def read_layer_kinds(config: JsonFile, default: list[str]) -> list[str]:
    """Return the kind of each layer's attention: `layer_types`, or the default."""
    kinds = config.texts("layer_types") or default
    if len(kinds) != len(default) or set(kinds) - {FULL, SLIDING}:
        raise config.refuse("layer_types", f"must name {FULL} or {SLIDING} for each of {len(default)} layers")
    return kinds


def _rotary(config: JsonFile, kind: str, size: int) -> Rotary:
    key, default = _THETAS[kind]
    return read_rotary(config, size, config.number(key, default), kind)


def _layer(config: JsonFile, index: int, window: int | None, rotary: Rotary) -> Layer:
    biased, wide = config.boolean("attention_bias", False), config.boolean("mlp_bias", False)
    return Layer(
        stem=f"layers.{index}.",
        attention=Attention(fused="attn.Wqkv", out="attn.Wo", bias=biased, out_bias=biased),
        feed_forward=FeedForward(up="mlp.Wi", down="mlp.Wo", fused="gate up", up_bias=wide, down_bias=wide),
        # The embeddings' norm precedes the first layer.
        norms=Norms(before_attention="attn_norm" if index else "", before_feed_forward="mlp_norm"),
        window=window,
        rotary=rotary,
    )
