"""`make test ISA=...` limits the engines' instructions: reported capabilities, and kernels that run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[4] / "Makefile"
PROGRAM = """
import json
import numpy as np
from shoal.backends.local.compile import import_openvino

openvino = import_openvino()
core = openvino.Core()
rows = openvino.opset13.parameter([-1, 64], np.float32)
weights = np.ones((64, 64), np.float32)
product = openvino.opset13.softmax(openvino.opset13.matmul(rows, weights, False, False), 1)
compiled = core.compile_model(openvino.Model([product], [rows]), "CPU", {"PERF_COUNT": True})
request = compiled.create_infer_request()
request.infer([np.ones((8, 64), np.float32)])
kernels = [each.exec_type for each in request.get_profiling_info()]
print(json.dumps([core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"), kernels]))
"""


def limit_isa(isa: str) -> dict[str, str]:
    (line,) = re.findall(rf"^CAP_{isa} := (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    return dict(setting.split("=") for setting in line.split())


@pytest.mark.parametrize(("isa", "kernel"), [("avx2", "avx2"), ("avx512", "avx512|avx2")])
def test_the_engine_keeps_to_it(isa: str, kernel: str) -> None:
    """There is no bf16, and no kernel uses newer instructions. Without AVX512 both cases are the same."""
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=os.environ | limit_isa(isa), capture_output=True, text=True, check=True)
    capabilities, kernels = json.loads(run.stdout)
    assert "BF16" not in capabilities
    assert not [each for each in kernels if "bf16" in each or (isa == "avx2" and "avx512" in each)], kernels
    assert any(re.search(kernel, each) for each in kernels), kernels
