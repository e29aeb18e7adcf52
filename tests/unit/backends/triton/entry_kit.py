"""Specifications of repository entries over small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.backends.triton.repository_entry import EntryOptions, EntrySpec
from shoal.specs import TextSpec

SPEC = TextSpec(
    tokenizer="tokenizer.json",
    inputs=("input_ids", "attention_mask"),
    dimension=4,
    max_tokens=64,
    prompts={"query": "Frage: größer "},
    pooled="pooled",
)


def entry(folder: Path, name: str = "org/mini", *, graph: bytes = b"graph", **fields: Any) -> EntrySpec:
    """Return an entry whose files are written to `folder`; `options` as a dict, everything else as EntrySpec's
    fields."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(graph)
    (folder / "tokenizer.json").write_text("{}")
    options = EntryOptions(**fields.pop("options", {}))
    expected: dict[str, Any] = {
        "text": SPEC,
        "tokenizer": folder / "tokenizer.json",
        "source": "hf:org/mini@main",
        "space": "5face",
    }
    return EntrySpec(name=name, graph=folder / "model.onnx", options=options, **(expected | fields))


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return every file and folder under `folder`: contents by path, and the targets of links."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found
