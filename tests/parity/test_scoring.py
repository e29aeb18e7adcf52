"""The newer families score as transformers and sentence-transformers do: classifiers, cross-encoders, and language
models by their answers, through the whole serving path, with texts padded on the right and the reference's on either
side."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import LocalModel, open_local
from shoal.config.settings import Settings
from shoal.types import Classify
from tests.parity.family_models import MODELS, shake, words_tokenizer
from tests.parity.test_cross_encoders import DOCUMENTS, QUERY, close, cross_encoder, scores

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

LONGEST = 120
PAIRS = [(QUERY, document) for document in (*DOCUMENTS, *(" ".join(["renew a passport"] * n) for n in (9, 24, 35, 90)))]
TEMPLATE = """<|start|>Judge by the Instruct. Answer "yes" or "no".
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("find it") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|end|>
<think>

</think>

"""
CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modernbert": ("modernbert", "ModernBertForSequenceClassification", {}),
    "modernbert-mean": (
        "modernbert-biased",
        "ModernBertForSequenceClassification",
        {"classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "silu"},
    ),
    "albert": ("albert", "AlbertForSequenceClassification", {}),
    "qwen2": ("qwen2", "Qwen2ForSequenceClassification", {}),
    "qwen3": ("qwen3", "Qwen3ForSequenceClassification", {}),
    "llama": ("llama3", "LlamaForSequenceClassification", {}),
    "mistral": ("mistral", "MistralForSequenceClassification", {}),
    "gemma": ("gemma", "GemmaForSequenceClassification", {}),
}
"""Each by a name of its own: the family's, the class, and its configuration."""


def opened(folder: Path, home: Path, engine: Any) -> LocalModel:
    settings = Settings(home=str(home), offline=True, engine=engine, precision="f32", truncate=True)
    return asyncio.run(open_local("m", [parse_address(f"file:{folder}")], settings))


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_score_as_cross_encoders_do(tmp_path: Path, name: str, labels: int) -> None:
    """Pairs of mixed lengths, some cut; raw logits and scores."""
    import torch

    family, kind, changes = CLASSIFIERS[name]
    folder = tmp_path / "model"
    if family in ("qwen2", "qwen3", "llama3", "mistral", "gemma"):
        tokenizer = bytes_tokenizer()
        tokenizer.save_pretrained(folder)
        size = len(tokenizer)
    else:
        size = words_tokenizer(folder)
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": LONGEST}))
    torch.manual_seed(3)
    shake(MODELS[family](size, kind, num_labels=labels, **changes)).save_pretrained(folder)
    model = cross_encoder(folder)
    local = opened(folder, tmp_path / "home", "openvino")
    assert local.facts.max_input_tokens == model.max_seq_length == LONGEST
    assert "agrees with a numpy forward pass" in local.facts.verified
    pairs = [pair for pair in PAIRS if all(pair)]
    logits = model.predict(pairs, activation_fn=torch.nn.Identity())
    close(scores(local, Classify(model="m", inputs=[], raw_scores=True), pairs), logits)
    usual = model.predict(pairs) if labels == 1 else model.predict(pairs, apply_softmax=True)
    close(scores(local, Classify(model="m", inputs=[]), pairs), usual)


def bytes_tokenizer() -> Any:
    """A tokenizer that joins bytes across the borders of a template's parts, like those of language models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    corpus = [TEMPLATE, QUERY, " yes no yes no", *(document[:200] for document in DOCUMENTS)] * 5
    special = ["<|pad|>", "<|start|>", "<|end|>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=LONGEST
    )


def answering(folder: Path, family: str, *, template: str | None, tied: bool, one: bool, **saved: Any) -> Path:
    """Save a language model that scores by its answers, as sentence-transformers does."""
    import torch
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import modules

    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = template
    plain = folder / "plain"
    torch.manual_seed(5)
    kind = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma": "GemmaForCausalLM"}[family]
    shake(MODELS[family](len(tokenizer), kind, tie_word_embeddings=tied)).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    parts = [modules.Transformer(str(plain), transformer_task="text-generation")]
    parts.append(modules.LogitScore(yes, None if one else no))
    CrossEncoder(modules=parts, device="cpu", **saved).save(str(folder / "model"), create_model_card=False)
    return folder / "model"


ANSWERING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"template": TEMPLATE, "tied": True, "one": False}),
    "qwen3-prompt": (
        "qwen3",
        {
            "template": TEMPLATE,
            "tied": False,
            "one": False,
            "prompts": {"fish": "where do fish swim?"},
            "default_prompt_name": "fish",
        },
    ),
    "qwen2-one-answer": ("qwen2", {"template": TEMPLATE, "tied": False, "one": True}),
    "gemma": ("gemma", {"template": TEMPLATE, "tied": True, "one": True}),
    "qwen3-without-template": ("qwen3", {"template": None, "tied": True, "one": False}),
}


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "torch"])
@pytest.mark.parametrize("name", ANSWERING)
def test_language_models_score_by_their_answers(tmp_path: Path, name: str, engine: str) -> None:
    """The same tokens of a template, the same cut of a long document, the same scores."""
    import torch

    family, options = ANSWERING[name]
    folder = answering(tmp_path, family, **options)
    model, local = cross_encoder(folder), opened(folder, tmp_path / "home", engine)
    assert local.facts.max_input_tokens == model.max_seq_length == LONGEST
    assert "agrees with a numpy forward pass" in local.facts.verified
    pairs = PAIRS if options["template"] else [pair for pair in PAIRS if all(pair)]
    for raw in (False, True):
        expected = model.predict(pairs, activation_fn=torch.nn.Identity() if raw else None)
        assert np.ptp(expected) > 0.01
        close(scores(local, Classify(model="m", inputs=[], raw_scores=raw), pairs), expected)
