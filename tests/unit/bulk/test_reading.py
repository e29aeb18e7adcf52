"""Rows of files in every format: order, skipping, bad rows, columns."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bulk import reading
from shoal.bulk.reading import Columns, Row, Rows, describe_inputs, find_files
from shoal.errors import ConfigError, SetupError

TEXT = Columns(("text",))
WITH_ID = Columns(("text",), "id")
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    """Write (id, text) rows in the format of the path's suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows))
    elif path.suffix == ".csv":
        table = io.StringIO(newline="")
        csv.writer(table).writerows([("id", "text"), *rows])
        path.write_bytes(table.getvalue().encode())
    else:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        columns = {"id": [name for name, _ in rows], "text": [text for _, text in rows]}
        table = pa.table(columns, schema=pa.schema([("id", pa.string()), ("text", pa.string())]))
        pq.write_table(table, path, row_group_size=3)
    return path


def read(paths: list[Path], columns: Columns, steps: list[tuple[bool, int]] | None = None) -> list[Row]:
    """Read all rows, or take and skip by `steps` and then take the rest."""
    rows = Rows(describe_inputs([str(path) for path in paths], columns), columns)
    found: list[Row] = []
    for is_skip, count in steps or []:
        if is_skip:
            rows.skip(count)
        else:
            found += rows.take(count)
    found += rows.take(10_000)
    assert rows.consumed == rows.total
    assert rows.take(1) == []
    rows.close()
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@given(
    files=st.lists(st.lists(st.tuples(CELLS.filter(bool), CELLS), max_size=9), min_size=1, max_size=3),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=5),
)
def test_skipping_changes_no_row(
    suffix: str, files: list[list[tuple[str, str]]], steps: list[tuple[bool, int]], tmp_path_factory: Any
) -> None:
    """Rows come in order over all files, and those after skipped ones are the same as without skipping."""
    folder = tmp_path_factory.mktemp("rows")
    paths = [write(folder / f"{number}{suffix}", rows) for number, rows in enumerate(files)]
    every = read(paths, WITH_ID)
    assert [row.record.id for row in every] == [name for rows in files for name, _ in rows]
    assert [row.record.texts for row in every] == [(text,) if text else () for rows in files for _, text in rows]
    assert [row.number for row in every] == list(range(len(every)))
    assert [row.file_row for row in every] == [at for rows in files for at in range(1, len(rows) + 1)]
    kept, place = [], 0
    for is_skip, count in steps:
        kept += [] if is_skip else every[place : place + count]
        place += count
    assert read(paths, WITH_ID, steps) == kept + every[place:]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ""}', "empty text in column 'text'"),
        (b'{"text": 3}', "column 'text' holds int, not text"),
        (b'{"text": null}', "no value in column 'text'"),
        (b'{"other": "a"}', "no value in column 'text'"),
        (b'["a"]', "not a JSON object"),
        (b'{"text": "a"', "not a JSON object"),
        (b'{"text": "\xff"}', "not a JSON object"),
        (b'{"text": "\\ud800"}', "not a JSON object"),
        (b"", "empty line"),
        (b'{"text": "' + b"x" * 100 + b'"}', "longer than 64 bytes"),
    ],
)
def test_bad_json_lines_have_a_reason(
    line: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad line fails alone: the lines around it are read."""
    monkeypatch.setattr(reading, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(reading, "_LONG_LINE", reading.Record((), "", "the line is longer than 64 bytes"))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\r\n{"text": "after"}')
    before, bad, after = read([path], TEXT)
    assert (before.record.texts, after.record.texts) == (("before",), ("after",))
    assert reason in bad.record.reason


def test_text_files_have_one_text_a_line(tmp_path: Path) -> None:
    """Only LF and CRLF end a line; empty lines and other encodings are set aside."""
    path = tmp_path / "a.txt"
    path.write_bytes("one\u2028still\r\n\n".encode() + b"\xff\nlast")
    records = [row.record for row in read([path], TEXT)]
    assert [record.texts for record in records] == [("one\u2028still",), (), (), ("last",)]
    assert [record.reason for record in records] == ["", "empty text", "not UTF-8 at byte 1", ""]


def test_bad_csv_rows_have_a_reason(tmp_path: Path) -> None:
    """A row that is short or not UTF-8 fails alone; a byte order mark belongs to no column."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,id\n"two\nlines",1\n\xff,2\n"",3\nshort\n')
    records = [row.record for row in read([path], WITH_ID)]
    assert records[0].texts == ("two\nlines",)
    assert [record.reason for record in records[1:]] == [
        "column 'text' is not UTF-8",
        "empty text in column 'text'",
        "no value in column 'id'",
    ]


def test_pairs_are_read_from_two_columns(tmp_path: Path) -> None:
    """Texts keep the order of the columns asked for, not of the file."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"document": "d", "id": 7, "query": "q"}\n')
    (row,) = read([path], Columns(("query", "document"), "id"))
    assert row.record == reading.Record(("q", "d"), "7")


@pytest.mark.parametrize(
    ("name", "data", "columns", "message"),
    [
        ("a.csv", b"a,b\n", TEXT, "has no column 'text'; it has: a, b"),
        ("a.txt", b"a\n", WITH_ID, "a text file has no columns"),
    ],
)
def test_a_file_without_the_columns_fails_at_once(
    name: str, data: bytes, columns: Columns, message: str, tmp_path: Path
) -> None:
    """The error comes before any row is computed."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        describe_inputs([str(tmp_path / name)], columns)


def test_a_broken_parquet_file_is_an_error(tmp_path: Path) -> None:
    """Errors of pyarrow name the file."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(SetupError, match=r"a\.parquet cannot be read as Parquet"):
        describe_inputs([str(tmp_path / "a.parquet")], TEXT)


def test_files_are_found_by_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns keep their order, matches are sorted, and a file named twice counts once."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d.doc"):
        Path(name).touch()
    assert find_files(["c.txt", "*.jsonl", "a.jsonl"]) == ["c.txt", "a.jsonl", "b.jsonl"]
    with pytest.raises(ConfigError, match=r"no file matches x\*"):
        find_files(["x*"])
    with pytest.raises(ConfigError, match="folder"):
        find_files([str(tmp_path)])
    with pytest.raises(ConfigError, match="known by its suffix"):
        find_files(["d.doc"])
