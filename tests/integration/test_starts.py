"""Concurrent model loads: first uses of a library in several threads neither kill nor hang the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.server_kit import environment
from tests.integration.starts_kit import start, tiny_models
from tests.unit.models.head_checkpoints import static

AT_ONCE = """
import sys, threading

def at_once(work):
    barrier = threading.Barrier(4)
    failed = []

    def run():
        barrier.wait()
        try:
            work()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads), "deadlock"
    assert not failed, failed

sys.setswitchinterval(1e-6)
"""

READ = """
from pathlib import Path
from shoal.models.manifest import read_manifest
at_once(lambda: read_manifest(Path(sys.argv[1])))
"""

COMPILE = """
from pathlib import Path
from shoal.backends.local.compile import compile_graph
from shoal.backends.local.options import EngineOptions
at_once(lambda: compile_graph(Path(sys.argv[1]), EngineOptions(precision="f32")))
"""

DTYPES = """
from shoal.backends.local.compile import _to_port, import_openvino
model = import_openvino().Core().read_model(sys.argv[1])
at_once(lambda: [_to_port(given) for given in model.inputs])
"""


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Four models in a store."""
    folder = tmp_path_factory.mktemp("starts")
    addresses = [*tiny_models(folder), f"static=file:{static(folder / 'static')}"]
    first = start(addresses, folder / "home")
    assert first.ending == "ready", first.log
    return addresses, folder / "home"


@pytest.mark.timeout(700)
def test_four_models_load_at_once(homes: tuple[list[str], Path]) -> None:
    """Each start becomes ready and ends with exit code 0; `bench/starts.py` runs a hundred."""
    endings = [start(*homes).ending for _ in range(2)]
    assert endings == ["ready"] * 2


@pytest.mark.parametrize("code", [READ, DTYPES, COMPILE], ids=["manifest", "dtypes", "compile"])
@pytest.mark.timeout(180)
def test_a_first_use_in_four_threads(code: str, homes: tuple[list[str], Path]) -> None:
    """The first steps of every load, run at the same moment in fresh processes."""
    _, home = homes
    manifest = next(path for path in home.rglob("manifest.json") if path.with_name("model.onnx").is_file())
    place = manifest.parent if code is READ else manifest.parent / "model.onnx"
    for _ in range(5):
        subprocess.run([sys.executable, "-c", AT_ONCE + code, str(place)], env=environment(), check=True, timeout=120)
