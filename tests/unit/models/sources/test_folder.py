"""Models in folders of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import SourceError
from shoal.models.address import parse_address
from shoal.models.sources import fetch
from shoal.models.sources.folder import resolve


def test_a_folder_is_used_where_it_is(model_folder: Path, tmp_path: Path) -> None:
    """Nothing is copied: the answer is the folder itself, by its real path."""
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
    ("path", "said"), [("gone", "does not exist"), ("tiny/config.json", "is a file"), (".", "neither config.json")]
)
def test_what_is_no_model_is_refused(model_folder: Path, path: str, said: str) -> None:
    """A missing path, a file and a folder without a model are told apart."""
    with pytest.raises(SourceError, match=said):
        resolve(parse_address(f"file:{model_folder.parent / path}"))


def test_a_folder_of_open_clip_is_one(tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text("{}", encoding="utf-8")
    assert resolve(parse_address(f"file:{tmp_path}")).target == str(tmp_path.resolve())
    assert resolve(parse_address(f"file:{tmp_path}"), weights=False).target == str(tmp_path.resolve())
