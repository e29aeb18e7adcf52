"""Narrow numbers for vectors, each row by itself: what a text becomes never depends on its neighbours.

`binary` and `ubinary` are the signs, eight dimensions a byte, the first in the highest bit, as sentence-transformers
packs them: a bit is set where the value is above 0, missing ones at the end are 0, and `binary` is `ubinary` less 128.

`int8` is the value times 127, rounded to the nearest number (halves to the even one) and kept within -127..127;
`uint8` is that plus 128. The range is -1 to 1, which a vector of length one cannot leave. Cohere, Voyage and
sentence-transformers fit ranges to a collection instead, which loses less and needs that collection: such numbers and
these do not compare. Cosines of `int8` are those of the vectors within about 0.01 at 1,024 dimensions; of `uint8` only
after 128 was taken off.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from shoal.types import Array

Precision: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

SCALE = 127


def quantize(vectors: Array, precision: Precision) -> Array:
    """Of float32 [..., d]: float32 [..., d] as it is, int8 or uint8 [..., d], or int8 or uint8 [..., ceil(d / 8)].

    `int8` and `uint8` want vectors of length one.
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
