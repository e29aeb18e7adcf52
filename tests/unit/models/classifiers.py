"""Tiny random classifiers and cross-encoders as folders of files, complementing the embedders of `checkpoints`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from shoal.types import Array
from tests.unit.models.checkpoints import HIDDEN, checkpoint, encoder_config, encoder_tensors, tokenizer, write_json

KINDS = ("bert", "electra", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert")
NAMES = {
    "bert": "Bert",
    "electra": "Electra",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "mpnet": "MPNet",
    "distilbert": "DistilBert",
}
HEADS = {"bert": ("bert.pooler.dense", "classifier"), "distilbert": ("pre_classifier", "classifier")}
PREFIXES = {"xlm-roberta": "roberta", "camembert": "roberta"}
SIGMOID = "torch.nn.modules.activation.Sigmoid"
IDENTITY = "torch.nn.modules.linear.Identity"


def head_names(kind: str) -> tuple[str, str]:
    """The two linear layers of a head."""
    return HEADS.get(kind, ("classifier.dense", "classifier.out_proj"))


def classifier_config(kind: str, labels: int) -> dict[str, Any]:
    config = encoder_config("bert" if kind == "electra" else kind)
    names = [f"LABEL_{index}" for index in range(labels)]
    return config | {
        "model_type": kind,
        "architectures": [f"{NAMES[kind]}ForSequenceClassification"],
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def classifier_tensors(kind: str, labels: int) -> dict[str, Array]:
    tensors = encoder_tensors("bert" if kind == "electra" else kind, prefix=f"{PREFIXES.get(kind, kind)}.")
    random = np.random.default_rng(9)
    dense, out = head_names(kind)
    for name, rows in ((dense, HIDDEN), (out, labels)):
        tensors[f"{name}.weight"] = (random.standard_normal((rows, HIDDEN)) * 0.4).astype(np.float32)
        tensors[f"{name}.bias"] = random.standard_normal(rows).astype(np.float32)
    return tensors


def pair_tokenizer(kind: str) -> Tokenizer:
    """Frame pairs as the families do: BERT with segment ids, RoBERTa with two separators between the texts."""
    tiny_tokenizer = tokenizer("bert" if kind == "electra" else kind)
    cls, sep = ("[CLS]", "[SEP]") if kind in ("bert", "electra", "distilbert") else ("<s>", "</s>")
    second = f"$B:1 {sep}:1" if kind in ("bert", "electra", "distilbert") else f"{sep} $B {sep}"
    words = tiny_tokenizer.get_vocab()
    tiny_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} {second}",
        special_tokens=[(cls, words[cls]), (sep, words[sep])],
    )
    return tiny_tokenizer


def classifier(
    folder: Path, kind: str = "bert", *, labels: int = 1, config: dict[str, Any] | None = None, saved: Any = None
) -> Path:
    """Write a classifier as transformers does; `saved` adds config_sentence_transformers.json and related files, as
    sentence-transformers 6 writes a cross-encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", classifier_config(kind, labels) | (config or {}))
    save_file(classifier_tensors(kind, labels), folder / "model.safetensors")
    pair_tokenizer(kind).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 30, "tokenizer_class": "PreTrainedTokenizerFast"})
    if saved is not None:
        kinds = {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.base.modules.transformer.Transformer",
        }
        write_json(folder / "modules.json", [kinds])
        write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"} | saved)
        write_json(
            folder / "sentence_bert_config.json",
            {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "scores",
            },
        )
    return folder


__all__ = ["HIDDEN", "checkpoint", "classifier", "classifier_config", "classifier_tensors", "head_names"]
