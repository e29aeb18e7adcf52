"""The scripts in examples/ run, and Shoal reads the model that benchmarks write."""

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
def load_example() -> Iterator[Any]:
    """Load a script by its path, as when it is run."""
    names: list[str] = []

    def load(path: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look up their types
        names.append(spec.name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def test_images_are_drawn(
    load_example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files are named, all of them different, none of them large; the same on every machine."""
    monkeypatch.setattr("sys.argv", ["draw_images.py", str(tmp_path / "images")])
    script = load_example("examples/draw_images.py")
    script.main()
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == list(script.IMAGES)
    assert len({path.read_bytes() for path in paths}) == len(paths) >= 4
    for path in paths:
        assert 5_000 < path.stat().st_size < 60_000
        with Image.open(path) as image:
            assert image.size == script.SIZE
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in script.draw_all(tmp_path / "images")] == before
    with Image.open(tmp_path / "images" / "red_circle.jpg") as image:
        red, green, blue = np.asarray(image.convert("RGB"), np.int64)[140:160, 190:210].mean((0, 1))
    assert red > 180
    assert max(green, blue) < 80


def test_the_model_of_benchmarks_is_served(load_example: Any, tmp_path: Path) -> None:
    """A small one of them: texts and images have vectors of the same length, and are compared."""
    clip = load_example("bench/clip.py")
    folder = clip.write_clip(tmp_path / "clip", clip.TINY)
    (red, blue) = load_example("examples/draw_images.py").draw_all(tmp_path)[:2]
    with shoal.open(f"clip=file:{folder}", home=str(tmp_path / "home")) as s:
        rows = s.embed(["a red circle", red, blue])
        assert rows.shape == (3, clip.TINY.dimension)
        assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        assert not np.allclose(rows[1], rows[2], atol=1e-3)
        ranking = s.rank(red, ["a red circle", "a house"])
        cosines = {each.index: each.cosine for each in ranking}
        assert cosines[0] == pytest.approx(float(rows[0] @ rows[1]), abs=1e-4)
        assert sum(each.score for each in ranking) == pytest.approx(1)
