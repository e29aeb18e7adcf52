"""Opens scripted models."""

from __future__ import annotations

from shoal.backends.base.backend import Resources, Target
from shoal.backends.base.chat_pipeline import load_chat_pipeline
from shoal.backends.fake.model import CHAT_TEMPLATE, FakeEngine, FakeGenerator, FakePipeline, FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts, Runner
from shoal.core.routing import TaskRouter
from shoal.specs import ContrastSpec
from shoal.types import TaskKind


def open_fake(target: Target, resources: Resources) -> Runner:
    """Open a model with one replica per address; the first address's script sets its tasks. Raises AddressError."""
    scripts = [FakeScript.parse(dict(address.options)) for address in target.addresses]
    script = scripts[0]
    engines = [FakeEngine(one, f"fake-{number}") for number, one in enumerate(scripts)]
    talkers = [FakeGenerator(one, f"fake-{number}") for number, one in enumerate(scripts)]
    if script.labels:
        tasks: tuple[TaskKind, ...] = ("rerank", "classify") if script.labels == 1 else ("classify",)
        scores = ModelFacts(
            source="fake",
            backend="fake",
            tasks=tasks,
            max_input_tokens=512,
            vectors=(),
            labels=script.label_names,
            modalities=script.modalities,
        )
        return LaneRunner(resources.lane(target, FakePipeline(script), engines, scores), scores)
    embeds = ModelFacts(
        source="fake",
        backend="fake",
        tasks=("embed",),
        dimension=script.dimension,
        max_input_tokens=512,
        vectors=script.kinds,
        modalities=script.modalities,
        contrast=ContrastSpec(scale=10.0) if script.images else None,
    )
    talks = ModelFacts(source="fake", backend="fake", tasks=("generate",), adapters=talkers[0].facts.adapters)
    pipeline = load_chat_pipeline(None, target.settings, template=CHAT_TEMPLATE)
    lane = resources.lane(target, FakePipeline(script), engines, embeds)
    return TaskRouter([LaneRunner(lane, embeds), resources.generation(target, pipeline, talkers, talks)])
