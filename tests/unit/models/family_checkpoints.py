"""Tiny random models of every family that Shoal builds, as folders of files; no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shoal.models.convert.contract.architecture import Adapters, Buckets, Encoder, Experts, Layer, Linear, Relative
from shoal.models.convert.contract.families import read_encoder
from shoal.models.convert.contract.json_file import JsonFile
from shoal.types import Array
from tests.unit.models.checkpoints import MEAN, checkpoint, vocabulary, write_json

WORDS = len(vocabulary("bert"))
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
"""The width is that of `checkpoints.MEAN`."""

GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NOMIC = {
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": "modeling.NomicBertModel"},
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 24,
    "n_positions": 64,
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "rotary_emb_base": 100.0,
}
JINA = SIZES | {
    "model_type": "bert",
    "auto_map": {"AutoModel": "modeling.JinaBertModel"},
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
}
DEBERTA = SIZES | {
    "model_type": "deberta-v2",
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "modernbert": SIZES | {"model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2},
    "modernbert-biased": SIZES
    | {
        "model_type": "modernbert",
        "local_attention": 8,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_activation": "silu",
    },
    "qwen2": SIZES | {"model_type": "qwen2", "num_key_value_heads": 2, "architectures": ["Qwen2Model"]},
    "qwen2-bidirectional": SIZES | {"model_type": "qwen2", "auto_map": {}, "is_causal": False},
    "qwen3": GROUPED | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1_000_000},
    "qwen3-windows": GROUPED
    | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "llama3": GROUPED | {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "llama-yarn": GROUPED
    | {"model_type": "llama", "attention_bias": True, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "mistral": GROUPED | {"model_type": "mistral", "sliding_window": 7},
    "gemma": GROUPED | {"model_type": "gemma", "hidden_act": "gelu"},
    "gemma3": GROUPED
    | {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "embeddinggemma": GROUPED
    | {
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "_sliding_window_pattern": 2,
        "use_bidirectional_attention": True,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": WORDS,
        "d_model": 16,
        "d_kv": 6,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "n_positions": 64,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
    "albert": SIZES | {"model_type": "albert", "embedding_size": 12, "hidden_act": "gelu_new"},
    "nomic": NOMIC,
    "nomic-of-transformers": SIZES | {"model_type": "nomic_bert", "type_vocab_size": 2},
    "nomic-experts": NOMIC
    | {
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": 2,
        "num_experts": 5,
        "moe_top_k": 2,
    },
    "gte": SIZES | {"model_type": "gte"},
    "gte-published": SIZES
    | {
        "model_type": "new",
        "architectures": ["NewModel"],
        "auto_map": {"AutoModel": "modeling.NewModel"},
        "type_vocab_size": 0,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "ntk", "factor": 2.0},
    },
    "gte-unpacked": SIZES | {"model_type": "new", "pack_qkv": False},
    "deberta": DEBERTA,
    "deberta-own-maps": DEBERTA
    | {
        "share_att_key": False,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": -1,
        "max_relative_positions": 12,
        "norm_rel_ebd": "none",
        "embedding_size": 12,
        "type_vocab_size": 2,
        "position_biased_input": True,
    },
    "jina-v2": JINA | {"num_attention_heads": 8},
    "jina-v2-code": JINA | {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm", "feed_forward_type": "reglu"},
    "jina-v3": SIZES
    | {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "auto_map": {"AutoModel": "modeling.XLMRobertaLoRA"},
        "position_embedding_type": "rotary",
        "rotary_emb_base": 300.0,
        "lora_adaptations": ["retrieval.query", "text-matching"],
        "lora_rank": 2,
        "lora_alpha": 3,
        "type_vocab_size": 1,
    },
    "jina-v3-of-transformers": SIZES | {"model_type": "jina_embeddings_v3", "type_vocab_size": 1},
    "deberta-c2p": DEBERTA | {"pos_att_type": "c2p"},
    "deberta-p2c": DEBERTA | {"pos_att_type": "p2c"},
    "electra-projected": SIZES | {"model_type": "electra", "embedding_size": 12},
}
"""config.json of each, by a name of its own."""
FAMILIES["t5-gated"] = FAMILIES["t5"] | {"model_type": "mt5", "feed_forward_proj": "gated-gelu"}


def family_checkpoint(
    folder: Path,
    name: str,
    *,
    prefix: str = "",
    pooling: dict[str, Any] = MEAN,
    after: tuple[str, ...] = ("Normalize",),
    **changes: Any,
) -> Path:
    """Write a whole model of the family: a BERT's tokenizer, the pooling, modules after it, and its own encoder."""
    config = FAMILIES[name] | changes
    checkpoint(folder, pooling=pooling, after=after, sentence={"max_seq_length": 48, "do_lower_case": False})
    write_json(folder / "config.json", config)
    encoder = read_encoder(JsonFile("config.json", config))
    made = tensors(encoder, prefix)
    save_file(_with_adapters(made, encoder.adapters) if encoder.adapters else made, folder / "model.safetensors")
    return folder


def _with_adapters(made: dict[str, Array], adapters: Adapters) -> dict[str, Array]:
    """Return matrices under the names under which torch stores those with adapters, and an adapter for each."""
    random, stored = np.random.default_rng(6), {}
    for name, tensor in made.items():
        if tensor.ndim == 1:
            stored[name] = tensor
            continue
        place, (rows, columns) = name.replace(".weight", ".parametrizations.weight."), tensor.shape
        shapes = (rows, adapters.rank), (adapters.rank, columns)
        factors = [random.standard_normal((len(adapters.tasks), *shape)).astype(np.float32) for shape in shapes]
        letters = "AB" if "embeddings" in name else "BA"
        stored |= {f"{place}0.lora_{letter}": factor for letter, factor in zip(letters, factors, strict=True)}
        stored[f"{place}original"] = tensor
    return stored


def tensors(encoder: Encoder, prefix: str = "") -> dict[str, Array]:
    """Return random tensors of a described encoder, large enough for every part to affect the result."""
    random = np.random.default_rng(5)
    made: dict[str, Array] = {}

    def normal(name: str, *shape: int, scale: float = 0.4) -> None:
        made.setdefault(prefix + name, (random.standard_normal(shape) * scale).astype(np.float32))

    def linear(stem: str, part: Linear) -> None:
        normal(f"{stem}{part.name}.weight", *part.stored)
        if part.bias:
            normal(f"{stem}{part.name}.bias", part.stored[0])

    def norm(name: str, width: int) -> None:
        if not name:
            return
        normal(f"{name}.weight", width)
        made[f"{prefix}{name}.weight"] += np.float32(1 - encoder.shape.norm.offset)
        if encoder.shape.norm.kind == "layer" and encoder.shape.norm.bias:
            normal(f"{name}.bias", width)

    _tables(encoder, normal)
    norm(encoder.embeddings.norm, encoder.embeddings.width)
    if encoder.embeddings.projection:
        projection = encoder.embeddings.projection, encoder.hidden, encoder.embeddings.width
        linear("", Linear(*projection, encoder.embeddings.projection_bias))
    norm(encoder.embeddings.last_norm, encoder.hidden)
    if isinstance(encoder.distances, Relative):
        norm(encoder.distances.norm, encoder.hidden)
    for layer in {each.stem: each for each in encoder.layers}.values():
        for part in _maps(encoder, layer):
            linear(layer.stem, part)
        if isinstance(layer.feed_forward, Experts):
            _experts(encoder, layer.feed_forward, layer.stem, normal)
        for each in layer.norms.__struct_fields__:
            name = getattr(layer.norms, each)
            norm(name and layer.stem + name, encoder.hidden)
        for name in (layer.attention.query_norm, layer.attention.key_norm):
            width = encoder.hidden if layer.attention.norm_whole else encoder.shape.head_size
            norm(name and layer.stem + name, width)
    norm(encoder.final_norm, encoder.hidden)
    return made


def _tables(encoder: Encoder, normal: Any) -> None:
    tables, distances = encoder.embeddings, encoder.distances
    normal(f"{tables.words}.weight", encoder.vocab_size, tables.width)
    if tables.positions:
        normal(f"{tables.positions}.weight", tables.position_rows, tables.width)
    if tables.types:
        normal(f"{tables.types}.weight", tables.type_rows, tables.width)
    if isinstance(distances, Buckets):
        normal(f"{distances.tensor}.weight", distances.buckets, encoder.shape.heads)
    if isinstance(distances, Relative):
        normal(f"{distances.tensor}.weight", distances.rows, encoder.hidden)


def _maps(encoder: Encoder, layer: Layer) -> list[Linear]:
    parts: list[Linear | None] = [*layer.attention.maps(encoder.shape)]
    if not isinstance(layer.feed_forward, Experts):
        parts += layer.feed_forward.maps(encoder.shape)
    if isinstance(encoder.distances, Relative):
        names = encoder.distances.key, encoder.distances.query
        parts += [Linear(name, encoder.hidden, encoder.hidden, True) if name else None for name in names]
    return [part for part in parts if part is not None]


def _experts(encoder: Encoder, parts: Experts, stem: str, normal: Any) -> None:
    normal(f"{stem}{parts.router}.weight", parts.count, encoder.hidden)
    normal(stem + parts.bias, encoder.hidden)
    for name in (parts.up, parts.down):
        normal(stem + name, parts.count * encoder.shape.intermediate, encoder.hidden)
