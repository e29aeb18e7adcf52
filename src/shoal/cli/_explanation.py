"""Output of `shoal show --why`: how a model is read, and what would run it with the settings in effect."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import typer

from shoal.backends.local.open import describe_engine
from shoal.cli._tables import print_table
from shoal.config.settings import Settings
from shoal.models.explain import explain
from shoal.models.store import StoredModel

_DIFFERS = "differs"


def print_explanation(stored: StoredModel, settings: Settings, *, as_json: bool) -> None:
    """Print an explanation as a table, or as JSON."""
    facts = msgspec.to_builtins(explain(stored)) | describe_engine(stored, settings)
    differs = facts.pop(_DIFFERS, [])
    if as_json:
        typer.echo(json.dumps(facts | {_DIFFERS: differs}, indent=2))
        return
    rows = [(name.replace("_", " "), _text(value)) for name, value in facts.items()]
    rows += [("differs" if place == 0 else "", line) for place, line in enumerate(differs)]
    print_table(None, rows)


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list | tuple) else str(value)
