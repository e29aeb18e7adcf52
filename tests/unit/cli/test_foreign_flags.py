"""Flags of the servers that presets replace, on Shoal's command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.config.presets import FLAGS

runner = CliRunner()


def show_config(*words: str) -> Any:
    result = runner.invoke(app, ["config", "--json", *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("words", [("--triton_http_host", "10.0.0.5"), ("--triton_http_host=10.0.0.5",)])
def test_they_are_read_under_their_preset(words: tuple[str, ...]) -> None:
    """They work before and after it, in both forms, beside Shoal's own flags."""
    for line in ((*words, "--as", "triton-openai"), ("--as", "triton-openai", *words, "--port", "9000")):
        assert show_config(*line)["models"] == {"value": ["triton://10.0.0.5:8001"], "source": "--triton_http_host"}


def test_addresses_may_stand_between() -> None:
    """A positional address wins over a flag."""
    config = show_config("--as", "triton-openai", "--triton_http_host", "h", "triton://other:9001", "--verbose", "True")
    assert config["models"]["value"] == ["triton://other:9001"]
    assert config["settings"]["log_level"] == {"value": "debug", "source": "--verbose"}


@pytest.mark.parametrize("flag", FLAGS)
def test_without_the_preset_the_error_names_it(flag: str) -> None:
    """It is a usage error with exit code 2."""
    result = runner.invoke(app, ["config", flag, "1"])
    assert result.exit_code == 2
    assert f"{flag} is a flag of {FLAGS[flag].name}: add --as {FLAGS[flag].name}" in " ".join(result.output.split())


def test_the_help_is_about_shoal_s_own() -> None:
    """Flags of other servers are not listed."""
    text = runner.invoke(app, ["serve", "--help-all"], env={"COLUMNS": "400"}).output
    assert "--default-max-tokens" in text
    assert not [flag for flag in FLAGS if f"{flag} " in text]


def test_other_commands_do_not_know_them() -> None:
    """Presets apply to serving only."""
    result = runner.invoke(app, ["embed", "--triton_http_host", "h", "text"])
    assert result.exit_code == 2
    assert "No such option" in result.output
