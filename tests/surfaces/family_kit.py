"""A server with every kind of embedding model: real lanes over fake engines, so tests can compute every answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from shoal.backends.fake.model import FakeScript
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts, Observer, Token
from shoal.core.registry import Model, Registry
from shoal.http.openapi import OpenApi
from shoal.specs import ContrastSpec
from shoal.surfaces import SURFACES, Options, build_app
from shoal.types import TaskKind
from tests.surfaces.surface_kit import Server
from tests.unit.core.lanes import make_lane

EMBEDDER, SPLADE, RERANKER, CLASSIFIER, CLIP = "embedder", "splade", "reranker", "classifier", "clip"
DIMENSION = 4
SCRIPTS = {
    EMBEDDER: FakeScript(vectors="dense+tokens", dimension=DIMENSION),
    SPLADE: FakeScript(vectors="sparse", dimension=DIMENSION),
    RERANKER: FakeScript(labels=1),
    CLASSIFIER: FakeScript(labels=3),
    CLIP: FakeScript(images=1, dimension=DIMENSION),
}
PROMPT = "né: "
CONTRAST = ContrastSpec(scale=10.0)


class Words:
    """A tokenizer that splits on spaces and prepends [CLS]; a word's id is its length."""

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        first = [Token(101, "[CLS]", True, None, None)] if add_special_tokens else []
        whole = [(PROMPT if prompt_name else "") + text for text in texts]
        return [
            first + [Token(len(one[0]), one[0], False, *one.span()) for one in re.finditer(r"\S+", text)]
            for text in whole
        ]

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(each) for each in one if each != 101 or not skip_special_tokens) for one in ids]


def facts_of(script: FakeScript) -> ModelFacts:
    tasks: tuple[TaskKind, ...] = ("embed",)
    if script.labels:
        tasks = ("rerank", "classify") if script.labels == 1 else ("classify",)
    return ModelFacts(
        source="fake",
        backend="fake",
        tasks=tasks,
        dimension=None if script.labels else script.dimension,
        max_input_tokens=512,
        precision="f32",
        pooling="" if script.labels else "cls",
        prompts={"query": PROMPT} if not script.labels else {},
        vectors=() if script.labels else script.kinds,
        labels=script.label_names,
        modalities=script.modalities,
        contrast=CONTRAST if script.images else None,
    )


def add_family(gateway: Gateway, stack: AsyncExitStack, names: Sequence[str] = tuple(SCRIPTS), **more: Any) -> None:
    """Add the models of `SCRIPTS` with these names, ready to serve; `more` replaces facts of each."""
    for name in names:
        script = SCRIPTS[name]
        runner = LaneRunner(make_lane(script), replace(facts_of(script), **more), Words())
        stack.push_async_callback(runner.aclose)
        model = Model(name=name, created=1_700_000_000)
        gateway.registry.add(model)
        model.mark_loaded(runner)


@asynccontextmanager
async def family(
    *names: str, observer: Observer | None = None, facts: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    """Return a server with these models, in order, or with all of them."""
    gateway = Gateway(Registry(), observer)
    settings = Options(**options)
    async with AsyncExitStack() as stack:
        add_family(gateway, stack, names or tuple(SCRIPTS), **(facts or {}))
        surfaces = [make(settings) for make in SURFACES]
        app = build_app(gateway, [*surfaces, OpenApi(surfaces)], settings)
        first: Any = next(iter(gateway.registry))
        yield Server(app, first.runner, gateway, first)
