"""Fixtures for every test of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a settings file of the current folder out of the tests."""
    monkeypatch.chdir(tmp_path)
