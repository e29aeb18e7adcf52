"""Read language models that embed: Qwen2, Qwen3, Llama, Mistral and Gemma. RMSNorm before the parts, rotary positions,
grouped heads, gated feed-forward; a token attends to those before it, unless the model was trained to see all."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.models.convert.contract.architecture import (
    Attention,
    Embeddings,
    Encoder,
    FeedForward,
    Layer,
    Norm,
    Norms,
    Rotary,
    Shape,
)
from shoal.models.convert.contract.families.fields import (
    check_encoder,
    read_activation,
    read_layers,
    read_shape,
    require_values,
)
from shoal.models.convert.contract.families.modern_bert import FULL, SLIDING, read_layer_kinds
from shoal.models.convert.contract.families.rotary import frequencies, make_rotary, read_rotary
from shoal.models.convert.contract.json_file import JsonFile

_NORMS = Norms(before_attention="input_layernorm", before_feed_forward="post_attention_layernorm")
_FOUR_NORMS = Norms(
    before_attention="input_layernorm",
    attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    feed_forward="post_feedforward_layernorm",
)


class _Kind(NamedTuple):
    """`qkv_bias`: None if config.json's `attention_bias` says it, for all maps of the attention. `head_norms`: of
    queries and keys. `gemma`: norms store weights around 0, and words are scaled."""

    qkv_bias: bool | None = None
    head_norms: bool = False
    gemma: bool = False


KINDS = {
    "qwen2": _Kind(qkv_bias=True),
    "qwen3": _Kind(head_norms=True),
    "llama": _Kind(),
    "mistral": _Kind(qkv_bias=False),
    "gemma": _Kind(gemma=True),
    "gemma3_text": _Kind(head_norms=True, gemma=True),
}
"""By model_type."""


def read_decoder(config: JsonFile) -> Encoder:
    """Read a model of these families. Raises ModelFileError naming the key for what is not supported."""
    model_type = config.text("model_type")
    kind = KINDS[model_type]
    shape = _read_shape(config, kind)
    attention = _read_attention(config, kind)
    norms = _FOUR_NORMS if model_type == "gemma3_text" else _NORMS
    feed_forward = _read_feed_forward(config, model_type)
    windows = _read_gemma_windows(config) if model_type == "gemma3_text" else _read_windows(config, model_type)
    rotations = {window: _read_rotary(config, shape, model_type, window) for window in dict.fromkeys(windows)}
    return check_encoder(
        config,
        Encoder(
            family=model_type,
            prefix="model.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("max_position_embeddings", least=1),
            pad_id=max(config.integer("pad_token_id", 0, least=-1), 0),
            shape=shape,
            embeddings=Embeddings(
                words="embed_tokens", width=shape.hidden, scale=shape.hidden**0.5 if kind.gemma else 1.0
            ),
            layers=tuple(
                Layer(
                    stem=f"layers.{index}.",
                    attention=attention,
                    feed_forward=feed_forward,
                    norms=norms,
                    window=window,
                    rotary=rotations[window],
                )
                for index, window in enumerate(windows)
            ),
            final_norm="norm",
            causal=not _attends_to_all(config, kind),
        ),
    )


def _read_shape(config: JsonFile, kind: _Kind) -> Shape:
    norm = Norm(eps=config.number("rms_norm_eps", 1e-6), kind="rms", bias=False, offset=float(kind.gemma))
    if not kind.gemma:
        return read_shape(config, norm, read_activation(config, "hidden_act", "silu"), grouped=True)
    key = next((key for key in ("hidden_activation", "hidden_act") if key in config), "hidden_activation")
    activation = read_activation(config, key, "gelu_pytorch_tanh")
    if activation == "gelu" and not kind.head_norms:
        activation = "gelu_tanh"  # the first configurations of Gemma say "gelu" and mean the other form
    shape = read_shape(config, norm, activation, grouped=True)
    if not kind.head_norms:
        return shape
    require_values(config, attn_logit_softcapping=None)
    return msgspec.structs.replace(shape, scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5)


def _read_feed_forward(config: JsonFile, model_type: str) -> FeedForward:
    bias = model_type == "llama" and config.boolean("mlp_bias", False)
    return FeedForward(up="mlp.up_proj", gate="mlp.gate_proj", down="mlp.down_proj", up_bias=bias, down_bias=bias)


def _read_attention(config: JsonFile, kind: _Kind) -> Attention:
    stated = config.boolean("attention_bias", False)
    return Attention(
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.o_proj",
        bias=stated if kind.qkv_bias is None else kind.qkv_bias,
        out_bias=stated if kind.qkv_bias is None else False,
        query_norm="self_attn.q_norm" if kind.head_norms else "",
        key_norm="self_attn.k_norm" if kind.head_norms else "",
    )


def _attends_to_all(config: JsonFile, kind: _Kind) -> bool:
    """Whether tokens attend to later ones too, as in models trained further for embeddings. Raises ModelFileError if
    only the model's own code says it."""
    if config.boolean("use_bidirectional_attention", False):
        if not kind.gemma:
            raise config.refuse("use_bidirectional_attention", "is supported for Gemma only: use is_causal")
        return True
    if "auto_map" in config and "is_causal" not in config:
        raise config.refuse(
            "is_causal",
            "is missing, and the model's own code, which Shoal never runs, may change it: add true or false, as the "
            "model was trained",
        )
    return not config.boolean("is_causal", True)


def _read_windows(config: JsonFile, model_type: str) -> list[int | None]:
    """Return each layer's window: Mistral has one for all layers or none (null), Qwen one for the layers that the
    configuration names, the others have none."""
    count = read_layers(config)
    if model_type == "mistral":
        size = config.integer("sliding_window", 0 if "sliding_window" in config.data else 4096)
        return [size - 1 if size else None] * count
    if model_type not in ("qwen2", "qwen3") or not config.boolean("use_sliding_window", False):
        return [None] * count
    size, first = config.integer("sliding_window", 4096, least=1), config.integer("max_window_layers", 28)
    kinds = [SLIDING if index >= first else FULL for index in range(count)]
    return [size - 1 if kind == SLIDING else None for kind in read_layer_kinds(config, kinds)]


def _read_gemma_windows(config: JsonFile) -> list[int | None]:
    """Return each layer's window. Where tokens attend to later ones, half of it lies on each side."""
    size = config.integer("sliding_window", 4096, least=1)
    window = size // 2 if config.boolean("use_bidirectional_attention", False) else size - 1
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6, least=1), least=1)
    count = read_layers(config)
    kinds = [SLIDING if (index + 1) % every else FULL for index in range(count)]
    return [window if kind == SLIDING else None for kind in read_layer_kinds(config, kinds)]


def _read_rotary(config: JsonFile, shape: Shape, model_type: str, window: int | None) -> Rotary:
    """Return the rotation of a layer. Gemma 3 has another one, never scaled, in layers with a window."""
    if model_type != "gemma3_text":
        return read_rotary(config, shape.head_size)
    if window is None:
        return read_rotary(config, shape.head_size, 1_000_000.0, FULL)
    stated = config.section("rope_parameters").section(SLIDING)
    if "rope_theta" in stated:
        return read_rotary(config, shape.head_size, 10_000.0, SLIDING)
    return make_rotary(frequencies(config.number("rope_local_base_freq", 10_000.0), shape.head_size))
