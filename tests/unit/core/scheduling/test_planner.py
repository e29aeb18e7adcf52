from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.protocols import CostModel, EngineFacts, round_up
from shoal.core.scheduling.fair_queue import WEIGHTS, Entry
from shoal.core.scheduling.planner import BULK_RUN, SCAN_LIMIT, SPARE_ARRIVALS, Batch, Limits, Planner, Wait
from shoal.types import TrafficClass

BUCKETS = (8, 16, 32, 64)
FACTS = EngineFacts(
    name="r", inputs=("ids",), outputs=("v",), max_batch_size=8, length_buckets=BUCKETS, cost=CostModel(0.001, 0.00002)
)


class Work(Entry, eq=False, kw_only=True):
    cost: int = 8
    group: Any = ()
    traffic: TrafficClass = "interactive"
    client: str = "a"
    request: Any = 0
    arrived: float = 0.0
    deadline: float = 1e9
    tags: list[str] = msgspec.field(default_factory=list)


def planner(**limits: Any) -> Planner[Work]:
    return Planner(Limits(**limits), BUCKETS)


def taken(queue: Planner[Work], now: float = 0.0, facts: EngineFacts = FACTS, share: int = 1) -> Batch[Work]:
    batch, expired = queue.take(facts, now, share=share)
    assert isinstance(batch, Batch)
    assert not expired
    return batch


def test_nothing_queued_waits_for_arrivals() -> None:
    """An empty queue has no next wake-up time."""
    assert planner().take(FACTS, 0.0) == (Wait(None), [])


def test_lone_item_leaves_at_once() -> None:
    """A lone item does not wait for others."""
    queue = planner()
    work = Work()
    queue.add([work], 0.0)
    batch = taken(queue)
    assert (batch.entries, batch.flush, queue.items, queue.tokens) == ([work], "idle", 0, 0)


def test_linger_is_an_upper_bound() -> None:
    """With max_wait_time_ms a lone item waits until then at most, and less when the batch is full."""
    queue = planner(max_wait_time_ms=10)
    queue.add([Work(arrived=1.0)], 1.0)
    assert queue.take(FACTS, 1.0)[0] == Wait(1.01)
    assert taken(queue, 1.01).flush == "age"
    for _ in range(8):
        queue.add([Work(arrived=2.0)], 2.0)
    batch = taken(queue, 2.0)
    assert (len(batch.entries), batch.flush) == (8, "full"), "exactly as many as may be"


def test_batches_stop_at_each_limit() -> None:
    """Size, padded tokens and predicted time each end a batch, which then counts as full."""
    facts = msgspec.structs.replace(FACTS, cost=CostModel(0.001, 0.00002, efficient_tokens=8))
    for limits, expected in (
        ({"max_batch_size": 3}, 3),
        ({"max_batch_tokens": 33}, 4),
        ({"max_batch_ms": 1.0 + 0.02 * 8 * 7.5}, 7),
    ):
        queue = planner(**limits)
        for number in range(8):
            queue.add([Work(request=number)], 0.0)
        batch = taken(queue, facts=facts)
        assert (len(batch.entries), batch.flush) == (expected, "full")


def test_first_item_goes_however_large() -> None:
    """An item over every limit still runs, alone."""
    queue = planner(max_batch_tokens=4, max_batch_ms=0.001)
    queue.add([Work(cost=500)], 0.0)
    queue.add([Work(cost=500)], 0.0)
    assert [len(taken(queue).entries), len(taken(queue).entries)] == [1, 1]


def test_other_bucket_joins_only_when_padding_is_cheaper_than_a_call() -> None:
    """16 joins a batch of 32 (16 padded tokens, a call costs 50); 8 does not join 64 (56 tokens)."""
    queue = planner()
    queue.add([Work(cost=32, request=1)], 0.0)
    queue.add([Work(cost=16, request=2)], 0.0)
    assert len(taken(queue).entries) == 2
    queue.add([Work(cost=64, request=3)], 0.0)
    queue.add([Work(cost=8, request=4)], 0.0)
    assert [[entry.cost for entry in batch.entries] for batch in (taken(queue), taken(queue))] == [[64], [8]]


def test_lengths_stay_apart_where_results_must_not_depend_on_the_batch() -> None:
    """Without mixing, a batch has the padded length of each of its items, even if padding would be cheaper."""
    queue = planner(mixes_lengths=False)
    queue.add([Work(cost=cost, request=number) for number, cost in enumerate((32, 16, 30, 14))], 0.0)
    assert [[entry.cost for entry in batch.entries] for batch in (taken(queue), taken(queue))] == [[32, 30], [16, 14]]


def test_unpadded_engines_mix_lengths_freely() -> None:
    """Where a batch costs the sum of its items, lengths are not separated."""
    facts = EngineFacts(name="r", inputs=(), outputs=(), pads_batches=False)
    queue = planner()
    for number, cost in enumerate((64, 8, 32)):
        queue.add([Work(cost=cost, request=number)], 0.0)
    assert len(taken(queue, facts=facts).entries) == 3


def test_groups_never_mix() -> None:
    """Items that may not share an engine call are never in one batch."""
    queue = planner()
    for number in range(6):
        queue.add([Work(group=number % 2, request=number)], 0.0)
    assert [{entry.group for entry in taken(queue).entries} for _ in range(2)] == [{0}, {1}]


def test_isolated_items_run_alone() -> None:
    """An isolated item shares its batch with no other item, in either order."""
    queue = planner()
    queue.add([Work(request=1)], 0.0)
    queue.add([Work(request=2, runs_alone=True)], 0.0)
    queue.add([Work(request=3)], 0.0)
    sizes = sorted(len(taken(queue).entries) for _ in range(2))
    assert sizes == [1, 2]
    assert not queue.items


def test_expired_items_are_handed_back() -> None:
    """An item past its deadline never reaches an engine and is returned."""
    queue = planner()
    late, fine = Work(deadline=5.0, request=1), Work(request=2)
    queue.add([late], 0.0)
    queue.add([fine], 0.0)
    batch, expired = queue.take(FACTS, 6.0)
    assert isinstance(batch, Batch)
    assert (batch.entries, expired) == ([fine], [late])


def test_discarded_items_never_run() -> None:
    """A cancelled item leaves the counts at once, and no batch holds it."""
    queue = planner()
    discarded, stays = Work(request=1), Work(request=1)
    queue.add([discarded], 0.0)
    queue.add([stays], 0.0)
    queue.discard(discarded)
    queue.discard(discarded)
    assert (queue.items, [each for each in queue._arrivals if each.queued]) == (1, [stays])
    assert taken(queue).entries == [stays]


def test_served_items_are_let_go_behind_one_that_waits() -> None:
    """Traffic that passes a bulk job keeps nothing of what was served, and the oldest item that waits is known."""
    queue = planner(max_batch_size=1)
    queue.add([Work(request=0, traffic="bulk") for _ in range(400)], 0.0)
    for number in range(1, 1000):
        queue.add([Work(request=number, traffic="interactive")], number / 1000)
        taken(queue, now=number / 1000)
        assert len(queue._arrivals) <= 2 * queue.items + SPARE_ARRIVALS
        waiting = [each for each in queue._arrivals if each.queued]
        assert len(waiting) == queue.items
        assert waiting == sorted(waiting, key=lambda each: each.arrived)


def test_burst_is_spread_over_free_slots() -> None:
    """With two free slots that compute in parallel, each takes half of the items if half is worth a call."""
    for fixed, sizes in ((0.0001, [4, 4]), (0.001, [8])):
        facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(fixed, 0.00002))
        queue = planner()
        for number in range(8):
            queue.add([Work(request=number)], 0.0)
        batches = [taken(queue, facts=facts, share=share) for share in (2, 1)[: len(sizes)]]
        assert [len(batch.entries) for batch in batches] == sizes
        assert {batch.flush for batch in batches} == {"idle"}


def served_tokens(queue: Planner[Work], key: str, rounds: int) -> Counter[Any]:
    """Run batches, replace each served item by an equal one, and count tokens by an attribute."""
    served: Counter[Any] = Counter()
    now = 0.0
    for _ in range(rounds):
        now += 0.01
        for entry in taken(queue, now).entries:
            served[getattr(entry, key)] += entry.cost
            again = Work(
                cost=entry.cost, traffic=entry.traffic, client=entry.client, request=entry.request, arrived=now
            )
            queue.add([again], now)
    return served


def test_classes_share_by_weight() -> None:
    """A bulk backlog gets one ninth of a busy lane's tokens."""
    queue = planner(max_batch_size=4)
    for number in range(64):
        queue.add([Work(traffic="bulk", request=("b", number))], 0.0)
        queue.add([Work(traffic="interactive", request=("i", number))], 0.0)
    served = served_tokens(queue, "traffic", 900)
    share = served["bulk"] / served.total()
    assert share == pytest.approx(1 / (1 + WEIGHTS["interactive"]), rel=0.15)


@pytest.mark.parametrize("key", ["client", "request"])
def test_flows_share_equally_whatever_their_backlog(key: str) -> None:
    """A backlog fifty times as long gets no more service, by client and by request within a client."""
    queue = planner(max_batch_size=4)
    for number in range(100):
        flow = "greedy" if number % 50 else "modest"
        names = {"client": flow, "request": number} if key == "client" else {"client": "a", "request": flow}
        queue.add([Work(**names)], 0.0)
    served = served_tokens(queue, key, 500)
    assert served["modest"] == pytest.approx(served["greedy"], rel=0.1)


def test_newcomer_has_no_credit_and_no_debt() -> None:
    """A client that comes late gets its share from then on, and neither leads for long nor waits."""
    queue = planner(max_batch_size=1)
    for number in range(8):
        queue.add([Work(client="old", request=number)], 0.0)
    served_tokens(queue, "client", 1000)
    for number in range(8):
        queue.add([Work(client="new", request=number)], 0.0)
    served = served_tokens(queue, "client", 100)
    assert served["new"] == pytest.approx(served["old"], rel=0.1)


def test_starved_class_goes_first() -> None:
    """A class that was not served for max_age_ms leads the next batch, whatever its weight."""
    queue = planner(max_age_ms=100, max_batch_size=1)
    queue.add([Work(cost=64, traffic="bulk", request="first")], 0.0)
    for number in range(50):
        queue.add([Work(traffic="interactive", request=number)], 0.0)
    assert {taken(queue, 0.0).entries[0].traffic for _ in range(2)} == {"bulk", "interactive"}
    queue.add([Work(traffic="bulk", request="second")], 0.0)
    order = [taken(queue, now).entries[0].traffic for now in (0.0, 0.05, 0.09, 0.11, 0.12)]
    assert order == ["interactive", "interactive", "interactive", "bulk", "interactive"]


@pytest.mark.parametrize("batch_s", [0.2, 0.3, 10.0])
def test_no_class_starves_where_batches_are_longer_than_the_age(batch_s: float) -> None:
    """When every class is over max_age_ms at each batch, they alternate."""
    queue = planner(max_age_ms=250, max_batch_size=1)
    for number in range(20):
        queue.add([Work(request=number)], 0.0)
        queue.add([Work(traffic="bulk", request=("b", number))], 0.0)
    order = [taken(queue, number * batch_s).entries[0].traffic for number in range(20)]
    assert Counter(order) == {"interactive": 10, "bulk": 10}


@pytest.mark.parametrize("arrives", [3.0, 9.9])
def test_an_item_that_arrives_during_a_bulk_batch_goes_next(arrives: float) -> None:
    """It waits for the batch that runs, not for another one: that bulk was served when this batch began."""
    queue = planner(max_age_ms=250, max_batch_size=1)
    for number in range(20):
        queue.add([Work(traffic="bulk", request=number)], 0.0)
    assert taken(queue, 0.0).entries[0].traffic == "bulk"
    queue.add([Work(request="i")], arrives)
    order = [taken(queue, now).entries[0].traffic for now in (10.0, 20.0)]
    assert order == ["interactive", "bulk"]


def test_interactive_batch_takes_few_bulk_companions() -> None:
    """Bulk items fill an interactive batch only up to a quarter of max_batch_ms."""
    queue = planner(max_batch_ms=8.0)
    facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(0.001, 0.0001))
    for number in range(50):
        queue.add([Work(traffic="bulk", request=("b", number))], 0.0)
    queue.add([Work(traffic="interactive", request="i")], 0.0)
    batch = next(
        batch for batch in iter(lambda: taken(queue, facts=facts), None) if batch.entries[0].traffic == "interactive"
    )
    assert facts.cost.seconds(len(batch.entries) * 8) <= 0.002


def test_bulk_batches_are_short_while_interactive_traffic_is_near() -> None:
    """Bulk batches take half of max_batch_ms within a second of an interactive item, and all of it otherwise."""
    facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(0.0001, 0.0001, 1))
    sizes = []
    for interactive in (False, True):
        queue = planner(max_batch_ms=16.0)
        queue.add([Work(traffic="bulk")], -2.0)  # a new lane counts as shared for a second
        taken(queue, facts=facts)
        if interactive:
            queue.add([Work()], 0.0)
            taken(queue, facts=facts)
        for number in range(64):
            queue.add([Work(traffic="bulk", request=number)], 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [19, 9]


def test_slots_that_share_a_core_share_the_time_of_bulk_batches() -> None:
    """Two slots of one core each hold half as much, so both together take as long as one batch may."""
    sizes = []
    for slots, parallel in ((2, 0), (2, 2), (2, 1)):
        queue = planner(max_batch_ms=16.0)
        queue.add([Work()], 0.0)
        taken(queue)
        cost = CostModel(0.0, 0.0001)
        facts = EngineFacts(
            name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=cost, slots=slots, parallel=parallel
        )
        for number in range(64):
            queue.add([Work(traffic="bulk", request=number)], 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [10, 10, 5]


def test_bulk_batches_stay_long_where_calls_are_expensive() -> None:
    """On a shared lane the cost of a call is at most an eighth of a bulk batch, within max_batch_ms."""
    sizes = []
    for fixed in (0.0005, 0.001, 0.004):
        queue = planner(max_batch_ms=16.0)
        queue.add([Work()], 0.0)
        taken(queue)
        facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(fixed, 0.0001))
        for number in range(64):
            queue.add([Work(traffic="bulk", request=number)], 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [9, 8, 15]


@pytest.mark.parametrize("used", ["interactive", "bulk"])
def test_idle_moments_reset_the_shares_of_classes(used: TrafficClass) -> None:
    """After an idle moment both classes get their weighted share, whatever they used before."""
    shares = []
    for history in (0, 5000):
        queue = planner(max_batch_size=4)
        for number in range(history):
            queue.add([Work(cost=64, traffic=used, request=number)], 0.0)
            taken(queue, 0.0)
        for first in ("bulk", "interactive") if used == "interactive" else ("interactive", "bulk"):
            for number in range(64):
                queue.add([Work(traffic=first, request=(first, number))], 0.0)
        served = served_tokens(queue, "traffic", 200)
        shares.append(served["bulk"] / served.total())
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def flow(key: str, name: str, **fields: Any) -> Work:
    """Return an item of a client, or of a request of one client."""
    return Work(client=name, **fields) if key == "client" else Work(request=name, **fields)


@pytest.mark.parametrize("key", ["client", "request"])
def test_idle_moments_reset_the_shares_of_flows(key: str) -> None:
    """The same holds between clients, and between the requests of one client."""
    queue = planner(max_batch_size=1)
    for _ in range(1000):
        queue.add([flow(key, "old")], 0.0)
        taken(queue, 0.0)
    for name in ("new", "old"):
        for _ in range(8):
            queue.add([flow(key, name)], 0.0)
    served = served_tokens(queue, key, 100)
    assert served["new"] == pytest.approx(served["old"], rel=0.1)


@pytest.mark.parametrize("key", ["client", "request"])
def test_hundreds_of_discarded_flows_hide_no_item(key: str) -> None:
    """An item behind hundreds of flows whose items were all discarded is found at once."""
    queue = planner()
    discarded = [flow(key, f"gone {number}", group=number % 2) for number in range(4 * SCAN_LIMIT)]
    for work in discarded:
        queue.add([work], 0.0)
    last = [flow(key, name) for name in ("stays", "stays too")]
    for work in last:
        queue.add([work], 0.0)
    for work in discarded:
        queue.discard(work)
    assert taken(queue).entries == last


def test_a_batch_is_led_by_what_is_alike_among_thousands() -> None:
    """At most SCAN_LIMIT flows are scanned, and those that were skipped stay queued."""
    queue = planner()
    for number in range(2 * SCAN_LIMIT):
        queue.add([Work(request=number, group=int(number > 0))], 0.0)
    queue.add([Work(request="far", group=0)], 0.0)
    assert [len(taken(queue).entries) for _ in range(2)] == [1, 8]


def full_batch(cost: CostModel, items: int, length: int, traffic: TrafficClass, shared: bool, **facts: Any) -> int:
    """Return the item count of the first batch of a backlog of equal items."""
    queue = planner(max_batch_size=items, max_batch_tokens=10**9)
    if shared:
        queue.add([Work()], 0.0)
        taken(queue)
    for number in range(items):
        queue.add([Work(cost=length, traffic=traffic, request=number)], 0.0)
    engine = EngineFacts(name="r", inputs=(), outputs=(), max_batch_size=items, cost=cost, **facts)
    return len(taken(queue, facts=engine).entries)


@given(
    fixed=st.floats(1e-6, 0.2),
    dearer=st.floats(1.0, 4.0),
    per_token=st.floats(1e-8, 1e-3),
    length=st.sampled_from(BUCKETS),
    traffic=st.sampled_from(["interactive", "bulk"]),
    shared=st.booleans(),
    slots=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 2)]),
)
def test_batches_are_not_cut_where_cutting_saves_nothing(
    fixed: float, dearer: float, per_token: float, length: int, traffic: TrafficClass, shared: bool, slots: Any
) -> None:
    """Tokens get at least as much time as the call, so at least half of the best rate is kept; once a call takes more
    than half of max_batch_ms, batches do not shrink as calls get more expensive."""
    facts = {"slots": slots[0], "parallel": slots[1]}
    limit = 64
    size = full_batch(CostModel(fixed, per_token), limit, length, traffic, shared, **facts)
    assert size == limit or (size + 1) * length * per_token > fixed * 0.999
    if fixed >= 0.02:
        assert full_batch(CostModel(fixed * dearer, per_token), limit, length, traffic, shared, **facts) >= size


def test_companions_are_few_under_expensive_calls_too() -> None:
    """Bulk items make an interactive call of 48 ms a quarter longer, not twice as long."""
    queue = planner()
    for number in range(50):
        queue.add([Work(traffic="bulk", request=("b", number))], 0.0)
    queue.add([Work(traffic="interactive", request="i")], 0.0)
    facts = EngineFacts(name="r", inputs=(), outputs=(), cost=CostModel(0.048, 0.00025))
    assert [len(taken(queue, facts=facts).entries) for _ in range(2)] == [6, 24]


works = st.builds(
    Work,
    cost=st.integers(1, 100),
    group=st.integers(0, 1),
    traffic=st.sampled_from(["interactive", "bulk"]),
    client=st.sampled_from("abc"),
    request=st.integers(0, 5),
    deadline=st.sampled_from([1e9, 1e9, 1e9, 3.0]),
    runs_alone=st.sampled_from([False] * 9 + [True]),
)
steps = st.lists(st.one_of(works, st.just("take"), st.just("discard")), max_size=80)


@pytest.mark.parametrize(("traffic", "run"), [("bulk", BULK_RUN), ("interactive", 1)])
def test_requests_of_many_texts_are_served_in_turns(traffic: TrafficClass, run: int) -> None:
    """Beside others, a bulk request is served `BULK_RUN` texts at a time, an interactive one a text at a time."""
    queue = planner()
    for request in "ab":
        queue.add([Work(traffic=traffic, request=request) for _ in range(20)], 0.0)
    facts = msgspec.structs.replace(FACTS, max_batch_size=64)
    served = [entry.request for entry in taken(queue, facts=facts).entries]
    assert served[: 4 * run] == [*"a" * run, *"b" * run] * 2
    assert served.count("a") == served.count("b")


def test_a_run_ends_where_entries_are_gone_or_late() -> None:
    """Of the texts of one request, those that were discarded never run, and those that are late leave by themselves."""
    queue = planner()
    entries = [Work(deadline=5.0 if number == 2 else 1e9) for number in range(5)]
    queue.add(entries, 0.0)
    queue.discard(entries[1])
    batch, expired = queue.take(FACTS, 6.0)
    assert isinstance(batch, Batch)
    assert (batch.entries, expired) == ([entries[0], *entries[3:]], [entries[2]])
    assert (queue.items, queue.tokens) == (0, 0)


@given(steps=steps, size=st.integers(1, 6), padded=st.booleans(), share=st.integers(1, 3))
def test_every_item_leaves_exactly_once_and_batches_keep_the_limits(
    steps: list[Any], size: int, padded: bool, share: int
) -> None:
    """No item is lost, duplicated or run after its cancellation, and batches keep the limits."""
    queue = planner(max_batch_size=size, max_batch_tokens=300, max_batch_ms=5.0)
    facts = EngineFacts(
        name="r",
        inputs=(),
        outputs=(),
        pads_batches=padded,
        length_buckets=BUCKETS,
        size_buckets=(1, 2, 4, 8),
        cost=CostModel(efficient_tokens=120),
    )
    waiting: list[Work] = []
    left: list[Work] = []

    def take(now: float) -> None:
        batch, expired = queue.take(facts, now, share=share)
        left.extend(expired)
        assert all(entry.deadline <= now for entry in expired)
        entries = batch.entries if isinstance(batch, Batch) else []
        left.extend(entries)
        assert entries or expired or not waiting
        if len(entries) > 1:
            assert len(entries) <= size
            assert len({entry.group for entry in entries}) == 1
            assert not any(entry.runs_alone for entry in entries)
            longest = max(round_up(entry.cost, BUCKETS) for entry in entries)
            tokens = round_up(len(entries), facts.size_buckets) * longest if padded else sum(e.cost for e in entries)
            assert tokens <= 300
            assert facts.cost.seconds(tokens) <= 0.005
        for entry in (*entries, *expired):
            waiting.remove(entry)

    for now, step in enumerate(steps):
        if isinstance(step, Work):
            alike = [step, *(copy(step) for _ in range(step.cost % 3))]
            queue.add(alike, float(now))
            waiting += alike
        elif step == "take":
            take(float(now))
        elif waiting:
            queue.discard(waiting.pop(len(waiting) // 2))
        assert queue.items == len(waiting)
        assert queue.tokens == sum(entry.cost for entry in waiting)
    while waiting:
        take(2.0)
    assert len(left) == len(set(map(id, left)))
    assert queue.take(facts, 0.0)[0] == Wait(None)


def times(queue: Planner[Work], *deadlines: float, now: float = 0.0, behind: float = 0.0) -> tuple[int, list[float]]:
    """Queue texts with these deadlines; return how many run, and the deadlines of those that are given up."""
    for number, deadline in enumerate(deadlines):
        queue.add([Work(request=number, deadline=deadline)], now)
    batch, late = queue.take(SLOW, now, behind=behind)
    return (len(batch.entries) if isinstance(batch, Batch) else 0), sorted(work.deadline for work in late)


SLOW = EngineFacts(
    name="r",
    inputs=("ids",),
    outputs=("v",),
    max_batch_size=8,
    length_buckets=BUCKETS,
    cost=CostModel(0.1, 0.005, efficient_tokens=20),
)
"""0.14 s a text of 8 tokens, 0.18 s two, 0.2 s at most."""


@pytest.mark.parametrize(
    ("deadlines", "runs", "late"),
    [
        ((0.17, 0.5), 1, [0.17]),
        ((0.21, 0.5), 2, []),
        ((0.1, 0.15, 0.5), 1, [0.1, 0.15]),
        ((0.05, 0.1, 0.08), 1, [0.05, 0.08]),
        ((0.05,), 1, []),
    ],
    ids=["late", "in time", "some", "all", "alone"],
)
def test_items_that_would_be_late_are_given_up(deadlines: tuple[float, ...], runs: int, late: list[float]) -> None:
    """An item that cannot finish in time is given up in favor of one that can. If none can, the one with the most time
    runs, since the prediction may be wrong."""
    assert times(planner(), *deadlines) == (runs, late)


def test_a_running_batch_counts() -> None:
    """With a free slot but 0.3 s of work before it, no item runs in vain."""
    assert times(planner(), 0.4, 1.0, behind=0.3) == (1, [0.4])
    assert times(planner(), 0.4, behind=0.3) == (0, [0.4])


def test_a_long_queue_means_full_batches() -> None:
    """An item that would be in time in a small batch is given up if a large batch runs."""
    assert times(planner(), 0.15) == (1, [])
    assert times(planner(), 0.15, *([9.0] * 7)) == (2, [0.15])
