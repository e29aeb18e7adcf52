"""The heads of transformers' `...ForSequenceClassification` classes, by family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.errors import ModelFileError
from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.families.fields import ACTIVATIONS, read_activation
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.types import Answers, Classifier
from shoal.specs import ScoreSpec

_SEGMENTED = frozenset({"bert", "albert", "deberta", "gte", "nomic"})
"""Families whose classes are given the text that each token belongs to."""

_LOGITS = "causal_logits"
"""What sentence-transformers calls the output of a language model."""


def _modern_bert(config: JsonFile) -> dict[str, Any]:
    pooling = config.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.refuse("classifier_pooling", f"{pooling!r} is neither cls nor mean")
    return {
        "pooling": pooling,
        "dense": "head.dense",
        "dense_bias": config.boolean("classifier_bias", False),
        "activation": read_activation(config, "classifier_activation"),
        "norm": "head.norm",
        "out": "classifier",
    }


def _deberta(config: JsonFile) -> dict[str, Any]:
    activation = read_activation(config, "pooler_hidden_act", known=ACTIVATIONS | {"tanh": "tanh"})
    if config.integer("pooler_hidden_size", config.integer("hidden_size")) != config.integer("hidden_size"):
        raise config.refuse("pooler_hidden_size", "must be the hidden_size")
    return {"dense": "pooler.dense", "activation": activation, "out": "classifier"}


def _nomic(config: JsonFile) -> dict[str, Any]:
    stem = "bert" if "n_embd" in config else "nomic_bert"
    return {"dense": f"{stem}.pooler.dense", "activation": "tanh", "out": "classifier"}


def _decoder(config: JsonFile) -> dict[str, Any]:
    # Without a padding token, transformers reads the very last one.
    unread = config.integer("pad_token_id") if "pad_token_id" in config else None
    return {"pooling": "lasttoken", "out": "score", "out_bias": False, "unread": unread}


def _layers(dense: str, activation: str, out: str) -> Callable[[JsonFile], dict[str, Any]]:
    return lambda config: {"dense": dense, "activation": activation, "out": out}


_PROJECTED = _layers("classifier.dense", "tanh", "classifier.out_proj")
_HEADS: dict[str, Callable[[JsonFile], dict[str, Any]]] = {
    "bert": _layers("bert.pooler.dense", "tanh", "classifier"),
    "roberta": _PROJECTED,
    "xlm-roberta": _PROJECTED,
    "camembert": _PROJECTED,
    "mpnet": _PROJECTED,
    "distilbert": _layers("pre_classifier", "relu", "classifier"),
    "electra": _layers("classifier.dense", "gelu", "classifier.out_proj"),
    "albert": _layers("albert.pooler", "tanh", "classifier"),
    "new": _layers("new.pooler.dense", "tanh", "classifier"),
    "gte": _layers("gte.pooler.dense", "tanh", "classifier"),
    "nomic_bert": _nomic,
    "jina_embeddings_v3": _PROJECTED,
    "modernbert": _modern_bert,
    "deberta-v2": _deberta,
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3_text"), _decoder),
}
"""By model_type: the fields of a Classifier."""


_DECODES = (
    "classifiers read the last token of a decoder, and Shoal builds only the encoder; use a repository that ships "
    "onnx/model.onnx, or a classifier of another family, such as cross-encoder/nli-deberta-v3-base"
)
_UNBUILT = dict.fromkeys(("t5", "mt5"), _DECODES)


def read_head(config: JsonFile, spec: ScoreSpec, *, segments: bool) -> Classifier:
    """Read the head that the family's class has. Raises ModelFileError, naming the key, for one that is not
    supported."""
    model_type = config.text("model_type")
    if model_type in _UNBUILT:
        raise config.refuse("model_type", f"{model_type!r} {_UNBUILT[model_type]}")
    if model_type not in _HEADS:
        raise config.refuse("model_type", f"Shoal knows no classifier of {model_type!r}; it knows {', '.join(_HEADS)}")
    return Classifier(spec=spec, segments=segments, **_HEADS[model_type](config))


def read_answers(folder: Path, path: str, config: JsonFile, spec: ScoreSpec) -> Classifier:
    """Read the module in `path` that scores by the next token of the language model in `config`: sentence-transformers'
    LogitScore. Raises ModelFileError, naming the key, for one that is not supported."""
    name = f"{path}/config.json" if path else "config.json"
    module = read_object(folder, name)
    if module is None:
        raise ModelFileError("is missing, but modules.json lists this LogitScore; fetch the model again", file=name)
    module.only(frozenset({"true_token_id", "false_token_id", "module_input_name"}))
    if module.text("module_input_name", _LOGITS) != _LOGITS:
        raise module.refuse("module_input_name", f"must be {_LOGITS}")
    for key in ("true_token_id", "false_token_id"):
        if key in module and module.integer(key) >= config.integer("vocab_size"):
            raise module.refuse(key, f"is outside the vocabulary of {config.integer('vocab_size')}")
    other = module.integer("false_token_id") if "false_token_id" in module else None
    answers = make_answers(config, module.integer("true_token_id"), other)
    return Classifier(spec=spec, pooling="lasttoken", out="lm_head", answers=answers)


def make_answers(config: JsonFile, true: int, false: int | None = None) -> Answers:
    """Return the answers of the language model in `config`. Raises ModelFileError for one whose logits are not a
    product with its last layer."""
    if config.data.get("final_logit_softcapping"):
        raise config.refuse("final_logit_softcapping", "is not supported in a language model that scores")
    tied = config.boolean("tie_word_embeddings", config.text("model_type").startswith("gemma"))
    return Answers(true=true, false=false, tied=tied)


def reads_segments(encoder: Encoder) -> bool:
    """Whether the encoder tells the two texts of a pair apart by token types."""
    return encoder.family in _SEGMENTED and encoder.token_types > 1
