"""Read DeBERTa-v2 and v3 (He et al. 2021, 2023): BERT with scores of relative positions."""

from __future__ import annotations

import msgspec

from shoal.models.convert.contract.architecture import Attention, Embeddings, Encoder, Layer, Norm, Relative
from shoal.models.convert.contract.families.bert import BERT_FEED_FORWARD, BERT_NORMS
from shoal.models.convert.contract.families.fields import (
    bert_tables,
    check_encoder,
    read_activation,
    read_layers,
    read_shape,
    repeat_layer,
    require_values,
)
from shoal.models.convert.contract.json_file import JsonFile

_KEY, _QUERY = "attention.self.key_proj", "attention.self.query_proj"
_LAYER = Layer(
    stem="encoder.layer",
    attention=Attention(query=_QUERY, key=_KEY, value="attention.self.value_proj", out="attention.output.dense"),
    feed_forward=BERT_FEED_FORWARD,
    norms=BERT_NORMS,
)


def read_deberta(config: JsonFile) -> Encoder:
    """Read the encoder. Raises ModelFileError naming the key for what is not supported."""
    if config.integer("conv_kernel_size", 0):
        raise config.refuse("conv_kernel_size", "a convolution after the first layer is not supported")
    if not config.boolean("relative_attention", False):
        raise config.refuse("relative_attention", "must be true: Shoal builds DeBERTa with relative positions")
    norm = Norm(eps=config.number("layer_norm_eps", 1e-7))
    shape = read_shape(config, norm, read_activation(config, "hidden_act"))
    require_values(config, attention_head_size=shape.head_size)
    positions = config.integer("max_position_embeddings", 512, least=1)
    relative = _read_relative(config, positions)
    parts = 1 + bool(relative.key) + bool(relative.query)
    return check_encoder(
        config,
        Encoder(
            family="deberta",
            prefix="deberta.",
            vocab_size=config.integer("vocab_size", least=1),
            max_positions=positions,
            pad_id=config.integer("pad_token_id", 0),
            shape=msgspec.structs.replace(shape, scale=(shape.head_size * parts) ** -0.5),
            embeddings=_read_embeddings(config, shape.hidden, positions),
            layers=repeat_layer(_LAYER, read_layers(config)),
            distances=relative,
        ),
    )


def _read_relative(config: JsonFile, positions: int) -> Relative:
    kinds = _listed(config, "pos_att_type")
    if set(kinds) - {"c2p", "p2c"}:
        raise config.refuse("pos_att_type", f"{config.data['pos_att_type']!r} must consist of c2p and p2c")
    shared = config.boolean("share_att_key", False)
    buckets = max(config.integer("position_buckets", -1, least=-1), 0)
    if 0 < buckets < 4:
        raise config.refuse("position_buckets", f"must be 4 or more, or none, not {buckets}")
    farthest = config.integer("max_relative_positions", -1, least=-1)
    maximum = farthest if farthest > 0 else positions
    key, query = (_KEY, _QUERY) if shared else ("attention.self.pos_key_proj", "attention.self.pos_query_proj")
    return Relative(
        tensor="encoder.rel_embeddings",
        rows=2 * (buckets or maximum),
        key=key if "c2p" in kinds else "",
        query=query if "p2c" in kinds else "",
        norm="encoder.LayerNorm" if "layer_norm" in _listed(config, "norm_rel_ebd") else "",
        buckets=buckets,
        maximum=maximum,
    )


def _listed(config: JsonFile, key: str) -> list[str]:
    """Return a list of words, which may be stored as one text, separated by "|"."""
    if isinstance(config.data.get(key), list):
        return config.texts(key)
    return [word.strip() for word in config.text(key, "").lower().split("|") if word.strip()]


def _read_embeddings(config: JsonFile, hidden: int, positions: int) -> Embeddings:
    width = config.integer("embedding_size", hidden, least=1)
    placed, types = config.boolean("position_biased_input", True), config.integer("type_vocab_size", 0)
    return msgspec.structs.replace(
        bert_tables(width, positions=positions if placed else 0, types=types, norm=""),
        projection="embeddings.embed_proj" if width != hidden else "",
        projection_bias=False,
        last_norm="embeddings.LayerNorm",
    )
