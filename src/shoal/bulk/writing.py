"""The output folder: shards that are whole or not there, the manifest that knows them, the rows set aside.

A file is written under a temporary name, synced and renamed. The manifest lists a shard only after its files and its
rejected rows are on disk, so whatever a killed process leaves beyond the manifest is written again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from shoal.bulk.computing import Column
from shoal.bulk.plan import VERSION, Manifest, Recipe, Shard, find_differences
from shoal.bulk.reading import Row, import_parquet
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, SetupError

MANIFEST = "manifest.json"
ERRORS = "errors.jsonl"
_LOCK = ".lock"
_TEMPORARY = ".tmp"


class Rejection(msgspec.Struct, frozen=True):
    """A line of errors.jsonl. `row` counts from 0 over all inputs, `file_row` from 1 in its file."""

    file: str
    file_row: int
    row: int
    shard: int
    id: str
    reason: str


class Table(NamedTuple):
    """Rows of a shard that have a result: their numbers, their ids (None without an id column), columns by name."""

    rows: list[int]
    ids: list[str] | None
    columns: Mapping[str, Column]


def reject(row: Row, shard: int, reason: str) -> Rejection:
    return Rejection(row.file, row.file_row, row.number, shard, row.record.id, reason)


class OutputFolder:
    """The folder of one run, made by `open_folder`. `manifest` lists the shards that are finished and intact."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def finished(self) -> dict[int, Shard]:
        return {shard.number: shard for shard in self.manifest.shards}

    def write_shard(self, number: int, rows: int, tables: Sequence[Table], rejections: Sequence[Rejection]) -> None:
        """Write a shard of `rows` rows: those with a result, and those set aside."""
        tables = [table for table in tables if table.rows] or tables[:1]
        files = {}
        for name, write in _plan_files(number, self.manifest.recipe.format, tables):
            files[name] = self._write_file(name, write)
        self.append_rejections(rejections)
        written = sum(len(table.rows) for table in tables)
        shard = Shard(number=number, rows=rows, written=written, errors=len(rejections), files=files)
        self._save(self.manifest.with_shard(shard))

    def append_rejections(self, rejections: Iterable[Rejection]) -> None:
        """Append to errors.jsonl. Lines of shards that the manifest does not list are dropped by the next run."""
        lines = b"".join(map(_to_line, rejections))
        if lines:
            with open(self.path / ERRORS, "ab") as file:
                file.write(lines)
                _sync(file)

    def finish(self, rows: int) -> None:
        """Record that the inputs have `rows` rows, all of them in shards; sorts errors.jsonl."""
        self._keep_rejections(self.finished)
        self._save(msgspec.structs.replace(self.manifest, rows=rows))

    def start(self) -> None:
        """Remove what a killed process left, and forget shards whose files are missing or have another hash."""
        for left in self.path.glob(f"*{_TEMPORARY}"):
            left.unlink()
        intact = [shard for shard in self.manifest.shards if self._is_intact(shard)]
        self._keep_rejections({shard.number for shard in intact})
        rows = self.manifest.rows if len(intact) == len(self.manifest.shards) else None
        self._save(msgspec.structs.replace(self.manifest, shards=intact, rows=rows))

    def _is_intact(self, shard: Shard) -> bool:
        try:
            return all(_hash_file(self.path / name) == digest for name, digest in shard.files.items())
        except OSError:
            return False

    def _keep_rejections(self, shards: Collection[int]) -> None:
        """Rewrite errors.jsonl with the lines of these shards, in the order of rows."""
        try:
            lines = (self.path / ERRORS).read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        kept = sorted((each for each in _parse_rejections(lines) if each.shard in shards), key=lambda each: each.row)
        if kept:
            self._write_file(ERRORS, lambda file: file.writelines(map(_to_line, kept)))
        else:
            (self.path / ERRORS).unlink()

    def _save(self, manifest: Manifest) -> None:
        self._write_file(MANIFEST, lambda file: file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"))
        self.manifest = manifest

    def _write_file(self, name: str, write: Callable[[BinaryIO], object]) -> str:
        """Write a file that is whole or not there; returns its SHA-256."""
        target = self.path / name
        temporary = target.with_name(name + _TEMPORARY)
        with open(temporary, "wb") as file:
            write(file)
            _sync(file)
        digest = _hash_file(temporary)
        temporary.rename(target)
        _sync_folder(self.path)
        return digest


@contextmanager
def open_folder(path: Path, recipe: Recipe) -> Iterator[OutputFolder]:
    """Open the output folder for one run at a time, new or begun with the same recipe.

    Raises ConfigError if the folder holds something else, and SetupError if it cannot be written or is in use.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(path / _LOCK, "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SetupError(f"{path} is in use by another run: wait for it, or name another folder") from None
            folder = OutputFolder(path, _load(path, recipe))
            folder.start()
            yield folder
    except OSError as error:
        raise SetupError(f"{error.filename or path}: {error.strerror}") from None


def _load(path: Path, recipe: Recipe) -> Manifest:
    try:
        data = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        others = sorted(each.name for each in path.iterdir() if each.name != _LOCK and each.suffix != _TEMPORARY)
        if others:
            raise ConfigError(
                f"{path} holds {others[0]} but no {MANIFEST}: name an empty folder", param="--out"
            ) from None
        return Manifest(recipe=recipe)
    try:
        manifest = json_decoder(Manifest).decode(data)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{path / MANIFEST} cannot be read ({error}): name another folder") from None
    if manifest.version != VERSION:
        raise SetupError(f"{path} was written by another version of Shoal: name another folder")
    if differences := find_differences(manifest.recipe, recipe):
        raise ConfigError(
            f"{path} cannot be continued: {'; '.join(differences)}: name another folder, or repeat the first command",
            param="--out",
        )
    return manifest


def _plan_files(number: int, form: str, tables: Sequence[Table]) -> Iterator[tuple[str, Callable[[BinaryIO], object]]]:
    """Yield the files of a shard by name, each with the function that writes it."""
    stem = f"shard-{number:05}"
    if form == "parquet":
        yield f"{stem}.parquet", lambda file: _write_parquet(file, tables)
        return
    if form == "npy":
        yield f"{stem}.npy", lambda file: _write_npy(file, tables)
        tables = [table._replace(columns={}) for table in tables]
    yield f"{stem}.jsonl", lambda file: file.writelines(_to_lines(tables))


def _write_npy(file: BinaryIO, tables: Sequence[Table]) -> None:
    """Write the one column of the tables as float32, without a second copy in memory."""
    arrays = [np.ascontiguousarray(next(iter(table.columns.values())), np.dtype("<f4")) for table in tables]
    shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    for array in arrays:
        file.write(array.data)


def _to_lines(tables: Sequence[Table]) -> Iterator[bytes]:
    for table in tables:
        columns = {name: _to_list(column) for name, column in table.columns.items()}
        for at, row in enumerate(table.rows):
            named = {} if table.ids is None else {"id": table.ids[at]}
            values = {name: column[at] for name, column in columns.items()}
            yield _to_line({"row": row, **named, **values})


def _to_list(column: Column) -> Sequence[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column


def _write_parquet(file: BinaryIO, tables: Sequence[Table]) -> None:
    parquet = import_parquet()
    import pyarrow as pa

    parts = []
    for table in tables:
        columns: dict[str, Any] = {"row": pa.array(table.rows, pa.int64())}
        if table.ids is not None:
            columns["id"] = pa.array(table.ids, pa.string())
        columns |= {name: _to_arrow(column) for name, column in table.columns.items()}
        parts.append(pa.table(columns))
    parquet.write_table(pa.concat_tables(parts), file, use_dictionary=False)


def _to_arrow(column: Column) -> Any:
    import pyarrow as pa

    if not isinstance(column, np.ndarray):
        return pa.array(column, pa.string())
    flat = pa.array(np.ascontiguousarray(column).reshape(-1))
    return flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, column.shape[1])


def _parse_rejections(lines: Iterable[bytes]) -> Iterator[Rejection]:
    """Yield the whole lines; a process that was killed may leave a part of one."""
    decode = json_decoder(Rejection).decode
    for line in lines:
        try:
            yield decode(line)
        except msgspec.MsgspecError:
            continue


def _to_line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
