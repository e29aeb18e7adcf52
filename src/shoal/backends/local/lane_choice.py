"""Chooses by measurement on which lane a small batch that is alone runs. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

LENGTHS = (16, 64, 256)
"""Tokens of one text for which the two lanes are compared before the first lone batches."""

RUNS = 5
"""Runs of a length on each lane in that comparison."""

RECENT = 8
"""Latest times of the present lane, the median of which a trial of the other lane is compared with. Also the least
number of batches between two trials."""

TRIALS = 5
"""Latest trials, the median of which decides, so that single outliers do not."""

ENOUGH = TRIALS // 2 + 1
"""Trials that a decision requires."""

CLEAR = 0.9
"""The other lane is taken once its time is below this part of the present one's. Runs on shared cores scatter."""

COST = 0.01
"""The part of the time of lone batches that trials of a slower lane add at most: what a trial took longer than the
batches before it decides after how many batches the next one follows."""

LONGEST_WAIT = 256
"""The most batches between two trials. Trials of a lane that takes more than 3.5 times as long add more than COST."""


class LaneChoice:
    """Where lone batches run, by their tokens: on the wide lane until measured.

    On idle cores the wide lane takes 0.5 to 0.65 of the time of a stream; where other programs use the cores its
    threads wait for each other, and it may take twice as long. So a lone batch tries the other lane now and then.
    Batches of the same octave of tokens (16 to 31, 32 to 63, ...) share their measurements. A new octave starts on the
    lane of the nearest one.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, SizeClass] = {}

    def find(self, tokens: int) -> SizeClass:
        """Return the choice for batches of so many tokens."""
        octave = tokens.bit_length()
        found = self._sizes.get(octave)
        if found is None:
            nearest = min(self._sizes, key=lambda each: abs(each - octave), default=octave)
            found = SizeClass(nearest not in self._sizes or self._sizes[nearest].is_wide)
            self._sizes[octave] = found
        return found


class SizeClass:
    """The lane of lone batches of similar size, and the measurements behind it."""

    def __init__(self, is_wide: bool) -> None:
        self.is_wide = is_wide
        self._times: deque[float] = deque(maxlen=RECENT)
        self._trials: deque[float] = deque(maxlen=TRIALS)  # times of the other lane, as multiples of the present one's
        self._wait = self._left = RECENT

    def choose(self) -> bool:
        """Return whether the next batch runs on the wide lane."""
        if self._left:
            self._left -= 1
            return self.is_wide
        self._left = self._wait  # even if this trial fails and is not recorded
        return not self.is_wide

    def record(self, is_wide: bool, time: float) -> None:
        """Record that a batch ran on a lane. `time` is above 0 and in any unit in which batches of the class compare,
        such as the part of a predicted time."""
        if is_wide == self.is_wide:
            self._times.append(time)
        elif self._times:
            ratio = time / _median(self._times)
            self._trials.append(ratio)
            if len(self._trials) >= ENOUGH and _median(self._trials) < CLEAR:
                self.is_wide = is_wide
                self._times.clear()
                self._trials = deque((1 / each for each in self._trials), TRIALS)
                ratio = 1 / ratio
            self._wait = self._left = min(max(RECENT, round((ratio - 1) / COST)), LONGEST_WAIT)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
