"""Flags of other servers that may have no value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app

runner = CliRunner()


def show_config(*words: str) -> Any:
    result = runner.invoke(app, ["config", "--json", "--as", "tei", *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["settings"]


@pytest.mark.parametrize(
    ("words", "truncate", "source"),
    [
        (["--auto-truncate"], True, "--auto-truncate"),
        (["--auto-truncate", "true"], True, "--auto-truncate"),
        (["--auto-truncate", "false"], False, "--auto-truncate"),
        (["--auto-truncate=false"], False, "--auto-truncate"),
        (["--auto-truncate", "--port", "9000"], True, "--auto-truncate"),
        (["--auto-truncate", "--no-truncate"], False, "--no-truncate"),
        ([], True, "default"),
    ],
)
def test_a_value_may_follow(words: list[str], truncate: bool, source: str) -> None:
    """Without a value the flag means yes. Shoal's own flag wins."""
    assert show_config(*words)["truncate"] == {"value": truncate, "source": source}


def test_an_address_after_it_stays_one() -> None:
    """An address after the flag is not its value."""
    result = runner.invoke(app, ["config", "--json", "--as", "tei", "--json-output", "--model-id", "a/b"])
    output = json.loads(result.stdout)
    assert output["settings"]["log_format"]["value"] == "json"
    assert output["models"]["value"] == ["hf:a/b"]
