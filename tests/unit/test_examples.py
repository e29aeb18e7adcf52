"""The scripts in examples/ run, and the model that benchmarks write is one that Shoal reads."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shoal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def loaded() -> Iterator[Any]:
    """Load a script by its path, as it is when it is run."""
    names: list[str] = []

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their types up
        names.append(spec.name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def test_pictures_are_drawn(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files are named, all of them different, none of them large; the same on every machine."""
    monkeypatch.setattr("sys.argv", ["draw_pictures.py", str(tmp_path / "pictures")])
    script = loaded("examples/draw_pictures.py")
    script.main()
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == list(script.PICTURES)
    assert len({path.read_bytes() for path in paths}) == len(paths) >= 4
    for path in paths:
        assert 5_000 < path.stat().st_size < 60_000
        with Image.open(path) as picture:
            assert picture.size == script.SIZE
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in script.draw_all(tmp_path / "pictures")] == before
    with Image.open(tmp_path / "pictures" / "red_circle.jpg") as picture:
        red, green, blue = np.asarray(picture.convert("RGB"), np.int64)[140:160, 190:210].mean((0, 1))
    assert red > 180
    assert max(green, blue) < 80


def test_the_model_of_benchmarks_is_served(loaded: Any, tmp_path: Path) -> None:
    """A small one of them: texts and pictures have vectors of the same length, and are compared."""
    clip = loaded("bench/clip.py")
    folder = clip.write_clip(tmp_path / "clip", clip.TINY)
    (red, blue) = loaded("examples/draw_pictures.py").draw_all(tmp_path)[:2]
    with shoal.open(f"clip=file:{folder}", home=str(tmp_path / "home")) as s:
        rows = s.embed(["a red circle", red, blue])
        assert rows.shape == (3, clip.TINY.dimension)
        assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        assert not np.allclose(rows[1], rows[2], atol=1e-3)
        found = s.rank(red, ["a red circle", "a house"])
        cosines = {each.index: each.cosine for each in found}
        assert cosines[0] == pytest.approx(float(rows[0] @ rows[1]), abs=1e-4)
        assert sum(each.score for each in found) == pytest.approx(1)
