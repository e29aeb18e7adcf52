"""How much of the engine's best rate 64 clients get: by precision, by instruction set, by length of the texts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from harness import Server, medians, parser, phase, stored, write, wrk
from raw import Raw
from throughput import BURST, bursts

METHOD = """
One server per line, default settings but for `precision`; the engine alone runs the same ONNX file with the precision,
streams and threads that the server uses, token ids made beforehand, no HTTP, no tokenizer: its best rate over batch
sizes at the length that the server pads these texts to. Both in turn in every round on the same two cores, the other
one idle; medians over rounds. Load comes from wrk on the same cores, one thread, 64 connections with one text each,
float answers, every text distinct and of exact length. `batch`: mean items of a batch, by the server's own metrics.
`burst`: seconds for 1,000 connections that send one text each at the same moment, by the engine's for as many texts.
avx2 and avx512 hold the instruction set down in both processes (avx512 has no bf16).
"""
CLIENTS = 64
LENGTHS = (16, 100, 250)
BURST_LENGTHS = (16, 100)
HELD = {
    "native": {},
    "avx2": {"OV_CPU_MAX_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"OV_CPU_MAX_ISA": "AVX512_CORE", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
LINES = (("native", "f32"), ("avx2", "f32"), ("avx512", "f32"), ("native", "bf16"))


def one_length(server: Server, raw: Raw, tokens: int, arguments: Any) -> dict[str, Any]:
    rounds = []
    wrk(server, tokens, CLIENTS, 2)  # the server learns its efficient batch
    for _ in range(arguments.rounds):
        engine = raw.best(raw.padded(tokens), arguments.seconds)
        before = server.batch_counts()
        ran = wrk(server, tokens, CLIENTS, arguments.seconds)
        items, count = (after - old for after, old in zip(server.batch_counts(), before, strict=True))
        rounds.append(
            {
                "shoal / engine": ran["per_s"] / engine["texts_per_s"],
                "engine_per_s": engine["texts_per_s"],
                "shoal_per_s": ran["per_s"],
                "batch": items / max(count, 1.0),
                "engine_batch": engine["batch_size"],
                "p50_ms": ran["p50"],
                "p99_ms": ran["p99"],
            }
        )
    return medians(rounds)


def one_line(precision: str, arguments: Any) -> dict[str, Any]:
    """Run in a process of its own, whose environment holds the instruction set down for the engine alone too."""
    with Server(arguments.model, precision=precision) as server:
        server.settle()
        raw = Raw(stored(arguments.model), server.card()["precision"])
        found: dict[str, Any] = {
            f"{tokens} tokens": one_length(server, raw, tokens, arguments) for tokens in arguments.lengths
        }
        if arguments.burst:
            found[f"burst of {BURST:,}"] = {
                f"{tokens} tokens": bursts(server, raw, tokens, arguments)["together / engine"]
                for tokens in BURST_LENGTHS
            }
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of the texts")
    options.add_argument("--burst", action=argparse.BooleanOptionalAction, default=True, help="1,000 texts at once")
    options.add_argument("--name", default="efficiency", help="name of the results")
    options.add_argument("--line", default="", help="one precision only, as JSON on stdout: for this script itself")
    arguments = options.parse_args()
    if arguments.line:
        print(json.dumps(one_line(arguments.line, arguments)))
        return
    results: dict[str, Any] = {}
    for held, precision in LINES:
        with phase(f"{precision}, {held}"):
            ran = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--line", precision],
                env=os.environ | HELD[held],
                stdout=subprocess.PIPE,
                check=True,
            )
        results[f"{precision}, {held}"] = json.loads(ran.stdout.splitlines()[-1])
        print(json.dumps(results[f"{precision}, {held}"]))
        write(arguments.name, METHOD, results)


if __name__ == "__main__":
    main()
