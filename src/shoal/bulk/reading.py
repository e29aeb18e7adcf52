"""Rows of text, JSONL, CSV and Parquet files, in order and a block at a time. What cannot be used of a row becomes the
reason why it is set aside; only a file that cannot be read as a whole raises."""

from __future__ import annotations

import csv
import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from shoal.bulk.plan import Input
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, MissingExtra, SetupError

MAX_ROW_BYTES = 16 * 2**20
"""Longest line, and longest cell of a CSV file. Longer ones are set aside, so that memory stays bounded."""

HEAD_BYTES = 2**20
PARQUET_BATCH_ROWS = 4096
NO_VALUE = "no value in column"
"""Begins the reason of rows without a value, which may be a wrong name of a column."""

TEXT, JSONL, CSV, PARQUET = "text", "jsonl", "csv", "parquet"
SUFFIXES = {
    ".txt": TEXT,
    ".text": TEXT,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
}


class Columns(NamedTuple):
    """The columns that hold the texts of a row, one or two, and its id ("" for none)."""

    texts: tuple[str, ...]
    id: str = ""


class Record(NamedTuple):
    """A row of a file: its texts, or the reason why it has none ("" otherwise). `id` is "" without an id column."""

    texts: tuple[str, ...]
    id: str = ""
    reason: str = ""


class Row(NamedTuple):
    """A record and its place: `number` counts from 0 over all inputs, `file_row` from 1 in its file."""

    number: int
    file: str
    file_row: int
    record: Record


class _Reader(Protocol):
    """The records of one file. `skip` and `take` return fewer than `count` at the end of the file only. `position` is
    in bytes of the file, for progress."""

    def skip(self, count: int) -> int: ...

    def take(self, count: int) -> list[Record]: ...

    @property
    def position(self) -> int: ...

    def close(self) -> None: ...


class Rows:
    """All rows of the inputs, in order. Not for several threads at once.

    `consumed` is in bytes of the inputs, and reaches `total` at the end.
    """

    def __init__(self, inputs: Sequence[Input], columns: Columns) -> None:
        self.total = sum(each.size for each in inputs)
        self.number = 0
        self._inputs = inputs
        self._columns = columns
        self._next = 0
        self._before = 0
        self._file_row = 0
        self._reader: _Reader | None = None

    @property
    def consumed(self) -> int:
        return self._before + (self._reader.position if self._reader is not None else 0)

    def skip(self, count: int) -> int:
        """Pass over `count` rows without parsing them where the format allows; returns how many there were."""
        left = count
        while left and (reader := self._open()) is not None:
            skipped = reader.skip(left)
            self._advance(skipped, left)
            left -= skipped
        return count - left

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows; fewer only at the end. Raises SetupError for a file that cannot be read."""
        rows: list[Row] = []
        while len(rows) < count and (reader := self._open()) is not None:
            path, first, number, wanted = self._path, self._file_row + 1, self.number, count - len(rows)
            records = reader.take(wanted)
            rows += [Row(number + at, path, first + at, record) for at, record in enumerate(records)]
            self._advance(len(records), wanted)
        return rows

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def _path(self) -> str:
        return self._inputs[self._next].path

    def _open(self) -> _Reader | None:
        """Return the reader of the current file, or None after the last."""
        if self._reader is None and self._next < len(self._inputs):
            self._reader = _open_file(self._path, self._columns)
        return self._reader

    def _advance(self, rows: int, wanted: int) -> None:
        self.number += rows
        self._file_row += rows
        if rows < wanted:
            self.close()
            self._before += self._inputs[self._next].size
            self._next += 1
            self._file_row = 0


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that paths and glob patterns name: patterns in their order, matches of one by name, each file
    once. Raises ConfigError for a pattern without a file and for a format that is not known."""
    found: dict[str, None] = {}
    for pattern in patterns:
        is_file = Path(pattern).is_file()
        matches = [pattern] if is_file else sorted(filter(_is_file, glob.glob(pattern, recursive=True)))
        if not matches:
            folder = ": it is a folder, name its files as in 'folder/*.jsonl'" if Path(pattern).is_dir() else ""
            raise ConfigError(f"no file matches {pattern}{folder}", param="--")
        for path in matches:
            _format_of(path)
            found[path] = None
    return list(found)


def describe_inputs(paths: Sequence[str], columns: Columns) -> list[Input]:
    """Return the identity of each file. Raises ConfigError if a file lacks the columns, as far as its head tells, and
    SetupError if it cannot be read."""
    inputs = []
    for path in paths:
        _open_file(path, columns).close()
        try:
            with open(path, "rb") as file:
                head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
            status = Path(path).stat()
        except OSError as error:
            raise SetupError(f"{path} cannot be read: {error.strerror}") from None
        inputs.append(Input(path, status.st_size, status.st_mtime_ns, head))
    return inputs


def make_record(values: Sequence[object], columns: Columns, row_id: object = None) -> Record:
    """Check the texts and the id of a row, where None means that a value is missing."""
    for name, value in zip(columns.texts, values, strict=True):
        if value is None:
            return _refuse(f"{NO_VALUE} {name!r}", row_id)
        if not isinstance(value, str):
            return _refuse(f"column {name!r} holds {type(value).__name__}, not text", row_id)
        if not value:
            return _refuse(f"empty text in column {name!r}", row_id)
        if not _is_unicode(value):
            return _refuse(f"column {name!r} is not UTF-8", row_id)
    if columns.id and row_id is None:
        return _refuse(f"no value in column {columns.id!r}", row_id)
    return Record(tuple(values), _format_id(row_id))  # type: ignore[arg-type]  # all are texts


def _refuse(reason: str, row_id: object = None) -> Record:
    return Record((), _format_id(row_id), reason)


def _format_id(value: object) -> str:
    text = "" if value is None else value if isinstance(value, str) else str(value)
    return text if _is_unicode(text) else text.encode(errors="replace").decode()


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which are what is left of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_file(path: str) -> bool:
    return Path(path).is_file()


def _format_of(path: str) -> str:
    found = SUFFIXES.get(Path(path).suffix.lower())
    if found is None:
        raise ConfigError(f"{path}: the format is not known by its suffix; known: {', '.join(SUFFIXES)}", param="--")
    return found


def _open_file(path: str, columns: Columns) -> _Reader:
    kind = _format_of(path)
    try:
        if kind == TEXT and (len(columns.texts) > 1 or columns.id):
            raise ConfigError(f"{path}: a text file has no columns; use JSONL, CSV or Parquet", param="--")
        if kind == PARQUET:
            return _ParquetReader(path, columns)
        file = open(path, "rb")  # noqa: SIM115 - the reader closes it
        if kind == CSV:
            try:
                return _open_csv(file, path, columns)
            except ConfigError:
                file.close()
                raise
        parse = partial(_parse_json if kind == JSONL else _parse_text, columns=columns)
        return _UnitReader(_read_lines(file), parse, file)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from None


class _UnitReader:
    """Records of a file that is a sequence of units, such as lines, which are parsed only when taken."""

    def __init__(self, units: Iterator[Any], parse: Callable[[Any], Record], file: BinaryIO) -> None:
        self._units = units
        self._parse = parse
        self._file = file

    def skip(self, count: int) -> int:
        return sum(1 for _ in islice(self._units, count))

    def take(self, count: int) -> list[Record]:
        return [self._parse(unit) for unit in islice(self._units, count)]

    @property
    def position(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def _read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines without their ends; None for one that is longer than MAX_ROW_BYTES."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) <= MAX_ROW_BYTES:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_ROW_BYTES)
        yield None


_LONG_LINE = Record((), "", f"the line is longer than {MAX_ROW_BYTES} bytes")


def _parse_text(line: bytes | None, columns: Columns) -> Record:
    if line is None:
        return _LONG_LINE
    if not line:
        return _refuse("empty text")
    try:
        return Record((line.decode(),))
    except UnicodeDecodeError as error:
        return _refuse(f"not UTF-8 at byte {error.start + 1}")


_decode_object = json_decoder(dict[str, msgspec.Raw]).decode
_decode_value = json_decoder(object).decode


def _parse_json(line: bytes | None, columns: Columns) -> Record:
    if line is None:
        return _LONG_LINE
    if not line:
        return _refuse("empty line")
    try:
        fields = _decode_object(line)
        values = [_decode_value(fields[name]) if name in fields else None for name in columns.texts]
        row_id = _decode_value(fields[columns.id]) if columns.id in fields else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return _refuse(f"not a JSON object: {error}")
    return make_record(values, columns, row_id)


def _open_csv(file: BinaryIO, path: str, columns: Columns) -> _UnitReader:
    """Read the header. Bytes that are not UTF-8 become surrogates, which fail their own row alone."""
    csv.field_size_limit(MAX_ROW_BYTES)
    pieces = iter(partial(file.readline, MAX_ROW_BYTES + 1), b"")
    lines = (piece.decode("utf-8", "surrogateescape") for piece in pieces)
    cells = _read_cells(csv.reader(lines, delimiter="\t" if Path(path).suffix.lower() == ".tsv" else ","))
    header = next(cells, [])
    if isinstance(header, str):
        raise ConfigError(f"{path}: the header cannot be read: {header}", param="--")
    if header:
        header[0] = header[0].removeprefix("\ufeff")
    _check_columns(path, columns, header)
    places = [header.index(name) for name in columns.texts]
    id_place = header.index(columns.id) if columns.id else None

    def parse(row: list[str] | str) -> Record:
        if isinstance(row, str):
            return _refuse(f"not CSV: {row}")
        values = [row[place] if place < len(row) else None for place in places]
        row_id = row[id_place] if id_place is not None and id_place < len(row) else None
        return make_record(values, columns, row_id)

    return _UnitReader(cells, parse, file)


def _read_cells(rows: Iterator[list[str]]) -> Iterator[list[str] | str]:
    """Yield the cells of each row, or the reason why there are none. Empty lines are no rows, as in other readers."""
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield str(error)
            continue
        if row is None:
            return
        if row:
            yield row


def _check_columns(path: str, columns: Columns, known: Sequence[str]) -> None:
    for name in (*columns.texts, columns.id):
        if name and name not in known:
            raise ConfigError(
                f"{path} has no column {name!r}; it has: {', '.join(known)}: name one with --column, --query-column, "
                "--document-column or --id-column",
                param="--column",
            )


def import_parquet() -> Any:
    """Return `pyarrow.parquet`. Raises MissingExtra."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("Parquet", "bulk") from None
    return pyarrow.parquet


class _ParquetReader:
    """Records of a Parquet file. Whole row groups are skipped without reading them."""

    def __init__(self, path: str, columns: Columns) -> None:
        parquet = import_parquet()
        self._path = path
        self._columns = columns
        self._size = Path(path).stat().st_size
        with _reading(path):
            self._file = parquet.ParquetFile(path)
        _check_columns(path, columns, self._file.schema_arrow.names)
        self._groups = [self._file.metadata.row_group(at).num_rows for at in range(self._file.num_row_groups)]
        self._group = self._offset = self._done = 0
        self._records: Iterator[Record] | None = None

    def skip(self, count: int) -> int:
        start = self._done
        while (left := count - (self._done - start)) and self._group < len(self._groups):
            rows = self._groups[self._group]
            if self._records is None and rows <= left:
                self._group += 1
                self._done += rows
            else:
                self._next_records(left)
        return self._done - start

    def take(self, count: int) -> list[Record]:
        records: list[Record] = []
        while len(records) < count and self._group < len(self._groups):
            records += self._next_records(count - len(records))
        return records

    @property
    def position(self) -> int:
        return int(self._size * self._done / max(sum(self._groups), 1))

    def close(self) -> None:
        self._file.close()

    def _next_records(self, count: int) -> list[Record]:
        """Return up to `count` records of the current row group, and move to the next one at its end."""
        with _reading(self._path):
            if self._records is None:
                self._records = self._read_group(self._group)
            records = list(islice(self._records, count))
        self._offset += len(records)
        self._done += len(records)
        if self._offset == self._groups[self._group]:
            self._group, self._offset, self._records = self._group + 1, 0, None
        return records

    def _read_group(self, group: int) -> Iterator[Record]:
        names = [*self._columns.texts, *([self._columns.id] if self._columns.id else [])]
        batches = self._file.iter_batches(batch_size=PARQUET_BATCH_ROWS, row_groups=[group], columns=names)
        width = len(self._columns.texts)
        for batch in batches:
            for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                yield make_record(values[:width], self._columns, values[width] if self._columns.id else None)


class _reading:
    """Turn what pyarrow raises for a broken file into a SetupError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | ValueError):  # pyarrow's ArrowInvalid is a ValueError
            raise SetupError(f"{self._path} cannot be read as Parquet: {error}") from None
