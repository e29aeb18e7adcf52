"""Models in local folders."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address
from shoal.errors import SourceError
from shoal.models.sources import fetch
from shoal.models.sources.folder import resolve


def test_a_folder_is_used_where_it_is(model_folder: Path, tmp_path: Path) -> None:
    """Nothing is copied: the result is the folder's real path."""
    link = tmp_path / "link"
    link.symlink_to(model_folder)
    fetched = fetch(parse_address(f"file:{link}"), tmp_path / "into")
    assert fetched.folder == model_folder.resolve()
    assert not (tmp_path / "into").exists()


def test_the_fingerprint_follows_the_files(model_folder: Path) -> None:
    """Equal files have one fingerprint; a touched, added or renamed file changes it, a hidden folder does not."""
    address = parse_address(f"file:{model_folder}")
    prints = [resolve(address).revision, resolve(address).revision]
    (model_folder / ".git").mkdir()
    (model_folder / ".git" / "HEAD").write_text("x")
    prints.append(resolve(address).revision)
    assert len(set(prints)) == 1
    os.utime(model_folder / "config.json", ns=(1, 1))
    prints.append(resolve(address).revision)
    (model_folder / "new.json").write_text("{}")
    prints.append(resolve(address).revision)
    (model_folder / "new.json").rename(model_folder / "old.json")
    prints.append(resolve(address).revision)
    assert len(set(prints)) == 4


def test_home_is_expanded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde, which shells leave alone after a colon, means the home folder."""
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert resolve(parse_address(f"file:~/{model_folder.name}")).target == str(model_folder.resolve())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "does not exist"),
        ("tiny/config.json/within", "does not exist"),
        ("tiny/config.json", "is a file"),
        (".", "config.json"),
    ],
)
def test_paths_without_a_model_are_refused(model_folder: Path, path: str, message: str) -> None:
    """A missing path, a file and a folder without a model have different errors."""
    with pytest.raises(SourceError, match=message):
        resolve(parse_address(f"file:{model_folder.parent / path}"))


def test_a_path_that_the_system_does_not_take_is_refused(model_folder: Path) -> None:
    """Its existence cannot be checked."""
    with pytest.raises(SourceError, match="cannot be read: File name too long"):
        resolve(parse_address(f"file:{model_folder.parent / ('n' * 300)}"))


def test_modules_that_cannot_be_read(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and the reason, as for every other file."""
    (model_folder / "modules.json").write_text("[]")

    def read_bytes(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(SourceError, match=r"modules\.json cannot be read: Permission denied"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_clone_without_its_large_files_is_reported(model_folder: Path, tmp_path: Path, name: str) -> None:
    """Git LFS leaves pointers in their place; downloading again would bring the same pointers."""
    (model_folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:53aa\nsize 90868376\n")
    with pytest.raises(SourceError, match=f"{name} is a Git LFS pointer.* `git lfs pull` in {model_folder}"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


def special(path: Path, kind: str) -> None:
    """Replace a file with a special file that must never be opened."""
    path.unlink()
    match kind:
        case "named pipe":
            os.mkfifo(path)
        case "pipe behind a link":
            os.mkfifo(path.with_name(".pipe"))
            path.symlink_to(".pipe")
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as unix_socket:
                unix_socket.bind(os.path.relpath(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["modules.json", "config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["named pipe", "pipe behind a link", "device", "socket"])
def test_special_files_are_refused(
    model_folder: Path, tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, without opening it: a pipe without a writer blocks forever, /dev/zero never ends."""
    monkeypatch.chdir(model_folder)
    special(model_folder / name, kind)
    word = kind.partition(" ")[0] if kind != "named pipe" else kind
    with pytest.raises(SourceError, match=rf"{name}.*{word}"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


@pytest.mark.parametrize("kind", ["named pipe", "folder"])
@pytest.mark.parametrize("alone", [False, True])
def test_something_else_in_the_place_of_the_config(
    model_folder: Path, tmp_path: Path, kind: str, *, alone: bool
) -> None:
    """The error names it and does not claim that a file is missing."""
    if kind == "folder":
        (model_folder / "config.json").unlink()
        (model_folder / "config.json").mkdir()
    else:
        special(model_folder / "config.json", kind)
    if alone:
        (model_folder / "modules.json").unlink()
    with pytest.raises(SourceError, match=rf"config.json cannot be read: it is a {kind}, not a regular file"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


def test_a_file_that_is_not_there_is_named(model_folder: Path, tmp_path: Path) -> None:
    """For example a dangling link of a hub cache: the file is missing, not the folder."""
    (model_folder / "vocab.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(SourceError, match=r"cannot be read: No such file or directory \(.*/vocab.txt\)"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


def test_a_file_that_may_not_be_read_is_named(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_open = Path.open

    def refused(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return original_open(path, *how, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(SourceError, match=r"config.json cannot be read: Permission denied"):
        fetch(parse_address(f"file:{model_folder}"), tmp_path / "into")


def test_a_folder_of_open_clip_is_one(tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text("{}", encoding="utf-8")
    assert resolve(parse_address(f"file:{tmp_path}")).target == str(tmp_path.resolve())
    assert resolve(parse_address(f"file:{tmp_path}"), weights=False).target == str(tmp_path.resolve())
