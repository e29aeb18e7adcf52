"""Which files are read, and how texts are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.mcp.passages import MAX_FILE_BYTES, PASSAGE_CHARACTERS, Passage, check_folders, read_passages, split_text


def test_a_short_text_is_one_passage() -> None:
    assert split_text("a", "\n one\n\ntwo \n") == [Passage("a", 2, " one\n\ntwo")]
    assert split_text("a", " \n") == []


def test_long_texts_are_cut_at_line_ends() -> None:
    """Each passage knows its line, and a line that is too long is cut inside."""
    lines = ["x" * 600, "y" * 600, "z" * (2 * PASSAGE_CHARACTERS + 1), "end"]
    passages = split_text("a", "\n".join(lines))
    assert [each.line for each in passages] == [1, 2, 3, 3, 3]
    assert passages[-1].text == "z\nend"


@given(st.text(alphabet="ab \n", max_size=5000))
def test_no_word_is_lost(text: str) -> None:
    passages = split_text("a", text)
    assert "".join("".join(each.text.split()) for each in passages) == "".join(text.split())
    for each in passages:
        assert 0 < len(each.text) <= PASSAGE_CHARACTERS
        assert each.text.split("\n")[0] in text.splitlines()[each.line - 1]


def test_text_files_below_a_folder_are_read(tmp_path: Path) -> None:
    """In order; without hidden ones, links, binary ones, large ones, and folders of tools."""
    for name in ("b.md", "a/c.py", ".git/config", "node_modules/m.js", ".hidden", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else f"text of {name}")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zero.bin").write_bytes(b"a\0b")
    (tmp_path / "large.txt").write_text("x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "link.md").symlink_to(tmp_path / "b.md")
    found = [each for passages in read_passages([tmp_path]) for each in passages]
    assert [(each.source, each.text) for each in found] == [
        (str(tmp_path / "b.md"), "text of b.md"),
        (str(tmp_path / "a/c.py"), "text of a/c.py"),
    ]
    assert len(list(read_passages([tmp_path / ".hidden"]))) == 1  # it was named


def test_a_folder_must_exist(tmp_path: Path) -> None:
    check_folders([tmp_path])
    with pytest.raises(ConfigError, match="there is no such folder or file"):
        check_folders([tmp_path, tmp_path / "none"])
