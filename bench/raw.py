"""The engine alone: OpenVINO on the served ONNX file, token ids made beforehand, nothing of Shoal between."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from shoal.backends.local.compile import import_openvino
from shoal.backends.local.options import plan_threads
from shoal.backends.local.shapes import length_buckets
from shoal.machine_limits import usable_cores
from shoal.models.store import StoredModel

SIZES = (4, 8, 16, 32, 64)
IDS = (1000, 29000)
"""Whole words of the vocabulary, so that no special token is met."""


class Raw:
    """Compiled with the settings that the server uses: `streams` side by side, no pinning, the same precision."""

    def __init__(self, entry: StoredModel, precision: str, streams: int = 0) -> None:
        self._core = import_openvino().Core()
        self._model = self._core.read_model(str(entry.graph))
        self._lengths = length_buckets(entry.manifest.text.max_tokens)
        self.streams, self.threads = plan_threads(streams, 0, usable_cores())
        self.precision = precision
        self._draw = np.random.default_rng(1)
        self._requests = self._compile(self.streams)
        self._one = self._compile(1)[0] if self.streams > 1 else self._requests[0]

    @property
    def facts(self) -> dict[str, Any]:
        return {"streams": self.streams, "threads": self.threads, "precision": self.precision}

    def padded(self, tokens: int) -> int:
        """The length that the server gives such texts, so that compiled kernels are met again."""
        return next(length for length in self._lengths if length >= tokens)

    def best(self, tokens: int, seconds: float) -> dict[str, float]:
        """Texts a second at this length's best batch size: all are tried briefly, the winner is measured."""
        tried = {size: self.rate(size, tokens, max(0.3, seconds / 10)) for size in SIZES if size * tokens <= 16384}
        size = max(tried, key=lambda one: tried[one])
        return {"texts_per_s": round(self.rate(size, tokens, seconds), 1), "batch_size": size}

    def lone_ms(self, tokens: int, seconds: float, *, one_stream: bool = False) -> float:
        """p50 of one text at a time, in the server's stream configuration or on one stream with all threads."""
        request = self._one if one_stream else self._requests[0]
        feeds = [self._feed(1, tokens) for _ in range(32)]
        latencies = []
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            request.start_async(feeds[len(latencies) % 32], share_inputs=True)
            request.wait()
            latencies.append(time.perf_counter() - start)
        return median(latencies[len(latencies) // 10 :]) * 1000

    def _compile(self, streams: int) -> list[Any]:
        settings = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": self.threads,
            "ENABLE_CPU_PINNING": False,
        }
        compiled = self._core.compile_model(self._model, "CPU", settings)
        return [compiled.create_infer_request() for _ in range(streams)]

    def _feed(self, size: int, tokens: int) -> dict[str, Any]:
        """Random ids; every other input of these graphs is all ones (masks) or all zeros (types)."""
        feed = {}
        for port in self._model.inputs:
            name = port.get_any_name()
            if name == "input_ids":
                feed[name] = self._draw.integers(*IDS, (size, tokens), dtype=np.int64)
            else:
                feed[name] = np.full((size, tokens), 0 if "type" in name else 1, np.int64)
        return feed

    def rate(self, size: int, tokens: int, seconds: float) -> float:
        """All streams busy; what is finished after the clock started counts."""
        feeds = [self._feed(size, tokens) for _ in range(8)]
        for request in self._requests:
            request.infer(feeds[0], share_inputs=True)
            request.start_async(feeds[0], share_inputs=True)
        start = time.perf_counter()
        done = 0
        while (now := time.perf_counter()) - start < seconds:
            for request in self._requests:
                request.wait()
                done += 1
                request.start_async(feeds[done % 8], share_inputs=True)
        for request in self._requests:
            request.wait()
        return done * size / (now - start)
