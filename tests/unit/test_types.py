from __future__ import annotations

import time
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.specs import LayerSpec, MultiSpec, PartsSpec, ScoreSpec, SparseSpec, TextSpec
from shoal.types import (
    BatchFacts,
    BatchStats,
    Chunk,
    Classify,
    Context,
    DurationStat,
    Embed,
    Embedded,
    Generate,
    Guide,
    InferenceStats,
    MemoryUsage,
    Message,
    ModelStats,
    Part,
    Rerank,
    Sampling,
    Scored,
    SparseVector,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolDelta,
    Usage,
    Wire,
    compute_digest,
    pack,
    unpack,
)

small = st.integers(0, 2**31 - 1)
maybe = st.none() | st.text(max_size=9)
finite = st.floats(allow_nan=False)
extras = st.dictionaries(
    st.text(max_size=9), st.recursive(st.none() | small | st.text(), lambda inner: st.lists(inner, max_size=3))
).map(lambda fields: {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})
vectors = arrays.arrays(
    st.sampled_from(["<f4", ">f4", "<f2", "<f8", "<i8", "|u1"]), arrays.array_shapes(min_dims=1, max_dims=3, min_side=0)
)
facts = st.builds(
    BatchFacts,
    size=small,
    id=small,
    batches=small,
    flush=st.sampled_from(["full", "idle", "age"]),
    replica=st.text(),
    queue_ms=finite,
    prepare_ms=finite,
    infer_ms=finite,
)
large = st.integers(0, 2**64 - 1)
spent = st.builds(DurationStat, count=large, ns=large)
words = st.lists(st.text(max_size=9), max_size=3)
samplings = st.builds(
    Sampling,
    max_tokens=st.none() | small,
    temperature=st.none() | finite,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=words,
    logit_bias=st.dictionaries(small, finite, max_size=3),
    guide=st.none() | st.builds(Guide, kind=st.sampled_from(["json_object", "regex"]), value=st.text()),
)
messages = st.builds(
    Message,
    role=st.text(max_size=9),
    content=st.none() | st.text() | st.lists(st.builds(Part, text=st.text()), max_size=3),
    tool_calls=st.lists(st.builds(ToolCall, id=st.text(), name=st.text(), arguments=st.text()), max_size=2),
    tool_call_id=maybe,
)
tools = st.builds(
    Tool, name=st.text(), parameters=st.dictionaries(st.text(max_size=9), st.none() | small | st.text() | words)
)
bodies = st.none() | st.tuples(st.text(max_size=9), st.binary())
logprobs = st.builds(
    TokenLogprob,
    token=st.text(),
    logprob=finite,
    data=st.none() | st.binary(),
    top=st.lists(st.builds(TokenLogprob, token=st.text(), logprob=finite), max_size=2),
)
generates = st.builds(
    Generate,
    model=st.text(),
    prompts=st.lists(st.text() | st.lists(small, max_size=5), max_size=3),
    messages=st.lists(messages, max_size=3),
    n=small,
    sampling=samplings,
    tools=st.lists(tools, max_size=2),
    adapter=st.text(),
    raw=st.none() | st.tuples(st.text(), extras),
    extras=extras,
)
sparse = st.builds(SparseVector, indices=vectors, values=vectors)
layers = st.builds(
    LayerSpec,
    kind=st.sampled_from(["dense", "layer_norm", "normalize", "truncate"]),
    takes=small,
    dimension=small,
    path=st.text(max_size=9),
    file=st.text(max_size=9),
    activation=st.text(max_size=9),
    bias=st.booleans(),
    residual=st.booleans(),
)
STRUCTS: dict[Any, st.SearchStrategy[Any]] = {
    Embed: st.builds(
        Embed,
        model=st.text(),
        inputs=st.lists(st.text() | st.lists(small, max_size=5), max_size=5),
        prompt_name=maybe,
        input_type=maybe,
        truncate=st.none() | st.booleans(),
        truncation_direction=st.sampled_from(["left", "right"]),
        normalize=st.booleans(),
        dimensions=st.none() | small,
        outputs=st.lists(st.sampled_from(["dense", "tokens", "sparse", "multi"]), max_size=4).map(tuple),
    ),
    Rerank: st.builds(
        Rerank,
        model=st.text(),
        queries=words,
        documents=words,
        raw_scores=st.booleans(),
        truncate=st.none() | st.booleans(),
        max_document_tokens=st.none() | small,
    ),
    Classify: st.builds(
        Classify, model=st.text(), inputs=st.lists(st.text() | st.tuples(st.text(), st.text()), max_size=5)
    ),
    Generate: generates,
    Embedded: st.builds(
        Embedded,
        vectors=vectors,
        tokens=st.lists(small),
        truncated=small,
        facts=facts,
        space=st.text(),
        sparse=st.lists(sparse, max_size=2),
        token_vectors=st.lists(vectors, max_size=2),
        multi_vectors=st.lists(vectors, max_size=2),
    ),
    Scored: st.builds(Scored, scores=vectors, tokens=st.lists(small), truncated=small, facts=facts),
    SparseVector: sparse,
    Chunk: st.builds(
        Chunk,
        text=st.text(),
        index=small,
        finish_reason=maybe,
        reasoning=st.text(),
        tools=st.lists(st.builds(ToolDelta, index=small, id=st.text(), arguments=st.text()), max_size=2),
        logprobs=st.lists(logprobs, max_size=2),
        usage=st.none() | st.builds(Usage, prompt_tokens=small, completion_tokens=small),
        raw=bodies,
        cut=small,
    ),
    Context: st.builds(
        Context,
        id=st.text(),
        deadline=finite,
        client=st.text(),
        traffic=st.sampled_from([None, "interactive", "bulk"]),
    ),
    TextSpec: st.builds(
        TextSpec,
        tokenizer=st.text(),
        inputs=st.lists(st.text(), max_size=3).map(tuple),
        dimension=small,
        max_tokens=small,
        prompts=st.dictionaries(st.text(max_size=9), st.text()),
        default_prompt_name=maybe,
        lower_case=st.booleans(),
        include_prompt=st.booleans(),
        ends_normalized=st.booleans(),
        score=st.none()
        | st.builds(ScoreSpec, labels=words.map(tuple), activation=st.sampled_from(["identity", "softmax"])),
        sparse=st.none() | st.builds(SparseSpec, skipped=st.lists(small, max_size=3).map(tuple)),
        multi=st.none() | st.builds(MultiSpec, dimension=small, fill_id=st.none() | small),
        parts=st.none()
        | st.builds(
            PartsSpec,
            encoder=st.text(max_size=9),
            after=st.lists(layers, max_size=2).map(tuple),
            late=st.lists(layers, max_size=2).map(tuple),
            token_weights=st.none() | layers,
            splade=st.tuples(st.sampled_from(["max", "sum"]), st.sampled_from(["relu", "log1p_relu"])),
        ),
    ),
    ModelStats: st.builds(
        ModelStats,
        name=st.text(),
        version=st.text(max_size=9),
        last_inference=large,
        inference_count=large,
        execution_count=large,
        inference_stats=st.builds(InferenceStats, success=spent, fail=spent, queue=spent, compute_infer=spent),
        batch_stats=st.lists(st.builds(BatchStats, batch_size=small, compute_infer=spent), max_size=3),
        memory_usage=st.lists(
            st.builds(MemoryUsage, type=st.sampled_from(["CPU", "GPU"]), byte_size=large), max_size=2
        ),
    ),
}


def plain(value: Any) -> Any:
    """Return a struct as values that compare by content; arrays by type, shape and bytes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return (type(value), {name: plain(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return value


def test_every_wire_struct_has_an_example() -> None:
    """A new wire struct is covered by the property below."""
    assert set(STRUCTS) == {*get_args(Wire), TextSpec}


@given(st.sampled_from(list(STRUCTS)).flatmap(lambda kind: STRUCTS[kind]))
def test_pack_and_unpack_are_inverse(value: Any) -> None:
    """Every field is equal after the round trip; arrays bit by bit, extras byte by byte."""
    again = unpack(pack(value), type(value))
    assert plain(again) == plain(value)


@given(vectors)
def test_arrays_round_trip_exactly(array: Any) -> None:
    """NaN payloads and signed zeros too, for every memory order."""
    for given_ in (array, np.asfortranarray(array)):
        again = unpack(pack(Embedded(vectors=given_, tokens=[])), Embedded).vectors
        assert (again.dtype, again.shape) == (array.dtype, array.shape)
        assert again.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack(Chunk(text="x"))[:-1],
        msgspec.msgpack.encode({"type": "embed", "model": 5}),
        msgspec.msgpack.encode({"vectors": ["<f4", [2], b"\0" * 4], "tokens": []}),
        msgspec.msgpack.encode({"vectors": ["|O", [1], b"\0" * 8], "tokens": []}),
        msgspec.msgpack.encode({"vectors": [1, 2], "tokens": []}),
        msgspec.msgpack.encode({"vectors": "text", "tokens": []}),
    ],
)
@pytest.mark.parametrize("kind", [Embed, Embedded])
def test_invalid_structs_are_refused(data: bytes, kind: type[Any]) -> None:
    """Truncated, of another type, or with an invalid array: a decoding error, never a wrong value."""
    with pytest.raises(msgspec.DecodeError):
        unpack(data, kind)


def test_task_types_are_told_apart() -> None:
    """Tags identify the task type."""
    with pytest.raises(msgspec.ValidationError):
        unpack(pack(Embed(model="m", inputs=["x"])), Generate)


@pytest.mark.parametrize("stranger", [object(), {1, 2j}])
def test_only_types_with_a_wire_form_are_packed(stranger: Any) -> None:
    """Other types are bugs; the error names the type."""
    with pytest.raises((NotImplementedError, TypeError)):
        pack(Chunk(text=stranger))


def test_structs_are_frozen() -> None:
    """Code that shares a task cannot change it."""
    with pytest.raises(AttributeError):
        Chunk().text = "x"  # type: ignore[misc]


def test_remaining_counts_down_to_zero() -> None:
    """Seconds until the deadline, by the given or the monotonic clock; never negative."""
    ctx = Context(id="r", deadline=100.0)
    assert [ctx.remaining(now) for now in (40.0, 100.0, 140.0)] == [60.0, 0.0, 0.0]
    assert 9 < Context(id="r", deadline=time.monotonic() + 10).remaining() <= 10


@given(batches=st.lists(st.dictionaries(st.text(max_size=3), vectors, max_size=3), max_size=3))
def test_digests_of_batches_differ(batches: list[dict[str, Any]]) -> None:
    """Digests ignore the order of names, and depend on every byte, shape, type and the number of batches."""
    digest = compute_digest(batches)
    assert digest == compute_digest([dict(reversed(batch.items())) for batch in batches])
    assert len(digest) == 16
    for at, batch in enumerate(batches):
        for name, array in batch.items():
            changed = {**batch, name: array[None]}
            assert digest != compute_digest([*batches[:at], changed, *batches[at + 1 :]])
