"""Stands in for a GPU where there is none: what torch.cuda records is noted, operation by operation, and run again from
the same memory. It knows no streams and no kernels, only which addresses a recording reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest


class Recorder:
    """Like torch.cuda.CUDAGraph."""

    capturing = False

    def __init__(self) -> None:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        steps: list[tuple[Any, Any, Any, Any]] = []

        class Noting(TorchDispatchMode):  # type: ignore[misc]  # torch is no dependency of the type checker
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
                    raise RuntimeError("operation not permitted when stream is capturing")
                found = func(*args, **(kwargs or {}))
                steps.append((func, args, kwargs or {}, found))
                return found

        self._steps = steps
        self._noting = Noting()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        Recorder.capturing = True
        self._noting.__enter__()

    def capture_end(self) -> None:
        self._noting.__exit__(None, None, None)
        Recorder.capturing = False

    def replay(self) -> None:
        import torch
        from torch.utils import _pytree

        for func, args, kwargs, found in self._steps:
            again = func(*args, **kwargs)
            for new, old in zip(_pytree.tree_leaves(again), _pytree.tree_leaves(found), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Event:
    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def unpinned(empty: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        return empty(*shape, **options)

    return wrapped


def on_stream(stream: object) -> AbstractContextManager[None]:
    return nullcontext()


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the torch engine find a GPU, whose memory is the processor's."""
    import torch

    from shoal.backends.local.torch import engine

    patch.setattr(engine, "_pick_device", lambda options: engine._Device("cpu:0", "a stand-in", 2, 1, "0"))
    patch.setattr(torch, "empty", unpinned(torch.empty))
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name, value in {
        "CUDAGraph": Recorder,
        "Event": Event,
        "Stream": object,
        "stream": on_stream,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: Recorder.capturing,
    }.items():
        patch.setattr(torch.cuda, name, value)
