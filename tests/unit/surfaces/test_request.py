"""Options are the settings under the same names."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.config import Settings
from shoal.surfaces import Options


def test_options_are_settings() -> None:
    """Every option is a setting of the same name, type of value and default, so neither can drift."""
    settings = Settings()
    options = Options.of(settings)
    for each in fields(Options):
        if each.name != "metrics":
            assert getattr(options, each.name) == getattr(settings, each.name) == each.default, each.name


def test_a_missing_setting_is_noticed() -> None:
    """An option without its setting is a mistake of ours, and loud."""
    with pytest.raises(AttributeError):
        Options.of(object())
