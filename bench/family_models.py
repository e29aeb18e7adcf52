"""Random models of realistic sizes, written by transformers and sentence-transformers themselves.

`family_models.py NAME TOKENIZER FOLDER`, with a Python that has both. TOKENIZER is a WordPiece tokenizer.json;
vocabularies have their real size. Imports nothing of Shoal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
GEMMA = BASE | {"num_hidden_layers": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 1152}
QWEN3 = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
QWEN2 = QWEN3 | {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}
T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 256,
    "share_att_key": True,
    "type_vocab_size": 0,
}
MODERN = BASE | {"num_hidden_layers": 22, "intermediate_size": 1152}
GRAPHS: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "modernbert-base": ("ModernBertModel", "ModernBertConfig", "cls", 50368, MODERN),
    "nomic-embed-text-v1.5": ("NomicBertModel", "NomicBertConfig", "mean", 30528, BASE),
    "gte-base-en-v1.5": ("GteModel", "GteConfig", "cls", 30528, BASE | {"type_vocab_size": 0}),
    "jina-embeddings-v3": (
        "JinaEmbeddingsV3Model",
        "JinaEmbeddingsV3Config",
        "mean",
        250002,
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "deberta-v3-base": ("DebertaV2Model", "DebertaV2Config", "mean", 128100, BASE | DEBERTA),
    "albert-base-v2": ("AlbertModel", "AlbertConfig", "mean", 30522, BASE | {"embedding_size": 128}),
    "sentence-t5-base": ("T5EncoderModel", "T5Config", "mean", 32128, T5),
    "embeddinggemma-300m": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        "mean",
        262144,
        GEMMA | {"head_dim": 256, "sliding_window": 512, "use_bidirectional_attention": True},
    ),
    "qwen3-embedding-0.6b": ("Qwen3Model", "Qwen3Config", "lasttoken", 151669, QWEN3 | {"head_dim": 128}),
    "qwen2-0.5b": ("Qwen2Model", "Qwen2Config", "lasttoken", 151936, QWEN2),
}
"""Class, configuration, pooling, size of the vocabulary, and sizes as the published model has them."""


def main() -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

    name, tokenizer, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    kind, config, pooling, vocabulary, sizes = GRAPHS[name]
    torch.manual_seed(11)
    tokens = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    if kind == "ModernBertModel":
        tokens |= {"cls_token_id": 101, "sep_token_id": 102}
    made = getattr(transformers, config)(vocab_size=vocabulary, **tokens | sizes)
    encoder = getattr(transformers, kind)(made)
    encoder.save_pretrained(folder / "encoder")
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer, **special)
    wrapped.padding_side = "left" if pooling == "lasttoken" else "right"
    wrapped.save_pretrained(folder / "encoder")
    transformer = st.Transformer(str(folder / "encoder"), max_seq_length=512)
    parts = [transformer, st.Pooling(encoder.config.hidden_size, pooling_mode=pooling), st.Normalize()]
    SentenceTransformer(modules=parts).save(str(folder / "model"), create_model_card=False)


if __name__ == "__main__":
    main()
