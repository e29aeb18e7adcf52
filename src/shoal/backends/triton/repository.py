"""A Triton model repository on a disk that Shoal can write.

    <name>/config.pbtxt, <name>/1/...     a model in Triton's layout
    <name>/shoal.json                     the mark: Shoal made this folder and may replace or remove it

A folder appears complete, through one rename, and replaces an older one in one step. Links are never followed. Shoal
never changes folders without the mark, nor files that others added to a folder with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from shoal.backends.triton.folder_exchange import exchange
from shoal.backends.triton.naming import Part, served_name, triton_name
from shoal.backends.triton.repository_entry import FORMAT, Content, EntrySpec, TritonModel, triton_models
from shoal.backends.triton.staging import staging
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, Forbidden, InvalidValue, ModelFileError

MARK = "shoal.json"
CONFIG = "config.pbtxt"
PARTS: tuple[Part, ...] = ("model", "tokenizer", "encoder", "image")
"""In removal order: the whole before its parts."""

LOCK_WAIT_S = 60.0
MAX_PUSH = 2**31 - 2**20
"""Maximum bytes of a push. A gRPC message is under 2 GiB, and the configuration needs room too."""

_COMPILED = "__pycache__"
"""Python writes this folder beside a model.py that it runs."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The content of shoal.json; `name` and `part` are those of its folder. `created`: unix seconds. `files`: paths of
    all files that Shoal wrote there."""

    format: int
    name: str
    part: Part
    source: str = ""
    space: str = ""
    created: int = 0
    files: tuple[str, ...] = ()


_MARK = json_decoder(Mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryEntry:
    """A model in the repository. `name` is the served name, or the folder's name if Shoal did not make it and no served
    name maps to it. `size`: bytes of all its files. `folders`: the whole first, then its parts."""

    name: str
    folders: tuple[str, ...]
    size: int
    managed: bool
    source: str = ""
    space: str = ""
    created: int = 0


@dataclass(frozen=True, slots=True)
class ModelPush:
    """A model to load by file push: `files` maps paths in the model's folder ("1/model.onnx") to contents."""

    model: TritonModel
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def ensemble(self) -> bool:
        """Whether only ModelReady shows if its load succeeded. Triton 2.51 looks for an ensemble's parts on its disk,
        does not find pushed ones, answers INTERNAL "failed to poll from model repository", and loads the ensemble
        anyway (Triton issue 4630)."""
        return self.model.config.platform == "ensemble"


class Repository:
    """A model repository that several processes may use. Every method and `folder` block: call them in a thread.

    Methods raise ConfigError (`triton_repository`) for errors of the disk, InvalidValue for an invalid model name,
    Forbidden for what Shoal did not make, Unavailable when another process writes for over `lock_wait_s`.
    """

    def __init__(self, folder: Path | str, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._path = Path(folder)
        self._lock_wait_s = lock_wait_s

    @cached_property
    def folder(self) -> Path:
        """The folder's real path, with links resolved."""
        return Path(os.path.realpath(self._path.expanduser()))

    def write(self, spec: EntrySpec) -> tuple[str, ...]:
        """Write the entry of a model, replacing an older one; return its folders, parts before the whole.

        Raises ModelFileError if a file of `spec` is missing.
        """
        models = triton_models(spec)
        _check_sources(models)
        with self._lock_repository() as partial:
            self._check_own(spec.name, [model.name for model in models])
            built = [(_build_folder(partial, spec, model), self.folder / model.name) for model in models]
            _install(built)
            _sync(self.folder)
            written = {model.name for model in models}
            for name in [triton_name(spec.name, part) for part in PARTS]:
                if name not in written:
                    _move_aside(self.folder / name, partial)
        return tuple(model.name for model in models)

    def remove(self, name: str) -> bool:
        """Remove what Shoal made for a served name; return False if there is nothing."""
        folders = [self.folder / triton_name(name, part) for part in PARTS]
        if not any(map(os.path.lexists, folders)):
            return False
        with self._lock_repository() as partial:
            self._check_own(name, [folders[0].name])
            taken = [_move_aside(folder, partial) for folder in folders]
        return any(taken)

    def find(self, name: str) -> RepositoryEntry | None:
        """Return the entry of a served name, made by Shoal or not; None if there is none."""
        return next((one for one in self.entries() if one.name == name), None)

    def entries(self) -> list[RepositoryEntry]:
        """Return every model in the repository, by name. Links and hidden folders are not models; parts belong to
        their whole."""
        with self._convert_disk_errors():
            marks = {folder.name: _read_mark(folder) for folder in _list_folders(self.folder)}
            held = []
            for folder, mark in marks.items():
                if mark is None:
                    held.append(self._foreign_entry(folder))
                elif mark.part == "model":
                    ours = [name for name in (triton_name(mark.name, part) for part in PARTS) if marks.get(name)]
                    held.append(self._managed_entry(mark, ours))
        return sorted(held, key=lambda one: one.name)

    def _foreign_entry(self, folder: str) -> RepositoryEntry:
        size = _folder_size(self.folder / folder)
        return RepositoryEntry(name=served_name(folder) or folder, folders=(folder,), size=size, managed=False)

    def _managed_entry(self, mark: Mark, folders: Sequence[str]) -> RepositoryEntry:
        return RepositoryEntry(
            name=mark.name,
            folders=tuple(folders),
            size=sum(_folder_size(self.folder / folder) for folder in folders),
            managed=True,
            source=mark.source,
            space=mark.space,
            created=mark.created,
        )

    def _check_own(self, served: str, needed: Sequence[str]) -> None:
        """Raise Forbidden if a needed folder exists and is not Shoal's, or one of Shoal's has other files too;
        InvalidValue if a folder is outside the repository."""
        for folder in [self.folder / triton_name(served, part) for part in PARTS]:
            if folder.parent != self.folder:
                raise InvalidValue(f"{served!r} points outside the repository", param="model")
            mark = _read_mark(folder)
            if mark is None and folder.name in needed and os.path.lexists(folder):
                raise Forbidden(
                    f"{folder} was not made by Shoal and is left unchanged: choose another name, or move it away",
                    param="model",
                )
            if mark is not None and (added := sorted(_list_files(folder) - {*mark.files, MARK})):
                raise Forbidden(
                    f"{folder} contains files that Shoal did not write ({', '.join(added[:3])}): move them away first",
                    param="model",
                )

    @contextmanager
    def _lock_repository(self) -> Iterator[Path]:
        with self._convert_disk_errors(), staging(self.folder, self._lock_wait_s) as partial:
            self._sweep_orphans(partial)
            yield partial

    @contextmanager
    def _convert_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ConfigError(
                f"the model repository {self.folder} cannot be used: {error.strerror or error}{where}; check "
                "triton_repository and its permissions",
                param="triton_repository",
            ) from error

    def _sweep_orphans(self, partial: Path) -> None:
        """Remove parts without a whole: their writer died between the two."""
        for folder in list(_list_folders(self.folder)):
            mark = _read_mark(folder)
            if mark is not None and mark.part != "model" and _read_mark(self.folder / triton_name(mark.name)) is None:
                _move_aside(folder, partial)


def build_pushes(spec: EntrySpec) -> tuple[ModelPush, ...]:
    """Return the models of an entry in load order, for a Triton whose disk Shoal cannot write. Blocks.

    Raises ModelFileError if a file is missing, ConfigError if a model does not fit into one message.
    """
    models = triton_models(spec)
    _check_sources(models)
    found = []
    for model in models:
        size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in model.files.values())
        if size > MAX_PUSH:
            raise ConfigError(
                f"{spec.name} has {size} bytes, but a push is limited to {MAX_PUSH}: set triton_repository to a folder "
                "that Triton reads and Shoal can write",
                param="triton_repository",
            )
        files = {path: one.read_bytes() if isinstance(one, Path) else one for path, one in model.files.items()}
        found.append(ModelPush(model, files))
    return tuple(found)


def _check_sources(models: Sequence[TritonModel]) -> None:
    """Raise ModelFileError if a file of an entry is missing."""
    for model in models:
        for content in model.files.values():
            if isinstance(content, Path) and not content.is_file():
                raise ModelFileError("is missing; pull the model again", file=str(content))


def _build_folder(partial: Path, spec: EntrySpec, model: TritonModel) -> Path:
    """Write a model's folder into `partial`, synced to disk."""
    target = partial / model.name
    files: dict[str, Content] = {**model.files, CONFIG: model.config_text}
    mark = Mark(
        format=FORMAT,
        name=spec.name,
        part=model.part,
        source=spec.source,
        space=spec.space,
        created=int(time.time()),
        files=tuple(files),
    )
    files[MARK] = msgspec.json.format(msgspec.json.encode(mark), indent=1)
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_bytes(content)
        _sync(path)
    for root, _, _ in os.walk(target):
        _sync(Path(root))
    return target


def _install(built: Sequence[tuple[Path, Path]]) -> None:
    """Move every folder into place; if one of them fails, restore those before it."""
    done: list[tuple[Path, Path, bool]] = []
    try:
        for new, place in built:
            older = place.exists()
            if older:
                exchange(new, place)
            else:
                new.rename(place)
            done.append((new, place, older))
    except OSError:
        for new, place, older in reversed(done):
            if older:
                exchange(new, place)
            else:
                place.rename(new)
        raise


def _move_aside(folder: Path, partial: Path) -> bool:
    """Move a folder that Shoal made out of the repository in one step; it is deleted with `partial`."""
    if _read_mark(folder) is None:
        return False
    folder.rename(Path(tempfile.mkdtemp(dir=partial)) / folder.name)
    return True


def _read_mark(folder: Path) -> Mark | None:
    """Return the mark of a real folder, if there is one and it names this folder."""
    path = folder / MARK
    if folder.is_symlink() or path.is_symlink():
        return None
    try:
        mark = _MARK.decode(path.read_bytes())
        return mark if mark.format == FORMAT and triton_name(mark.name, mark.part) == folder.name else None
    except (OSError, msgspec.MsgspecError, InvalidValue):
        return None


def _list_folders(root: Path) -> Iterator[Path]:
    """Yield the real, visible folders in `root`."""
    try:
        with os.scandir(root) as found:
            names = sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    yield from (root / name for name in names if not name.startswith("."))


def _list_files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder except Python's compiled ones. A link counts as a file."""
    found = set()
    for root, folders, names in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(root, name))]
        if _COMPILED in folders:
            folders.remove(_COMPILED)
        found |= {os.path.relpath(os.path.join(root, name), folder) for name in (*names, *linked)}
    return found


def _folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder; a link counts its own."""
    total = 0
    for name in _list_files(folder):
        try:
            total += os.lstat(folder / name).st_size
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
    return total


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, before a rename publishes it."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
