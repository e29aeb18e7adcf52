"""Names of stored models, without the modules that open them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal.models.manifest import MANIFEST
from shoal.models.stored_names import list_stored_names


def test_names_are_those_of_the_manifests(tmp_path: Path) -> None:
    """Each once; what cannot be read is left out, and no store is no name."""
    for place, text in (("a/1", '{"id": "a"}'), ("a/2", '{"id": "a"}'), ("b/1", "{"), ("c/1", '{"id": "org/c"}')):
        folder = tmp_path / "models" / place
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(text)
    assert list_stored_names(str(tmp_path)) == ["a", "org/c"]
    assert list_stored_names(str(tmp_path / "none")) == []


def test_it_imports_no_numpy() -> None:
    """A key press must not wait for it."""
    code = "import sys, shoal.models.stored_names; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
