"""Statistics as JSON: what protobuf itself writes of Triton's message."""

from __future__ import annotations

from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from shoal.kserve import protocol_pb2 as protocol
from shoal.surfaces.health.statistics import encode_statistics
from shoal.types import BatchStats, DurationStat, InferenceStats, MemoryUsage, ModelStats

counts = st.sampled_from([0, 1]) | st.integers(0, 2**64 - 1)
spent = st.builds(DurationStat, count=counts, ns=counts)
inference = st.builds(InferenceStats, **dict.fromkeys(InferenceStats.__struct_fields__, spent))
batches = st.builds(BatchStats, batch_size=counts, compute_input=spent, compute_infer=spent, compute_output=spent)
memory = st.builds(MemoryUsage, type=st.sampled_from(["CPU", "GPU"]), id=st.integers(0, 8), byte_size=counts)
models = st.builds(
    ModelStats,
    name=st.text(min_size=1, max_size=8),
    version=st.sampled_from(["", "1"]),
    last_inference=counts,
    inference_count=counts,
    execution_count=counts,
    inference_stats=inference,
    batch_stats=st.lists(batches, max_size=3),
    memory_usage=st.lists(memory, max_size=2),
)


def message(stats: ModelStats) -> Any:
    """Triton's own message: it sets every duration, also one of nought."""
    message = protocol.ModelStatistics(name=stats.name, version=stats.version)
    for name in ("last_inference", "inference_count", "execution_count"):
        setattr(message, name, getattr(stats, name))
    for name in InferenceStats.__struct_fields__:
        _set(getattr(message.inference_stats, name), getattr(stats.inference_stats, name))
    for each in stats.batch_stats:
        batch = message.batch_stats.add(batch_size=each.batch_size)
        for name in ("compute_input", "compute_infer", "compute_output"):
            _set(getattr(batch, name), getattr(each, name))
    for usage in stats.memory_usage:
        message.memory_usage.add(type=usage.type, id=usage.id, byte_size=usage.byte_size)
    return message


def _set(duration: Any, spent: DurationStat) -> None:
    duration.SetInParent()
    duration.count, duration.ns = spent.count, spent.ns


@given(stats=st.lists(models, max_size=2))
def test_as_protobuf_writes_it(stats: list[ModelStats]) -> None:
    """Names, order of nothing, strings for 64 bits and what is left out: all as from a client of Triton."""
    response = protocol.ModelStatisticsResponse(model_stats=[message(each) for each in stats])
    assert orjson.loads(encode_statistics(stats)) == MessageToDict(response, preserving_proto_field_name=True)


def test_a_model_that_did_nothing() -> None:
    """Its durations are there, and empty."""
    (model,) = orjson.loads(encode_statistics([ModelStats(name="idle")]))["model_stats"]
    assert model == {"name": "idle", "inference_stats": {name: {} for name in InferenceStats.__struct_fields__}}
