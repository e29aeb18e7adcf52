"""Tiny random models of the families beyond BERT's, written by transformers and sentence-transformers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.reference_models import LETTERS, LONGEST, WORDS

HIDDEN = 32


class Made:
    """How a model is made: `kind` and `config` are the names of its classes in transformers. `pooling` is that of the
    family's embedding models; with "lasttoken", every text ends in a token of its own and is padded on the left."""

    def __init__(self, kind: str, config: str, pooling: str = "mean", **sizes: Any) -> None:
        self.pooling = pooling
        self._kind = kind
        self._config = config
        self._sizes = sizes

    def __call__(self, size: int, kind: str = "", **changes: Any) -> Any:
        """Return the model with a vocabulary of `size`, or another `kind` of model of its configuration."""
        import transformers

        config = getattr(transformers, self._config)(vocab_size=size, **self._sizes | changes)
        return getattr(transformers, kind or self._kind)(config)


_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
_WIDE = _GROUPED | {"head_dim": 16}
_MODERN = _SIZES | {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8}
_DEBERTA = _SIZES | {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
}
_T5: dict[str, Any] = {"d_model": HIDDEN, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GEMMA3 = _WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 12, "sliding_window_pattern": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}

NATIVE: dict[str, Made] = {
    "modernbert": Made("ModernBertModel", "ModernBertConfig", "cls", **_MODERN, global_attn_every_n_layers=2),
    "modernbert-biased": Made(
        "ModernBertModel", "ModernBertConfig", **_MODERN, norm_bias=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": Made("Qwen2Model", "Qwen2Config", "lasttoken", **_GROUPED),
    "qwen2-bidirectional": Made("Qwen2Model", "Qwen2Config", "lasttoken", **_GROUPED, is_causal=False),
    "qwen3": Made("Qwen3Model", "Qwen3Config", "lasttoken", **_WIDE),
    "qwen3-windows": Made(
        "Qwen3Model", "Qwen3Config", "mean", **_WIDE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "llama3": Made("LlamaModel", "LlamaConfig", "lasttoken", **_GROUPED, rope_parameters=_LLAMA3),
    "llama-yarn": Made("LlamaModel", "LlamaConfig", "mean", **_GROUPED, attention_bias=True, rope_parameters=_YARN),
    "mistral": Made("MistralModel", "MistralConfig", "lasttoken", **_GROUPED, sliding_window=11),
    "gemma": Made("GemmaModel", "GemmaConfig", "lasttoken", **_WIDE),
    "gemma3": Made("Gemma3TextModel", "Gemma3TextConfig", **_GEMMA3),
    "embeddinggemma": Made("Gemma3TextModel", "Gemma3TextConfig", **_GEMMA3, use_bidirectional_attention=True),
    "t5": Made("T5EncoderModel", "T5Config", **_T5),
    "mt5-gated": Made("MT5EncoderModel", "MT5Config", **_T5, feed_forward_proj="gated-gelu"),
    "nomic": Made("NomicBertModel", "NomicBertConfig", **_SIZES),
    "gte": Made("GteModel", "GteConfig", "cls", **_SIZES),
    "gte-without-types": Made("GteModel", "GteConfig", "cls", **_SIZES, type_vocab_size=0),
    "jina-v3": Made("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", **_SIZES),
    "deberta": Made("DebertaV2Model", "DebertaV2Config", **_DEBERTA, position_buckets=16, share_att_key=True),
    "deberta-own-maps": Made(
        "DebertaV2Model",
        "DebertaV2Config",
        **_DEBERTA | {"position_biased_input": True, "norm_rel_ebd": "none"},
        max_relative_positions=20,
        embedding_size=16,
        type_vocab_size=2,
    ),
    "albert": Made("AlbertModel", "AlbertConfig", **_SIZES, embedding_size=16),
    "electra-projected": Made("ElectraModel", "ElectraConfig", "cls", **_SIZES, embedding_size=16),
}
"""Families with a graph in Shoal."""

FOREIGN: dict[str, Made] = {"megatron-bert": Made("MegatronBertModel", "MegatronBertConfig", **_SIZES)}
"""Without one."""

MODELS = NATIVE | FOREIGN


def words_tokenizer(folder: Path, *, last: str = "") -> int:
    """Write a tokenizer.json of words and letters; `last` is appended to every text. Return the size of its
    vocabulary."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys((*WORDS, *LETTERS))]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = f"$A {last}" if last else "[CLS] $A [SEP]"
    special = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    wrapped.padding_side = "left" if last else "right"
    wrapped.save_pretrained(folder)
    return len(vocabulary)


def shake(model: Any, scale: float = 0.1) -> Any:
    """Change every parameter: fresh norms and biases are ones and zeros, which would prove nothing."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def other(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Save the model as sentence-transformers does; return its folder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

    torch.manual_seed(11)
    make = MODELS[name]
    encoder = folder / "encoder"
    size = words_tokenizer(encoder, last="[SEP]" if make.pooling == "lasttoken" else "")
    shake(make(size)).to(getattr(torch, dtype)).save_pretrained(encoder)
    parts = [
        st.Transformer(str(encoder), max_seq_length=LONGEST, model_kwargs={"dtype": "auto"}),
        st.Pooling(HIDDEN, pooling_mode=make.pooling),
        st.Normalize(),
    ]
    SentenceTransformer(modules=parts).save(str(folder / "model"), create_model_card=False)
    return folder / "model"
