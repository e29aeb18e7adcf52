"""Which replica gets a request: keys, ranks, bounds."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.generation.affinity import (
    BOUND,
    FREE_REQUESTS,
    Demand,
    Load,
    Routing,
    choose,
    estimate_demand,
    rank,
)
from shoal.types import Context, Generate, Message, Part, Sampling

NAMES = ["http://one", "http://two", "http://three"]


def ctx(session: str = "") -> Context:
    return Context(id="r", deadline=0.0, session=session)


def chat(*contents: str, **fields: str) -> Generate:
    roles = ["system", *("user", "assistant") * len(contents)]
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return Generate(
        model="m",
        messages=[Message(role=role, content=content) for role, content in zip(roles, contents, strict=False)],
        raw=("openai.chat", raw),
    )


def key(task: Generate, session: str = "", routing: Routing = "session") -> bytes:
    return estimate_demand(task, ctx(session), routing).key


def test_a_session_comes_from_the_header_then_from_the_body() -> None:
    plain = chat("s", "hello")
    assert key(plain) == b""
    assert key(plain, "a") != key(plain, "b")
    assert key(chat("s", "hello", user="u"), "a") == key(plain, "a")
    assert key(chat("s", "x", prompt_cache_key="k", user="u")) == key(chat("s", "y", prompt_cache_key="k", user="v"))
    assert key(chat("s", "x", user="u")) != key(chat("s", "x", user="v"))
    assert key(chat("s", "x", user="")) == b""


def test_later_turns_begin_like_the_first_one() -> None:
    first, later, other = chat("s", "hello"), chat("s", "hello", "hi", "go on"), chat("s", "bye")
    assert key(first, routing="prefix") == key(later, routing="prefix") != key(other, routing="prefix")
    assert key(first, routing="load") == key(first) == b""


@pytest.mark.parametrize("prompt", ["x" * 5000, list(range(5000))])
def test_the_beginning_of_a_prompt_decides(prompt: str | list[int]) -> None:
    other = prompt[:-1]
    task = Generate(model="m", prompts=[prompt])
    assert key(task, routing="prefix") == key(Generate(model="m", prompts=[other]), routing="prefix") != b""


def test_each_adapter_has_its_own_cache() -> None:
    task = Generate(model="m", prompts=["hello"])
    assert key(task, "s") != key(msgspec.structs.replace(task, adapter="loud"), "s")


def test_parts_and_broken_text_count() -> None:
    parts = Message(role="user", content=[Part(text="\ud800abcd"), Part(type="image", url="data:x")])
    demand = estimate_demand(Generate(model="m", messages=[parts]), ctx(), "prefix")
    assert demand.key and demand.tokens > 0


def test_tokens_are_of_prompt_and_answer() -> None:
    task = Generate(model="m", prompts=["x" * 400], sampling=Sampling(max_tokens=50), n=2)
    assert estimate_demand(task, ctx(), "load").tokens == 100 + 2 * 50


def test_without_a_key_the_fewest_tokens_decide_then_turns() -> None:
    loads = [Load(1, 900, 1), Load(3, 100, 3), Load(1, 100, 4)]
    assert choose(NAMES, loads, Demand(b"", 10)) == 2
    assert choose(NAMES, [Load(0, 0, 3), Load(0, 0, 1), Load(0, 0, 2)], Demand(b"", 10)) == 1


@given(st.lists(st.binary(min_size=1), min_size=1, max_size=20, unique=True), st.sampled_from(range(3)))
def test_a_lost_replica_moves_only_its_own_keys(keys: list[bytes], lost: int) -> None:
    left = [name for at, name in enumerate(NAMES) if at != lost]
    for each in keys:
        order = [NAMES[at] for at in rank(NAMES, each)]
        assert [left[at] for at in rank(left, each)] == [name for name in order if name != NAMES[lost]]


def test_keys_are_spread() -> None:
    counts = Counter(rank(NAMES, str(number).encode())[0] for number in range(3000))
    assert all(850 < count < 1150 for count in counts.values())


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5000)), min_size=2, max_size=6), st.integers(1, 5000))
def test_a_busy_replica_passes_its_keys_on(pairs: list[tuple[int, int]], tokens: int) -> None:
    names = [str(number) for number in range(len(pairs))]
    loads = [Load(requests, requests and size, 0) for requests, size in pairs]
    at = choose(names, loads, Demand(b"key", tokens))
    bound = BOUND * (sum(load.tokens for load in loads) + tokens) / len(loads)
    keeps = [load.requests < FREE_REQUESTS or load.tokens + tokens <= bound for load in loads]
    order = rank(names, b"key")
    assert at == next((each for each in order if keeps[each]), at)
    if not any(keeps):
        assert loads[at].tokens == min(load.tokens for load in loads)
