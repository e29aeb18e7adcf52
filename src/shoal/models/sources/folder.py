"""`file:`: a model's folder on this machine, used in place. If its weights are pickles, its files are linked or copied,
so that the pickles can be replaced; and if it is read as a reranker, so that it can be marked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.downloads.disk import check_plain, link_or_copy
from shoal.errors import NotAtSource, SourceError
from shoal.models.address import Address
from shoal.models.manifest import sha256
from shoal.models.rerankers import recognize_folder
from shoal.models.sources.access import FetchedModel, FetchJob, disk_error
from shoal.models.sources.select import IR, OPEN_CLIP, TOKENIZER, is_pickle, is_weights, read_module_folders

_POINTER = b"version https://git-lfs.github.com/spec/"


def resolve(address: Address, *, weights: bool = True) -> Address:
    """Return the address with the real absolute path, and a fingerprint of the files as the revision.

    The fingerprint covers names, sizes, times and the form of reranker, so it reads no files. Raises SourceError if the
    folder holds no model; without `weights`, a tokenizer.json alone is enough.
    """
    needed = ("config.json", "modules.json", OPEN_CLIP, *(IR[:1] if weights else (TOKENIZER,)))
    path = Path(address.target).expanduser()
    try:
        path = path.resolve(strict=True)
        if not path.is_dir():
            raise SourceError(f"{address} is a file: name the folder that holds the model")
        for name in needed:
            if (path / name).exists():  # a pipe in its place would look like a missing file below
                _check_plain(address, path, name)
        if not any((path / name).is_file() for name in needed) and not (
            weights and any(any(path.glob(each)) for each in ("*.gguf", "*/*-of-*.gguf"))
        ):
            raise SourceError(f"{address} contains neither {' nor '.join(needed)}: name the model's own folder")
        lines = sorted(_describe(file, path) for file in _walk(path))
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not os.path.exists(path):
            raise NotAtSource(f"{address} does not exist: check the path") from None
        # For example, a dangling link in the folder. Not Path.exists: it raises without permission.
        raise SourceError(f"{address} cannot be read: {error.strerror} ({error.filename})") from error
    fingerprint = hashlib.sha256("".join([*lines, address.reranker]).encode()).hexdigest()[:32]
    return msgspec.structs.replace(address, target=str(path), revision=fingerprint)


def fetch(job: FetchJob) -> FetchedModel:
    """Return the folder itself, with its weights hashed; if they are pickles, or it is read as a reranker, copy the
    files to `job.into`."""
    address = resolve(job.address, weights=job.weights)
    folder = Path(address.target)
    names = [path.relative_to(folder).as_posix() for path in _walk(folder)]
    recognized = recognize_folder(folder, address.id)
    chosen = job.choose(names, _modules(job.address, folder) if "modules.json" in names else [], recognized)
    for name in chosen:
        _check(job.address, folder, name)
    copied = any(map(is_pickle, chosen)) or (job.weights and bool(job.find_reranker(names, recognized)))
    fetched = FetchedModel(job.into if copied else folder, address)
    for name in filter(is_weights, chosen):
        job.stop.check()
        fetched.hashes[name] = sha256(folder / name)
    if copied:
        for name in chosen:
            job.stop.check()
            _take(folder / name, job.into / name)
    return fetched


def _modules(address: Address, folder: Path) -> list[str]:
    """Return the folders that modules.json names. Raises SourceError."""
    try:
        check_plain(folder / "modules.json")
        return read_module_folders(folder)
    except OSError as error:
        raise _unreadable(address, "modules.json", error) from error


def _unreadable(address: Address, name: str, error: OSError) -> SourceError:
    return SourceError(f"{address}: {name} cannot be read: {error.strerror}")


def _check_plain(address: Address, folder: Path, name: str) -> None:
    try:
        check_plain(folder / name)
    except OSError as error:
        raise _unreadable(address, name, error) from error


def _check(address: Address, folder: Path, name: str) -> None:
    """Raise SourceError for anything but a plain file, and for a clone made without Git LFS: it has a short pointer in
    place of each large file, so cloning again does not help."""
    try:
        check_plain(folder / name)
        with (folder / name).open("rb") as file:
            begins = file.read(len(_POINTER))
    except OSError as error:
        raise _unreadable(address, name, error) from error
    if begins == _POINTER:
        raise SourceError(
            f"{address}: {name} is a Git LFS pointer, not the file itself: run `git lfs install` and "
            f"`git lfs pull` in {folder}"
        )


def _take(path: Path, target: Path) -> None:
    """Link or copy the file. Raises SourceError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(path, target)
    except OSError as error:
        raise disk_error(error, str(target.parent)) from error


def _describe(path: Path, folder: Path) -> str:
    stat = path.stat()
    return f"{path.relative_to(folder)}\t{stat.st_size}\t{stat.st_mtime_ns}\n"


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every file except those in hidden folders, such as a repository's history."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root, name) for name in names)
