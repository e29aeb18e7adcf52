"""Overrides a model's prompts with those of its configuration."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from shoal.config.settings import ModelTable
from shoal.errors import ConfigError
from shoal.models.store import StoredModel
from shoal.specs import TextSpec


def override_prompts(name: str, spec: TextSpec, table: ModelTable) -> TextSpec:
    """Return the specification with the table's prompts over its own, which changes the vector space. Models that only
    score ignore prompts. Raises ConfigError for a default prompt that neither has."""
    if spec.score is not None or not (table.prompts or table.default_prompt_name):
        return spec
    prompts = {**spec.prompts, **table.prompts}
    default = table.default_prompt_name or spec.default_prompt_name
    if default is not None and default not in prompts:
        has = f"its prompts are {', '.join(sorted(prompts))}" if prompts else "it has no prompts"
        raise ConfigError(f"default_prompt_name: {default!r} is not a prompt of {name}: {has}")
    return msgspec.structs.replace(spec, prompts=prompts, default_prompt_name=default)


def apply_prompts(stored: StoredModel, table: ModelTable) -> StoredModel:
    """Return the model with `override_prompts`; itself if the table has no prompts."""
    spec = stored.manifest.text_spec
    overridden = override_prompts(stored.manifest.id, spec, table)
    if overridden is spec:
        return stored
    return replace(stored, manifest=msgspec.structs.replace(stored.manifest, text=overridden))
