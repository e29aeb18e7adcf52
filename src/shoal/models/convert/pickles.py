"""Convert weights published only as pickles to safetensors, in the exporter's process, before anything here reads them.
The pickles are not kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import read_object
from shoal.models.manifest import is_inside, sha256
from shoal.models.progress import Stop
from shoal.models.sources import FetchedModel
from shoal.models.sources.select import is_pickle, is_pickle_index, is_weights

if TYPE_CHECKING:
    from shoal.models.convert.export import ExportResult


class Export(Protocol):
    """Exports the model of `folder` into the empty folder `into`, with a `graph` or only with all weights in
    safetensors: `export.export` with its limits."""

    def __call__(
        self, folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop, /, *, graph: bool
    ) -> ExportResult: ...


def convert_pickles(
    fetched: FetchedModel, target: Path, export: Export | None, progress: Callable[[str, float], None], stop: Stop
) -> FetchedModel:
    """Replace pickles by safetensors and delete them; `published` has the hashes of the original weights. Changes only
    files in `target`: a model that is used in place has no chosen pickles.

    Raises ModelFileError for a pickle with anything but tensors, and for one that must not be opened.
    """
    folder = fetched.folder
    names = _names(folder) if folder.is_relative_to(target) else []
    pickles = [name for name in names if is_pickle(name)]
    if not pickles:
        return fetched
    if export is None:
        raise ModelFileError(
            "is a pickle and cannot be loaded without the convert extra; fetch the model again", file=pickles[0]
        )
    _refuse_own_code(folder, names)
    hashes = dict(fetched.hashes)
    for name in filter(is_weights, names):
        stop.check()
        hashes.setdefault(name, sha256(folder / name))
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as place:
        found = export(folder, Path(place), progress, stop, graph=False)
        for name in found.converted:
            if not is_inside(name):
                raise ModelFileError("is outside the model's folder; report this with the model's name", file=name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(place) / name, folder / name)
    for name in [*pickles, *filter(is_pickle_index, names)]:
        (folder / name).unlink()
    return replace(
        fetched,
        hashes={name: digest for name, digest in hashes.items() if name not in pickles},
        published_hashes={name: digest for name, digest in hashes.items() if is_weights(name)},
    )


def _refuse_own_code(folder: Path, names: Sequence[str]) -> None:
    """Reject models with their own code before spending time on them: without a shipped graph, only that code defines
    what the weights mean."""
    if any(name.endswith(".onnx") for name in names):
        return
    for name in names:
        config = read_object(folder, name) if PurePosixPath(name).name == "config.json" else None
        if config is not None and "auto_map" in config:
            raise config.refuse("auto_map", "the model contains custom code, which Shoal never runs")


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
