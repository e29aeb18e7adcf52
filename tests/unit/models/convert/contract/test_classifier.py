"""Classifiers and cross-encoders: detection, labels, activation and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.classifier import read_activation, read_labels
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.types import Classifier
from tests.unit.models.checkpoints import HIDDEN, checkpoint, write_json
from tests.unit.models.classifiers import IDENTITY, KINDS, SIGMOID, classifier, head_names

PLAIN = "torch.nn.Softmax"


def config(**data: Any) -> JsonFile:
    return JsonFile("config.json", data)


def head(folder: Path) -> Classifier:
    head_spec = read_contract(folder).classifier
    assert head_spec is not None
    return head_spec


def saved(**data: Any) -> JsonFile:
    return JsonFile("config_sentence_transformers.json", {"model_type": "CrossEncoder"} | data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_its_head(tmp_path: Path, kind: str) -> None:
    """Layer names, activation, and segment ids for families trained with them."""
    head_spec = head(classifier(tmp_path, kind, labels=3))
    assert (head_spec.dense, head_spec.out) == head_names(kind)
    assert head_spec.activation == {"distilbert": "relu", "electra": "gelu"}.get(kind, "tanh")
    assert head_spec.segments == (kind in ("bert", "electra"))
    assert head_spec.spec.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_classifier_embeds_nothing(tmp_path: Path) -> None:
    """Its contract has lengths and tokens but no dimension."""
    contract = read_contract(classifier(tmp_path))
    assert (contract.dimension, contract.max_tokens, contract.pad_id) == (0, 30, 0)
    assert contract.encoder is not None and contract.vocab_size == contract.encoder.vocab_size


def test_modules_with_a_pooling_make_an_embedder(tmp_path: Path) -> None:
    """For any encoder class: sentence-transformers follows modules.json."""
    contract = read_contract(checkpoint(tmp_path, config={"architectures": ["BertForSequenceClassification"]}))
    assert contract.classifier is None
    assert contract.dimension == HIDDEN


@pytest.mark.parametrize("architectures", [["BertModel"], ["BertForMaskedLM", "BertForSequenceClassification"], None])
def test_the_first_architecture_counts(tmp_path: Path, architectures: Any) -> None:
    """As in sentence-transformers; with another first class the model is an encoder with an unused head."""
    folder = classifier(tmp_path, config={"architectures": architectures})
    assert read_contract(folder).classifier is None


def test_a_cross_encoder_as_sentence_transformers_6_saves_it(tmp_path: Path) -> None:
    """One Transformer in modules.json, optionally in its own folder; the settings next to it are for scoring."""
    whole = classifier(tmp_path / "flat", saved={"activation_fn": IDENTITY, "prompts": {"q": "query: "}})
    contract = read_contract(whole)
    assert head(whole).spec.activation == "identity"
    assert (contract.prompts, contract.default_prompt_name) == ({"q": "query: "}, None)
    folder = tmp_path / "nested"
    classifier(folder / "0_Transformer", "mpnet")
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind}])
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    assert read_contract(folder).encoder_path == "0_Transformer"
    assert head(folder).spec.pairs


@pytest.mark.parametrize(
    ("modules", "key"),
    [
        ([], None),
        ({}, None),
        (
            [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}],
            "[1]",
        ),
        ([{"type": "own.code.Transformer", "path": ""}], "[0].type"),
        (["sentence_transformers.models.Transformer"], "[0].type"),
        ([{"type": "sentence_transformers.models.Transformer", "path": 3}], None),
        ([{"type": "sentence_transformers.models.Transformer", "path": "../other"}], "[0].path"),
    ],
)
def test_more_than_one_transformer_is_refused(tmp_path: Path, modules: Any, key: str | None) -> None:
    """The scores of other modules would be wrong."""
    folder = classifier(tmp_path, saved={})
    write_json(folder / "modules.json", modules)
    with pytest.raises(ModelFileError) as refused:
        read_contract(folder)
    assert str(refused.value).startswith("modules.json")
    assert key is None or key in str(refused.value)


def test_a_cross_encoder_needs_a_classifier(tmp_path: Path) -> None:
    """A causal model scored by yes and no logits is not supported."""
    folder = classifier(tmp_path, config={"architectures": ["BertForMaskedLM"]}, saved={})
    with pytest.raises(ModelFileError, match=r"architectures.*no scores"):
        read_contract(folder)


@pytest.mark.parametrize(
    "changes",
    [{"transformer_task": "feature-extraction"}, {"module_output_name": "token_embeddings"}, {"odd": 1}],
)
def test_settings_that_change_scores_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Settings of sentence_bert_config.json must match the served model."""
    folder = classifier(tmp_path, saved={})
    place = folder / "sentence_bert_config.json"
    write_json(place, json.loads(place.read_text()) | changes)
    with pytest.raises(ModelFileError, match=f"sentence_bert_config.json: {next(iter(changes))}"):
        read_contract(folder)


def test_an_architecture_without_a_graph_is_refused(tmp_path: Path) -> None:
    """By its own key, as for embedders, unless it ships a graph."""
    changes = {"model_type": "xlnet", "architectures": ["XLNetForSequenceClassification"]}
    folder = classifier(tmp_path, config=changes)
    with pytest.raises(ModelFileError, match="model_type"):
        read_contract(folder)
    (folder / "model.onnx").write_bytes(b"")
    head_spec = head(folder)
    assert (head_spec.dense, head_spec.spec.labels) == ("", ("LABEL_0",))


@pytest.mark.parametrize(
    ("config", "segments"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizerFast"}, True),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, False),
        ({"tokenizer_class": "AlbertTokenizer"}, False),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, True),
    ],
)
def test_segments_are_those_that_the_tokenizer_gives(tmp_path: Path, config: dict[str, Any], segments: bool) -> None:
    """A BERT with a RoBERTa tokenizer never had a second segment."""
    folder = classifier(tmp_path)
    write_json(folder / "tokenizer_config.json", {"model_max_length": 30} | config)
    assert head(folder).segments == segments


def test_a_single_segment_is_no_input(tmp_path: Path) -> None:
    """A table of one row distinguishes nothing."""
    assert not head(classifier(tmp_path, config={"type_vocab_size": 1})).segments


def test_without_a_tokenizer_config_segments_are_given(tmp_path: Path) -> None:
    """transformers' default for BERT."""
    folder = classifier(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert head(folder).segments


def test_tables_of_their_own_width_are_projected(tmp_path: Path) -> None:
    """As in ELECTRA's small models; the head's width is the hidden size."""
    encoder = read_contract(classifier(tmp_path, "electra", config={"embedding_size": 8})).encoder
    assert encoder is not None
    assert (encoder.embeddings.width, encoder.embeddings.projection) == (8, "embeddings_project")


class TestLabels:
    """id2label, num_labels, and transformers' default of two."""

    @given(st.lists(st.text(max_size=8), min_size=1, max_size=40, unique=True), st.randoms(use_true_random=False))
    def test_they_come_in_the_order_of_their_numbers(self, names: list[str], order: Any) -> None:
        """For any order of the object's keys."""
        items = [(str(index), name) for index, name in enumerate(names)]
        order.shuffle(items)
        assert read_labels(config(id2label=dict(items))) == tuple(names)

    @pytest.mark.parametrize(("fields", "count"), [({}, 2), ({"num_labels": 5}, 5), ({"num_labels": None}, 2)])
    def test_without_names_they_are_numbered(self, fields: dict[str, Any], count: int) -> None:
        """With transformers' default names."""
        assert read_labels(config(**fields)) == tuple(f"LABEL_{index}" for index in range(count))

    def test_numeric_names_are_converted_to_text(self) -> None:
        """Some configurations have them."""
        assert read_labels(config(id2label={"0": 0, "1": 1})) == ("0", "1")

    @pytest.mark.parametrize(
        "fields",
        [
            {"id2label": {"0": "a", "2": "c"}},
            {"id2label": {"1": "a"}},
            {"id2label": {}},
            {"id2label": ["a"]},
            {"num_labels": 0},
            {"num_labels": 10**9},
            {"num_labels": True},
            {"id2label": {"0": None}},
            {"id2label": {"0": {"a": 1}}},
            {"id2label": {"0": "a", "1": "a"}},
            {"id2label": {str(index): str(index) for index in range(100_001)}},
        ],
    )
    def test_invalid_numberings_are_refused(self, fields: dict[str, Any]) -> None:
        """By key."""
        with pytest.raises(ModelFileError, match=next(iter(fields))):
            read_labels(config(**fields))


class TestActivation:
    """Each case of the activation rule."""

    @pytest.mark.parametrize("labels", [1, 3])
    @pytest.mark.parametrize(
        "name",
        [
            "torch.nn.modules.activation.Sigmoid",
            "torch.nn.modules.activation.Softmax",
            "torch.nn.modules.linear.Identity",
            "torch.nn.Sigmoid",
            "torch.nn.Softmax",
            "torch.nn.Identity",
        ],
    )
    def test_a_named_one_stands(self, name: str, labels: int) -> None:
        """In each of the three places."""
        expected = name.rpartition(".")[2].lower()
        assert read_activation(config(), saved(activation_fn=name), labels) == expected
        assert read_activation(config(sentence_transformers={"activation_fn": name}), None, labels) == expected
        assert read_activation(config(sbert_ce_default_activation_function=name), None, labels) == expected

    def test_the_newest_place_is_believed(self) -> None:
        """The separate file first, then config.json's object, then the oldest key."""
        both = config(sentence_transformers={"activation_fn": IDENTITY}, sbert_ce_default_activation_function=PLAIN)
        assert read_activation(both, saved(activation_fn=SIGMOID), 3) == "sigmoid"
        assert read_activation(both, saved(), 3) == "identity"

    @pytest.mark.parametrize("labels", [1, 4])
    def test_code_of_its_own_is_passed_over(self, labels: int) -> None:
        """A name outside of torch means the default, as in sentence-transformers."""
        expected = "sigmoid" if labels == 1 else "identity"
        assert read_activation(config(), saved(activation_fn="my.Own"), labels) == expected
        assert read_activation(config(sbert_ce_default_activation_function="my.Own"), None, labels) == expected

    def test_an_activation_that_is_not_known_is_refused(self) -> None:
        """It would change the scores."""
        with pytest.raises(ModelFileError, match=r"activation_fn: unknown activation 'torch.nn.Tanh'.*Sigmoid"):
            read_activation(config(), saved(activation_fn="torch.nn.Tanh"), 1)

    @pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
    def test_one_label_has_a_sigmoid(self, problem: str | None) -> None:
        """For any problem_type: training leaves "regression" there."""
        assert read_activation(config(problem_type=problem), None, 1) == "sigmoid"
        assert read_activation(config(problem_type=problem), saved(), 1) == "sigmoid"

    @pytest.mark.parametrize(
        ("problem", "expected"),
        [
            (None, "softmax"),
            ("single_label_classification", "softmax"),
            ("multi_label_classification", "sigmoid"),
            ("regression", "identity"),
        ],
    )
    def test_a_plain_classifier_follows_its_problem(self, problem: str | None, expected: str) -> None:
        """As in transformers' pipeline; a cross-encoder with several labels has no activation."""
        assert read_activation(config(problem_type=problem), None, 3) == expected
        assert read_activation(config(problem_type=problem), saved(), 3) == "identity"
        assert read_activation(config(problem_type=problem, sentence_transformers={}), None, 3) == "identity"

    def test_an_unknown_problem_type_is_refused(self) -> None:
        """By key."""
        with pytest.raises(ModelFileError, match="problem_type"):
            read_activation(config(problem_type="ranking"), None, 3)


@pytest.mark.parametrize(
    ("labels", "config", "pairs"),
    [
        (1, {}, True),
        (3, {}, False),
        (3, {"sbert_ce_default_activation_function": None}, True),
        (3, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
    ],
)
def test_models_trained_on_pairs(tmp_path: Path, labels: int, config: dict[str, Any], pairs: bool) -> None:
    """Rerankers and cross-encoders; unknown for a classifier with several labels."""
    assert head(classifier(tmp_path, labels=labels, config=config)).spec.pairs == pairs
