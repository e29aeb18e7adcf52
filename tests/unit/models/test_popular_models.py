"""The table of popular models is true: each is built from tiny files like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.models.convert.convert import convert
from shoal.models.convert.verify import verify
from tests.unit.models.engines import RUNS
from tests.unit.models.popular_models import EMBEDDERS, OTHERS, Embedder, rows, table

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("model", EMBEDDERS, ids=lambda model: model.name)
def test_it_is_served_natively(tmp_path: Path, model: Embedder) -> None:
    """Read as its files say, and the same as a forward pass in numpy."""
    folder, target = model.write(tmp_path / "model"), tmp_path / "served"
    target.mkdir()
    converted = convert(folder, target)
    spec = converted.spec
    assert (converted.source, spec.pooling) == ("built", model.pooling)
    assert spec.ends_normalized == (model.after[-1:] == ("Normalize",))
    assert tuple(spec.prompts) == model.prompts
    run = RUNS["openvino"](target / converted.graph)
    assert verify(folder, converted.contract, target, spec, run).passed


@pytest.mark.parametrize("model", OTHERS, ids=lambda model: model.name)
def test_other_kinds_have_tests_of_their_own(model: object) -> None:
    assert (ROOT / getattr(model, "test", "")).is_file()


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "model-list.md").read_text()
    assert len({row[0] for row in rows()}) == len(rows()) >= 40
