"""The models on this machine's disk, under `$SHOAL_HOME`.

    models/<model>/<entry>/manifest.json   one revision of a model: its manifest, ...
    models/<model>/<entry>/...             ... graph and tokenizer, ...
    models/<model>/<entry>/source/...      ... and the files that it was made from
    models/<model>/.partial-*              work that has not come to its end
    locks/<model>                          held by whoever works on a model

An entry appears whole, by one rename, or not at all; readers need no lock. `<model>` is the address's scheme and target
with "+" for "/": names hold no "+", so that no two models share a folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ModelFileError, SourceError
from shoal.models.address import Address
from shoal.models.manifest import NOTES, Manifest, check_files, read_manifest, write_manifest
from shoal.models.progress import Stop

_log = logging.getLogger(__name__)
_PARTIAL = ".partial-"
_FOLDER = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+!-]*")


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in the store. Paths in the manifest are relative to `path`."""

    path: Path
    manifest: Manifest

    @property
    def graph(self) -> Path:
        """The ONNX file that engines run."""
        return self.path / self.manifest.graph

    @property
    def tokenizer(self) -> Path:
        """The model's tokenizer.json."""
        return self.path / self.manifest.text.tokenizer


class Store:
    """Reads and changes the models under one home folder. Nothing outside of it is ever written or removed."""

    def __init__(self, home: Path | str) -> None:
        self._home = Path(home).expanduser().absolute()
        self._models = self._home / "models"

    @property
    def home(self) -> Path:
        return self._home

    def entries(self) -> list[Stored]:
        """Every model whose manifest this Shoal reads, newest first. Files are not looked at."""
        found = [stored for folder in _folders(self._models) for stored in _entries(folder)]
        return sorted(found, key=lambda stored: (-stored.manifest.created, str(stored.path)))

    def find(self, address: Address) -> Stored | None:
        """The newest entry for an address whose files are as its manifest says; None when there is no such."""
        for stored in sorted(_entries(self._folder(address)), key=lambda one: -one.manifest.created):
            if not _answers(stored.manifest, address):
                continue
            if wrong := check_files(stored.path, stored.manifest):
                _log.warning("%s in the store is damaged (%s); it is not used", address, "; ".join(wrong))
                continue
            return stored
        return None

    @contextmanager
    def working(self, address: Address, stop: Stop | None = None) -> Iterator[Path]:
        """Own a model and get an empty folder to build its entry in, for `commit`; removed at the end if it is left.

        Waits until no other process or thread works on this model. What a dead one left behind is removed.
        """
        with self._locked(address, stop or Stop()):
            folder = self._folder(address)
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"{_PARTIAL}*"):
                _sweep(leftover)
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
            partial.chmod(0o755)
            try:
                yield partial
            finally:
                _sweep(partial)
                _remove_if_empty(folder)

    def commit(self, partial: Path, address: Address, manifest: Manifest) -> Stored:
        """Turn a folder of `working` into the entry for `address`. Older answers to the same address go."""
        write_manifest(partial, manifest)
        folder = partial.parent
        target = folder / _entry_name(address, manifest)
        superseded = {one.path for one in _entries(folder) if one.manifest.address == manifest.address}
        for path in sorted({target, *superseded}):
            _discard(path)
        partial.rename(target)
        return Stored(target, manifest)

    def remove(self, stored: Stored) -> None:
        """Delete an entry of this store. Raises SourceError when it is none, or is being worked on."""
        folder = stored.path.parent
        if (
            folder.parent != self._models
            or not _FOLDER.fullmatch(folder.name)
            or not _FOLDER.fullmatch(stored.path.name)
        ):
            raise SourceError(f"{stored.path} is not a model of the store at {self._home}: it was left as it is")
        if folder.is_symlink() or stored.path.is_symlink():
            raise SourceError(f"{stored.path} leads out of the store through a link: remove the link yourself")
        with self._lock_file(folder.name) as lock:
            if not _try_lock(lock):
                raise SourceError(f"{stored.manifest.id} is being pulled by another process: stop that one first")
            _discard(stored.path)
            _remove_if_empty(folder)

    def notes(self, stored: Stored) -> dict[str, Any]:
        """What `note` kept; empty when there is nothing, or nothing readable."""
        try:
            return msgspec.json.decode((stored.path / NOTES).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            return {}

    def note(self, stored: Stored, key: str, value: Any) -> None:
        """Keep a JSON value that spares the next start some work; a store that cannot be written goes without."""
        data = msgspec.json.encode(self.notes(stored) | {key: value})
        try:
            with tempfile.NamedTemporaryFile(dir=stored.path, prefix=".notes-", delete=False) as file:
                file.write(data)
            os.replace(file.name, stored.path / NOTES)
        except OSError as error:
            _log.debug("%s cannot be noted for %s: %s", key, stored.path, error)

    def _folder(self, address: Address) -> Path:
        return self._models / _folder_name(address)

    @contextmanager
    def _locked(self, address: Address, stop: Stop) -> Iterator[None]:
        with self._lock_file(_folder_name(address)) as lock:
            while not _try_lock(lock):
                stop.wait(0.1)
            yield

    @contextmanager
    def _lock_file(self, name: str) -> Iterator[int]:
        """An open lock file. Lock files stay: removing one while another process opens it would let two hold it."""
        path = self._home / "locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield lock
        finally:
            os.close(lock)


def _folder_name(address: Address) -> str:
    if address.scheme == "file":
        # Folders of one name in different places are different models, and a path may hold what a name may not.
        return f"file+{hashlib.sha256(address.target.encode()).hexdigest()[:32]}"
    return f"{address.scheme}+{address.target.replace('/', '+')}"


def _answers(manifest: Manifest, address: Address) -> bool:
    """Whether an entry is what an address asks for: by the same words, or by the exact revision that they led to."""
    if address.scheme == "file":
        return manifest.revision == address.revision
    return str(address) in (manifest.address, manifest.source)


def _entry_name(address: Address, manifest: Manifest) -> str:
    """Revision and, where one was asked for by another name, that name: `main+4c2a...`."""
    asked = address.revision if address.revision != manifest.revision else ""
    return "+".join(filter(None, (asked.replace("/", "+"), manifest.revision)))


def _folders(parent: Path) -> Iterator[Path]:
    """The real folders in `parent` by name; links and hidden ones are passed over."""
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    yield from (parent / name for name in names if _FOLDER.fullmatch(name))


def _entries(folder: Path) -> Iterator[Stored]:
    for path in _folders(folder):
        try:
            yield Stored(path, read_manifest(path))
        except ModelFileError as error:
            _log.warning("%s is passed over: %s", path, error.message)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _discard(entry: Path) -> None:
    """Take an entry away in one step, then delete it: no reader meets half of one."""
    if entry.is_symlink():
        entry.unlink()
    elif entry.exists():
        away = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=entry.parent))
        entry.rename(away / entry.name)
        shutil.rmtree(away)


def _sweep(path: Path) -> None:
    """Delete what is left of unfinished work; what cannot be deleted is in nobody's way."""
    shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
