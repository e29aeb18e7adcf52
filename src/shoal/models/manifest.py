"""The store's record of a model: where it came from, how it was converted, and the hash of every file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from shoal.decoding import json_decoder
from shoal.downloads.disk import check_plain
from shoal.errors import ModelFileError
from shoal.specs import ContrastSpec, ImageSpec, TextSpec

MANIFEST = "manifest.json"
NOTES = "notes.json"
"""What engines learned about a model on this machine; worth keeping, but not part of the model."""

FORMAT = 1
CONVERTER = 4
"""Increased whenever the conversion changes its output for the same files; older results are then converted again."""


class FileFacts(msgspec.Struct, frozen=True):
    """A file's hash, size and time. `size` in bytes; `mtime` in nanoseconds: an unchanged file is trusted without
    reading it."""

    sha256: str
    size: int
    mtime: int


class Verdict(msgspec.Struct, frozen=True):
    """The result of comparing a converted model with a second computation, as text; `min_cosine` is that of the worst
    row."""

    text: str
    min_cosine: float


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A language model as described by its files. `format` is that of its graph. `tokenizer`: path of tokenizer.json
    inside the model's folder, with the chat template and other settings beside it. `place`: the folder of a model that
    is used in place; empty if its files are in the store. `stop_ids`: tokens that end an answer. `cache_heads`: (heads,
    head width) of each cached key and value; empty if only the graph shows them."""

    format: Literal["ir", "gguf"]
    tokenizer: str
    place: str = ""
    architecture: str = ""
    context_tokens: int | None = None
    vocab_size: int = 0
    stop_ids: tuple[int, ...] = ()
    cache_heads: tuple[tuple[int, int], ...] = ()


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A model's image tower, with or without a text tower. `graph` is a path like those of the manifest."""

    graph: str
    spec: ImageSpec
    verification: Verdict | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One model in the store.

    `address` is the requested address; `source` is the one that answered, and `revision` the commit, version or
    fingerprint of its files. Version `converter` of the conversion made `graph`. `graph_source` is "built", "shipped",
    "exported" (by PyTorch) or "folder" (an engine runs the model's own files); `conversion` describes it in words.

    A model that embeds or scores texts has `text`. A language model has `generation`, and its `graph` is the author's
    own. A model that takes images has `image`; if it takes nothing else, it has no `text`, and `graph` is that of
    `image`. `contrast`: how images and texts are compared. `verification` None: not compared with a second computation
    yet.

    `created`: Unix seconds. `weights`: SHA-256 of the published weights, by path at the source; they identify the
    model. `files`: all files except manifest and notes. Paths (`graph`, those in specs and `files`) are relative to the
    model's folder, except for a graph that is used in place.
    """

    format: int = FORMAT
    id: str
    address: str
    source: str
    revision: str
    converter: int
    graph: str
    graph_source: str
    conversion: str
    parameters: int
    text: TextSpec | None = None
    generation: GenerationSpec | None = None
    image: ImagePart | None = None
    contrast: ContrastSpec | None = None
    verification: Verdict | None = None
    created: int
    weights: dict[str, str]
    files: dict[str, FileFacts]

    @property
    def text_spec(self) -> TextSpec:
        """Return `text` of a model that embeds or scores texts. Raises ModelFileError for any other."""
        if self.text is None and self.image is not None:
            raise ModelFileError("is the graph of a model that accepts only images", file=self.graph)
        if self.text is None:
            raise ModelFileError(
                "is a language model, which generates text and cannot embed or score it", file=self.graph
            )
        return self.text

    @property
    def verification_summary(self) -> str:
        """Return the results of comparing its graphs, in words; "" if one of them was not compared."""
        verdicts = [self.verification] if self.text is not None or self.image is None else []
        verdicts += [self.image.verification] if self.image is not None else []
        return "; ".join(one.text for one in verdicts if one is not None) if all(verdicts) else ""

    @property
    def size(self) -> int:
        """Total size of its files in bytes."""
        return sum(facts.size for facts in self.files.values())

    @property
    def digest(self) -> str:
        """SHA-256 over the names and hashes of all files: equal for equal content."""
        lines = "".join(f"{facts.sha256}  {name}\n" for name, facts in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


class _Format(msgspec.Struct):
    format: int


_FORMAT = json_decoder(_Format)
_MANIFEST = json_decoder(Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the model's folder."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Read a model's manifest. Raises ModelFileError if it is missing, broken or of another format."""
    try:
        check_plain(folder / MANIFEST)
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot be read ({error.strerror}); pull the model again", file=MANIFEST) from error
    try:
        version = _FORMAT.decode(data).format
        if version != FORMAT:
            raise ModelFileError(
                f"is {version}, but this version of Shoal reads {FORMAT}; pull the model again",
                file=MANIFEST,
                key="format",
            )
        manifest = _MANIFEST.decode(data)
    except msgspec.MsgspecError as error:
        raise ModelFileError(f"is broken ({error}); pull the model again", file=MANIFEST) from error
    spec, image = manifest.generation or manifest.text, manifest.image
    if spec is None and image is None:
        raise ModelFileError("does not state the model's task; pull the model again", file=MANIFEST, key="text")
    named = [spec.tokenizer] if spec is not None else []
    named += [image.graph] if image is not None else []
    for name in (*manifest.files, manifest.graph, *named):
        if not is_inside(name):
            raise ModelFileError(
                "is outside the model's folder; remove the model and pull it again", file=MANIFEST, key=name
            )
    return manifest


def measure(folder: Path, known: dict[str, str] | None = None) -> dict[str, FileFacts]:
    """Hash every file under `folder` except manifest and notes; `known` holds hashes (by path) computed before."""
    facts = {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if name not in (MANIFEST, NOTES):
            stat = path.stat()
            digest = (known or {}).get(name) or sha256(path)
            facts[name] = FileFacts(sha256=digest, size=stat.st_size, mtime=stat.st_mtime_ns)
    return facts


def check_files(folder: Path, manifest: Manifest, *, full: bool = False) -> list[str]:
    """Compare the files with the manifest; return one line per difference, none if all is well.

    A file with the right size and time is trusted. One with only the right size is hashed, because copying a store
    changes times but not contents. `full` hashes every file.
    """
    wrong = []
    for name, facts in sorted(manifest.files.items()):
        path = folder / name
        try:
            stat = os.lstat(path)
            check_plain(path)
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
            continue
        if stat.st_size != facts.size:
            wrong.append(f"{name} has {stat.st_size} bytes, not {facts.size}")
        elif (full or stat.st_mtime_ns != facts.mtime) and sha256(path) != facts.sha256:
            wrong.append(f"{name} has changed: its SHA-256 is not {facts.sha256}")
    return wrong


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_inside(name: str) -> bool:
    """Whether a relative path with forward slashes stays in its folder on every operating system."""
    return not {"", ".", ".."} & set(name.split("/")) and "\\" not in name and "\0" not in name


def _walk(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            yield Path(root, name)
