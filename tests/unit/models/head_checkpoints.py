"""Tiny random models of other kinds as folders of files: static, SPLADE, bge-m3 and late interaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shoal.types import Array
from tests.unit.models.checkpoints import (
    HIDDEN,
    ST,
    checkpoint,
    dense,
    encoder_tensors,
    tokenizer,
    vocabulary,
    write_json,
)

WIDTH = 8
MARKERS = ("[Q] ", "[D] ")
PREFIX = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "mpnet": "mpnet."} | {
    "distilbert": "distilbert."
}
PYLATE = {
    "model_type": "ColBERT",
    "query_prefix": MARKERS[0],
    "document_prefix": MARKERS[1],
    "query_length": 12,
    "document_length": 20,
    "attend_to_expansion_tokens": False,
    "skiplist_words": ["?", ".", "no token"],
    "do_query_expansion": True,
    "similarity_fn_name": "MaxSim",
}


def normal(*shape: int, seed: int = 1) -> Array:
    values: Array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return values


def modules(folder: Path, *listed: tuple[str, str]) -> None:
    """Write modules.json from (type, path)."""
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(listed)]
    write_json(folder / "modules.json", entries)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    data = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in data.items() if value is not None})


def static(folder: Path, *, path: str = "", rows: int | None = None, after: tuple[tuple[str, str], ...] = ()) -> Path:
    """A sentence-transformers StaticEmbedding without its tokenizer's truncation."""
    place = folder / path
    place.mkdir(parents=True, exist_ok=True)
    save_file({"embedding.weight": normal(rows or len(vocabulary("bert")), WIDTH)}, place / "model.safetensors")
    tiny_tokenizer = tokenizer("bert")
    tiny_tokenizer.no_truncation()
    tiny_tokenizer.save(str(place / "tokenizer.json"))
    modules(folder, (f"{ST}StaticEmbedding", path), *after)
    return folder


def model2vec(folder: Path, *, quantized: bool = False, config: dict[str, Any] | None = None) -> Path:
    """A folder of model2vec's, without modules.json."""
    size = len(vocabulary("bert"))
    random = np.random.default_rng(4)
    tensors: dict[str, Array] = {"embeddings": normal(5 if quantized else size, WIDTH)}
    if quantized:
        tensors |= {"mapping": random.integers(0, 5, size), "weights": random.uniform(0.5, 2, size)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "model2vec", "normalize": True} | (config or {}))
    tokenizer("bert").save(str(folder / "tokenizer.json"))
    return folder


def masked_tensors(kind: str, *, own: bool = False, old_norm: bool = False) -> dict[str, Array]:
    """The head of a masked language model; `own`: with a last layer separate from the word embeddings."""
    names = {
        "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    }
    dense, norm, last = names.get(kind, ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"))
    bias = last if own or kind == "distilbert" else last.rpartition(".")[0]
    size = len(vocabulary(kind))
    scale, shift = ("gamma", "beta") if old_norm else ("weight", "bias")
    tensors = {
        f"{dense}.weight": normal(HIDDEN, HIDDEN, seed=2) * 0.5,
        f"{dense}.bias": normal(HIDDEN, seed=3),
        f"{norm}.{scale}": normal(HIDDEN, seed=4) + 1,
        f"{norm}.{shift}": normal(HIDDEN, seed=5),
        f"{bias}.bias": normal(size, seed=6),
    }
    return tensors | ({f"{last}.weight": normal(size, HIDDEN, seed=7)} if own else {})


def masked(folder: Path, kind: str = "bert", *, own: bool = False, old_norm: bool = False) -> Path:
    """A ...ForMaskedLM of transformers."""
    checkpoint(folder, kind, pooling=None, prefix=PREFIX[kind])
    edit(
        folder / "config.json", architectures=[f"{kind.title().replace('-', '')}ForMaskedLM".replace("Mpnet", "MPNet")]
    )
    if kind == "distilbert":
        edit(folder / "config.json", architectures=["DistilBertForMaskedLM"])
    if kind == "xlm-roberta":
        edit(folder / "config.json", architectures=["XLMRobertaForMaskedLM"])
    tensors = encoder_tensors(kind, PREFIX[kind]) | masked_tensors(kind, own=own, old_norm=old_norm)
    save_file(tensors, folder / "model.safetensors")
    return folder


def splade(folder: Path, kind: str = "bert", *, pooling: dict[str, Any] | None = None, **options: bool) -> Path:
    """A SparseEncoder as sentence-transformers 5 saved it."""
    masked(folder, kind, **options)
    modules(folder, (f"{ST}MLMTransformer", ""), (f"{ST}SpladePooling", "1_SpladePooling"))
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max"} | (pooling or {}))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 30, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "prompts": {"query": ""}})
    return folder


def m3(folder: Path, kind: str = "xlm-roberta", *, sparse: bool = True, multi: bool = True) -> Path:
    """bge-m3 in small."""
    checkpoint(folder, kind, pooling={"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": True})
    if sparse:
        save_file({"weight": normal(1, HIDDEN), "bias": normal(1)}, folder / "sparse_linear.safetensors")
    if multi:
        save_file({"weight": normal(WIDTH, HIDDEN), "bias": normal(WIDTH)}, folder / "colbert_linear.safetensors")
    return folder


def marked(folder: Path, kind: str = "bert", markers: tuple[str, ...] = MARKERS, prefix: str = "") -> Path:
    """An encoder whose tokenizer has two more tokens."""
    checkpoint(folder, kind, pooling=None, prefix=prefix)
    tiny_tokenizer = tokenizer(kind)
    tiny_tokenizer.add_tokens(list(markers))
    tiny_tokenizer.save(str(folder / "tokenizer.json"))
    tensors = encoder_tensors(kind, prefix)
    words = f"{prefix}embeddings.word_embeddings.weight"
    tensors[words] = np.concatenate([tensors[words], normal(len(markers), HIDDEN)])
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", vocab_size=len(tensors[words]))
    return folder


def pylate(folder: Path, kind: str = "bert", *, layers: int = 1, **changes: Any) -> Path:
    """A model as PyLate saves it; `changes` to config_sentence_transformers.json, None removes a key."""
    marked(folder, kind)
    listed = [(f"{ST}Transformer", "")]
    for index in range(1, layers + 1):
        into = HIDDEN if index == 1 else WIDTH
        dense(folder, f"{index}_Dense", into, WIDTH, activation="Identity", bias=False)
        listed.append(("pylate.models.Dense.Dense", f"{index}_Dense"))
    modules(folder, *listed)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 11, "do_lower_case": False})
    settings = {key: value for key, value in (PYLATE | changes).items() if value is not None}
    write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def native(folder: Path, *, sentence: dict[str, Any] | None = None, mask: dict[str, Any] | None = None) -> Path:
    """A model as sentence-transformers' MultiVectorEncoder saves it."""
    marked(folder)
    dense(folder, "1_Dense", HIDDEN, WIDTH, activation="Identity", bias=False)
    modules(
        folder,
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.base.modules.dense.Dense", "1_Dense"),
        ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask"),
        ("sentence_transformers.base.modules.normalize.Normalize", "3_Normalize"),
    )
    write_json(folder / "2_MultiVectorMask" / "config.json", {"skiplist_words": []} | (mask or {}))
    write_json(folder / "3_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "feature-extraction"} | (sentence or {}))
    saved = {"model_type": "MultiVectorEncoder", "prompts": {"query": "[Q] ", "document": "[D] "}}
    write_json(folder / "config_sentence_transformers.json", saved)
    return folder


def stanford(folder: Path, metadata: dict[str, Any] | None = None) -> Path:
    """A checkpoint of the Stanford library's ColBERT."""
    marked(folder, markers=("[unused0]", "[unused1]"), prefix="bert.")
    tensors = load_file(folder / "model.safetensors") | {"linear.weight": normal(WIDTH, HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", architectures=["HF_ColBERT"])
    if metadata is not None:
        write_json(folder / "artifact.metadata", metadata)
    return folder
