"""Manifests: stored values and detected changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from shoal.errors import ModelFileError
from shoal.models.manifest import (
    MANIFEST,
    FileFacts,
    ImagePart,
    Manifest,
    Verdict,
    check_files,
    is_inside,
    measure,
    read_manifest,
    sha256,
    write_manifest,
)
from shoal.specs import ImageSpec, TextSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "source" / "config.json").write_bytes(b"{}")
    return tmp_path


def manifest(files: dict[str, FileFacts], **changes: object) -> Manifest:
    manifest = Manifest(
        id="org/tiny",
        address="hf:org/tiny",
        source="hf:org/tiny",
        revision="abc",
        converter=1,
        graph="model.onnx",
        graph_source="built",
        weights={},
        conversion="built",
        parameters=5,
        text=TextSpec(
            tokenizer="tokenizer.json", inputs=("input_ids",), dimension=8, max_tokens=16, prompts={"q": "?"}
        ),
        verification=Verdict("agrees", 0.99999),
        created=1_700_000_000,
        files=files,
    )
    return msgspec.structs.replace(manifest, **changes)


def test_manifest_round_trips(folder: Path) -> None:
    """The manifest is human-readable JSON."""
    written = manifest(measure(folder))
    write_manifest(folder, written)
    assert read_manifest(folder) == written
    assert json.loads((folder / MANIFEST).read_text())["format"] == 1


def test_measure_covers_every_file_but_the_manifest(folder: Path) -> None:
    """All files are hashed, also in subfolders, but not the manifest itself."""
    write_manifest(folder, manifest({}))
    facts = measure(folder)
    assert facts.keys() == {"model.onnx", "source/config.json"}
    assert facts["model.onnx"].sha256 == sha256(folder / "model.onnx")
    assert facts["model.onnx"].size == 5


def test_known_hashes_are_not_computed_again(folder: Path) -> None:
    """A hash computed during the fetch is reused."""
    assert measure(folder, {"model.onnx": "known"})["model.onnx"].sha256 == "known"


def test_untouched_files_are_trusted(folder: Path) -> None:
    """Size and time suffice for the quick check; equal content with a new time passes too."""
    facts = manifest(measure(folder))
    assert check_files(folder, facts) == []
    os.utime(folder / "model.onnx", ns=(1, 1))
    assert check_files(folder, facts) == []


@pytest.mark.parametrize(("content", "message"), [(b"grap", "4 bytes"), (b"hparg", "has changed"), (None, "missing")])
def test_changed_files_are_named(folder: Path, content: bytes | None, message: str) -> None:
    """The quick check detects a missing, truncated or rewritten file."""
    facts = manifest(measure(folder))
    path = folder / "model.onnx"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    (line,) = check_files(folder, facts)
    assert "model.onnx" in line
    assert message in line


def test_full_check_reads_everything(folder: Path) -> None:
    """Only the full check detects a change with the old size and time."""
    facts = manifest(measure(folder))
    path = folder / "model.onnx"
    path.write_bytes(b"hparg")
    os.utime(path, ns=(facts.files["model.onnx"].mtime,) * 2)
    assert check_files(folder, facts) == []
    assert len(check_files(folder, facts, full=True)) == 1


def test_digest_follows_content(folder: Path) -> None:
    """Equal files have one digest whenever they were written; other content or names have another."""
    facts = measure(folder)
    later = {name: msgspec.structs.replace(one, mtime=1) for name, one in facts.items()}
    other = facts | {"model.onnx": msgspec.structs.replace(facts["model.onnx"], sha256="0" * 64)}
    assert manifest(facts).digest == manifest(later).digest
    assert len({manifest(facts).digest, manifest(other).digest, manifest({}).digest}) == 3
    assert manifest(facts).size == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is broken"),
        ('{"format": 1}', "is broken"),
        ('{"format": 99, "unheard": true}', "this version of Shoal reads 1"),
    ],
)
def test_unusable_manifests_state_the_next_step(folder: Path, text: str | None, message: str) -> None:
    """An absent, broken or newer manifest is refused with the next step."""
    if text is not None:
        (folder / MANIFEST).write_text(text)
    with pytest.raises(ModelFileError) as caught:
        read_manifest(folder)
    assert message in caught.value.message
    assert "pull the model again" in caught.value.message


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a/../../b"])
def test_a_manifest_cannot_lead_out_of_its_folder(folder: Path, path: str) -> None:
    """Paths of files, graphs and tokenizer must be inside of it, else the manifest is refused."""
    facts = FileFacts(sha256="", size=1, mtime=1)
    spec = manifest({}).text_spec
    for hostile in (
        manifest({path: facts}),
        manifest({}, graph=path),
        manifest({}, text=msgspec.structs.replace(spec, tokenizer=path)),
        manifest({}, image=ImagePart(graph=path, spec=ImageSpec(size=(2, 2), dimension=1))),
    ):
        write_manifest(folder, hostile)
        with pytest.raises(ModelFileError, match="is outside the model's folder"):
            read_manifest(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/..", "./a", "a\\b", "a\0", "a//../b"])
def test_hostile_relative_paths(name: str) -> None:
    """No form of a path that could leave its folder counts as inside."""
    assert not is_inside(name)
    assert is_inside("1_Pooling/config.json")
