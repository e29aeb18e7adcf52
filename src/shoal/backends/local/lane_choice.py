"""Chooses by measurement on which lane a small batch that is alone runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (16, 64, 256)
"""Tokens of one text for which the two lanes are compared."""

RUNS = 4
"""Runs of a length per comparison and lane; the first may compile kernels and is ignored."""

CLEAR = 0.9
"""The other lane is taken once its time is below this part of the present one's. Runs on shared cores scatter."""

CHECK_INTERVAL_S = 10.0
"""Time between comparisons of an engine that has run lone batches since the last one, one length each."""

CHECK_PART = 0.01
"""The part of the time that comparisons of a slow model take at most."""


OCTAVES = 64


class LaneChoice:
    """Where lone batches run, by their tokens: on the wide lane until measured.

    On idle cores the wide lane takes 0.5 to 0.65 of the time of a stream; where other programs use the cores its
    threads wait for each other, and it may take twice as long.
    """

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = tuple(lengths)
        self._wide = [True] * OCTAVES

    def record(self, length: int, wide: Sequence[float], narrow: Sequence[float]) -> None:
        """Record the seconds of each run of a text of `length` tokens, on both lanes under the same conditions."""
        is_wide = self.is_wide(length)
        present, other = (wide, narrow) if is_wide else (narrow, wide)
        if min(other[1:]) < CLEAR * min(present[1:]):
            for octave in range(OCTAVES):
                if min(self.lengths, key=lambda each: abs(each.bit_length() - octave)) == length:
                    self._wide[octave] = not is_wide

    def is_wide(self, tokens: int) -> bool:
        """Return whether a lone batch of so many tokens runs on the wide lane, as the nearest measured length does."""
        return self._wide[tokens.bit_length()]
