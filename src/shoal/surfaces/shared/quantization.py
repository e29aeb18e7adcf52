"""Quantize vectors row by row, so that the result for a text never depends on the other texts of a request.

`binary` and `ubinary` hold the signs, eight dimensions per byte, the first in the highest bit, as sentence-transformers
packs them. A bit is set if the value is above 0, padding bits at the end are 0, and `binary` is `ubinary` minus 128.

`int8` is the value times 127, rounded to the nearest integer (halves to even) and clipped to -127..127. `uint8` is
`int8` plus 128. The range is -1 to 1, which a vector of length one cannot exceed. Cohere, Voyage and
sentence-transformers fit the range to a collection instead. That loses less but needs the collection, and the two kinds
of numbers are not comparable. Cosines of `int8` vectors are within about 0.01 of the exact ones at 1,024 dimensions;
those of `uint8` only after subtracting 128.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from shoal.types import Array

Precision: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

SCALE = 127


def quantize(vectors: Array, precision: Precision) -> Array:
    """Quantize float32 [..., d] to `precision`.

    Return float32 [..., d] unchanged for `float`, int8 or uint8 [..., d] for `int8` and `uint8`, and int8 or uint8
    [..., ceil(d / 8)] for `binary` and `ubinary`. `int8` and `uint8` need vectors of length one.
    """
    match precision:
        case "float":
            return vectors
        case "ubinary":
            bits: Array = np.packbits(vectors > 0, axis=-1)
            return bits
        case "binary":
            return (np.packbits(vectors > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)
    whole = np.rint(np.clip(vectors, -1, 1) * SCALE).astype(np.int16)
    narrow: Array = whole.astype(np.int8) if precision == "int8" else (whole + 128).astype(np.uint8)
    return narrow
