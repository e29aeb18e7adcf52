"""docs/surfaces.md lists every route, and each row names its tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.http.openapi import to_openapi_path
from shoal.surfaces import Options
from shoal.surfaces.proxy.auto_batching import AutoBatchingProxy
from shoal.web import Pages
from tests.surfaces.surface_kit import serve
from tests.surfaces.test_documented import app_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "surfaces.md").read_text()
ROW = re.compile(r"^\| `(GET|POST|DELETE) ([^` ]+)`( under `--as [\w-]+`)? \| (.+) \| (.+) \| (.+) \|$", re.M)


class Row(NamedTuple):
    method: str
    path: str
    preset: str
    dialect: str
    client: str
    tests: str

    @property
    def files(self) -> list[Path]:
        return [ROOT / "tests" / name for name in re.findall(r"`([^`]+)`", self.tests)]


ROWS = [Row(*cells) for cells in ROW.findall(PAGE)]


def test_every_route_has_a_row() -> None:
    """Exactly the registered routes: all surfaces, the pages, and routes added by presets."""
    gateway = serve().gateway
    routes = {(each.operation.method, to_openapi_path(each.operation.path)) for each in app_of().routes.all}
    routes |= {(each.method, to_openapi_path(each.path)) for each in Pages().routes(gateway)}
    added = {(each.method, each.path) for each in AutoBatchingProxy(Options()).routes(gateway)}
    assert {(row.method, row.path) for row in ROWS if not row.preset} == routes
    assert {(row.method, row.path) for row in ROWS if row.preset} == added


def test_no_row_twice() -> None:
    """A path may have several rows, one per dialect."""
    keys = [(row.method, row.path, row.preset, row.dialect) for row in ROWS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}{row.preset}: {row.dialect}")
def test_each_row_has_a_test(row: Row) -> None:
    """Its files exist, and one of them calls the path."""
    assert row.files
    texts = [file.read_text() for file in row.files]
    parts = [re.escape(part) for part in re.split(r"\{\w+\}", row.path)]
    called = re.compile(r"(?<![\w/-])" + r"[^\"'\s]+".join(parts) + r"(?![\w/-])")
    assert any(called.search(text) for text in texts), f"none of {row.tests} calls {row.path}"
    package = row.client.partition(" ")[0].replace("-", "_")
    if package not in {"recorded:", "HTTP", "HTTP:", "Chromium"}:
        assert any(re.search(rf"^(?:import|from) {package}\b", text, re.M) for text in texts)
