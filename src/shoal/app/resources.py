"""What backends are offered to open models with: lanes, runners of generation, the store. Part of the composition
root."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shoal.backends import Backends
from shoal.backends.base.backend import NO_SAMPLING, Target
from shoal.backends.base.generation_options import build_generation_options
from shoal.cache import RowCaches
from shoal.config import SERVED_MODEL, LoadedConfig
from shoal.config.settings import IMAGE_BATCH_MS_FACTOR, ModelTable
from shoal.core.generation.runner import GenerationRunner
from shoal.core.lifecycle.loading import Plan, ProgressReporter
from shoal.core.protocols import ChatPipeline, Engine, ModelFacts, Observer, Pipeline, TextGenerator
from shoal.core.recording import Tracer
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from shoal.errors import ConfigError
from shoal.models.address import Address, ServedModel, parse_source
from shoal.models.progress import Progress
from shoal.models.store import Store, StoredModel
from shoal.types import Modality

PROGRESS_INTERVAL_S = 0.1
"""Between two reports of bytes: more are more than anybody looks at."""


def get_served(plan: Plan) -> ServedModel:
    """The names and addresses that a plan was made of, which are its payload."""
    assert isinstance(plan.payload, ServedModel)
    return plan.payload


class RunningLanes:
    """The lanes of the models that run."""

    def __init__(self) -> None:
        self._lanes: dict[str, Sequence[Lane]] = {}

    def put(self, name: str, lanes: Sequence[Lane]) -> None:
        self._lanes[name] = lanes

    def forget(self, name: str) -> None:
        self._lanes.pop(name, None)

    def lengths(self) -> list[tuple[str, int, int]]:
        """(model, items, tokens) that wait now, for the metrics."""
        every = [(name, [lane.queue_size for lane in lanes]) for name, lanes in self._lanes.items()]
        return [(name, sum(items for items, _ in each), sum(tokens for _, tokens in each)) for name, each in every]


class ModelResources:
    """Resources of this process, as backends see them, and the backends over them.

    `threads` prepare texts, `image_threads` what is heavier (None: the same ones). `progress` sees downloads and
    conversions, from threads. `tracer`: for the batches.
    """

    def __init__(  # noqa: PLR0913 - the last three may be left out, and are named
        self,
        loaded: LoadedConfig,
        observer: Observer,
        threads: Threads,
        *,
        caches: RowCaches,
        queues: RunningLanes,
        image_threads: Threads | None = None,
        progress: Progress | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.loaded = loaded
        self.store = Store(loaded.settings.home)
        self.progress = progress or Progress()
        self.backends = Backends(self)
        self._caches = caches
        self._queues = queues
        self._observer = observer
        self._tracer = tracer
        self._threads = threads
        self._image_threads = image_threads or threads
        self._served_names: set[str] = set()

    def forget(self, name: str) -> None:
        """A model's runner is closed."""
        self._queues.forget(name)
        self._caches.close(name)

    def table(self, name: str) -> ModelTable:
        return self.loaded.table(name, served=name in self._served_names)

    def serve(self, name: str) -> None:
        """The process is started for the model of that name. Raises ConfigError where there is one, and the preset has
        keys for one alone."""
        self._served_names.add(name)
        if self.loaded.served_model and len(self._served_names) > 1:
            label = self.loaded.table_sources[SERVED_MODEL][next(iter(self.loaded.served_model))].label
            raise ConfigError(
                f"{label} applies to one model, but {' and '.join(sorted(self._served_names))} are served: omit it "
                f'and set {", ".join(self.loaded.served_model)} in [models."NAME"] of shoal.toml',
                param=label,
            )

    def target(self, plan: Plan) -> Target:
        """What a plan opens."""
        served = get_served(plan)
        return Target(
            name=plan.name,
            source=plan.source,
            addresses=served.addresses,
            settings=self.loaded.for_model(plan.name),
            table=self.table(plan.name),
            options=plan.options,
            name_only=served.name_only,
        )

    async def source(self, target: Target) -> Address:
        """The address of a model; for a bare name, that of the model in the store which has it: the one that came from
        that address of the hub, else the newest of that name whose address names no form of reranker."""
        address = target.addresses[0]
        if not target.name_only or address.revision:
            return address
        found = [one.manifest.address for one in await asyncio.to_thread(self.store.find_by_name, target.name_only)]
        if str(address) in found:
            return address
        return next((one for one in map(parse_source, found) if not one.reranker), address)

    async def prepare(self, target: Target, address: Address, report: ProgressReporter) -> StoredModel:
        return await self.backends.for_address(address).prepare(target, address, report)

    def build_deployment(self, target: Target) -> Any:
        from shoal.ray.deployments import build_model  # late: it imports Ray

        return build_model(self.loaded, target.name, ",".join(map(str, target.addresses)))

    def reporter(self, report: ProgressReporter) -> Progress:
        return _Reporter(asyncio.get_running_loop(), report, self.progress)

    def lane(self, target: Target, pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
        return self.lanes(target, {"text": (pipeline, engines)}, facts)["text"]

    def lanes(
        self, target: Target, parts: Mapping[Modality, tuple[Pipeline, Sequence[Engine]]], facts: ModelFacts
    ) -> dict[Modality, Lane]:
        """A lane for each modality of a model, with one cache for all."""
        name, settings = target.name, target.settings
        limits = Limits(
            settings.max_batch_size,
            settings.max_batch_tokens,
            settings.max_batch_ms,
            settings.max_wait_time_ms,
            settings.max_age_ms,
            mixes_lengths=not settings.reproducible,
        )
        longer = replace(limits, max_batch_ms=settings.max_batch_ms * IMAGE_BATCH_MS_FACTOR)
        options = LaneOptions(
            model=name,
            limits=limits,
            max_items=settings.max_queue_items,
            max_queue_s=settings.max_queue_ms / 1000,
            space=facts.space,
            cache=self._caches.open(
                name, settings, facts, "+".join(one[0].facts.precision for _, one in parts.values())
            ),
        )
        lanes = {
            modality: Lane(
                pipeline,
                engines,
                replace(options, limits=longer) if modality == "image" else options,
                threads=self._image_threads if pipeline.work == "heavy" else self._threads,
                observer=self._observer,
                tracer=self._tracer,
            )
            for modality, (pipeline, engines) in parts.items()
        }
        self._queues.put(name, list(lanes.values()))
        return lanes

    def generation(
        self,
        target: Target,
        pipeline: ChatPipeline,
        generators: Sequence[TextGenerator],
        facts: ModelFacts,
        recommended: Mapping[str, Any] = NO_SAMPLING,
    ) -> GenerationRunner:
        able = generators[0].facts
        options = build_generation_options(target.name, target.settings, target.table, able, self._threads, recommended)
        own = {"parameters": sorted(able.parameters), **pipeline.details}
        return GenerationRunner(pipeline, generators, replace(facts, details={**facts.details, **own}), options)


class _Reporter(Progress):
    """Progress from a thread to a job's report on the loop, and to whoever else wants to see it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: ProgressReporter, also: Progress) -> None:
        self._loop = loop
        self._report = report
        self._next = also
        self._last_report = 0.0
        self._lock = threading.Lock()

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self._next.report_fetch(what, done, total)
        with self._lock:
            now = time.monotonic()
            if now - self._last_report < PROGRESS_INTERVAL_S and done != total:
                return
            self._last_report = now
        self._report_progress(f"downloading {what}", float(done), None if total is None else float(total))

    def report_work(self, stage: str, fraction: float) -> None:
        self._next.report_work(stage, fraction)
        self._report_progress(stage, fraction=fraction)

    def report_note(self, line: str) -> None:
        self._next.report_note(line)

    def _report_progress(
        self, stage: str, done: float | None = None, total: float | None = None, fraction: float | None = None
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(partial(self._report, stage, done, total, fraction=fraction))
        except RuntimeError:  # the loop is closed: nobody listens any more
            return
