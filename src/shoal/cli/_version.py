"""Versions of Shoal and of the packages that affect it, read from metadata without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from shoal import __version__

_PACKAGES = ("openvino", "onnxruntime", "onnx", "tokenizers", "numpy", "uvicorn", "starlette", "huggingface-hub")


def versions() -> Iterator[str]:
    yield f"shoal {__version__}"
    yield f"python {platform.python_version()} ({platform.system()} {platform.machine()})"
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} not installed"
