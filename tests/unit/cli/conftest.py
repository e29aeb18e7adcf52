"""What holds for every test of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A settings file in the current folder must not take part."""
    monkeypatch.chdir(tmp_path)
