"""Memory and time of hostile and large images, in a separate process with hard limits."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.pipelines.image.image_kit import bombs, broken, chunk, png_of, turned

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Reads images with at most so many MB more of address space, and seconds of CPU, than it has at the start.
READER = """
import json, resource, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shoal.errors import InvalidValue
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ImageSpec

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

steps = Preprocessing(ImageSpec(size=(224, 224), dimension=8, edge=224, crop=(224, 224)))
more, seconds, threads, *names = sys.argv[1:]
files = {name: Path(name).read_bytes() for name in names}
steps.values(steps.pixels(files.pop(names[0])))
resource.setrlimit(resource.RLIMIT_AS, (kilobytes("VmSize") * 1024 + int(more) * 1_000_000,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(seconds),) * 2)

def read(data):
    try:
        return list(steps.values(steps.pixels(data)).shape)
    except InvalidValue as error:
        return str(error)

before = kilobytes("VmRSS")
if int(threads) > 1:
    with ThreadPoolExecutor(int(threads)) as pool:
        said = list(pool.map(read, files.values()))
else:
    said = [read(data) for data in files.values()]
print(json.dumps([dict(zip(files, said)), (kilobytes("VmHWM") - before) * 1024]))
"""


def read(
    folder: Path, images: dict[str, bytes], *, more: int, seconds: int, threads: int = 1
) -> tuple[dict[str, object], int]:
    """The outcome for each image, and the growth of the process in bytes. A first harmless image loads the
    libraries."""
    names: dict[str, str] = {}
    for number, (name, data) in enumerate({"": turned(6), **images}.items()):
        path = folder / str(number)
        path.write_bytes(data)
        names[str(path)] = name
    command = [sys.executable, "-c", READER, str(more), str(seconds), str(threads), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result, grown = json.loads(done.stdout)
    return {names[path]: each for path, each in result.items()}, grown


def test_bombs_take_neither_memory_nor_time(tmp_path: Path) -> None:
    """Each is refused for its content, not for lack of memory, within 64 MB and a few seconds in total; the bomb in a
    text chunk has no pixels."""
    hostile = bombs() | broken()
    results, grown = read(tmp_path, hostile, more=64, seconds=20)
    assert set(results) == set(hostile)
    for name, each in results.items():
        assert isinstance(each, str), name
        assert "MemoryError" not in each, name
    assert grown < 64_000_000


@pytest.mark.parametrize("kind", ["JPEG", "turned JPEG", "alpha"])
def test_legal_images_fit_in_the_budget(kind: str, tmp_path: Path) -> None:
    """40 million pixels, the maximum, within 256 MiB."""
    path = tmp_path / "large.jpg"
    if kind == "alpha":
        packer = zlib.compressobj(1)
        row = b"\x00" + bytes([9, 8, 7, 128]) * 8000
        packed = b"".join([*(packer.compress(row) for _ in range(5000)), packer.flush()])
        data = png_of(8000, 5000, chunk(b"IDAT", packed), colour=6)
    else:
        exif = Image.Exif()
        exif[0x0112] = 6 if kind == "turned JPEG" else 1
        Image.new("RGB", (8000, 5000), "red").save(path, exif=exif)
        data = path.read_bytes()
    results, grown = read(tmp_path, {kind: data}, more=600, seconds=60)
    assert results == {kind: [3, 224, 224]}
    assert grown < 256 * 1024 * 1024


def test_a_large_progressive_jpeg_is_read_alone(tmp_path: Path) -> None:
    """40 million pixels whose coefficients are kept for all scans: two threads take turns, and no memory stays lent."""
    Image.new("RGB", (8000, 5000), "green").save(tmp_path / "large.jpg", progressive=True, subsampling=0)
    data = (tmp_path / "large.jpg").read_bytes()
    results, grown = read(tmp_path, {str(each): data for each in range(2)}, more=1200, seconds=60, threads=2)
    assert list(results.values()) == [[3, 224, 224]] * 2
    assert grown < 480 * 1024 * 1024


def test_threads_share_the_budget(tmp_path: Path) -> None:
    """Six images of 20 million pixels take 480 MB at once; two fit, and memory kept by malloc is returned."""
    Image.new("RGB", (5000, 4000), "blue").save(tmp_path / "large.jpg")
    data = (tmp_path / "large.jpg").read_bytes()
    results, grown = read(tmp_path, {str(each): data for each in range(6)}, more=4000, seconds=60, threads=6)
    assert list(results.values()) == [[3, 224, 224]] * 6
    assert grown < 300 * 1024 * 1024
