"""What refused pictures cost a server: memory, and how long its event loop is held."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

from clip import TINY, write_clip
from harness import HERE, Server, parser, phase, write

from shoal.bench.machine import PACKAGES

sys.path.insert(0, str(HERE.parent))  # the tables are those of the tests

from tests.unit.http.fetching.test_allowed import REFUSED
from tests.unit.pipelines.image.image_kit import bombs, broken

METHOD = """
A tiny CLIP; every file of the tests' tables of bombs and broken pictures as base64 to /v1/embeddings, every URL of the
table of refused addresses with `image_hosts=public`, a file of 20 MB that begins as a PNG and is none, and one that is
over the limit, one after the other, `rounds` times over. All are refused. `growth_mb`: the most that the server's
resident memory rose above what it was after warming, while one of them was there. `late`: how often a timer of the
server's event loop, set every 0.1 s, was later than so many seconds, of so many times.
"""
LATE = ("0.01", "0.025", "0.05", "0.1")


def refused(server: Server, text: str) -> None:
    body = json.dumps({"model": server.model, "input": [{"image": text}]}).encode()
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, {"content-type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        if error.code == 400:
            return
        raise
    raise RuntimeError(f"it was not refused: {text[:60]}")


def late(server: Server) -> dict[str, float]:
    """How many samples of the loop's lag are above each of LATE, and how many there are."""
    found = re.findall(r'shoal_\w*lag\w*_bucket\{le="([^"]+)"\} (\S+)', server.text("/metrics"))
    counts = {bound: float(count) for bound, count in found}
    return {bound: counts["+Inf"] - counts[bound] for bound in LATE} | {"samples": counts["+Inf"]}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    hostile = {name: b64encode(data).decode() for name, data in (bombs() | broken()).items()}
    hostile |= {url: url for url in REFUSED}
    hostile["20 MB and no picture"] = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20_000_000)).decode()
    hostile["over the limit"] = b64encode(bytes(21_500_000)).decode()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_clip(Path(temporary) / "clip", TINY)
        settings = {"home": Path(temporary) / "home", "image_hosts": "public", "max_body_bytes": 2**25}
        with Server(f"clip=file:{folder}", **settings) as server:
            server.settle()
            for text in hostile.values():
                refused(server, text)
            assert server.process is not None
            before, growth = late(server), dict[str, float]()
            with phase("hostile pictures"):
                start = time.perf_counter()
                for _ in range(arguments.rounds):
                    for name, text in hostile.items():
                        rested = server.status_kb("VmRSS")
                        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
                        refused(server, text)
                        growth[name] = max(growth.get(name, 0), (server.status_kb("VmHWM") - rested) / 1024)
                elapsed = time.perf_counter() - start
            time.sleep(0.5)
            after = late(server)
    results: dict[str, Any] = {
        "requests": arguments.rounds * len(hostile),
        "seconds": elapsed,
        "growth_mb": dict(sorted(growth.items(), key=lambda one: -one[1])[:8]),
        "late": {bound: after[bound] - before[bound] for bound in after},
    }
    print(json.dumps(results, indent=1))
    write("hostile_pictures", METHOD, results, (*PACKAGES, "pillow"))


if __name__ == "__main__":
    main()
