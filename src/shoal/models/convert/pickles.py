"""Convert weights published only as pickles to safetensors before anything else reads them. The pickles are not kept.

Their tensors are read without PyTorch and without running anything in them (`pickled`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.pickled import read_tensors, write_safetensors
from shoal.models.manifest import sha256
from shoal.models.progress import Stop
from shoal.models.sources import FetchedModel
from shoal.models.sources.select import is_pickle, is_pickle_index, is_weights, safetensors_name


def convert_pickles(
    fetched: FetchedModel, target: Path, progress: Callable[[str, float], None], stop: Stop
) -> FetchedModel:
    """Replace pickles by safetensors and delete them; `published` has the hashes of the original weights. Changes only
    files in `target`: a model that is used in place has no chosen pickles.

    Raises ModelFileError for a pickle with anything but tensors.
    """
    folder = fetched.folder
    names = _names(folder) if folder.is_relative_to(target) else []
    pickles = [name for name in names if is_pickle(name)]
    if not pickles:
        return fetched
    hashes = dict(fetched.hashes)
    for name in filter(is_weights, names):
        stop.check()
        hashes.setdefault(name, sha256(folder / name))
    for number, name in enumerate(pickles):
        progress("read", number / len(pickles))
        tensors = read_tensors(folder / name, name)
        write_safetensors(folder / safetensors_name(name), tensors, stop.check)
        del tensors  # it maps the file
        (folder / name).unlink()
    for name in filter(is_pickle_index, names):
        _convert_index(folder, name)
    return replace(
        fetched,
        hashes={name: digest for name, digest in hashes.items() if name not in pickles},
        published_hashes={name: digest for name, digest in hashes.items() if is_weights(name)},
    )


def _convert_index(folder: Path, name: str) -> None:
    """Write the index of the converted shards. Raises ModelFileError for one that lists none."""
    index = read_object(folder, name) or JsonFile(name, {})
    places = index.object("weight_map")
    if not places or not all(isinstance(place, str) and is_pickle(place) for place in places.values()):
        raise index.refuse("weight_map", "lists no shards; fetch the model again")
    renamed = {tensor: safetensors_name(place) for tensor, place in places.items()}
    target = folder / safetensors_name(name)
    target.write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": renamed}))
    (folder / name).unlink()


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
