"""`python -m shoal.config` writes docs/settings.md."""

from __future__ import annotations

import sys

from shoal.config.reference import render_reference

if __name__ == "__main__":
    sys.stdout.write(render_reference())
