"""Find the size of a server's vocabulary, which its info does not tell."""

from __future__ import annotations

import logging

from shoal.backends.tei.http_link import HttpLink
from shoal.errors import BackendError, CapacityError

logger = logging.getLogger("shoal.backends")

BEYOND = 2**21
"""A token id outside any vocabulary in use, the largest of which have about 260,000 tokens."""

POINTS = 16
"""Token ids to decode in one call, at most: servers accept 32 inputs by default."""


async def find_vocab_size(link: HttpLink, max_inputs: int, deadline: float) -> int | None:
    """Return one more than the last token id that the server decodes to a text; None if that cannot be found.

    A server silently leaves out ids that it does not know; if none is left, TEI 1.9.3 on ONNX Runtime ends. `/decode`
    answers an unknown id with an empty text. Ids inside the vocabulary may have an empty text too, but hardly two in a
    row, so the last of several pairs that has a text tells where to look on.
    """
    points = max(1, min(POINTS, max_inputs))
    known, empty = -1, BEYOND
    try:
        if await link.decode([[BEYOND]], skip_special_tokens=False, deadline=deadline) != [""]:
            return None
        while empty - known > 1:
            pairs = max(1, points // 2)
            step = max(1, (empty - known) // (pairs + 1))
            starts = range(known + step, empty, step)[:pairs]
            ids = sorted({each for start in starts for each in (start, start + 1) if each < empty})
            for some in (ids[at : at + points] for at in range(0, len(ids), points)):
                texts = await link.decode([[each] for each in some], skip_special_tokens=False, deadline=deadline)
                known = max((each for each, text in zip(some, texts, strict=True) if text), default=known)
            empty = min((start for start in starts if start > known), default=empty)
    except (BackendError, CapacityError) as error:
        logger.info("the size of the vocabulary of %s is unknown: %s", link.base, error.message)
        return None
    return known + 1 or None
