"""Graphs in f32 with the activations that OpenVINO fuses into matrix products, and with these kept apart.

    python bench/activations.py base=some/model.onnx

measures the served model, and each given graph under its name. Those of the stored results have random weights and the
sizes of `family_models.py`, six layers, Gemma's with 30,522 words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import parser, phase, stored, write

from shoal.backends.local.compile import import_openvino, separate_activations

METHOD = """
Each graph is compiled twice in one process of its own, for one stream of one thread in f32: as it is, so that OpenVINO
fuses activations into matrix products, and after `separate_activations`, which Shoal applies. Both run the same random
token ids in turn. `fused` and `apart`: the least processor time of a batch, in ms, which other programs disturb less
than its wall time. `ratio`: fused / apart. `cosine`: the least between the two outputs. AVX2 and AVX512 by
OV_CPU_MAX_ISA and ONEDNN_MAX_CPU_ISA. Other programs used the cores meanwhile.
"""

INSTRUCTIONS = ("AVX2", "AVX512_CORE")
SHAPES = ((1, 16), (8, 16), (32, 16), (8, 100))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("graphs", nargs="*", help="NAME=PATH of further graphs")
    options.add_argument("--alone", help="measure this graph in this process")
    options.set_defaults(rounds=15)
    arguments = options.parse_args()
    if arguments.alone:
        print(json.dumps(measure(arguments.alone, arguments.rounds)))
        return
    served = stored(arguments.model)
    graphs = {served.manifest.id: str(served.graph)} | dict(each.split("=", 1) for each in arguments.graphs)
    results: dict[str, Any] = {}
    for name, path in graphs.items():
        for isa in INSTRUCTIONS:
            with phase(f"{name}, {isa}"):
                command = [sys.executable, __file__, "--alone", path, "--rounds", str(arguments.rounds)]
                held = os.environ | {"OV_CPU_MAX_ISA": isa, "ONEDNN_MAX_CPU_ISA": isa}
                done = subprocess.run(command, check=True, env=held, stdout=subprocess.PIPE)
                results.setdefault(name, {})[isa] = json.loads(done.stdout)
            print(results[name][isa], flush=True)
    write("activations", METHOD, results)


def measure(graph: str, rounds: int) -> dict[str, Any]:
    core = import_openvino().Core()
    model = core.read_model(str(Path(graph)))
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    forms = {"fused": model.clone(), "apart": separate_activations(model)}
    compiled = {form: core.compile_model(each, "CPU", settings) for form, each in forms.items()}
    requests = {form: each.create_infer_request() for form, each in compiled.items()}
    names = [port.get_any_name() for port in compiled["fused"].inputs]
    found = {}
    for items, length in SHAPES:
        ids = np.random.default_rng(1).integers(1000, 29000, (items, length))
        feeds = {
            name: ids if name == "input_ids" else np.full((items, length), "mask" in name, np.int64) for name in names
        }
        took: dict[str, list[float]] = {form: [] for form in requests}
        outputs = {}
        for _ in range(rounds + 1):  # the first run compiles kernels
            for form, request in requests.items():
                begin = time.process_time()
                answers = request.infer(feeds, share_inputs=True)
                took[form].append((time.process_time() - begin) * 1000)
                outputs[form] = next(iter(answers.values())).astype(np.float64)
        least = {form: min(times[1:]) for form, times in took.items()}
        found[f"{items} x {length} tokens"] = {
            **{form: round(each, 1) for form, each in least.items()},
            "ratio": round(least["fused"] / least["apart"], 2),
            "cosine": least_cosine(*outputs.values()),
        }
    return found


def least_cosine(left: Any, right: Any) -> float:
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return round(float(((left * right).sum(-1) / lengths).min()), 9)


if __name__ == "__main__":
    main()
