"""Store models on this machine's disk, under `$SHOAL_HOME`.

    models/<model>/<entry>/manifest.json   one revision of a model: its manifest, ...
    models/<model>/<entry>/...             ... graph and tokenizer, ...
    models/<model>/<entry>/source/...      ... and the files that it was made from
    models/<model>/.partial-*              unfinished work
    models/<model>/<entry>/.adding-*       unfinished work on files added to an entry later
    models/<model>/.aside-<entry>          an old entry while a new one takes its place
    locks/<model>                          held by the process that works on a model

An entry appears complete, by one rename, or not at all, so readers need no lock. The entry it replaces is deleted
afterwards, or restored by the next process if that never happened. `<model>` is the address's scheme and target with
"+" for "/": names contain no "+", so no two models share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.decoding import json_decoder
from shoal.downloads.disk import try_lock
from shoal.errors import ModelFileError, SourceError
from shoal.models.address import Address
from shoal.models.manifest import NOTES, Manifest, check_files, read_manifest, write_manifest
from shoal.models.progress import Stop
from shoal.names import gguf_parts

_NOTES = json_decoder(dict[str, Any])

T = TypeVar("T")

_log = logging.getLogger(__name__)
_PARTIAL = ".partial-"
_ASIDE = ".aside-"
_ADDING = ".adding-"
_NOTING = ".notes-"
_NOTING_S = 60.0
"""Seconds after which a temporary note is considered abandoned; writing one takes an instant."""
_LOOKS = 100
_LOOK_S = 0.01
"""A reader waits at most a second for the one missing rename."""
_FOLDER = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+!-]*")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the store. Paths in the manifest are relative to `path`."""

    path: Path
    manifest: Manifest

    @property
    def graph(self) -> Path:
        """The file that engines run: ONNX, or a language model's OpenVINO graph or GGUF."""
        spec = self.manifest.generation
        return (Path(spec.place) if spec is not None and spec.place else self.path) / self.manifest.graph

    @property
    def size(self) -> int:
        """Bytes on disk, including a graph that is used in place."""
        names = {*gguf_parts(self.graph.name), self.graph.with_suffix(".bin").name}
        parts = () if self.graph.is_relative_to(self.path) else map(self.graph.with_name, names)
        return self.manifest.size + sum(part.stat().st_size for part in parts if part.is_file())

    @property
    def tokenizer(self) -> Path:
        """The model's tokenizer.json."""
        return self.path / (self.manifest.generation or self.manifest.text_spec).tokenizer


class Store:
    """Reads and changes the models under one home folder. Never writes or removes anything outside it."""

    def __init__(self, home: Path | str) -> None:
        self._home = Path(home).expanduser().absolute()
        self._models = self._home / "models"
        self._logged_complaints: set[str] = set()

    @property
    def home(self) -> Path:
        return self._home

    def entries(self) -> list[StoredModel]:
        """Return every model with a readable manifest, newest first. Does not check files.

        Raises SourceError if the home cannot be read.
        """
        found = [stored for folder in _folders(self._models) for stored in self._read_consistently(folder, _entries)]
        return sorted(found, key=lambda stored: (-stored.manifest.created, str(stored.path)))

    def find_by_name(self, name: str) -> list[StoredModel]:
        """Return the entries with this id or address, as `entries` does."""
        return [one for one in self.entries() if name in (one.manifest.id, one.manifest.address)]

    def find(self, address: Address, damage: list[str] | None = None) -> StoredModel | None:
        """Return the newest entry for an address whose files match its manifest; None if there is none.

        The reasons for skipping other entries are added to `damage` if given, else logged. Raises SourceError if the
        home cannot be read.
        """

        return self._read_consistently(self._folder(address), partial(_load_entry, address), damage)

    @contextmanager
    def working(self, address: Address, stop: Stop | None = None) -> Iterator[Path]:
        """Lock a model and yield an empty folder to build its entry in, for `commit`; removed at the end if not
        committed.

        Waits until no other process or thread works on this model. Leftovers of dead processes, of this model or
        another, are removed or restored. Raises SourceError if the home cannot be written.
        """
        with self._hold_lock(_folder_name(address), stop or Stop()):
            folder = self._folder(address)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _tidy(folder)
                self._tidy_others(folder)
                partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
                partial.chmod(0o755)
            except OSError as error:
                raise _unusable_error(folder, "written", error) from None
            try:
                yield partial
            finally:
                _sweep(partial)
                _remove_if_empty(folder)

    @contextmanager
    def adding(self, stored: StoredModel, stop: Stop | None = None) -> Iterator[Path]:
        """Lock an entry's model and yield an empty folder inside the entry for additional files. The folder is removed
        at the end, so move files to keep next to it.

        Waits until no other process or thread works on this model, and removes leftovers of dead processes. Raises
        SourceError if the home cannot be written, OSError if the entry cannot.
        """
        with self._hold_lock(stored.path.parent.name, stop or Stop()):
            for leftover in (*stored.path.glob(f"{_ADDING}*"), *stored.path.glob(".variant-*")):
                _sweep(leftover)
            place = Path(tempfile.mkdtemp(prefix=_ADDING, dir=stored.path))
            try:
                yield place
            finally:
                _sweep(place)

    def commit(self, partial: Path, address: Address, manifest: Manifest) -> StoredModel:
        """Turn a folder of `working` into the entry for `address`, then delete older entries for the same address."""
        write_manifest(partial, manifest)
        folder = partial.parent
        target = folder / _entry_name(address, manifest)
        superseded = {one.path for one in _entries(folder, []) if one.manifest.address == manifest.address}
        aside = _set_aside(target)
        try:
            partial.rename(target)
        except OSError:
            _put_back(folder)
            raise
        for path in sorted({aside, *superseded} - {target}):
            _discard(path)
        return StoredModel(target, manifest)

    def remove(self, stored: StoredModel) -> None:
        """Delete an entry of this store; one that is already gone is no error.

        Raises SourceError if it is not an entry of this store, is being worked on, or cannot be removed.
        """
        folder = stored.path.parent
        if (
            folder.parent != self._models
            or not _FOLDER.fullmatch(folder.name)
            or not _FOLDER.fullmatch(stored.path.name)
        ):
            raise SourceError(f"{stored.path} is not a model in the store at {self._home}: it was not changed")
        if folder.is_symlink() or stored.path.is_symlink():
            raise SourceError(f"{stored.path} leads out of the store through a link: remove the link manually")
        with self._lock_file(folder.name) as lock:
            if not try_lock(lock):
                raise SourceError(f"{stored.manifest.id} is being pulled by another process: stop that process first")
            try:
                _put_back(folder)
                _discard(stored.path)
                _remove_if_empty(folder)
            except OSError as error:
                raise _unusable_error(stored.path, "removed", error) from None

    def notes(self, stored: StoredModel) -> dict[str, Any]:
        """Return what `note` stored; empty if there is nothing, or nothing readable."""
        try:
            return _NOTES.decode((stored.path / NOTES).read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}

    def note(self, stored: StoredModel, key: str, value: Any) -> None:
        """Store a JSON value that saves the next start some work; skipped if the store is not writable."""
        data = msgspec.json.encode(self.notes(stored) | {key: value})
        try:
            with tempfile.NamedTemporaryFile(dir=stored.path, prefix=_NOTING, delete=False) as file:
                place = Path(file.name)
                with contextlib.ExitStack() as left:
                    left.callback(place.unlink, missing_ok=True)
                    file.write(data)
                    file.flush()
                    os.replace(place, stored.path / NOTES)
            _sweep_notes(stored.path)
        except OSError as error:
            _log.debug("cannot record %s for %s: %s", key, stored.path, error)

    def _tidy_others(self, own: Path) -> None:
        """Delete leftovers of killed pulls of other models, which may never be pulled again."""
        for folder in _folders(self._models):
            if folder == own or not any(folder.glob(f"{_PARTIAL}*")):
                continue
            with contextlib.suppress(SourceError, OSError), self._lock_file(folder.name) as lock:
                if try_lock(lock):  # otherwise another process is working on it
                    _tidy(folder)
                    _remove_if_empty(folder)

    def _folder(self, address: Address) -> Path:
        return self._models / _folder_name(address)

    def _read_consistently(
        self, folder: Path, look: Callable[[Path, list[str]], T], damage: list[str] | None = None
    ) -> T:
        """Call `look` until no entry changed meanwhile: half of an old entry and half of a new one would look damaged.
        The complaints of the last call are added to `damage` if given, else logged once."""
        for _ in range(_LOOKS):
            complaints: list[str] = []
            before = _state(folder)
            found = look(folder, complaints)
            self._wait_for_swap(folder)
            if _state(folder) == before:
                break
        if damage is not None:
            damage += complaints
            return found
        for complaint in complaints:
            if complaint not in self._logged_complaints:
                self._logged_complaints.add(complaint)
                _log.warning("%s", complaint)
        return found

    def _wait_for_swap(self, folder: Path) -> None:
        """Wait until the process that moved an entry aside has placed the new one; if it died, restore the old one.

        A store that is not writable stays unchanged.
        """
        if not any(_asides(folder)):
            return
        with contextlib.suppress(SourceError, OSError), self._lock_file(folder.name) as lock:
            for _ in range(_LOOKS):
                if try_lock(lock):
                    _put_back(folder)
                    return
                if all(target.exists() for _, target in _asides(folder)):
                    return
                time.sleep(_LOOK_S)

    @contextmanager
    def _hold_lock(self, name: str, stop: Stop) -> Iterator[None]:
        with self._lock_file(name) as lock:
            while not try_lock(lock):
                stop.wait(0.1)
            yield

    @contextmanager
    def _lock_file(self, name: str) -> Iterator[int]:
        """Yield an open lock file. Lock files are never removed: another process may be opening one, and then two could
        hold it."""
        path = self._home / "locks" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable_error(path, "written", error) from None
        try:
            yield lock
        finally:
            os.close(lock)


def _folder_name(address: Address) -> str:
    if address.scheme == "file":
        # Equally named folders in different places are different models, and a path may contain characters that a name
        # may not.
        return f"file+{hashlib.sha256(address.target.encode()).hexdigest()[:32]}"
    return f"{address.scheme}+{address.target.replace('/', '+')}"


def _matches(manifest: Manifest, address: Address) -> bool:
    """Whether an entry matches an address: by the same text, or by the exact revision that it resolved to."""
    if address.scheme == "file":
        return manifest.revision == address.revision
    return str(address) in (manifest.address, manifest.source)


def _entry_name(address: Address, manifest: Manifest) -> str:
    """Return the entry's name: the revision, preceded by the quantization or form of reranker and the requested
    revision if there are such: `+Q8_0+main+4c2a...`. No revision begins with "+", so none is taken for a form."""
    requested = address.revision if address.revision != manifest.revision else ""
    form = address.form or address.reranker
    return "+".join(filter(None, (form and f"+{form}", requested.replace("/", "+"), manifest.revision)))


def _folders(parent: Path) -> Iterator[Path]:
    """Yield the real folders in `parent` by name; skip links and hidden folders."""
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable_error(parent, "read", error) from None
    yield from (parent / name for name in names if _FOLDER.fullmatch(name))


def _state(folder: Path) -> set[tuple[str, int, int]]:
    """Return a value that changes whenever an entry is added, removed or replaced."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(_PARTIAL):
                stat = entry.stat(follow_symlinks=False)
                found.add((entry.name, stat.st_ino, stat.st_ctime_ns))
    return found


def _entries(folder: Path, complaints: list[str]) -> list[StoredModel]:
    found = []
    for path in _folders(folder):
        try:
            found.append(StoredModel(path, read_manifest(path)))
        except ModelFileError as error:
            complaints.append(f"skipping {path}: {error.message}")
    return found


def _load_entry(address: Address, folder: Path, complaints: list[str]) -> StoredModel | None:
    for stored in sorted(_entries(folder, complaints), key=lambda one: -one.manifest.created):
        if not _matches(stored.manifest, address):
            continue
        if wrong := check_files(stored.path, stored.manifest):
            complaints.append(f"{address} in the store is corrupt ({'; '.join(wrong)}) and is not used")
            continue
        return stored
    return None


def _asides(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield what was moved aside, and where it belongs."""
    return ((path, folder / path.name.removeprefix(_ASIDE)) for path in folder.glob(f"{_ASIDE}*"))


def _set_aside(entry: Path) -> Path:
    """Make room for a new entry; return where the old one was moved, if there was one. A link is simply removed."""
    aside = entry.with_name(_ASIDE + entry.name)
    if entry.is_symlink():
        entry.unlink()
    elif entry.exists():
        entry.rename(aside)
    return aside


def _tidy(folder: Path) -> None:
    """Remove or restore what dead processes left of a model; the caller holds its lock."""
    _put_back(folder)
    for leftover in folder.glob(f"{_PARTIAL}*"):
        _sweep(leftover)


def _put_back(folder: Path) -> None:
    """Restore entries that a dead process moved aside; delete them if their replacement arrived."""
    for aside, target in _asides(folder):
        if target.exists():
            _discard(aside)
        else:
            aside.rename(target)


def _discard(entry: Path) -> None:
    """Move an entry away in one step, then delete it, so that no reader sees half of it."""
    if entry.is_symlink():
        entry.unlink()
    elif entry.exists():
        away = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=entry.parent))
        entry.rename(away / entry.name)
        shutil.rmtree(away)


def _sweep(path: Path) -> None:
    """Delete unfinished work; ignore what cannot be deleted."""
    shutil.rmtree(path, ignore_errors=True)


def _sweep_notes(entry: Path) -> None:
    """Delete temporary notes of processes that died while writing them."""
    for leftover in entry.glob(f"{_NOTING}*"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if leftover.stat().st_mtime < time.time() - _NOTING_S:
                leftover.unlink()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        if not any(folder.iterdir()):
            folder.rmdir()


def _unusable_error(path: Path, done: str, error: OSError) -> SourceError:
    return SourceError(
        f"{path} cannot be {done} ({error.strerror}): set SHOAL_HOME to a folder that you own, or correct its "
        "permissions"
    )
