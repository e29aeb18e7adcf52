"""The settings of `shoal bulk`."""

from __future__ import annotations

from pathlib import Path

from shoal import config
from shoal.bulk.tasks import BATCH_MS
from shoal.cli.bulk import _adapt_settings


def test_no_table_makes_results_depend_on_batches(tmp_path: Path) -> None:
    """A shard that is computed again must be the same, whatever the table of its model says."""
    file = tmp_path / "shoal.toml"
    file.write_text('[models.m]\nbackends = ["fake:"]\nreproducible = false\n')
    loaded = _adapt_settings(config.load({}, {}, file))
    assert loaded.settings.reproducible
    assert loaded.for_model("m").reproducible


def test_batches_may_take_longer_unless_the_operator_says_how_long() -> None:
    """Nobody waits for one batch, but a limit that is set holds."""
    assert _adapt_settings(config.load({}, {}, None)).settings.max_batch_ms == BATCH_MS
    assert _adapt_settings(config.load({"max_batch_ms": 20.0}, {}, None)).settings.max_batch_ms == 20.0
