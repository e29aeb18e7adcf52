"""Heads of the newer families, and language models that score by their answers: graphs, mistakes, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.types import Answers, Classifier
from shoal.models.convert.convert import convert
from shoal.models.convert.graphs.text import build_text_graph
from shoal.models.convert.reference import score
from shoal.models.convert.verify import Verification, verify
from tests.unit.models.checkpoints import write_json
from tests.unit.models.classifiers import pair_tokenizer
from tests.unit.models.engines import RUNS
from tests.unit.models.family_checkpoints import FAMILIES, tensors
from tests.unit.models.scoring_checkpoints import HEADS, MESSAGES, answering_checkpoint, head_checkpoint

Write = Callable[[Path], Path]
ANSWERING: dict[str, Write] = {
    "two answers": answering_checkpoint,
    "one answer": lambda folder: answering_checkpoint(folder, answers={"true_token_id": 7, "false_token_id": None}),
    "tied": lambda folder: answering_checkpoint(folder, tied=True),
    "tied by default": lambda folder: answering_checkpoint(folder, "gemma", stem="Gemma", tie_word_embeddings=None),
    "without a template": lambda folder: answering_checkpoint(folder, template=None),
}
ALL: dict[str, Write] = {
    **{name: lambda folder, name=name: head_checkpoint(folder, name) for name in HEADS},  # type: ignore[misc]
    **ANSWERING,
}


def checked(folder: Path, target: Path, engine: str, change: Callable[[Classifier], Classifier]) -> Verification:
    """Verify the graph of the model's description with `change` made to its head."""
    target.mkdir()
    converted = convert(folder, target)
    contract = converted.contract
    assert contract.classifier is not None and converted.source == "built"
    build_text_graph(folder, replace(contract, classifier=change(contract.classifier)), target / converted.graph)
    return verify(folder, contract, target, converted.spec, RUNS[engine](target / converted.graph))


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("name", ALL)
def test_the_graph_agrees_with_numpy(tmp_path: Path, name: str, engine: str) -> None:
    """Texts and pairs of several lengths in one padded batch."""
    result = checked(ALL[name](tmp_path / "model"), tmp_path / "served", engine, lambda head: head)
    assert result.passed and result.method == "reference", result.text
    assert result.max_abs_diff < 1e-4


def own(**changes: Any) -> Callable[[Classifier], Classifier]:
    return lambda head: replace(head, **changes)


WRONG: dict[str, tuple[str, Callable[[Classifier], Classifier]]] = {
    "another pooling": ("modernbert-mean", own(pooling="cls")),
    "the first token": ("qwen3", own(pooling="cls")),
    "the mean": ("modernbert", own(pooling="mean")),
    "another activation": ("modernbert-mean", own(activation="gelu")),
    "no norm": ("modernbert", own(norm="")),
    "no bias in the dense layer": ("modernbert-mean", own(dense_bias=False)),
    "no dense layer": ("albert", own(dense="")),
    "no activation": ("albert", own(activation="identity")),
    "no bias in the last layer": ("albert", own(out_bias=False)),
    "swapped answers": ("two answers", own(answers=Answers(true=11, false=7, tied=False))),
    "an answer left out": ("two answers", own(answers=Answers(true=7, tied=False))),
    "an answer too many": ("one answer", own(answers=Answers(true=7, false=11, tied=False))),
}
"""A model each, and a mistake in its graph."""


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_head_is_found(tmp_path: Path, mistake: str) -> None:
    name, change = WRONG[mistake]
    assert not checked(ALL[name](tmp_path / "model"), tmp_path / "served", "onnxruntime", change).passed


@pytest.mark.parametrize(("pad", "ends"), [(0, 3), (None, 4)])
def test_padding_at_the_end_of_a_text_is_not_its_last_token(tmp_path: Path, pad: int | None, ends: int) -> None:
    """As in transformers, which looks for the last token that is not the padding's, if there is one."""
    folder = head_checkpoint(tmp_path, "qwen3", pad_token_id=pad)
    contract = read_contract(folder)
    assert contract.encoder is not None
    texts = [np.array([7, 8, 9, 0]), np.array([7, 8, 9, 0])[:ends]]
    whole, read = score(folder, contract, contract.encoder, texts)
    np.testing.assert_allclose(whole, read, atol=1e-5)
    build_text_graph(folder, contract, tmp_path / "out.onnx")
    batch = {"input_ids": np.array([texts[0]]), "attention_mask": np.ones((1, 4), np.int64)}
    got = RUNS["openvino"](tmp_path / "out.onnx")(batch, ("logits",))["logits"][0]
    np.testing.assert_allclose(got, whole, atol=1e-5)


def test_the_last_layer_must_be_stored_unless_it_is_tied(tmp_path: Path) -> None:
    folder = answering_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"^model.safetensors: lm_head.weight: this tensor is missing"):
        build_text_graph(folder, read_contract(folder), tmp_path / "out.onnx")


def test_a_template_is_read_with_its_variables(tmp_path: Path) -> None:
    """Special tokens, and the arguments that sentence-transformers saves for it."""
    arguments = {"chat_template": {"add_generation_prompt": True, "restore_suffix": True}}
    folder = answering_checkpoint(tmp_path, sentence={"processing_kwargs": arguments})
    write_json(folder / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    head = read_contract(folder).classifier
    assert head is not None and head.spec.template is not None
    template = head.spec.template
    assert (template.file, template.structured) == ("chat_template.jinja", False)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.variables == tokens | {"add_generation_prompt": True, "tools": None, "documents": None}
    assert head.spec.labels == ("LABEL_0",)
    assert head.spec.activation == "sigmoid"


@pytest.mark.parametrize("form", ["a text", "a list"])
def test_a_template_may_be_in_the_tokenizers_settings(tmp_path: Path, form: str) -> None:
    folder = answering_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "other", "template": "no"}, {"name": "default", "template": "yes"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": "yes" if form == "a text" else named})
    head = read_contract(folder).classifier
    assert head is not None and head.spec.template is not None
    assert (head.spec.template.source, head.spec.template.file) == ("yes", "tokenizer_config.json")


SENTENCE = "sentence_bert_config.json"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("1_LogitScore/config.json", {"true_token_id": 7, "module_input_name": "logits"}, "module_input_name"),
    ("1_LogitScore/config.json", {"true_token_id": 100_000}, "true_token_id"),
    ("1_LogitScore/config.json", {"false_token_id": 7}, "true_token_id"),
    ("1_LogitScore/config.json", {"true_token_id": 7, "threshold": 1}, "threshold"),
    (SENTENCE, {"transformer_task": "text-generation"}, "modality_config"),
    (SENTENCE, {"transformer_task": "sequence-classification"}, "transformer_task"),
    (SENTENCE, {"modality_config": {"text": MESSAGES, "image": MESSAGES}}, "modality_config.image"),
    (SENTENCE, {"modality_config": {"message": MESSAGES | {"format": "other"}}}, "modality_config.message"),
    (
        SENTENCE,
        {"modality_config": {"message": MESSAGES}, "processing_kwargs": {"text": {"max_length": 4}}},
        "processing_kwargs.text",
    ),
    (
        SENTENCE,
        {"modality_config": {"message": MESSAGES}, "processing_kwargs": {"chat_template": {"max_length": 4}}},
        "processing_kwargs.chat_template.max_length",
    ),
    (
        SENTENCE,
        {"modality_config": {"message": MESSAGES}, "processing_kwargs": {"chat_template": {"restore_suffix": False}}},
        "processing_kwargs.chat_template.restore_suffix",
    ),
]


@pytest.mark.parametrize(("file", "content", "key"), REFUSED)
def test_what_changes_the_scores_is_refused_by_file_and_key(
    tmp_path: Path, file: str, content: dict[str, Any], key: str
) -> None:
    folder = answering_checkpoint(tmp_path)
    write_json(folder / file, content)
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    assert (caught.value.file, caught.value.key) == (file, key)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "phi3"}, "model_type"),
    ],
)
def test_a_language_model_that_cannot_score_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    """Also where PyTorch could run its architecture: its last layer may do more than a product."""
    folder = answering_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | changes)
    with pytest.raises(ModelFileError, match=rf"^config.json: {key}: "):
        read_contract(folder, foreign=True)


@pytest.mark.parametrize("missing", ["1_LogitScore/config.json", "chat_template.jinja"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = answering_checkpoint(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ModelFileError, match=rf"^{missing}: is missing"):
        read_contract(folder)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"classifier_pooling": "max"}, "classifier_pooling"), ({"classifier_activation": "no"}, "classifier_activation")],
)
def test_an_unknown_head_of_modern_bert_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    folder = head_checkpoint(tmp_path, "modernbert")
    write_json(folder / "config.json", HEADS["modernbert"] | changes)
    with pytest.raises(ModelFileError, match=rf"^config.json: {key}: "):
        read_contract(folder)


def test_a_family_without_a_known_head_is_refused(tmp_path: Path) -> None:
    folder = head_checkpoint(tmp_path, "albert")
    write_json(folder / "config.json", {"model_type": "t5", "architectures": ["T5ForSequenceClassification"]})
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 4, "n_positions": 32}
    write_json(folder / "config.json", config | sizes)
    with pytest.raises(ModelFileError, match=r"^config.json: model_type: 't5' classifiers .* decoder.*; use "):
        read_contract(folder)


SPLADE: dict[str, dict[str, Any]] = {
    "as transformers' defaults": FAMILIES["modernbert"],
    "with biases": FAMILIES["modernbert-biased"] | {"classifier_bias": True, "classifier_activation": "relu"},
}


def splade_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a masked language model over ModernBERT, its last layer tied to the words."""
    write_json(folder / "config.json", config | {"architectures": ["ModernBertForMaskedLM"]})
    pair_tokenizer("bert").save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"model_max_length": 48, "name_or_path": "org/splade-modern"})
    contract, random = read_contract(folder), np.random.default_rng(9)
    assert contract.encoder is not None
    shapes: dict[str, tuple[int, ...]] = {"head.dense.weight": (16, 16), "head.norm.weight": (16,)}
    if config.get("classifier_bias"):
        shapes |= {"head.dense.bias": (16,), "head.norm.bias": (16,)}
    shapes["decoder.bias"] = (contract.vocab_size,)
    head = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors(contract.encoder, "model.") | head, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("name", SPLADE)
def test_splade_over_modern_bert(tmp_path: Path, name: str, engine: str) -> None:
    folder, target = splade_checkpoint(tmp_path / "model", SPLADE[name]), tmp_path / "served"
    target.mkdir()
    converted = convert(folder, target)
    splade = converted.contract.splade
    assert splade is not None and converted.source == "built"
    run = RUNS[engine](target / converted.graph)
    result = verify(folder, converted.contract, target, converted.spec, run)
    assert result.passed and result.method == "reference", result.text
    wrong = replace(converted.contract, splade=replace(splade, inner="tanh"))
    build_text_graph(folder, wrong, target / converted.graph)
    run = RUNS[engine](target / converted.graph)
    assert not verify(folder, converted.contract, target, converted.spec, run).passed


def test_a_language_head_without_the_last_bias_is_refused(tmp_path: Path) -> None:
    folder = splade_checkpoint(tmp_path, FAMILIES["modernbert"])
    config = FAMILIES["modernbert"] | {"architectures": ["ModernBertForMaskedLM"], "decoder_bias": False}
    write_json(folder / "config.json", config)
    with pytest.raises(ModelFileError, match=r"^config.json: decoder_bias: must be true"):
        read_contract(folder)
