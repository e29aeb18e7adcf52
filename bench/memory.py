"""What Shoal costs before it does anything: import, start, memory, disk."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import median

from harness import Server, parser, phase, write

METHOD = """
Import: median of wall time of `python -c 'import shoal'` minus that of `python -c pass`. Start: wall time from the
launch of `python -m shoal serve` to the first 200 of /health/ready with the model in the store (median over rounds).
Idle memory: VmRSS and its anonymous part once warming has ended, no request so far; peak is VmHWM. Installed size: the
files of Shoal and everything that it requires, by extra, as the installed distributions list them.
"""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    results: dict[str, object] = {}
    with phase("import"):
        results["import_ms"] = imports(max(5, arguments.rounds))
    with phase("first start (fetches the model if the store has none)"), Server(arguments.model):
        pass
    starts = []
    for number in range(arguments.rounds):
        with phase(f"start {number + 1}"), Server(arguments.model) as server:
            starts.append(server.ready_s)
            if number == 0:
                settled = server.settle()
                time.sleep(1)
                results["idle"] = {
                    "rss_mb": mb(server.status_kb("VmRSS")),
                    "anonymous_mb": mb(server.status_kb("RssAnon")),
                    "peak_mb": mb(server.status_kb("VmHWM")),
                    "threads": int(server.status_kb("Threads")),
                    "warming_s": round(settled, 1),
                }
    results["start_to_ready_s"] = {"median": round(median(starts), 2), "worst": round(max(starts), 2)}
    results["installed_mb"] = {"core": installed(()), "local": installed(("local",))}
    print(results)
    write("memory", METHOD, results)


def imports(rounds: int) -> dict[str, float]:
    def wall(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - start) * 1000

    wall("import shoal")  # bytecode and page cache
    bare = median(wall("pass") for _ in range(rounds))
    whole = median(wall("import shoal") for _ in range(rounds))
    return {"python": round(bare, 1), "shoal": round(whole - bare, 1)}


def mb(kb: int) -> float:
    return round(kb / 1024, 1)


def installed(extras: tuple[str, ...]) -> float:
    """MB of the files of `shoal` with these extras and of all that they require, once each."""
    from packaging.requirements import Requirement

    waiting: list[tuple[str, tuple[str, ...]]] = [("shoal", extras)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    files: set[Path] = set()
    while waiting:
        name, wanted = waiting.pop()
        key = (re.sub(r"[-_.]+", "-", name).lower(), wanted)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # another platform's, or an extra that is not installed
        files |= {Path(str(found.locate_file(file))).resolve() for file in found.files or []}
        for text in found.requires or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((need.name, tuple(sorted(need.extras))))
    import shoal

    # an editable install lists a pointer to the sources, not the sources
    if "site-packages" not in str(Path(shoal.__file__)):
        files |= {path.resolve() for path in Path(shoal.__file__).parent.rglob("*")}
    return round(sum(size(path) for path in files if "__pycache__" not in path.parts) / 1e6, 1)


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


if __name__ == "__main__":
    main()
