"""Read the encoder of T5 and mT5 (Raffel et al. 2020): RMSNorm before the parts, unscaled attention without biases, and
a learned score for the distance of key and query, the same in all layers."""

from __future__ import annotations

from shoal.models.convert.contract.architecture import (
    Attention,
    Buckets,
    Embeddings,
    Encoder,
    FeedForward,
    Layer,
    Norm,
    Norms,
    Shape,
)
from shoal.models.convert.contract.families.fields import (
    ACTIVATIONS,
    check_encoder,
    read_heads,
    read_layers,
    repeat_layer,
)
from shoal.models.convert.contract.json_file import JsonFile

MODEL_TYPES = ("t5", "mt5")
_FIRST, _SECOND = "layer.0.SelfAttention", "layer.1.DenseReluDense"
_ATTENTION = Attention(
    query=f"{_FIRST}.q", key=f"{_FIRST}.k", value=f"{_FIRST}.v", out=f"{_FIRST}.o", bias=False, out_bias=False
)
_NORMS = Norms(before_attention="layer.0.layer_norm", before_feed_forward="layer.1.layer_norm")


def read_t5(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    hidden, heads = config.integer("d_model", least=1), read_heads(config, "num_heads")
    gated, name = _read_feed_forward(config)
    stem = f"{_SECOND}.wi_1" if gated else f"{_SECOND}.wi"
    feed_forward = FeedForward(
        up=stem, gate=f"{_SECOND}.wi_0" if gated else "", down=f"{_SECOND}.wo", up_bias=False, down_bias=False
    )
    return check_encoder(
        config,
        Encoder(
            family="t5",
            prefix="",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("n_positions", 512, least=1),
            pad_id=config.integer("pad_token_id", 0),
            shape=Shape(
                hidden=hidden,
                heads=heads,
                kv_heads=heads,
                head_size=config.integer("d_kv", least=1),
                intermediate=config.integer("d_ff", least=1),
                activation=ACTIVATIONS[name],
                norm=Norm(eps=config.number("layer_norm_epsilon", 1e-6), kind="rms", bias=False),
                scale=1.0,
            ),
            embeddings=Embeddings(words="shared", width=hidden),
            layers=repeat_layer(
                Layer(stem="encoder.block", attention=_ATTENTION, feed_forward=feed_forward, norms=_NORMS),
                read_layers(config, "num_layers"),
            ),
            final_norm="encoder.final_layer_norm",
            distances=_read_distances(config),
        ),
    )


def _read_distances(config: JsonFile) -> Buckets:
    buckets = config.integer("relative_attention_num_buckets", 32, least=4)
    return Buckets(
        tensor=f"encoder.block.0.{_FIRST}.relative_attention_bias",
        buckets=buckets,
        maximum=config.integer("relative_attention_max_distance", 128, least=buckets // 2),
    )


def _read_feed_forward(config: JsonFile) -> tuple[bool, str]:
    """Return whether the feed-forward is gated, and the name of its activation."""
    stated = config.text("feed_forward_proj", "relu")
    kind, _, name = stated.rpartition("-")
    if stated == "gated-gelu":
        name = "gelu_new"  # as transformers reads it
    if kind not in ("", "gated") or name not in ACTIVATIONS:
        raise config.refuse("feed_forward_proj", f"{stated!r} is not supported")
    return kind == "gated", name
