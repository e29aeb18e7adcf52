"""Tiny random models of the newer families that score, as folders of files; no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shoal.models.convert.contract import Contract, read_contract
from shoal.types import Array
from tests.unit.models.checkpoints import write_json
from tests.unit.models.classifiers import pair_tokenizer
from tests.unit.models.family_checkpoints import FAMILIES, tensors

_OF_V3 = ("model_type", "rotary_emb_base", "lora_adaptations", "lora_rank", "lora_alpha")
HEADS: dict[str, dict[str, Any]] = {
    "modernbert": FAMILIES["modernbert"] | {"architectures": ["ModernBertForSequenceClassification"]},
    "modernbert-mean": FAMILIES["modernbert-biased"]
    | {
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "classifier_activation": "silu",
    },
    "albert": FAMILIES["albert"] | {"architectures": ["AlbertForSequenceClassification"]},
    **{
        name: FAMILIES[name] | {"architectures": [f"{stem}ForSequenceClassification"]}
        for name, stem in (("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("llama3", "Llama"), ("mistral", "Mistral"))
    },
    "gemma": FAMILIES["gemma"] | {"architectures": ["GemmaForSequenceClassification"]},
    "gte": FAMILIES["gte"] | {"architectures": ["GteForSequenceClassification"]},
    "gte-published": FAMILIES["gte-published"] | {"architectures": ["NewForSequenceClassification"]},
    "nomic": FAMILIES["nomic"] | {"architectures": ["NomicBertForSequenceClassification"]},
    "jina-reranker-v2": {
        **{key: value for key, value in FAMILIES["jina-v3"].items() if key not in _OF_V3},
        "architectures": ["XLMRobertaForSequenceClassification"],
        "auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"},
        "position_embedding_type": "absolute",
        "emb_pooler": None,
    },
}
"""config.json of each classifier, by a name of its own."""

TEMPLATE = (
    "judge {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('fish') }} "
    "q: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "d: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} ="
)
MESSAGES = {"method": "forward", "method_output_name": "logits"}
PACKAGE = "sentence_transformers.cross_encoder.modules"


def head_checkpoint(folder: Path, name: str, *, labels: int = 3, **changes: Any) -> Path:
    """Write a classifier of the family, as transformers does."""
    names = {str(index): f"LABEL_{index}" for index in range(labels)}
    write_json(folder / "config.json", HEADS[name] | {"id2label": names} | changes)
    return _finish(folder)


def answering_checkpoint(
    folder: Path,
    name: str = "qwen3",
    *,
    stem: str = "Qwen3",
    tied: bool = False,
    answers: dict[str, Any] | None = None,
    template: str | None = TEMPLATE,
    sentence: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a language model that scores by its answers, as sentence-transformers 6 saves it."""
    config = FAMILIES[name] | {"architectures": [f"{stem}ForCausalLM"], "tie_word_embeddings": tied}
    write_json(folder / "config.json", config | changes)
    paths = {"": "Transformer", "1_LogitScore": "LogitScore"}
    modules = [{"idx": 0, "path": path, "type": f"{PACKAGE}.{kind}"} for path, kind in paths.items()]
    write_json(folder / "modules.json", modules)
    own = (
        {"true_token_id": 7, "false_token_id": 11, "module_input_name": "causal_logits"} if answers is None else answers
    )
    write_json(folder / "1_LogitScore" / "config.json", own)
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"} | (saved or {}))
    reads = {"text": MESSAGES} | ({"message": MESSAGES | {"format": "flat"}} if template is not None else {})
    usual = {
        "transformer_task": "text-generation",
        "modality_config": reads,
        "module_output_name": "causal_logits",
    }
    write_json(folder / "sentence_bert_config.json", usual | (sentence or {}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return _finish(folder)


def _finish(folder: Path) -> Path:
    """Write the tokenizer, and the tensors that the configuration asks for."""
    pair_tokenizer("bert").save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 48, "tokenizer_class": "TokenizersBackend"})
    contract = read_contract(folder)
    assert contract.encoder is not None
    save_file(tensors(contract.encoder, contract.encoder.prefix) | _head(contract), folder / "model.safetensors")
    return folder


def _head(contract: Contract) -> dict[str, Array]:
    random, head, encoder = np.random.default_rng(9), contract.classifier, contract.encoder
    assert head is not None and encoder is not None
    width, labels = encoder.hidden, len(head.spec.labels)
    shapes: dict[str, tuple[int, ...]] = {}
    if head.dense:
        shapes[f"{head.dense}.weight"] = (width, width)
        shapes |= {f"{head.dense}.bias": (width,)} if head.dense_bias else {}
    if head.norm:
        shapes[f"{head.norm}.weight"] = (width,)
        shapes |= {f"{head.norm}.bias": (width,)} if encoder.shape.norm.bias else {}
    if head.answers is None:
        shapes[f"{head.out}.weight"] = (labels, width)
        shapes |= {f"{head.out}.bias": (labels,)} if head.out_bias else {}
    elif not head.answers.tied:
        shapes[f"{head.out}.weight"] = (encoder.vocab_size, width)
    return {name: (random.standard_normal(shape) * 0.4).astype(np.float32) for name, shape in shapes.items()}
