"""Parity tests need PyTorch, transformers and sentence-transformers: `make test-parity` makes an environment with them.
Elsewhere these files are not collected, so the default suite neither imports nor skips anything."""

from __future__ import annotations

import os
from importlib.util import find_spec

# PyTorch's threads spin while they wait: several libraries with a thread for each core slow each other down eightfold
# on a busy machine. Before the first import of it, and for the processes that export.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MISSING = [name for name in ("torch", "transformers", "sentence_transformers") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    return f"parity: left out, without {', '.join(MISSING)} (make test-parity)" if MISSING else "parity: collected"
