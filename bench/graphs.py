"""The graph that Shoal builds beside one that a library exported, on both engines: which to take where.

    python bench/graphs.py exported/model.onnx

`exported/model.onnx` is the same model as the served one, with the output `last_hidden_state` or without it; the one of
`make bench-peers` lies in `.venv-peers/onnx`.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import onnxruntime
from harness import parser, phase, stored, write

from shoal.backends.local.compile import import_openvino
from shoal.machine_limits import usable_cores

METHOD = """
Raw engines in one process, f32, random token ids without padding, nothing of Shoal between. `built`: the graph that
Shoal makes from the weights; `exported`: the given file. `lone`: p50 of one text at a time on one stream with all
cores. `rate`: texts a second with one stream a core, each running batches of this size one after the other. ONNX
Runtime may spin, as by its default. All take turns in every round; medians over rounds.
"""
Run: TypeAlias = Callable[[dict[str, Any]], object]
LENGTHS = (16, 100)
BATCHES = {16: (8, 32), 100: (4, 16)}


def openvino(path: Path, streams: int) -> tuple[list[str], list[Run]]:
    core = import_openvino().Core()
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": usable_cores(),
        "ENABLE_CPU_PINNING": False,
    }
    compiled = core.compile_model(str(path), "CPU", settings)
    requests = [compiled.create_infer_request() for _ in range(streams)]
    return [each.get_any_name() for each in compiled.inputs], [
        lambda feeds, request=request: request.infer(feeds, share_inputs=True) for request in requests
    ]


def onnx_runtime(path: Path, streams: int) -> tuple[list[str], list[Run]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores() // streams
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [each.name for each in session.get_inputs()], [lambda feeds: session.run(None, feeds)] * streams


def draw(names: list[str], items: int, length: int) -> dict[str, Any]:
    values = {"input_ids": np.random.default_rng().integers(1000, 29000, (items, length))}
    return {name: values.get(name, np.full((items, length), "mask" in name, dtype=np.int64)) for name in names}


def lone_ms(names: list[str], run: Run, length: int, seconds: float) -> float:
    feeds = [draw(names, 1, length) for _ in range(16)]
    took: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        run(feeds[len(took) % len(feeds)])
        took.append(time.perf_counter() - start)
    return median(took[len(took) // 10 :]) * 1000


def rate(names: list[str], runs: list[Run], size: int, length: int, seconds: float) -> float:
    start = time.perf_counter()
    counts = [0] * len(runs)

    def work(at: int) -> None:
        feeds = [draw(names, size, length) for _ in range(8)]
        while time.perf_counter() < start + seconds:
            runs[at](feeds[counts[at] % len(feeds)])
            counts[at] += 1

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * size / (time.perf_counter() - start)


def measure(exported: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    graphs = {"built": stored(arguments.model).graph, "exported": exported}
    engines = {"OpenVINO": openvino, "ONNX Runtime": onnx_runtime}
    wide, narrow = (
        {
            f"{engine}, {graph}": build(path, streams)
            for engine, build in engines.items()
            for graph, path in graphs.items()
        }
        for streams in (1, usable_cores())
    )
    found: dict[str, dict[str, list[float]]] = {name: {} for name in wide}
    for number in range(arguments.rounds):
        with phase(f"round {number + 1}"):
            for length in LENGTHS:
                for name, (names, runs) in wide.items():
                    took = lone_ms(names, runs[0], length, arguments.seconds)
                    found[name].setdefault(f"lone, {length} tokens, ms", []).append(took)
                for size in BATCHES[length]:
                    for name, (names, runs) in narrow.items():
                        texts = rate(names, runs, size, length, arguments.seconds)
                        found[name].setdefault(f"rate, {size} of {length} tokens, texts/s", []).append(texts)
    return {name: {key: round(median(each), 2) for key, each in rows.items()} for name, rows in found.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("exported", type=Path)
    options.set_defaults(rounds=5, seconds=1.0)
    arguments = options.parse_args()
    write("graphs", METHOD, measure(arguments.exported, arguments))


if __name__ == "__main__":
    main()
