"""Read Jina's encoders: version 2 (Günther et al. 2023), a BERT with penalties for distances and a gated feed-forward;
its variant for code, with norms of queries and keys; and the flash-attention form of XLM-R, of which version 3 (Sturua
et al. 2024) has rotary positions and jina-reranker-v2 a table of them."""

from __future__ import annotations

import msgspec

from shoal.models.convert.contract.architecture import (
    Activation,
    Adapters,
    Attention,
    Encoder,
    FeedForward,
    Layer,
    Norm,
    Norms,
    Rotary,
    Slopes,
)
from shoal.models.convert.contract.families.bert import BERT_ATTENTION
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

_GLU: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
_LAYER = Layer(
    stem="encoder.layer",
    attention=BERT_ATTENTION,
    feed_forward=FeedForward(up="mlp.gated_layers", down="mlp.wo", fused="gate up", up_bias=False),
    norms=Norms(after_attention="attention.output.LayerNorm", after_feed_forward="mlp.layernorm"),
)
_CODE = "jina-bert-v2-qk-post-norm"
"""Part of the name of the repository that the variant's configuration refers to; it has no key of its own."""
_CODE_LAYER = Layer(
    stem="encoder.layer",
    attention=msgspec.structs.replace(
        BERT_ATTENTION,
        query_norm="attention.self.layer_norm_q",
        key_norm="attention.self.layer_norm_k",
        norm_whole=True,
    ),
    feed_forward=FeedForward(up="mlp.up_gated_layer", down="mlp.down_layer", fused="up gate", up_bias=False),
    norms=Norms(
        summed_attention="attention.output.LayerNorm", after_attention="layer_norm_1", after_feed_forward="layer_norm_2"
    ),
)
_V3_LAYER = Layer(
    stem="encoder.layers",
    attention=Attention(fused="mixer.Wqkv", out="mixer.out_proj"),
    feed_forward=FeedForward(up="mlp.fc1", down="mlp.fc2"),
    norms=Norms(after_attention="norm1", after_feed_forward="norm2"),
)


def is_jina_v2(config: JsonFile) -> bool:
    """Whether a "bert" is Jina's."""
    return config.data.get("position_embedding_type") == "alibi"


def is_flash_xlm_r(config: JsonFile) -> bool:
    """Whether an "xlm-roberta" is Jina's."""
    return config.data.get("position_embedding_type") == "rotary" or _names_flash_code(config)


def with_flash_type(config: JsonFile) -> JsonFile:
    """Return the configuration with the model_type that jina-reranker-v2's leaves to its own code."""
    if "model_type" in config or not _names_flash_code(config):
        return config
    return config.with_data({**config.data, "model_type": "xlm-roberta"})


def _names_flash_code(config: JsonFile) -> bool:
    return str(config.object("auto_map").get("AutoConfig")).endswith(".XLMRobertaFlashConfig")


def read_jina_v2(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    kind = config.text("feed_forward_type")
    if kind not in _GLU:
        raise config.refuse("feed_forward_type", f"{kind!r} is not supported; Shoal knows {', '.join(_GLU)}")
    shape = read_shape(config, Norm(eps=config.number("layer_norm_eps", 1e-12)), _GLU[kind])
    names = (config.data.get("_name_or_path"), *config.object("auto_map").values())
    code = any(_CODE in str(name) for name in names)
    return check_encoder(
        config,
        Encoder(
            family="jina",
            prefix="bert.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("max_position_embeddings", least=1),
            pad_id=config.integer("pad_token_id", 0),
            shape=shape,
            embeddings=bert_tables(shape.hidden, types=_read_types(config)),
            layers=repeat_layer(_CODE_LAYER if code else _LAYER, read_layers(config)),
            distances=Slopes(factors=slopes(shape.heads)),
        ),
    )


def slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's factors (Press et al. 2022): a geometric series. If the heads are not a power of two, every other
    factor of the next longer series follows those of the largest power of two below."""
    whole = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return (*first, *(2 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (heads - whole), 2)))


def read_flash_xlm_r(config: JsonFile) -> Encoder:
    """Read the encoder, with no task chosen. Raises ModelFileError naming the key for what is not supported."""
    if config.data.get("emb_pooler") is not None:
        require_values(config, emb_pooler="mean")
    require_values(config, rotary_emb_interleaved=False)
    norm = Norm(eps=config.number("layer_norm_eps", 1e-5))
    shape = read_shape(config, norm, read_activation(config, "hidden_act"))
    rotary, positions, pad = _read_rotary(config, shape.head_size), 0, config.integer("pad_token_id", 1)
    if rotary is None:
        positions = config.integer("max_position_embeddings", least=1)
    tables = bert_tables(shape.hidden, positions=positions, types=_read_types(config), norm="emb_ln")
    return check_encoder(
        config,
        Encoder(
            family="jina",
            prefix="roberta.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=config.integer("max_position_embeddings", least=1),
            pad_id=pad,
            shape=shape,
            embeddings=msgspec.structs.replace(tables, position_offset=pad + 1 if positions else 0),
            layers=repeat_layer(msgspec.structs.replace(_V3_LAYER, rotary=rotary), read_layers(config)),
            adapters=_adapters(config),
        ),
    )


def _read_rotary(config: JsonFile, size: int) -> Rotary | None:
    """Return the rotation; None for a table of positions, which are XLM-R's."""
    kind = config.text("position_embedding_type", "rotary")
    if kind not in ("rotary", "absolute"):
        raise config.refuse("position_embedding_type", f"{kind!r} is not supported, only rotary and absolute are")
    return read_rotary(config, size, config.number("rotary_emb_base", 20_000.0)) if kind == "rotary" else None


def _adapters(config: JsonFile) -> Adapters | None:
    tasks = config.texts("lora_adaptations")
    if not tasks:
        return None
    rank = config.integer("lora_rank", 4, least=1)
    return Adapters(tasks=tuple(tasks), rank=rank, scale=config.number("lora_alpha", 1.0) / rank)


def _read_types(config: JsonFile) -> int:
    return config.integer("type_vocab_size", 2, least=1)
