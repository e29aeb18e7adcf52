"""Builds the options of a language model's runner from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.backends.base.backend import NO_SAMPLING
from shoal.config.settings import ModelTable, Settings
from shoal.core.generation.runner import PATIENCE_S, GenerationOptions
from shoal.core.generation.sampling import APPLIED_BY_SHOAL, TOKEN_ID_FIELDS, parse_sampling_defaults
from shoal.core.protocols import GeneratorFacts
from shoal.core.threads import Threads
from shoal.errors import ConfigError
from shoal.types import Sampling


def build_generation_options(
    name: str,
    settings: Settings,
    table: ModelTable,
    facts: GeneratorFacts,
    threads: Threads,
    recommended: Mapping[str, Any] = NO_SAMPLING,
) -> GenerationOptions:
    """Build the options. `recommended`: sampling defaults from the model's own files, which the model's table
    overrides. Raises ConfigError for invalid sampling defaults."""
    able = facts.parameters | APPLIED_BY_SHOAL | (TOKEN_ID_FIELDS if facts.output_mode == "ids" else frozenset())
    where = f'[models."{name}".sampling]'
    try:
        defaults = parse_sampling_defaults({**recommended, **table.sampling}, able, name)
    except KeyError as error:
        known = ", ".join(Sampling.__struct_fields__)
        raise ConfigError(f"{where}: {error.args[0]!r} is not a sampling field; valid fields: {known}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    return GenerationOptions(
        model=name,
        sampling=defaults,
        default_max_tokens=settings.default_max_tokens,
        ignore=frozenset(settings.ignore_parameters),
        threads=threads,
        routing=settings.replica_routing,
        patience_s=min(PATIENCE_S, settings.first_token_timeout_s * 0.9),
    )
