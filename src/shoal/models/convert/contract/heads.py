"""Choose the heads over an encoder's token vectors, if these are not pooled or not only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.models.convert.contract.entries import Entry
from shoal.models.convert.contract.json_file import JsonFile
from shoal.models.convert.contract.late import STANFORD, is_late, read_late, read_m3, read_stanford
from shoal.models.convert.contract.lengths import Length
from shoal.models.convert.contract.saved import Kind
from shoal.models.convert.contract.sparse import is_splade, plain_splade, read_splade, read_token_weights
from shoal.models.convert.contract.types import Late, Splade, TokenWeights


class Heads(NamedTuple):
    """The heads of a model. With `splade`, or `late` of a model of kind "late", there is no dense vector. `prompts` are
    prepended to those of the other files."""

    kind: Kind = "dense"
    splade: Splade | None = None
    token_weights: TokenWeights | None = None
    late: Late | None = None
    prompts: dict[str, str] = {}


def kind_of(folder: Path, entries: tuple[Entry, ...] | None, config: JsonFile) -> Kind:
    """Return the kind of vectors that the files describe. `config` is the encoder's config.json."""
    if entries is None:
        if STANFORD in config.texts("architectures"):
            return "late"
        return "sparse" if plain_splade(folder, config) else "dense"
    if is_splade(entries):
        return "sparse"
    return "late" if is_late(folder, entries) else "dense"


def read_heads(
    folder: Path,
    kind: Kind,
    entries: tuple[Entry, ...] | None,
    *,
    config: JsonFile,
    sentence: JsonFile | None,
    width: int,
) -> Heads:
    """Read the heads over token vectors of `width`. Raises ModelFileError for missing or unknown parts."""
    prefix = f"{entries[0].path}/" if entries and entries[0].path else ""
    if kind == "sparse":
        splade = read_splade(folder, entries, config, sentence) if entries else plain_splade(folder, config)
        return Heads(kind, splade=splade)
    if kind == "late":
        read = read_late(folder, entries, width, sentence) if entries else read_stanford(folder, width)
        return Heads(kind, late=read.late, prompts=read.prompts)
    return Heads(
        token_weights=read_token_weights(folder, prefix, width),
        late=read_m3(folder, prefix, width),
    )


def longest(late: Late | None, stated: list[Length]) -> list[Length]:
    """Return the stated lengths; if late interaction has its own for queries and documents, the larger of the two."""
    lengths = (
        [] if late is None else [length for length in (late.query_length, late.document_length) if length is not None]
    )
    if len(lengths) == 2:
        return [max(lengths)]
    return [max([min(stated), *lengths])] if stated else []


def with_markers(prompts: dict[str, str], markers: dict[str, str]) -> dict[str, str]:
    """Prepend each role's marker to its prompt, once."""
    return prompts | {role: text + prompts.get(role, "").removeprefix(text) for role, text in markers.items()}
