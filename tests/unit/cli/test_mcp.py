"""`shoal mcp` without its extra. What it does with it: tests/unit/mcp and tests/integration/test_mcp.py."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from shoal.cli import app


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "shoal.mcp.server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    result = CliRunner().invoke(app, ["mcp", "fake:"])
    assert result.exit_code == 1
    assert "`shoal mcp` needs the 'mcp' extra" in result.output
    assert "pip install -e '.[mcp]'" in result.output.replace("\n", " ")
