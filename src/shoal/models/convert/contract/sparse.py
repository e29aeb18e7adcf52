"""Read heads of sparse vectors: SPLADE over a masked language model, and bge-m3's weight per token.

A SPLADE model is one that sentence-transformers saves as a SparseEncoder, or a plain `...ForMaskedLM` whose files say
SPLADE; any other is read as an encoder, its most frequent use. bge-m3 stores its heads in files beside the encoder,
which are pickles until `convert.pickles` rewrites them as safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from shoal.errors import ModelFileError
from shoal.models.convert.contract.entries import MODULES, Entry, module_config
from shoal.models.convert.contract.families.fields import read_activation
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.types import Dense, Splade, TokenWeights
from shoal.models.convert.contract.vocabulary import Vocabulary
from shoal.models.convert.contract.weights import open_file

SPARSE_LINEAR = "sparse_linear.safetensors"
MASKED_LM = "ForMaskedLM"
_KEYS = frozenset(
    {"pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size"}
)
_STRATEGIES, _ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")
_WITHOUT_WEIGHT = ("cls", "eos", "pad", "unk")
"""Special tokens whose weights FlagEmbedding leaves out, by their roles in the tokenizer's settings."""

_XLM_R = ("<s>", "</s>", "<pad>", "<unk>")


def is_splade(entries: tuple[Entry, ...]) -> bool:
    """Whether modules.json lists a SPLADE model, whatever else is wrong with it."""
    return any(entry.kind in ("MLMTransformer", "SpladePooling") for entry in entries)


def read_splade(folder: Path, entries: tuple[Entry, ...], config: JsonFile, sentence: JsonFile | None) -> Splade:
    """Read the head of a SPLADE model. `config` is the encoder's config.json, `sentence` its sentence_bert_config.json.

    Raises ModelFileError unless the modules are a masked language model and a SpladePooling with known settings.
    """
    if len(entries) < 2 or entries[1].kind != "SpladePooling":
        raise ModelFileError("the second module must be a SpladePooling", file=MODULES, key="[1].type")
    if len(entries) > 2:
        raise ModelFileError(f"a {entries[2].kind} cannot follow a SpladePooling", file=MODULES, key=entries[2].where)
    if entries[0].kind == "Transformer" and (sentence is None or "transformer_task" not in sentence):
        name = sentence.name if sentence else "sentence_bert_config.json"
        raise ModelFileError("must be 'fill-mask' before a SpladePooling", file=name, key="transformer_task")
    pooling = module_config(folder, entries[1])
    pooling.only(_KEYS)
    strategy = _one_of(pooling, "pooling_strategy", _STRATEGIES)
    activation = _one_of(pooling, "activation_function", _ACTIVATIONS)
    for key in ("embedding_dimension", "word_embedding_dimension"):
        if key in pooling and pooling.integer(key) != config.integer("vocab_size"):
            raise pooling.refuse(
                key, f"{pooling.integer(key)} is not the vocabulary size, {config.integer('vocab_size')}"
            )
    return Splade(
        strategy=cast(Literal["max", "sum"], strategy),
        activation=cast(Literal["relu", "log1p_relu"], activation),
        **_read_language_head(config),
    )


def plain_splade(folder: Path, config: JsonFile) -> Splade | None:
    """Return the head of a masked language model without modules.json whose files call it SPLADE; None for any
    other."""
    architectures = config.texts("architectures") or [""]
    if not architectures[0].endswith(MASKED_LM):
        return None
    saved = read_object(folder, "config_sentence_transformers.json")
    tokenizer = read_object(folder, "tokenizer_config.json")
    names = [config.data.get("_name_or_path"), tokenizer.data.get("name_or_path") if tokenizer else None]
    is_sparse_encoder = saved is not None and saved.data.get("model_type") == "SparseEncoder"
    if not is_sparse_encoder and not any(isinstance(name, str) and "splade" in name.lower() for name in names):
        return None
    return Splade(**_read_language_head(config))


def is_tied(config: JsonFile) -> bool:
    """Whether the last layer of a masked language model is its word embeddings: transformers' default."""
    return config.boolean("tie_word_embeddings", True)


def _read_language_head(config: JsonFile) -> dict[str, Any]:
    """Return the fields of a Splade that the language model's own head determines."""
    tied = {"tied": is_tied(config)}
    if config.data.get("model_type") != "modernbert":
        return tied
    if not config.boolean("decoder_bias", True):
        raise config.refuse("decoder_bias", "must be true: a masked language model without it is not supported")
    inner = read_activation(config, "classifier_activation")
    return tied | {"dense_bias": config.boolean("classifier_bias", False), "inner": inner}


def refuse_pruning(saved: JsonFile) -> None:
    """Reject config_sentence_transformers.json if it keeps only the largest weights of each text."""
    if "max_active_dims" in saved:
        raise saved.refuse("max_active_dims", "keeping only the largest weights is not supported; save it with null")


def read_token_weights(folder: Path, prefix: str, width: int) -> TokenWeights | None:
    """Read bge-m3's head of token weights over vectors of `width`; None without its file."""
    name = f"{prefix}{SPARSE_LINEAR}"
    if not (folder / name).is_file():
        return None
    layer = linear_file(folder, name, width, "relu")
    if layer.out_features != 1:
        raise ModelFileError(f"must return one weight per token, not {layer.out_features}", file=name, key="weight")
    vocabulary = Vocabulary(folder, prefix)
    skipped = {vocabulary.special(role) for role in _WITHOUT_WEIGHT} - {None}
    skipped = skipped or {vocabulary.id(token) for token in _XLM_R}
    return TokenWeights(layer=layer, skipped=tuple(sorted(i for i in skipped if i is not None)))


def linear_file(folder: Path, name: str, width: int, activation: Literal["identity", "relu"]) -> Dense:
    """Read a linear layer over vectors of `width` from its own safetensors file: `weight` [out, width], optionally
    `bias`."""
    weights = open_file(folder, name)
    out, into = weights.table("weight")
    if width and into != width:
        raise ModelFileError(f"expects {into} dimensions, but its input has {width}", file=name, key="weight")
    return Dense(
        path="",
        in_features=into,
        out_features=out,
        bias=weights.has("bias"),
        activation=activation,
        file=name,
        stem="",
    )


def _one_of(config: JsonFile, key: str, known: tuple[str, ...]) -> str:
    value = config.text(key, known[0])
    if value not in known:
        raise config.refuse(key, f"{value!r} is not one of {', '.join(known)}")
    return value
