"""The request path through the code stays short: `bench/walk.py` counts its lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[3] / "bench" / "walk.py"

MAX_CALLS = 168
MAX_FILES = 42
"""`fake:` takes 168 and 42, the embedded engine 190 and 51; three calls are for `shoal explain`. Lower the limits with
the way; docs/design.md says why it is not shorter."""

MAX_TURNS = 5
"""Until the answer is written: the read, the request's task, its preparation, the batch's task, the request again."""

MAX_CALLBACKS = {"call_soon": 8, "create_task": 2, "create_future": 1}
"""Of all turns, the statistics behind the answer included. No timer."""

MAX_INSTRUCTIONS = 6100
"""`fake:` takes 5,980 on Python 3.11, whose bytecode other versions do not share; 200 of them keep the record for
`shoal explain`, 15 count by surface."""

MAX_GENERATORS = 3
"""The gateway's, the runner's and the engine's own."""


def test_one_embedding() -> None:
    ran = subprocess.run([sys.executable, WALK, "fake:"], capture_output=True, text=True, check=True, timeout=120)
    *_, turns, callbacks, last = ran.stdout.splitlines()
    match = re.fullmatch(r"(\d+) calls of \d+ functions in (\d+) files", last)
    assert match is not None, last
    calls, files = map(int, match.groups())
    assert calls <= MAX_CALLS, ran.stdout
    assert files <= MAX_FILES, ran.stdout
    match = re.fullmatch(r"\d+ turns of the loop, answered in (\d+); (\d+) reads, (\d+) writes", turns)
    assert match is not None, turns
    turn, reads, writes = map(int, match.groups())
    assert 0 < turn <= MAX_TURNS, ran.stdout
    assert (reads, writes) == (1, 1), ran.stdout
    counted = {name: int(count) for count, name in (each.split() for each in callbacks.split(", "))}
    assert counted["call_soon"] > 0, callbacks
    assert {name: count for name, count in counted.items() if count > MAX_CALLBACKS.get(name, 0)} == {}


def test_a_burst_is_one_batch() -> None:
    command = [sys.executable, str(WALK), "fake:", "--task", "burst"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *_, last = ran.stdout.splitlines()
    match = re.fullmatch(r"(\d+) instructions a text, in batches of \[64\]", last)
    assert match is not None, last
    if sys.version_info[:2] == (3, 11):
        assert 1000 < int(match[1]) <= MAX_INSTRUCTIONS, ran.stdout


def test_one_token() -> None:
    command = [sys.executable, str(WALK), "fake:", "--task", "chat"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    generators = ran.stdout.partition("generators\n")[2].splitlines()[:-1]
    assert 0 < len(generators) <= MAX_GENERATORS, ran.stdout
