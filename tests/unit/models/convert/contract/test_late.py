"""Late interaction: settings of PyLate, sentence-transformers and the Stanford library."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.heads import longest, with_markers
from shoal.models.convert.contract.lengths import Length
from shoal.models.convert.contract.types import Late
from shoal.specs import MultiSpec
from tests.unit.models.checkpoints import HIDDEN, POSITIONS, ST, vocabulary, write_json
from tests.unit.models.head_checkpoints import WIDTH, edit, modules, native, normal, pylate, stanford

WORDS = vocabulary("bert")
QUERY, DOCUMENT = len(WORDS), len(WORDS) + 1
"""The markers' ids: they were added last."""


def spec_of(folder: Path) -> MultiSpec:
    late = read_contract(folder).late
    assert late is not None
    return late.spec


def refused(folder: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        read_contract(folder)
    return caught.value


def test_pylate_format(tmp_path: Path) -> None:
    """Markers by id, queries filled with the mask token, and skipped punctuation tokens."""
    contract = read_contract(pylate(tmp_path))
    assert contract.late is not None
    assert contract.late.spec == MultiSpec(
        dimension=WIDTH,
        query_marker=QUERY,
        document_marker=DOCUMENT,
        query_length=12,
        document_length=20,
        fill_id=WORDS["[MASK]"],
        skipped=tuple(sorted((WORDS["?"], WORDS["."]))),
    )
    # max_seq_length is what PyLate last cut a text to, and says nothing.
    assert (contract.dimension, contract.max_tokens, contract.similarity) == (0, 20, "maxsim")
    assert [layer.activation for layer in contract.late.layers] == ["identity"]


def test_defaults_of_pylate(tmp_path: Path) -> None:
    """Queries have 32 tokens and are filled and not attended; all punctuation is skipped."""
    folder = pylate(tmp_path, query_length=None, document_length=None, skiplist_words=None, do_query_expansion=None)
    spec = spec_of(folder)
    assert (spec.query_length, spec.document_length, spec.attended) == (32, None, False)
    assert spec.skipped == tuple(sorted(WORDS[mark] for mark in string.punctuation if mark in WORDS))
    assert read_contract(folder).max_tokens == 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attend_to_expansion_tokens": True}, {"attended": True}),
        ({"attend_to_expansion_tokens": None, "attend_to_mask_tokens": True}, {"attended": True}),
        ({"do_query_expansion": False}, {"fill_id": None, "attended": False, "query_length": 12}),
        ({"query_prefix": "", "document_prefix": ""}, {"query_marker": None, "document_marker": None}),
        ({"query_prefix": "[Q]"}, {"query_marker": None}),
        ({"query_prefix": "fish "}, {"query_marker": WORDS["fish"]}),
        ({"skiplist_words": []}, {"skipped": ()}),
        ({"skiplist_words": ["[UNK]", "fish"]}, {"skipped": (WORDS["fish"],)}),
        (
            {"query_expansion": {"strategy": "fixed", "length": 9, "attend": True, "token": "fish"}},
            {"query_length": 9, "attended": True, "fill_id": WORDS["fish"]},
        ),
    ],
)
def test_settings_of_pylate(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each key changes only its own setting."""
    folder = pylate(tmp_path, **changes)
    spec = spec_of(folder)
    assert {name: getattr(spec, name) for name in expected} == expected


def test_a_prefix_that_is_no_token_comes_before_the_text(tmp_path: Path) -> None:
    """Once, before the role's own prompt."""
    prompts = {"query": "ask: find ", "document": "read "}
    folder = pylate(tmp_path, query_prefix="ask: ", document_prefix="see: ", prompts=prompts)
    assert read_contract(folder).prompts == {"query": "ask: find ", "document": "see: read "}


def test_any_of_its_files_identifies_it(tmp_path: Path) -> None:
    """Old files state no model type, and others have no PyLate layer."""
    folder = pylate(tmp_path / "old", model_type=None)
    assert read_contract(folder).late is not None
    folder = pylate(tmp_path / "bare", layers=0)
    late = read_contract(folder).late
    assert late is not None and late.layers == () and late.spec.dimension == HIDDEN


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"query_length": "many"}, "query_length"),
        ({"query_length": 2}, "query_length"),
        ({"document_length": 0}, "document_length"),
        ({"skiplist_words": "?"}, "skiplist_words"),
        ({"skiplist_words": [1]}, "skiplist_words"),
        ({"query_prefix": 7}, "query_prefix"),
        ({"do_query_expansion": "no"}, "do_query_expansion"),
        ({"query_expansion": {"strategy": "min", "length": 9}}, "query_expansion.strategy"),
        ({"query_expansion": {"strategy": "fixed"}}, "query_expansion.length"),
        ({"query_expansion": {"strategy": "fixed", "length": 9, "side": 1}}, "query_expansion.side"),
        ({"query_expansion": {"strategy": "fixed", "length": 9, "token": "[NONE]"}}, "query_expansion.token"),
        ({"model_type": "CrossEncoders"}, "model_type"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    """Malformed settings, and those that need another layout."""
    error = refused(pylate(tmp_path, **changes))
    assert (error.file, error.key) == ("config_sentence_transformers.json", key)


def test_no_token_to_fill_queries_with(tmp_path: Path) -> None:
    """The error names the tokenizer's file."""
    folder = pylate(tmp_path)
    text = (folder / "tokenizer.json").read_text().replace("[MASK]", "[MUSK]")
    (folder / "tokenizer.json").write_text(text)
    error = refused(folder)
    assert error.file == "tokenizer.json" and "mask token" in error.message


@pytest.mark.parametrize("kind", ["Pooling", "LayerNorm", "SpladePooling", "MultiVectorMask", "Normalize"])
def test_modules_that_are_none_of_pylate(tmp_path: Path, kind: str) -> None:
    """Its layers are Dense, and it normalizes by itself."""
    folder = pylate(tmp_path)
    modules(folder, (f"{ST}Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"), (ST + kind, "2_Other"))
    assert refused(folder).file == "modules.json"


def test_layers_that_do_not_fit(tmp_path: Path) -> None:
    """Sizes must form a chain, as for a dense model."""
    folder = pylate(tmp_path, layers=2)
    edit(folder / "2_Dense" / "config.json", in_features=5)
    error = refused(folder)
    assert (error.file, error.key) == ("2_Dense/config.json", "in_features")


def test_code_of_pylate_is_refused(tmp_path: Path) -> None:
    """Only its Dense is supported."""
    folder = pylate(tmp_path)
    modules(folder, (f"{ST}Transformer", ""), ("pylate.models.Other.Other", "1_Dense"))
    assert "custom code" in refused(folder).message


def test_sentence_transformers_format(tmp_path: Path) -> None:
    """Markers are prompts; filling, skipping and cutting are off unless the modules enable them."""
    contract = read_contract(native(tmp_path))
    assert contract.late is not None
    assert contract.late.spec == MultiSpec(dimension=WIDTH)
    assert contract.prompts == {"query": "[Q] ", "document": "[D] "}
    assert contract.max_tokens == POSITIONS


def test_settings_of_sentence_transformers(tmp_path: Path) -> None:
    """Of the Transformer and of the mask."""
    expansion = {"strategy": "fixed", "length": 8, "attend": True, "token": None}
    folder = native(
        tmp_path,
        sentence={"query_expansion": expansion, "document_length": 15, "max_seq_length": 18},
        mask={"skiplist_words": ["?"], "skiplist_tasks": ["document"]},
    )
    spec = spec_of(folder)
    assert (spec.query_length, spec.document_length, spec.attended) == (8, 15, True)
    assert (spec.fill_id, spec.skipped) == (WORDS["[MASK]"], (WORDS["?"],))
    assert read_contract(folder).max_tokens == 15


@pytest.mark.parametrize(
    ("sentence", "mask", "file", "key"),
    [
        ({"query_length": 0}, {}, "sentence_bert_config.json", "query_length"),
        ({"query_expansion": {"strategy": "min", "length": 4}}, {}, "sentence_bert_config.json", "strategy"),
        ({"transformer_task": "retrieval"}, {}, "sentence_bert_config.json", "transformer_task"),
        ({}, {"keep_only_token_ids": [4]}, "2_MultiVectorMask/config.json", "keep_only_token_ids"),
        ({}, {"skiplist_words": ["?"], "skiplist_tasks": ["query"]}, "2_MultiVectorMask/config.json", "skiplist_tasks"),
        ({}, {"novelty": 1}, "2_MultiVectorMask/config.json", "novelty"),
    ],
)
def test_settings_of_modules_that_are_refused(
    tmp_path: Path, sentence: dict[str, Any], mask: dict[str, Any], file: str, key: str
) -> None:
    """By file and key."""
    error = refused(native(tmp_path, sentence=sentence, mask=mask))
    assert error.file == file and error.key is not None and error.key.endswith(key)


def test_expansion_without_a_mask_is_refused(tmp_path: Path) -> None:
    """The added tokens would not be counted."""
    folder = native(tmp_path, sentence={"query_expansion": {"strategy": "fixed", "length": 8}})
    modules(folder, (f"{ST}Transformer", ""), (f"{ST}Dense", "1_Dense"), (f"{ST}Normalize", "3_Normalize"))
    assert refused(folder).key == "query_expansion"


def test_vectors_that_are_not_normalised_are_refused(tmp_path: Path) -> None:
    """MaxSim requires unit vectors, and a Normalize of another output does not help."""
    folder = native(tmp_path)
    modules(folder, (f"{ST}Transformer", ""), (f"{ST}Dense", "1_Dense"), (f"{ST}MultiVectorMask", "2_MultiVectorMask"))
    assert "the model does not end in a Normalize" in refused(folder).message
    folder = native(tmp_path / "other")
    write_json(folder / "3_Normalize" / "config.json", {"module_input_name": "sentence_embedding"})
    assert refused(folder).key == "module_input_name"


def test_a_checkpoint_of_the_stanford_library(tmp_path: Path) -> None:
    """Its own settings, with the usual defaults; the projection is among the encoder's weights."""
    metadata = {"query_maxlen": 10, "doc_maxlen": 25, "attend_to_mask_tokens": True, "mask_punctuation": False}
    spec = spec_of(stanford(tmp_path, metadata | {"nbits": 2, "lr": 1e-5}))
    assert (spec.query_length, spec.document_length, spec.attended, spec.skipped) == (10, 25, True, ())
    spec = spec_of(stanford(tmp_path / "silent"))
    assert (spec.query_length, spec.document_length, spec.attended) == (32, None, False)
    assert (spec.query_marker, spec.document_marker) == (QUERY, DOCUMENT)
    assert spec.skipped and spec.fill_id == WORDS["[MASK]"]


def test_stanford_checkpoints_that_are_refused(tmp_path: Path) -> None:
    """Distances other than the cosine, and another encoder's projection."""
    error = refused(stanford(tmp_path, {"similarity": "l2"}))
    assert (error.file, error.key) == ("artifact.metadata", "similarity")
    folder = stanford(tmp_path / "wide")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"linear.weight": normal(WIDTH, HIDDEN + 1)}, folder / "model.safetensors")
    assert refused(folder).key == "linear.weight"


LENGTHS = st.none() | st.integers(3, 600)


@given(query=LENGTHS, document=LENGTHS, stated=st.lists(st.integers(3, 600), max_size=2))
def test_the_longest_input(query: int | None, document: int | None, stated: list[int]) -> None:
    """Each side's own length, else the general one."""
    late = Late(
        layers=(),
        spec=MultiSpec(dimension=4, query_length=query, document_length=document),
        query_length=None if query is None else Length(query, "f", "query_length"),
        document_length=None if document is None else Length(document, "f", "document_length"),
    )
    lengths = [length.tokens for length in longest(late, [Length(each, "f", "k") for each in stated])]
    own = [length for length in (query, document) if length is not None]
    if len(own) == 2:
        assert lengths == [max(own)]
    elif stated:
        assert len(lengths) == 1 and lengths[0] >= min(stated) and all(lengths[0] >= length for length in own)
    else:
        assert lengths == []


@given(
    prompts=st.dictionaries(st.sampled_from(["query", "document", "other"]), st.text(max_size=4)),
    marker=st.text(min_size=1, max_size=3),
)
def test_markers_come_first_and_once(prompts: dict[str, str], marker: str) -> None:
    """A prompt that already has the marker stays unchanged."""
    once = with_markers(prompts, {"query": marker})
    assert once["query"].startswith(marker)
    assert with_markers(once, {"query": marker}) == once
    assert {role: text for role, text in once.items() if role != "query"} == {
        role: text for role, text in prompts.items() if role != "query"
    }
