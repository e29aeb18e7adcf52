"""Encode model statistics as protobuf encodes Triton's ModelStatistics in JSON: 64-bit integers are strings, and zero
or empty fields are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.types import DurationStat, InferenceStats, ModelStats

Long = Annotated[str, Meta(description="A 64-bit integer, absent if 0.")]


class Duration(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A count, and the total time in nanoseconds."""

    count: Long = ""
    ns: Long = ""


class Inference(msgspec.Struct, kw_only=True):
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class Batch(msgspec.Struct, kw_only=True, omit_defaults=True):
    batch_size: Long = ""
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class Memory(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str = ""
    id: Long = ""
    byte_size: Long = ""


class Model(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    version: str = ""
    last_inference: Annotated[str, Meta(description="Milliseconds of the Unix epoch.")] = ""
    inference_count: Annotated[str, Meta(description="Items.")] = ""
    execution_count: Annotated[str, Meta(description="Batches.")] = ""
    inference_stats: Inference
    batch_stats: list[Batch] = []
    memory_usage: list[Memory] = []


class Statistics(msgspec.Struct, kw_only=True, omit_defaults=True):
    model_stats: list[Model] = []


_ENCODE = msgspec.json.Encoder()


def encode_statistics(models: Sequence[ModelStats]) -> bytes:
    return _ENCODE.encode(Statistics(model_stats=[_to_model(each) for each in models]))


def _to_model(stats: ModelStats) -> Model:
    return Model(
        name=stats.name,
        version=stats.version,
        last_inference=_to_long(stats.last_inference),
        inference_count=_to_long(stats.inference_count),
        execution_count=_to_long(stats.execution_count),
        inference_stats=_to_inference(stats.inference_stats),
        batch_stats=[
            Batch(
                batch_size=_to_long(each.batch_size),
                compute_input=_to_duration(each.compute_input),
                compute_infer=_to_duration(each.compute_infer),
                compute_output=_to_duration(each.compute_output),
            )
            for each in stats.batch_stats
        ],
        memory_usage=[
            Memory(type=each.type, id=_to_long(each.id), byte_size=_to_long(each.byte_size))
            for each in stats.memory_usage
        ],
    )


def _to_inference(stats: InferenceStats) -> Inference:
    return Inference(**{name: _to_duration(getattr(stats, name)) for name in Inference.__struct_fields__})


def _to_duration(spent: DurationStat) -> Duration:
    return Duration(count=_to_long(spent.count), ns=_to_long(spent.ns))


def _to_long(value: int) -> str:
    return str(value) if value else ""
