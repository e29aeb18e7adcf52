"""Read GTE (Zhang et al. 2024, mGTE): norms after the sums, rotary positions, gated feed-forward.

The published models call themselves "new" and come with code; "gte" is the name in transformers. The tensors are the
same.
"""

from __future__ import annotations

from shoal.models.convert.contract.architecture import (
    Attention,
    Encoder,
    FeedForward,
    Layer,
    Norm,
    Norms,
)
from shoal.models.convert.contract.families.fields import (
    bert_tables,
    check_encoder,
    read_activation,
    read_layers,
    read_shape,
    repeat_layer,
    require_values,
)
from shoal.models.convert.contract.families.rotary import read_rotary
from shoal.models.convert.contract.json_file import JsonFile

_THETAS = {"new": 10_000.0, "gte": 160_000.0}
_PADS = {"new": 0, "gte": 1}
_FEED_FORWARD = FeedForward(up="mlp.up_gate_proj", down="mlp.down_proj", fused="up gate", up_bias=False)
_NORMS = Norms(after_attention="attn_ln", after_feed_forward="mlp_ln")
_FUSED = Attention(fused="attention.qkv_proj", out="attention.o_proj")
_SPLIT = Attention(query="attention.q_proj", key="attention.k_proj", value="attention.v_proj", out="attention.o_proj")


def read_gte(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    kind = config.text("model_type")
    require_values(config, position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False)
    norm = Norm(eps=config.number("layer_norm_eps", 1e-12))
    shape = read_shape(config, norm, read_activation(config, "hidden_act"))
    rotary = read_rotary(config, shape.head_size, _THETAS[kind])
    types = config.integer("type_vocab_size", 1)
    attention = _FUSED if config.boolean("pack_qkv", True) else _SPLIT
    return check_encoder(
        config,
        Encoder(
            family="gte",
            prefix=f"{kind}.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("max_position_embeddings", least=1),
            pad_id=config.integer("pad_token_id", _PADS[kind]),
            shape=shape,
            embeddings=bert_tables(shape.hidden, types=types),
            layers=repeat_layer(
                Layer(
                    stem="encoder.layer",
                    attention=attention,
                    feed_forward=_FEED_FORWARD,
                    norms=_NORMS,
                    rotary=rotary,
                ),
                read_layers(config),
            ),
        ),
    )
