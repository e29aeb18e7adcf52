"""What a replica counts, among the metrics of its Ray cluster: `ray_shoal_*`, with Serve's tags."""

from __future__ import annotations

import asyncio
import logging

from shoal.app import RunningModels

logger = logging.getLogger("shoal.ray")

REPORT_S = 5.0
"""Between two reports. Ray collects its metrics every 10 s."""


class ReplicaMetrics:
    """Reports a model's requests, queue and inferences until it is cancelled."""

    def __init__(self, running: RunningModels, model: str) -> None:
        from ray.serve.metrics import Counter, Gauge

        self._running = running
        self._model = model
        self._requests = Gauge("shoal_requests_in_flight", "Requests that this replica has not answered.")
        self._items = Gauge("shoal_queue_items", "Items in the queues of this replica.")
        self._tokens = Gauge("shoal_queue_tokens", "Tokens in the queues of this replica.")
        self._inferences = Counter("shoal_inferences", "Items that this replica has computed.")
        self._batches = Counter("shoal_batches", "Batches that this replica has computed.")
        self._counted = (0, 0)

    async def run(self) -> None:
        """Report again and again; never returns."""
        while True:
            try:
                self.report()
            except Exception:  # whatever Ray raises: the next report may do better
                logger.exception("reporting to Ray's metrics failed")
            await asyncio.sleep(REPORT_S)

    def report(self) -> None:
        """Set the gauges, and count what is new."""
        lengths = self._running.queues.lengths()
        self._requests.set(count_requests(self._running))
        self._items.set(sum(items for _, items, _ in lengths))
        self._tokens.set(sum(tokens for _, _, tokens in lengths))
        stats = self._running.counts.stats_for(self._model)
        counted = stats.inference_count, stats.execution_count
        for counter, now, before in zip((self._inferences, self._batches), counted, self._counted, strict=True):
            if now > before:  # Ray refuses 0
                counter.inc(now - before)
        self._counted = counted


def count_requests(running: RunningModels) -> int:
    """Return the requests that are not answered."""
    return sum(model.inflight for model in running.gateway.registry)
