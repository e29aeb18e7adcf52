"""Read BERT, RoBERTa, MPNet, DistilBERT and ELECTRA: norms after the sums, a table of positions."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.models.convert.contract.architecture import (
    Attention,
    Buckets,
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
    refuse_relative_positions,
    repeat_layer,
)
from shoal.models.convert.contract.json_file import JsonFile


class _Kind(NamedTuple):
    """`pad_id`: the family's default."""

    family: str
    prefix: str
    pad_id: int


KINDS = {
    "bert": _Kind("bert", "bert.", 0),
    "roberta": _Kind("roberta", "roberta.", 1),
    "xlm-roberta": _Kind("roberta", "roberta.", 1),
    "camembert": _Kind("roberta", "roberta.", 1),
    "mpnet": _Kind("mpnet", "mpnet.", 1),
    "distilbert": _Kind("distilbert", "distilbert.", 0),
    "electra": _Kind("bert", "electra.", 0),
}
"""By model_type."""

BERT_ATTENTION = Attention(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
)
BERT_FEED_FORWARD = FeedForward(up="intermediate.dense", down="output.dense")
BERT_NORMS = Norms(after_attention="attention.output.LayerNorm", after_feed_forward="output.LayerNorm")


_BERT = Layer(stem="encoder.layer", attention=BERT_ATTENTION, feed_forward=BERT_FEED_FORWARD, norms=BERT_NORMS)
_LAYERS = {
    "bert": _BERT,
    "roberta": _BERT,
    "mpnet": Layer(
        stem="encoder.layer",
        attention=Attention(
            query="attention.attn.q", key="attention.attn.k", value="attention.attn.v", out="attention.attn.o"
        ),
        feed_forward=BERT_FEED_FORWARD,
        norms=Norms(after_attention="attention.LayerNorm", after_feed_forward="output.LayerNorm"),
    ),
    "distilbert": Layer(
        stem="transformer.layer",
        attention=Attention(
            query="attention.q_lin", key="attention.k_lin", value="attention.v_lin", out="attention.out_lin"
        ),
        feed_forward=FeedForward(up="ffn.lin1", down="ffn.lin2"),
        norms=Norms(after_attention="sa_layer_norm", after_feed_forward="output_layer_norm"),
    ),
}
"""By family: where the layers are, before their numbers, and the names of their parts."""
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
_MPNET_MAX_DISTANCE = 128


def read_bert(config: JsonFile) -> Encoder:
    """Read an encoder of these families. Raises ModelFileError naming the key for what is not supported."""
    kind = KINDS[config.text("model_type")]
    family = kind.family
    _refuse_what_changes_the_vectors(config)
    config = config.with_keys(_DISTILBERT) if family == "distilbert" else config
    norm = Norm(eps=_NORM_EPS if family == "distilbert" else config.number("layer_norm_eps", _NORM_EPS))
    shape = read_shape(config, norm, read_activation(config, "hidden_act"))
    width, positions = _read_width(config, kind, shape.hidden), config.integer("max_position_embeddings", least=1)
    pad_id = _pad_id(config, kind)
    types = config.integer("type_vocab_size", 2, least=1) if family in ("bert", "roberta") else 0
    encoder = Encoder(
        family=family,
        prefix=kind.prefix,
        vocab_size=config.integer("vocab_size", least=1),
        max_positions=positions,
        pad_id=pad_id,
        shape=shape,
        embeddings=msgspec.structs.replace(
            bert_tables(width, positions=positions, types=types),
            position_offset=pad_id + 1 if family in ("roberta", "mpnet") else 0,
            projection="embeddings_project" if width != shape.hidden else "",
        ),
        layers=repeat_layer(_LAYERS[family], read_layers(config)),
        distances=_mpnet_buckets() if family == "mpnet" else None,
    )
    return check_encoder(config, encoder)


def _read_width(config: JsonFile, kind: _Kind, hidden: int) -> int:
    """Return the width of the tables: ELECTRA may project them to the hidden size."""
    width = hidden if kind.family == "distilbert" else config.integer("embedding_size", hidden, least=1)
    if width != hidden and kind.prefix != "electra.":
        raise config.refuse("embedding_size", f"must be the hidden_size, {hidden}: a projection is not supported")
    return width


def _mpnet_buckets() -> Buckets:
    return Buckets(tensor="encoder.relative_attention_bias", buckets=_MPNET_BUCKETS, maximum=_MPNET_MAX_DISTANCE)


def _pad_id(config: JsonFile, kind: _Kind) -> int:
    if kind.family == "mpnet":
        # transformers' MPNet derives positions from row 1, whatever pad_token_id says.
        if config.integer("pad_token_id", _MPNET_PAD) != _MPNET_PAD:
            raise config.refuse("pad_token_id", f"must be {_MPNET_PAD} for MPNet, whose positions depend on it")
        return _MPNET_PAD
    return config.integer("pad_token_id", kind.pad_id)


def _refuse_what_changes_the_vectors(config: JsonFile) -> None:
    refuse_relative_positions(config)
    if config.integer("relative_attention_num_buckets", _MPNET_BUCKETS) != _MPNET_BUCKETS:
        raise config.refuse("relative_attention_num_buckets", f"must be {_MPNET_BUCKETS}")
