"""The output folder: formats, what a killed process leaves, damaged shards, folders that are not continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.bulk.plan import Input, Recipe
from shoal.bulk.writing import ERRORS, MANIFEST, Rejection, Table, open_folder
from shoal.errors import ConfigError, SetupError
from shoal.types import Vectors

VECTORS: Vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
RECIPE = Recipe(task="embed", model={}, options={}, format="npy", shard_rows=3, inputs=[Input("a", 1, 1, "")])
TABLES = [Table([0], ["x"], {"vector": VECTORS[:1]}), Table([1, 2], ["y", "z"], {"vector": VECTORS[1:]})]
REJECTED = Rejection("a", 1, 0, 0, "", "empty text")


def recipe(**changes: Any) -> Recipe:
    return msgspec.structs.replace(RECIPE, **changes)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_npy_shards_have_their_rows_beside_them(tmp_path: Path) -> None:
    """Row i of the array belongs to line i of the JSONL file."""
    with open_folder(tmp_path, RECIPE) as folder:
        folder.write_shard(0, 3, TABLES, [])
        folder.finish(3)
    assert np.array_equal(np.load(tmp_path / "shard-00000.npy"), VECTORS)
    assert lines(tmp_path / "shard-00000.jsonl") == [{"row": row, "id": "xyz"[row]} for row in range(3)]
    assert json.loads((tmp_path / MANIFEST).read_text())["rows"] == 3


def test_parquet_shards_have_fixed_size_vectors(tmp_path: Path) -> None:
    """Columns are row, id and vector, of float32 lists of one size; an empty block changes no type."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    with open_folder(tmp_path, recipe(format="parquet")) as folder:
        folder.write_shard(0, 3, [Table([], [], {"vector": np.empty((0, 0), np.float32)}), *TABLES], [])
        folder.write_shard(1, 3, [Table([], [], {"vector": np.empty((0, 2), np.float32)})], [])
    table = pq.read_table(tmp_path / "shard-00000.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 2)
    assert table.to_pydict() == {"row": [0, 1, 2], "id": ["x", "y", "z"], "vector": VECTORS.tolist()}
    assert pq.read_table(tmp_path / "shard-00001.parquet").schema == table.schema


def test_jsonl_shards_hold_all_columns(tmp_path: Path) -> None:
    """Scores and answers are objects, one a row."""
    table = Table([4], None, {"score": np.array([0.5], np.float32), "answer": ["a"]})
    with open_folder(tmp_path, recipe(format="jsonl")) as folder:
        folder.write_shard(0, 1, [table], [])
    assert lines(tmp_path / "shard-00000.jsonl") == [{"row": 4, "score": 0.5, "answer": "a"}]


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_damaged_shard_is_forgotten(damage: str, tmp_path: Path) -> None:
    """Only intact shards count as finished, and keep their rejected rows."""
    with open_folder(tmp_path, RECIPE) as folder:
        folder.write_shard(0, 3, TABLES, [REJECTED])
        folder.write_shard(1, 3, TABLES, [msgspec.structs.replace(REJECTED, shard=1, row=3)])
        folder.finish(6)
    shard = tmp_path / "shard-00000.npy"
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with open_folder(tmp_path, RECIPE) as folder:
        assert (list(folder.finished), folder.manifest.rows) == ([1], None)
        assert [line["shard"] for line in lines(tmp_path / ERRORS)] == [1]
        folder.write_shard(0, 3, TABLES, [REJECTED])
        folder.finish(6)
    assert [line["row"] for line in lines(tmp_path / ERRORS)] == [0, 3]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Temporary files, rejected rows of shards without an entry, and half a line."""
    with open_folder(tmp_path, RECIPE) as folder:
        folder.append_rejections([REJECTED])
    (tmp_path / "shard-00000.npy.tmp").touch()
    with open(tmp_path / ERRORS, "ab") as file:
        file.write(b'{"file": "a", "fi')
    with open_folder(tmp_path, RECIPE):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", MANIFEST]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Foreign files, another recipe, another run at the same time."""
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes").touch()
    with pytest.raises(ConfigError, match="notes"), open_folder(used, RECIPE):
        pass
    with open_folder(tmp_path / "new", RECIPE), pytest.raises(SetupError, match="in use"):  # noqa: SIM117
        with open_folder(tmp_path / "new", RECIPE):
            pass
    with pytest.raises(ConfigError, match="--shard-rows was 3 and is 4"):  # noqa: SIM117
        with open_folder(tmp_path / "new", recipe(shard_rows=4)):
            pass
    (tmp_path / "new" / MANIFEST).write_text("{")
    with pytest.raises(SetupError, match="cannot be read"), open_folder(tmp_path / "new", RECIPE):
        pass
