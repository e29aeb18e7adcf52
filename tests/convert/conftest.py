"""Tests of the extra `convert-images` need torchvision, open_clip and timm: `make test-convert` makes an environment
with them. Elsewhere these files are not collected at all."""

from __future__ import annotations

import os

# Set before PyTorch is first imported, and for the export processes: its threads spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "2")

from shoal.models.convert.export_dual_encoder import can_export_towers

collect_ignore_glob = [] if can_export_towers() else ["test_*.py"]


def pytest_report_header() -> str:
    return "convert: collected" if can_export_towers() else "convert: left out (make test-convert)"
