"""Tiny random models as folders of files, like those on a hub; no PyTorch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shoal.types import Array

HIDDEN, HEADS, LAYERS, INNER, POSITIONS = 16, 2, 2, 24, 40
KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert")
ST = "sentence_transformers.models."
MEAN: dict[str, Any] = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!=*()[]:"


def vocabulary(kind: str) -> dict[str, int]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind not in ("bert", "distilbert"):
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), "fish", "##ing", "to", "##gether"]
    return {word: index for index, word in enumerate(words)}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def checkpoint(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: dict[str, Any] | None = MEAN,
    after: tuple[str, ...] = ("Normalize",),
    config: dict[str, Any] | None = None,
    sentence: dict[str, Any] | None = None,
    prefix: str = "",
) -> Path:
    """Write a whole model; `pooling` None leaves modules.json out, `after` names the modules after the pooling."""
    write_json(folder / "config.json", encoder_config(kind) | (config or {}))
    save_file(encoder_tensors(kind, prefix), folder / "model.safetensors")
    tokenizer(kind).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 64, "tokenizer_class": "PreTrainedTokenizerFast"})
    if pooling is not None:
        names = ("Transformer", "Pooling", *after)
        paths = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": ST + name}
            for index, (name, path) in enumerate(zip(names, paths, strict=True))
        ]
        write_json(folder / "modules.json", modules)
        write_json(folder / "1_Pooling" / "config.json", pooling)
        write_json(folder / "sentence_bert_config.json", sentence or {"max_seq_length": 32, "do_lower_case": False})
    return folder


def encoder_config(kind: str) -> dict[str, Any]:
    size = len(vocabulary(kind))
    if kind == "distilbert":
        return {
            "model_type": kind,
            "vocab_size": size,
            "dim": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": INNER,
            "max_position_embeddings": POSITIONS,
            "activation": "gelu",
        }
    config = {
        "model_type": kind,
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "gelu",
    }
    return config if kind == "mpnet" else config | {"type_vocab_size": 2}


def encoder_tensors(kind: str, prefix: str = "") -> dict[str, Array]:
    """Weights large enough for attention and activations to affect the result."""
    random = np.random.default_rng(5)
    tensors: dict[str, Array] = {}

    def normal(name: str, *shape: int) -> None:
        tensors[prefix + name] = (random.standard_normal(shape) * 0.4).astype(np.float32)

    def linear(name: str, out: int, into: int) -> None:
        normal(f"{name}.weight", out, into)
        normal(f"{name}.bias", out)

    def norm(name: str) -> None:
        normal(f"{name}.weight", HIDDEN)
        tensors[f"{prefix}{name}.weight"] += 1
        normal(f"{name}.bias", HIDDEN)

    normal("embeddings.word_embeddings.weight", len(vocabulary(kind)), HIDDEN)
    normal("embeddings.position_embeddings.weight", POSITIONS, HIDDEN)
    if kind not in ("mpnet", "distilbert"):
        normal("embeddings.token_type_embeddings.weight", 2, HIDDEN)
    norm("embeddings.LayerNorm")
    if kind == "mpnet":
        normal("encoder.relative_attention_bias.weight", 32, HEADS)
    for layer in range(LAYERS):
        parts = _layer(kind, layer)
        for name in parts[:4]:
            linear(name, HIDDEN, HIDDEN)
        norm(parts[4])
        linear(parts[5], INNER, HIDDEN)
        linear(parts[6], HIDDEN, INNER)
        norm(parts[7])
    return tensors


def _layer(kind: str, layer: int) -> list[str]:
    if kind == "distilbert":
        names = [f"attention.{n}_lin" for n in ("q", "k", "v", "out")]
        names += ["sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"]
        return [f"transformer.layer.{layer}.{name}" for name in names]
    if kind == "mpnet":
        names = [f"attention.attn.{n}" for n in "qkvo"] + ["attention.LayerNorm"]
    else:
        names = [f"attention.self.{n}" for n in ("query", "key", "value")]
        names += ["attention.output.dense", "attention.output.LayerNorm"]
    return [f"encoder.layer.{layer}.{n}" for n in (*names, "intermediate.dense", "output.dense", "output.LayerNorm")]


def dense(folder: Path, name: str, into: int, out: int, *, activation: str | None = "Tanh", bias: bool = True) -> None:
    random = np.random.default_rng(out)
    config: dict[str, Any] = {"in_features": into, "out_features": out, "bias": bias}
    if activation is not None:
        module = "linear" if activation == "Identity" else "activation"
        config["activation_function"] = f"torch.nn.modules.{module}.{activation}"
    write_json(folder / name / "config.json", config)
    tensors: dict[str, Array] = {"linear.weight": random.standard_normal((out, into)).astype(np.float32)}
    if bias:
        tensors["linear.bias"] = random.standard_normal(out).astype(np.float32)
    save_file(tensors, folder / name / "model.safetensors")


def layer_norm(folder: Path, name: str, size: int) -> None:
    random = np.random.default_rng(size)
    write_json(folder / name / "config.json", {"dimension": size})
    tensors: dict[str, Array] = {
        f"norm.{part}": random.standard_normal(size).astype(np.float32) for part in ("weight", "bias")
    }
    save_file(tensors, folder / name / "model.safetensors")


def save_bfloat16(tensors: dict[str, Array], path: Path) -> None:
    """Write the format by hand: safetensors' numpy writer needs another package for bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = (tensor.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tokenizer(kind: str) -> Tokenizer:
    words = vocabulary(kind)
    pad, unk, cls, sep = ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if "[PAD]" in words else ("<pad>", "<unk>", "<s>", "</s>")
    tiny_tokenizer = Tokenizer(models.WordPiece(words, unk_token=unk))
    tiny_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tiny_tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tiny_tokenizer.decoder = decoders.WordPiece()
    tiny_tokenizer.add_special_tokens([pad, unk, cls, sep])
    tiny_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B {sep}", special_tokens=[(cls, words[cls]), (sep, words[sep])]
    )
    # What a published tokenizer.json often carries, and what must not decide on the lengths.
    tiny_tokenizer.enable_truncation(6)
    tiny_tokenizer.enable_padding(length=6, pad_id=words[pad], pad_token=pad)
    return tiny_tokenizer
