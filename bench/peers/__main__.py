"""Shoal beside its peers: `make bench-peers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import parser, write

from . import engines, gateways, triton
from .contenders import Field, threads

METHOD = """
All contenders of a contest are started first, each peer in an environment of its own at a pinned version, and one
works at a time, in alternating rounds; load comes from wrk (one thread) on the same cores, every text distinct. Ratios
are medians over rounds of the ratio within a round, above 1 where Shoal is ahead: `rate`, Shoal's over the peer's;
`processor time`, the peer's over Shoal's for a request, user and system time of the server's whole process tree.
Engines: the same weights, f32 everywhere but in Shoal's default, as many threads as cores, one text a request, answers
in JSON numbers, `max_queue_ms=0` in Shoal, and vectors that agree (cosine >= 0.999). In each round all get the
same texts. sentence-transformers has no server: `encode` in process of as many texts at a time as there are clients,
no HTTP and no JSON, which is a bound for a server around it. Gateways: one worker process as by default, no keys, logs
at `error`, before bench/openai_stub.py (384 floats; 64 words; 64 chunks written one by one), which is one process on
the same cores: its own rate bounds everyone's, so that processor time tells more than the rate. Shoal puts embeddings
of several clients together into one request; the others pass them on. `added p50`: over the stub asked directly, at
one client.
"""
CONTESTS: dict[str, Callable[[Field, Any], dict[str, Any]]] = {
    "engines": engines.contest,
    "gateways": gateways.contest,
    "triton": triton.contest,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--python", default=".venv-parity/bin/python", help="Python with sentence-transformers")
    options.add_argument("--contest", action="append", choices=CONTESTS, help="only this one; may be repeated")
    options.add_argument("--peer", action="append", help="only this peer, by its name; may be repeated")
    options.add_argument("--name", default="peers", help="of the file in bench/results, for another machine's figures")
    options.add_argument("--no-write", action="store_true", help="only print")
    options.set_defaults(rounds=5)
    arguments = options.parse_args()
    field = Field(arguments.peer or ())
    results: dict[str, Any] = {"threads": threads(), "peers": {}}
    for name in arguments.contest or CONTESTS:
        results |= CONTESTS[name](field, arguments)
        results |= {"peers": field.states, "installed": field.installed}
        if not arguments.no_write:  # each contest takes minutes: what is measured stays
            write(arguments.name, METHOD, results)
    for name, state in field.states.items():
        print(f"{name}: {state}")


if __name__ == "__main__":
    main()
