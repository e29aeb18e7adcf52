"""The tasks of a bulk run, as calls of a gateway."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import numpy as np

from shoal.bulk.computing import Column, Task, Texts
from shoal.core.gateway import Gateway
from shoal.errors import ConfigError
from shoal.types import Context, Embed, Generate, Message, Rerank, Sampling

CALL_TEXTS = 512
"""Texts in one request: full batches, and few requests to account for."""

CALLS = 4
"""Requests in flight, so that a batch can be filled while the end of another request runs."""

BATCH_MS = 120.0
"""`max_batch_ms` of a gateway that only runs files, three times that of a server, for nobody waits for one batch. Where
other programs take the cores, texts seem slow and batches become small: with a third of two cores, batches had 15 short
texts instead of 8, and a text took 0.98 of the processor time."""

CALL_TIMEOUT_S = 86400.0
"""Nobody waits for one request; a run ends when it is interrupted."""

FORMATS = {"embed": ("npy", "parquet"), "rerank": ("jsonl", "npy", "parquet"), "generate": ("jsonl", "parquet")}
"""Task -> its output formats, the default first."""

_ids = count(1)


def check_format(task: str, form: str) -> str:
    """Return the format, or the task's default for "". Raises ConfigError."""
    if task not in FORMATS:
        raise ConfigError(f"--task must be one of {', '.join(FORMATS)} (got {task})", param="--task")
    if form and form not in FORMATS[task]:
        raise ConfigError(
            f"--format must be one of {', '.join(FORMATS[task])} for {task} (got {form})", param="--format"
        )
    return form or FORMATS[task][0]


def plan_task(
    gateway: Gateway, name: str, task: str, options: Mapping[str, Any], *, concurrency: int, max_items: int
) -> Task:
    """Plan a task of FORMATS for the model `name`. `options`: those of the recipe that decide its results;
    `concurrency`: prompts at once; `max_items` bounds the texts in flight."""
    if task == "embed":
        own = {each: options[each] for each in ("dimensions", "input_type", "prompt_name", "normalize")}
        return plan_embed(gateway, Embed(model=name, inputs=[], **own), max_items)
    if task == "rerank":
        return plan_rerank(gateway, name, raw_scores=options["raw_scores"], max_items=max_items)
    sampling = Sampling(**{each: options[each] for each in ("max_tokens", "temperature", "seed")})
    system, chat = options["system"] or "", options["chat"]
    return plan_generate(gateway, name, sampling, system=system, has_template=chat, concurrency=concurrency)


def describe_model(gateway: Gateway, name: str) -> dict[str, str]:
    """Return the facts that tell one model from another, for the recipe."""
    facts = gateway.model(name).facts
    known = ("id", "source", "revision", "space", "precision") if facts is not None else ()
    return {each: str(getattr(facts, each)) for each in known}


def plan_embed(gateway: Gateway, whole: Embed, max_items: int) -> Task:
    """`whole` holds the options, without inputs; `max_items` bounds what is in flight."""
    facts = gateway.model(whole.model).facts
    width = whole.dimensions or (facts.dimension if facts is not None else None) or 0

    async def call(texts: Sequence[Texts]) -> Mapping[str, Column]:
        task = Embed(
            model=whole.model,
            inputs=[text for (text,) in texts],
            prompt_name=whole.prompt_name,
            input_type=whole.input_type,
            normalize=whole.normalize,
            dimensions=whole.dimensions,
        )
        # A row may be a view of a larger batch: a copy frees the batch.
        return {"vector": np.array((await gateway.run(task, _new_context())).vectors, np.float32)}

    return Task(call, min(CALL_TEXTS, max(1, max_items // CALLS)), CALLS, {"vector": np.empty((0, width), np.float32)})


def plan_rerank(gateway: Gateway, model: str, *, raw_scores: bool, max_items: int) -> Task:
    """Texts are pairs of a query and a document."""

    async def call(texts: Sequence[Texts]) -> Mapping[str, Column]:
        queries, documents = map(list, zip(*texts, strict=True))
        task = Rerank(model=model, queries=queries, documents=documents, raw_scores=raw_scores)
        return {"score": np.array((await gateway.run(task, _new_context())).scores[:, 0], np.float32)}

    return Task(call, min(CALL_TEXTS, max(1, max_items // CALLS)), CALLS, {"score": np.empty(0, np.float32)})


def plan_generate(
    gateway: Gateway, model: str, sampling: Sampling, *, system: str, has_template: bool, concurrency: int
) -> Task:
    """One prompt a call: as the message of a user, after `system` if there is one, or continued as it is."""
    instructions = [Message(role="system", content=system)] if system else []

    async def call(texts: Sequence[Texts]) -> Mapping[str, Column]:
        ((prompt,),) = texts
        if has_template:
            messages = [*instructions, Message(role="user", content=prompt)]
            task = Generate(model=model, messages=messages, sampling=sampling)
        else:
            task = Generate(model=model, prompts=[prompt], sampling=sampling)
        pieces, reason, usage = [], "", None
        async with aclosing(gateway.stream(task, _new_context())) as chunks:
            async for chunk in chunks:
                pieces.append(chunk.text)
                reason = chunk.finish_reason or reason
                usage = chunk.usage or usage
        return {
            "answer": ["".join(pieces)],
            "finish_reason": [reason],
            "prompt_tokens": np.array([usage.prompt_tokens if usage else 0]),
            "completion_tokens": np.array([usage.completion_tokens if usage else 0]),
        }

    counts = {name: np.empty(0, np.int64) for name in ("prompt_tokens", "completion_tokens")}
    return Task(call, 1, concurrency, {"answer": [], "finish_reason": [], **counts})


def _new_context() -> Context:
    return Context(id=f"bulk-{next(_ids)}", deadline=time.monotonic() + CALL_TIMEOUT_S, traffic="bulk")
