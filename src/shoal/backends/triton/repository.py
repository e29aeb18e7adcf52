"""A Triton model repository on a disk that Shoal can write.

    <name>/config.pbtxt, <name>/1/...     a model, as Triton wants it
    <name>/shoal.json                     the mark: Shoal made this folder, and may replace and remove it

A folder appears whole, by one rename, and an older one is exchanged for it in one step. Links are never followed, and
what does not bear the mark is never changed; nor are files that somebody added to a folder that does.
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

from shoal.backends.triton.entry import FORMAT, Content, EntrySpec, TritonModel, triton_models
from shoal.backends.triton.exchange import exchange
from shoal.backends.triton.naming import Part, served_name, triton_name
from shoal.backends.triton.staging import staging
from shoal.decoding import json_decoder
from shoal.errors import ConfigError, Forbidden, InvalidValue, ModelFileError

MARK = "shoal.json"
CONFIG = "config.pbtxt"
PARTS: tuple[Part, ...] = ("model", "tokenizer", "encoder", "image")
"""In the order in which they go: the whole before its parts."""

LOCK_WAIT_S = 60.0
MAX_PUSH = 2**31 - 2**20
"""Bytes. A gRPC message is under 2 GiB, and the configuration needs room too."""

_COMPILED = "__pycache__"
"""Python writes it beside a model.py that it runs."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What shoal.json says; `name` and `part` are those of the folder that it lies in. `created`: unix seconds.
    `files`: the paths of all that Shoal put there."""

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
    """A model in the repository. `name` is the served name; of a folder that Shoal did not make and whose name no
    served name leads to, that name. `size`: bytes of all its files. `folders`: the whole first, then its parts."""

    name: str
    folders: tuple[str, ...]
    size: int
    managed: bool
    source: str = ""
    space: str = ""
    created: int = 0


@dataclass(frozen=True, slots=True)
class ModelPush:
    """A model for load by file push: `files` are bytes by their path in the model's folder ("1/model.onnx")."""

    model: TritonModel
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def ensemble(self) -> bool:
        """Triton 2.51 looks for the parts of an ensemble on its disk, does not find pushed ones, answers INTERNAL
        "failed to poll from model repository", and loads the ensemble all the same (Triton's issue 4630 is about this).
        So it is ModelReady that says whether its load worked."""
        return self.model.config.platform == "ensemble"


class Repository:
    """Every method and `folder` block: use them in a thread. Several processes may use one repository.

    Methods raise ConfigError (`triton_repository`) where the disk says no, InvalidValue for a name that no model may
    have, Forbidden for what Shoal did not make, Unavailable when another process writes for over `lock_wait_s`.
    """

    def __init__(self, folder: Path | str, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._given = Path(folder)
        self._lock_wait_s = lock_wait_s

    @cached_property
    def folder(self) -> Path:
        """The real folder, which the one given may be a link to."""
        return Path(os.path.realpath(self._given.expanduser()))

    def write(self, spec: EntrySpec) -> tuple[str, ...]:
        """Make the entry of a model, in place of an older one; answers its folders, parts before the whole.

        Raises ModelFileError when a file of `spec` is not there.
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
        """Remove what Shoal made for a served name; False when there is nothing."""
        folders = [self.folder / triton_name(name, part) for part in PARTS]
        if not any(map(os.path.lexists, folders)):
            return False
        with self._lock_repository() as partial:
            self._check_own(name, [folders[0].name])
            taken = [_move_aside(folder, partial) for folder in folders]
        return any(taken)

    def find(self, name: str) -> RepositoryEntry | None:
        """The entry of a served name, whoever made it; None when there is none."""
        return next((one for one in self.entries() if one.name == name), None)

    def entries(self) -> list[RepositoryEntry]:
        """Every model in the repository, by name. Parts belong to their whole; links and hidden folders are no
        models."""
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
        """Raises Forbidden when a needed folder is there and not ours, or one of ours holds more than we put there;
        InvalidValue when a folder lies elsewhere."""
        for folder in [self.folder / triton_name(served, part) for part in PARTS]:
            if folder.parent != self.folder:
                raise InvalidValue(f"{served!r} leads out of the repository", param="model")
            mark = _read_mark(folder)
            if mark is None and folder.name in needed and os.path.lexists(folder):
                raise Forbidden(
                    f"{folder} was not made by Shoal, which leaves it as it is: choose another name, or move it away",
                    param="model",
                )
            if mark is not None and (added := sorted(_list_files(folder) - {*mark.files, MARK})):
                raise Forbidden(
                    f"{folder} holds files that Shoal did not put there ({', '.join(added[:3])}): move them away first",
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
        """Parts without a whole: their writer died between the two."""
        for folder in list(_list_folders(self.folder)):
            mark = _read_mark(folder)
            if mark is not None and mark.part != "model" and _read_mark(self.folder / triton_name(mark.name)) is None:
                _move_aside(folder, partial)


def build_pushes(spec: EntrySpec) -> tuple[ModelPush, ...]:
    """The models of an entry for a Triton whose disk cannot be written, in the order in which to load them. Blocks.

    Raises ModelFileError when a file is not there, ConfigError when a model does not fit into one message.
    """
    models = triton_models(spec)
    _check_sources(models)
    found = []
    for model in models:
        size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in model.files.values())
        if size > MAX_PUSH:
            raise ConfigError(
                f"{spec.name} has {size} bytes, and a push takes at most {MAX_PUSH}: let Shoal write the repository "
                "(triton_repository), on a disk that Triton reads",
                param="triton_repository",
            )
        files = {path: one.read_bytes() if isinstance(one, Path) else one for path, one in model.files.items()}
        found.append(ModelPush(model, files))
    return tuple(found)


def _check_sources(models: Sequence[TritonModel]) -> None:
    """Raises ModelFileError when a file that belongs into an entry is not there."""
    for model in models:
        for content in model.files.values():
            if isinstance(content, Path) and not content.is_file():
                raise ModelFileError("is missing; pull the model again", file=str(content))


def _build_folder(partial: Path, spec: EntrySpec, model: TritonModel) -> Path:
    """A model's folder in `partial`, all of it on the disk."""
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
    """Put every folder into its place; when one of them cannot be, those before it are as they were."""
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
    """Move a folder of ours out of Triton's sight in one step; it is deleted with `partial`."""
    if _read_mark(folder) is None:
        return False
    folder.rename(Path(tempfile.mkdtemp(dir=partial)) / folder.name)
    return True


def _read_mark(folder: Path) -> Mark | None:
    """The mark of a real folder, when it is there and means this very folder."""
    path = folder / MARK
    if folder.is_symlink() or path.is_symlink():
        return None
    try:
        mark = _MARK.decode(path.read_bytes())
        return mark if mark.format == FORMAT and triton_name(mark.name, mark.part) == folder.name else None
    except (OSError, msgspec.MsgspecError, InvalidValue):
        return None


def _list_folders(root: Path) -> Iterator[Path]:
    """The real, visible folders in `root`."""
    try:
        with os.scandir(root) as found:
            names = sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    yield from (root / name for name in names if not name.startswith("."))


def _list_files(folder: Path) -> set[str]:
    """Paths of all that lies in a folder but what Python compiles on the way. A link counts as a file."""
    found = set()
    for root, folders, names in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(root, name))]
        if _COMPILED in folders:
            folders.remove(_COMPILED)
        found |= {os.path.relpath(os.path.join(root, name), folder) for name in (*names, *linked)}
    return found


def _folder_size(folder: Path) -> int:
    """Bytes of the files in a folder; links count as themselves."""
    total = 0
    for name in _list_files(folder):
        try:
            total += os.lstat(folder / name).st_size
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
    return total


def _sync(path: Path) -> None:
    """What was written is on the disk before a rename makes it count."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
