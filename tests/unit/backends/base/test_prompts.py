"""Prompts that the table of a local model adds to those of its files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.backends.base.prompts import apply_prompts
from shoal.config.settings import ModelTable
from shoal.errors import ConfigError
from shoal.models.space import stored_space
from shoal.models.store import Store, StoredModel
from shoal.specs import ScoreSpec
from tests.unit.backends.triton.open.kit import stored_model


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    return stored_model(Store(tmp_path))


def test_a_table_without_prompts_changes_nothing(stored: StoredModel) -> None:
    """The same model object is returned."""
    assert apply_prompts(stored, ModelTable()) is stored


def test_prompts_are_added(stored: StoredModel) -> None:
    """Prompts of the table win; another default prompt changes the vectors, and therefore the space."""
    own = stored.manifest.text_spec.prompts
    found = apply_prompts(stored, ModelTable(prompts={"default": "query: "}, default_prompt_name="default"))
    spec = found.manifest.text_spec
    assert (spec.prompts, spec.default_prompt_name) == ({**own, "default": "query: "}, "default")
    assert stored_space(found) != stored_space(stored)
    assert stored.manifest.text_spec.prompts == own


def test_a_default_that_nobody_knows_is_refused(stored: StoredModel) -> None:
    """The error lists the known names."""
    with pytest.raises(ConfigError, match="default_prompt_name: 'nobody' is not a prompt of org/mini: its prompts are"):
        apply_prompts(stored, ModelTable(prompts={"query": "q: "}, default_prompt_name="nobody"))
    bare = prompted_without(stored)
    with pytest.raises(ConfigError, match="it has no prompts"):
        apply_prompts(bare, ModelTable(default_prompt_name="nobody"))


def prompted_without(stored: StoredModel) -> StoredModel:
    spec = msgspec.structs.replace(stored.manifest.text_spec, prompts={}, default_prompt_name=None)
    return StoredModel(stored.path, msgspec.structs.replace(stored.manifest, text=spec))


def test_a_model_that_scores_has_none(stored: StoredModel) -> None:
    """A preset may set a prompt for every model."""
    spec = msgspec.structs.replace(stored.manifest.text_spec, score=ScoreSpec(labels=("one",), activation="sigmoid"))
    scoring = StoredModel(stored.path, msgspec.structs.replace(stored.manifest, text=spec))
    assert apply_prompts(scoring, ModelTable(default_prompt_name="query")) is scoring
