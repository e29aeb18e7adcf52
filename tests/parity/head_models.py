"""Tiny random models of the other kinds: static, SPLADE, bge-m3 and late interaction, as their libraries save them."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.reference_models import HIDDEN, LONGEST, Case, _config, _tokenizer
from tests.parity.reference_models import write as write_dense

MARKERS = ("[Q] ", "[D] ")


@dataclass(frozen=True)
class Splade:
    """A SparseEncoder; `legacy`: with the modules that sentence-transformers 5 wrote."""

    name: str
    family: str = "bert"
    strategy: str = "max"
    activation: str = "relu"
    config: dict[str, Any] = field(default_factory=dict)
    legacy: bool = False
    prompts: dict[str, str] = field(default_factory=dict)


SPLADES = (
    Splade("bert"),
    Splade("bert-legacy", legacy=True),
    Splade("bert-sum", strategy="sum"),
    Splade("bert-twice", activation="log1p_relu"),
    Splade("bert-sum-twice", strategy="sum", activation="log1p_relu"),
    Splade("bert-own-words", config={"tie_word_embeddings": False}),
    Splade("bert-prompts", prompts={"query": "where can i: ", "document": ""}),
    Splade("roberta", "roberta", config={"hidden_act": "relu"}),
    Splade("xlm-roberta", "xlm-roberta"),
    Splade("mpnet", "mpnet"),
    Splade("distilbert", "distilbert"),
)


def write_splade(case: Splade, folder: Path) -> Path:
    """Save the case's model as sentence-transformers does; return the folder."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import modules

    plain = write_masked(case.family, folder / "plain", case.config)
    transformer = modules.Transformer(str(plain), transformer_task="fill-mask")
    pooling = modules.SpladePooling(pooling_strategy=case.strategy, activation_function=case.activation)
    model = SparseEncoder(modules=[transformer, pooling], prompts=case.prompts or None, device="cpu")
    model.max_seq_length = LONGEST
    saved = folder / "model"
    model.save(str(saved), create_model_card=False)
    if case.legacy:
        (saved / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": LONGEST, "do_lower_case": False})
        )
        place = "sentence_transformers.sparse_encoder.models."
        listed = [
            {"idx": 0, "name": "0", "path": "", "type": f"{place}MLMTransformer"},
            {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{place}SpladePooling"},
        ]
        (saved / "modules.json").write_text(json.dumps(listed))
        settings = {"pooling_strategy": "max", "word_embedding_dimension": len(_tokenizer(case.family))}
        (saved / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    return saved


def write_masked(family: str, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A masked language model of transformers."""
    import torch
    import transformers

    torch.manual_seed(5)
    model = transformers.AutoModelForMaskedLM.from_config(_config(family, config or {}))
    _shake(model)
    model.save_pretrained(folder)
    tokenizer = _tokenizer(family)
    tokenizer.model_max_length = LONGEST
    tokenizer.save_pretrained(folder)
    return folder


def write_static(folder: Path, *, after: bool = False, prompts: dict[str, str] | None = None) -> Path:
    """A StaticEmbedding of sentence-transformers; `after`: followed by a Dense and a Normalize."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(3)
    tokenizer = _tokenizer("bert").backend_tokenizer
    vectors = torch.randn(tokenizer.get_vocab_size(), HIDDEN)
    parts: list[Any] = [modules.StaticEmbedding(tokenizer, embedding_weights=vectors)]
    if after:
        parts += [modules.Dense(HIDDEN, 12, activation_function=torch.nn.Tanh()), modules.Normalize()]
    SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(str(folder), create_model_card=False)
    return folder


def write_model2vec(
    folder: Path, *, quantized: bool = False, dtype: str = "float32", normalize: bool = True, modules: bool = True
) -> Path:
    """A folder of model2vec's; `quantized`: fewer rows than tokens, a mapping and a weight for each token."""
    from model2vec import StaticModel

    random = np.random.default_rng(3)
    tokenizer = _tokenizer("bert").backend_tokenizer
    size = tokenizer.get_vocab_size()
    rows = 20 if quantized else size
    vectors = random.standard_normal((rows, HIDDEN)) * 0.5
    table = np.round(vectors * 60).clip(-127, 127).astype(np.int8) if dtype == "int8" else vectors.astype(dtype)
    model = StaticModel(
        table,
        tokenizer,
        config={"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": HIDDEN},
        normalize=normalize,
        weights=random.uniform(0.2, 3, size) if quantized else None,
        token_mapping=random.integers(0, rows, size) if quantized else None,
        max_length=24,
    )
    model.save_pretrained(folder, model_name="tiny")
    if not modules:
        (folder / "modules.json").unlink()
    return folder


def write_m3(folder: Path, *, multi: int = 24) -> Path:
    """A small bge-m3, its heads as the convert extra writes them."""
    import torch
    from safetensors.torch import save_file

    saved = write_dense(Case("m3", "xlm-roberta", pooling="cls"), folder)
    torch.manual_seed(2)
    for name, out in (("sparse_linear", 1), ("colbert_linear", multi)):
        layer = torch.nn.Linear(HIDDEN, out)
        save_file({"weight": layer.weight.data * 4, "bias": layer.bias.data}, saved / f"{name}.safetensors")
    return saved


@dataclass(frozen=True)
class Late:
    """`change` edits config_sentence_transformers.json; `layers`: sizes of the Dense modules."""

    name: str
    family: str = "bert"
    change: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = (12,)
    residual: bool = False


LATES = (
    Late("pylate"),
    Late("pylate-attended", change={"attend_to_expansion_tokens": True}),
    Late("pylate-not-filled", change={"do_query_expansion": False}),
    Late("pylate-no-skiplist", change={"skiplist_words": []}),
    Late("pylate-own-skiplist", change={"skiplist_words": ["fish", "?", "nothing"]}),
    Late("pylate-text-prefixes", change={"query_prefix": "where can i: ", "document_prefix": ""}),
    Late("pylate-prompts", change={"prompts": {"query": "renew my: ", "document": "harbour "}}),
    Late("pylate-two-layers", layers=(40, 12)),
    Late("pylate-residual", layers=(HIDDEN, 12), residual=True),
    Late("pylate-no-layer", layers=()),
    Late("pylate-roberta", "xlm-roberta"),
    Late("pylate-distilbert", "distilbert"),
)


def write_pylate(case: Late, folder: Path) -> Path:
    """The files that PyLate 1 writes: markers among the tokens, settings in config_sentence_transformers.json."""
    encoder = _marked_encoder(case.family, folder)
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    into = HIDDEN
    for index, out in enumerate(case.layers, 1):
        _dense(encoder / f"{index}_Dense", into, out, residual=case.residual)
        listed.append({"idx": index, "name": str(index), "path": f"{index}_Dense", "type": "pylate.models.Dense.Dense"})
        into = out
    (encoder / "modules.json").write_text(json.dumps(listed))
    (encoder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 29, "do_lower_case": False}))
    settings = {
        "__version__": {"sentence_transformers": "4.0.2"},
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": MARKERS[0],
        "document_prefix": MARKERS[1],
        "query_length": 16,
        "document_length": 30,
        "attend_to_expansion_tokens": False,
        "skiplist_words": list(string.punctuation),
        "do_query_expansion": True,
    }
    (encoder / "config_sentence_transformers.json").write_text(json.dumps(settings | case.change))
    return encoder


def write_stanford(folder: Path, *, metadata: dict[str, Any] | None) -> Path:
    """A checkpoint of the Stanford library: the projection among the encoder's weights, settings in a separate JSON
    file."""
    import torch
    from safetensors.torch import load_file, save_file

    saved = _marked_encoder("bert", folder, markers=("[unused0]", "[unused1]"))
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(saved / "model.safetensors").items()}
    tensors["linear.weight"] = torch.randn(12, HIDDEN)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        (saved / "artifact.metadata").write_text(json.dumps(metadata))
    return saved


def write_multi_vector(folder: Path, finish: Callable[[Any], None] = lambda model: None) -> Path:
    """Save as sentence-transformers' MultiVectorEncoder does; `finish` edits its settings first."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(_marked_encoder("bert", folder)), device="cpu")
    finish(model)
    saved = folder / "saved"
    model.save(str(saved), create_model_card=False)
    return saved


def _marked_encoder(family: str, folder: Path, markers: tuple[str, ...] = MARKERS) -> Path:
    """An encoder with two additional tokens, as PyLate adds them."""
    import torch
    import transformers

    torch.manual_seed(9)
    tokenizer = _tokenizer(family)
    tokenizer.add_tokens(list(markers))
    tokenizer.model_max_length = LONGEST
    model = transformers.AutoModel.from_config(_config(family, {"vocab_size": len(tokenizer)}))
    _shake(model)
    saved = folder / "model"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    return saved


def _dense(folder: Path, into: int, out: int, *, residual: bool) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config: dict[str, Any] = {"in_features": into, "out_features": out, "bias": residual}
    config |= {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": residual}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"linear.weight": torch.randn(out, into) * 0.3}
    if residual:
        tensors["linear.bias"] = torch.randn(out)
        if into != out:
            tensors["residual.weight"] = torch.randn(out, into) * 0.3
    save_file(tensors, folder / "model.safetensors")


def _shake(model: Any) -> None:
    """Randomize norms and biases: fresh ones are ones and zeros, which would prove nothing."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
