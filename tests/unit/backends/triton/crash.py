"""Runs writers that die: `python -m tests.unit.backends.triton.crash ROOT fresh|replace|remove`. It repeats one change
of a repository in ROOT/0, ROOT/1, ...; the n-th process dies before its n-th disk operation, until one completes."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from shoal.backends.triton import repository as module
from shoal.backends.triton.folder_exchange import exchange
from shoal.backends.triton.repository import Repository
from tests.unit.backends.triton.entry_kit import entry

STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "os.chmod"}
OPTIONS = {"platform": "python", "text_in": True, "warm_up": False}
DIED = 9


def die_at(step: int) -> None:
    """Die without running `finally` blocks, as with kill -9."""
    steps = count()

    def on(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
        if (event in STEPS or writes) and next(steps) == step:
            os._exit(DIED)

    def exchanged(one: Path, other: Path) -> None:
        on("os.rename", ())
        exchange(one, other)

    sys.addaudithook(on)
    module.exchange = exchanged  # type: ignore[attr-defined]


def change(root: Path, scenario: str) -> None:
    repository = Repository(root / "models")
    if scenario == "remove":
        repository.remove("org/mini")
    else:
        repository.write(entry(root / "new", graph=b"new", options=OPTIONS))


def main(root: Path, scenario: str) -> None:
    for step in count():
        case = root / str(step)
        repository = Repository(case / "models")
        repository.write(entry(case / "old", "org/other", options=OPTIONS))
        if scenario != "fresh":
            repository.write(entry(case / "old", graph=b"old", options=OPTIONS))
        child = os.fork()
        if child == 0:
            entry(case / "new")
            die_at(step)
            change(case, scenario)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != DIED:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
