"""Read Nomic's encoders (Nussbaum et al. 2024, 2025): norms after the sums, rotary positions, and a feed-forward that
is gated, or in every n-th layer one of experts.

config.json has GPT-2's keys in the published models, and BERT's if transformers saved it; the tensors are the same.
"""

from __future__ import annotations

from shoal.models.convert.contract.architecture import (
    Activation,
    Attention,
    Encoder,
    Experts,
    FeedForward,
    Layer,
    Norm,
    Norms,
    Rotary,
)
from shoal.models.convert.contract.families.fields import (
    bert_tables,
    check_encoder,
    read_activation,
    read_layers,
    read_shape,
    require_values,
)
from shoal.models.convert.contract.families.rotary import read_rotary
from shoal.models.convert.contract.json_file import JsonFile

_GPT2 = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}
_GATES: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}
_TRAINED = 2048
_NORMS = Norms(after_attention="norm1", after_feed_forward="norm2")


def read_nomic(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    published = "n_embd" in config
    config = config.with_keys(_GPT2) if published else config
    _refuse_what_changes_the_vectors(config)
    gated, activation = _read_gate(config) if published else ("mlp.fc12", read_activation(config, "hidden_act", "silu"))
    shape = read_shape(config, Norm(eps=config.number("layer_norm_eps", 1e-12)), activation)
    rotary, positions = _rotary(config, shape.head_size, published), _positions(config)
    return check_encoder(
        config,
        Encoder(
            family="nomic",
            prefix="bert." if published else "nomic_bert.",  # as the class of a head names it
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=positions,
            pad_id=config.integer("pad_token_id", 0),
            shape=shape,
            embeddings=bert_tables(shape.hidden, types=config.integer("type_vocab_size", 2, least=1), norm="emb_ln"),
            layers=tuple(_layer(config, index, gated, rotary) for index in range(read_layers(config))),
        ),
    )


def _read_gate(config: JsonFile) -> tuple[str, Activation]:
    """Return the name of the gate, empty without one, and the activation."""
    name = config.text("activation_function")
    return ("mlp.fc12", _GATES[name]) if name in _GATES else ("", read_activation(config, "activation_function"))


def _rotary(config: JsonFile, size: int, published: bool) -> Rotary:
    # Without this key the published code has a table of positions.
    fraction = config.number("rotary_emb_fraction") if published else 1.0
    return read_rotary(config, int(size * fraction), config.number("rotary_emb_base", 1000.0))


def _positions(config: JsonFile) -> int:
    """Return the longest input. Scaled positions end where the scaling begins: beyond, it depends on the longest text
    of a batch."""
    trained = config.integer("max_trained_positions", config.integer("max_position_embeddings", _TRAINED), least=1)
    scaling = config.section("rope_parameters").text("rope_type", "default")
    if "rotary_scaling_factor" in config or scaling == "dynamic":
        return trained
    return max(trained, config.integer("n_positions", trained))


def _layer(config: JsonFile, index: int, gate: str, rotary: Rotary) -> Layer:
    biased = config.boolean("qkv_proj_bias", False)
    return Layer(
        stem=f"encoder.layers.{index}.",
        attention=Attention(fused="attn.Wqkv", out="attn.out_proj", bias=biased, out_bias=biased),
        feed_forward=_experts(config, index)
        or FeedForward(
            up="mlp.fc11" if gate else "mlp.fc1",
            gate=gate,
            down="mlp.fc2",
            up_bias=config.boolean("mlp_fc1_bias", False),
            down_bias=config.boolean("mlp_fc2_bias", False),
        ),
        norms=_NORMS,
        rotary=rotary,
    )


def _experts(config: JsonFile, index: int) -> Experts | None:
    every = config.integer("moe_every_n_layers", 0)
    if not every or index % every != 1:
        return None
    require_values(config, activation_function="gelu")
    count, top = config.integer("num_experts", least=1), config.integer("moe_top_k", least=1)
    if top > count:
        raise config.refuse("moe_top_k", f"{top} is more than the {count} experts")
    stem = "mlp.experts."
    return Experts(
        router="mlp.router.layer",
        up=f"{stem}mlp.w1",
        down=f"{stem}mlp.w2",
        bias=f"{stem}bias",
        count=count,
        top=top,
    )


def _refuse_what_changes_the_vectors(config: JsonFile) -> None:
    require_values(
        config,
        prenorm=False,
        parallel_block=False,
        causal=False,
        use_rms_norm=False,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
        rotary_head_dim=False,
        norm_mlp=False,
        expert_choice_router=False,
        moe_normalize_expert_weights=False,
        num_shared_experts=0,
        num_heads_kv=config.data.get("n_head"),
    )
