"""Write tensors as a safetensors file, one after the other, so that memory holds no more than the largest of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from shoal.models.convert.pickled.reader import StoredTensor

ALIGNMENT = 8


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor], check: Callable[[], None]) -> None:
    """Write the file at `path` (the format is in `contract.weights`); `check` is called before every tensor and may
    raise. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.data.shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            check()
            file.write(np.ascontiguousarray(tensor.data).data)
