"""Rerankers and classifiers whose published form brings code from the model hub, which is never run: they score as
transformers' class of the same network, whose weights are stored here under the published names.

Sources: for GTE, Alibaba-NLP/new-impl (modeling.py); for Nomic, nomic-ai/nomic-bert-2048 (modeling_hf_nomic_bert.py);
for Jina, jinaai/jina-reranker-v2-base-multilingual (modeling_xlm_roberta.py, embedding.py, config.json), an XLM-R with
other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.types import Classify
from tests.parity.family_models import MODELS, shake, words_tokenizer
from tests.parity.test_cross_encoders import close, cross_encoder, scores
from tests.parity.test_scoring import LONGEST, PAIRS, opened

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


class Form(NamedTuple):
    """A published form: `make` returns the network of a vocabulary and a number of labels. `names` replaces patterns in
    the names of its tensors. `config` returns the published config.json."""

    make: Callable[[int, int], Any]
    names: dict[str, str]
    config: Callable[[dict[str, Any]], dict[str, Any]]


def xlm_roberta(words: int, labels: int) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.XLMRobertaConfig(
        vocab_size=words, type_vocab_size=1, pad_token_id=0, max_position_embeddings=LONGEST + 1, num_labels=labels,
        layer_norm_eps=1e-5, initializer_range=0.3, **sizes,
    )  # fmt: skip
    return transformers.XLMRobertaForSequenceClassification(config)


def jina_config(config: dict[str, Any]) -> dict[str, Any]:
    code = "modeling_xlm_roberta.XLMRobertaForSequenceClassification"
    auto_map = {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModelForSequenceClassification": code,
    }
    own = {"auto_map": auto_map, "emb_pooler": None, "position_embedding_type": "absolute", "use_flash_attn": True}
    return {key: value for key, value in config.items() if key != "model_type"} | own


def gte_config(config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "model_type": "new",
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {
            "AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification"
        },
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "position_embedding_type": "rope",
        "pack_qkv": True,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    return {key: value for key, value in config.items() if key != "rope_parameters"} | own


def nomic_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertForSequenceClassification"],
        "auto_map": {"AutoModelForSequenceClassification": "modeling_hf_nomic_bert.NomicBertForSequenceClassification"},
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
        "activation_function": "swiglu",
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "prenorm": False,
        **{key: config[key] for key in ("vocab_size", "type_vocab_size", "pad_token_id", "id2label")},
    }


FORMS: dict[str, Form] = {
    "gte": Form(
        lambda words, labels: MODELS["gte"](
            words, "GteForSequenceClassification", num_labels=labels, type_vocab_size=2, initializer_range=0.1
        ),
        {r"^gte\.": "new."},
        gte_config,
    ),
    "nomic": Form(
        lambda words, labels: MODELS["nomic"](
            words, "NomicBertForSequenceClassification", num_labels=labels, initializer_range=0.1
        ),
        {r"^nomic_bert\.": "bert."},
        nomic_config,
    ),
    "jina-reranker-v2": Form(
        xlm_roberta,
        {
            r"\.embeddings\.LayerNorm\.": ".emb_ln.",
            r"\.encoder\.layer\.": ".encoder.layers.",
            r"\.attention\.output\.dense\.": ".mixer.out_proj.",
            r"\.attention\.output\.LayerNorm\.": ".norm1.",
            r"\.intermediate\.dense\.": ".mlp.fc1.",
            r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
            r"(layers\.\d+)\.output\.LayerNorm\.": r"\1.norm2.",
        },
        jina_config,
    ),
}


def publish(form: Form, plain: Path, folder: Path) -> None:
    """Write the model of `plain`, as transformers saved it, in its published form."""
    import torch
    from safetensors.torch import load_file, save_file

    stored = load_file(plain / "model.safetensors")
    renamed: dict[str, Any] = {}
    for name, tensor in stored.items():
        for pattern, replacement in form.names.items():
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901
        renamed[name] = tensor
    for name in [each for each in renamed if ".attention.self.query." in each]:
        parts = [renamed.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        renamed[name.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(form.config(config)))


def made(tmp_path: Path, name: str, labels: int) -> tuple[Path, Path]:
    """Return the folders of transformers' form and of the published one."""
    import torch

    plain, folder = tmp_path / "plain", tmp_path / "model"
    for place in (plain, folder):
        size = words_tokenizer(place)
        settings = place / "tokenizer_config.json"
        inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name != "jina-reranker-v2" else [])]
        own = {"model_max_length": LONGEST, "model_input_names": inputs}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    torch.manual_seed(3)
    form = FORMS[name]
    shake(form.make(size, labels)).save_pretrained(plain)
    publish(form, plain, folder)
    return plain, folder


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", FORMS)
def test_published_heads_score_as_those_of_transformers(tmp_path: Path, name: str, engine: str) -> None:
    """Pairs of mixed lengths, some cut; raw logits and scores of a reranker, computed in float64."""
    import torch

    plain, folder = made(tmp_path, name, 1)
    model = cross_encoder(plain)
    model.model.double()
    local = opened(folder, tmp_path / "home", engine)
    assert local.facts.tasks == ("rerank", "classify")
    assert local.facts.max_input_tokens == model.max_seq_length == LONGEST
    assert "agrees with a numpy forward pass" in local.facts.verified
    pairs = [pair for pair in PAIRS if all(pair)]
    logits = model.predict(pairs, activation_fn=torch.nn.Identity())
    close(scores(local, Classify(model="m", inputs=[], raw_scores=True), pairs), logits)
    close(scores(local, Classify(model="m", inputs=[]), pairs), model.predict(pairs))


def test_a_classifier_of_several_labels(tmp_path: Path) -> None:
    plain, folder = made(tmp_path, "nomic", 3)
    local = opened(folder, tmp_path / "home", "openvino")
    assert local.facts.tasks == ("classify",)
    pairs = [pair for pair in PAIRS if all(pair)]
    expected = cross_encoder(plain).predict(pairs, apply_softmax=True)
    close(scores(local, Classify(model="m", inputs=[]), pairs), expected)


WRONG: dict[str, tuple[str, str]] = {
    "gte": ("new.pooler.dense.weight", "flip"),
    "nomic": ("bert.embeddings.token_type_embeddings.weight", "flip"),
    "jina-reranker-v2": ("roberta.embeddings.position_embeddings.weight", "roll"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_weights_score_otherwise(tmp_path: Path, name: str) -> None:
    """The comparison notices a pooler, a token type or a position of another row: the network reads them."""
    from safetensors.torch import load_file, save_file

    plain, folder = made(tmp_path, name, 1)
    stored = load_file(folder / "model.safetensors")
    tensor, change = WRONG[name]
    stored[tensor] = getattr(stored[tensor], change)(*([1, 0] if change == "roll" else [0])).contiguous()
    save_file(stored, folder / "model.safetensors")
    local = opened(folder, tmp_path / "home", "openvino")
    pairs = [pair for pair in PAIRS if all(pair)]
    with pytest.raises(AssertionError):
        close(scores(local, Classify(model="m", inputs=[]), pairs), cross_encoder(plain).predict(pairs))
