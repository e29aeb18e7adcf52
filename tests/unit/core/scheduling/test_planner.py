from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.protocols import CostModel, EngineFacts, round_up
from shoal.core.scheduling.planner import SCAN_LIMIT, WEIGHTS, Batch, Entry, Limits, Planner, Wait
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
    """An empty queue has no time at which to look again."""
    assert planner().take(FACTS, 0.0) == (Wait(None), [])


def test_lone_item_leaves_at_once() -> None:
    """Nobody waits for company that is not there."""
    queue = planner()
    work = Work()
    queue.add(work, 0.0)
    batch = taken(queue)
    assert (batch.entries, batch.flush, queue.items, queue.tokens) == ([work], "idle", 0, 0)


def test_linger_is_an_upper_bound() -> None:
    """With max_wait_time_ms a lone item waits until then, and no longer than until the batch is full."""
    queue = planner(max_wait_time_ms=10)
    queue.add(Work(arrived=1.0), 1.0)
    assert queue.take(FACTS, 1.0)[0] == Wait(1.01)
    assert taken(queue, 1.01).flush == "age"
    for _ in range(8):
        queue.add(Work(arrived=2.0), 2.0)
    batch = taken(queue, 2.0)
    assert (len(batch.entries), batch.flush) == (8, "full"), "exactly as many as may be"


def test_batches_stop_at_each_limit() -> None:
    """Size, padded tokens and predicted time each end a batch, and say that it was full."""
    for limits, expected in (
        ({"max_batch_size": 3}, 3),
        ({"max_batch_tokens": 33}, 4),
        ({"max_batch_ms": 1.0 + 0.02 * 8 * 7.5}, 7),
    ):
        queue = planner(**limits)
        for number in range(8):
            queue.add(Work(request=number), 0.0)
        batch = taken(queue)
        assert (len(batch.entries), batch.flush) == (expected, "full")


def test_first_item_goes_however_large() -> None:
    """An item over every limit still runs, alone."""
    queue = planner(max_batch_tokens=4, max_batch_ms=0.001)
    queue.add(Work(cost=500), 0.0)
    queue.add(Work(cost=500), 0.0)
    assert [len(taken(queue).entries), len(taken(queue).entries)] == [1, 1]


def test_other_bucket_joins_only_when_padding_is_cheaper_than_a_call() -> None:
    """16 joins a batch of 32 (16 padded tokens, a call is worth 50); 8 beside 64 (56 tokens) does not."""
    queue = planner()
    queue.add(Work(cost=32, request=1), 0.0)
    queue.add(Work(cost=16, request=2), 0.0)
    assert len(taken(queue).entries) == 2
    queue.add(Work(cost=64, request=3), 0.0)
    queue.add(Work(cost=8, request=4), 0.0)
    assert [[entry.cost for entry in batch.entries] for batch in (taken(queue), taken(queue))] == [[64], [8]]


def test_unpadded_engines_mix_lengths_freely() -> None:
    """Where a batch costs the sum of its items, length is no reason to part them."""
    facts = EngineFacts(name="r", inputs=(), outputs=(), pads_batches=False)
    queue = planner()
    for number, cost in enumerate((64, 8, 32)):
        queue.add(Work(cost=cost, request=number), 0.0)
    assert len(taken(queue, facts=facts).entries) == 3


def test_groups_never_mix() -> None:
    """Items that may not share an engine call are never in one batch."""
    queue = planner()
    for number in range(6):
        queue.add(Work(group=number % 2, request=number), 0.0)
    assert [{entry.group for entry in taken(queue).entries} for _ in range(2)] == [{0}, {1}]


def test_alone_means_alone() -> None:
    """An isolated item shares its batch with nobody, in either order."""
    queue = planner()
    queue.add(Work(request=1), 0.0)
    queue.add(Work(request=2, runs_alone=True), 0.0)
    queue.add(Work(request=3), 0.0)
    sizes = sorted(len(taken(queue).entries) for _ in range(2))
    assert sizes == [1, 2]
    assert not queue.items


def test_expired_items_are_handed_back() -> None:
    """What is past its deadline never reaches an engine and is not lost either."""
    queue = planner()
    late, fine = Work(deadline=5.0, request=1), Work(request=2)
    queue.add(late, 0.0)
    queue.add(fine, 0.0)
    batch, expired = queue.take(FACTS, 6.0)
    assert isinstance(batch, Batch)
    assert (batch.entries, expired) == ([fine], [late])


def test_discarded_items_never_run() -> None:
    """A cancelled item leaves the counts at once and no batch holds it."""
    queue = planner()
    gone, stays = Work(request=1), Work(request=1)
    queue.add(gone, 0.0)
    queue.add(stays, 0.0)
    queue.discard(gone)
    queue.discard(gone)
    assert (queue.items, queue.pending()) == (1, [stays])
    assert taken(queue).entries == [stays]


def test_burst_is_spread_over_free_slots() -> None:
    """With two free slots that compute side by side, each takes half of what is there, if half is worth a call."""
    for fixed, sizes in ((0.0001, [4, 4]), (0.001, [8])):
        facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(fixed, 0.00002))
        queue = planner()
        for number in range(8):
            queue.add(Work(request=number), 0.0)
        batches = [taken(queue, facts=facts, share=share) for share in (2, 1)[: len(sizes)]]
        assert [len(batch.entries) for batch in batches] == sizes
        assert {batch.flush for batch in batches} == {"idle"}


def served_tokens(queue: Planner[Work], key: str, rounds: int) -> Counter[Any]:
    """Run batches, putting back a like item for each one served, and count tokens by an attribute."""
    served: Counter[Any] = Counter()
    now = 0.0
    for _ in range(rounds):
        now += 0.01
        for entry in taken(queue, now).entries:
            served[getattr(entry, key)] += entry.cost
            again = Work(
                cost=entry.cost, traffic=entry.traffic, client=entry.client, request=entry.request, arrived=now
            )
            queue.add(again, now)
    return served


def test_classes_share_by_weight() -> None:
    """A bulk backlog gets one ninth of a busy lane's tokens."""
    queue = planner(max_batch_size=4)
    for number in range(64):
        queue.add(Work(traffic="bulk", request=("b", number)), 0.0)
        queue.add(Work(traffic="interactive", request=("i", number)), 0.0)
    served = served_tokens(queue, "traffic", 900)
    share = served["bulk"] / served.total()
    assert share == pytest.approx(1 / (1 + WEIGHTS["interactive"]), rel=0.15)


@pytest.mark.parametrize("key", ["client", "request"])
def test_flows_share_equally_whatever_their_backlog(key: str) -> None:
    """One who queues fifty times as much as another is served no more, by client and by request within a client."""
    queue = planner(max_batch_size=4)
    for number in range(100):
        flow = "greedy" if number % 50 else "modest"
        names = {"client": flow, "request": number} if key == "client" else {"client": "a", "request": flow}
        queue.add(Work(**names), 0.0)
    served = served_tokens(queue, key, 500)
    assert served["modest"] == pytest.approx(served["greedy"], rel=0.1)


def test_newcomer_has_no_credit_and_no_debt() -> None:
    """A client that comes late is served its share from then on, neither first for long nor last."""
    queue = planner(max_batch_size=1)
    for number in range(8):
        queue.add(Work(client="old", request=number), 0.0)
    served_tokens(queue, "client", 1000)
    for number in range(8):
        queue.add(Work(client="new", request=number), 0.0)
    served = served_tokens(queue, "client", 100)
    assert served["new"] == pytest.approx(served["old"], rel=0.1)


def test_starved_class_goes_first() -> None:
    """A class that nobody served for max_age_ms leads the next batch, whatever its weight says."""
    queue = planner(max_age_ms=100, max_batch_size=1)
    queue.add(Work(cost=64, traffic="bulk", request="first"), 0.0)
    for number in range(50):
        queue.add(Work(traffic="interactive", request=number), 0.0)
    assert {taken(queue, 0.0).entries[0].traffic for _ in range(2)} == {"bulk", "interactive"}
    queue.add(Work(traffic="bulk", request="second"), 0.0)
    order = [taken(queue, now).entries[0].traffic for now in (0.0, 0.05, 0.09, 0.11, 0.12)]
    assert order == ["interactive", "interactive", "interactive", "bulk", "interactive"]


def test_interactive_batch_takes_few_bulk_companions() -> None:
    """Bulk items fill an interactive item's batch only up to a quarter of max_batch_ms."""
    queue = planner(max_batch_ms=8.0)
    facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(0.001, 0.0001))
    for number in range(50):
        queue.add(Work(traffic="bulk", request=("b", number)), 0.0)
    queue.add(Work(traffic="interactive", request="i"), 0.0)
    batch = next(
        batch for batch in iter(lambda: taken(queue, facts=facts), None) if batch.entries[0].traffic == "interactive"
    )
    assert facts.cost.seconds(len(batch.entries) * 8) <= 0.002


def test_bulk_batches_are_short_while_interactive_traffic_is_near() -> None:
    """Half of max_batch_ms for bulk within a second of an interactive item, all of it otherwise."""
    facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(0.0001, 0.0001))
    sizes = []
    for interactive in (False, True):
        queue = planner(max_batch_ms=16.0)
        if interactive:
            queue.add(Work(), 0.0)
            taken(queue, facts=facts)
        for number in range(64):
            queue.add(Work(traffic="bulk", request=number), 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [19, 9]


def test_slots_that_share_a_core_share_the_time_of_bulk_batches() -> None:
    """Two slots of one core: each holds half as much, so that both together take what one slot's batch may."""
    sizes = []
    for slots, parallel in ((2, 0), (2, 2), (2, 1)):
        queue = planner(max_batch_ms=16.0)
        queue.add(Work(), 0.0)
        taken(queue)
        cost = CostModel(0.0, 0.0001)
        facts = EngineFacts(
            name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=cost, slots=slots, parallel=parallel
        )
        for number in range(64):
            queue.add(Work(traffic="bulk", request=number), 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [10, 10, 5]


def test_bulk_batches_stay_long_where_calls_are_dear() -> None:
    """On a shared lane the call's own cost is at most an eighth of a bulk batch, but max_batch_ms is never passed."""
    sizes = []
    for fixed in (0.0005, 0.001, 0.004):
        queue = planner(max_batch_ms=16.0)
        queue.add(Work(), 0.0)
        taken(queue)
        facts = EngineFacts(name="r", inputs=(), outputs=(), length_buckets=BUCKETS, cost=CostModel(fixed, 0.0001))
        for number in range(64):
            queue.add(Work(traffic="bulk", request=number), 0.5)
        sizes.append(len(taken(queue, 0.5, facts=facts).entries))
    assert sizes == [9, 8, 15]


@pytest.mark.parametrize("used", ["interactive", "bulk"])
def test_idle_moments_wipe_the_slate_between_classes(used: TrafficClass) -> None:
    """However much one class used before nobody asked for anything, afterwards both get their weight's share."""
    shares = []
    for history in (0, 5000):
        queue = planner(max_batch_size=4)
        for number in range(history):
            queue.add(Work(cost=64, traffic=used, request=number), 0.0)
            taken(queue, 0.0)
        for first in ("bulk", "interactive") if used == "interactive" else ("interactive", "bulk"):
            for number in range(64):
                queue.add(Work(traffic=first, request=(first, number)), 0.0)
        served = served_tokens(queue, "traffic", 200)
        shares.append(served["bulk"] / served.total())
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def flow(key: str, name: str, **fields: Any) -> Work:
    """An item of a client, or of a request of one client."""
    return Work(client=name, **fields) if key == "client" else Work(request=name, **fields)


@pytest.mark.parametrize("key", ["client", "request"])
def test_idle_moments_wipe_the_slate_between_flows(key: str) -> None:
    """Also between clients, and between the requests of one."""
    queue = planner(max_batch_size=1)
    for _ in range(1000):
        queue.add(flow(key, "old"), 0.0)
        taken(queue, 0.0)
    for name in ("new", "old"):
        for _ in range(8):
            queue.add(flow(key, name), 0.0)
    served = served_tokens(queue, key, 100)
    assert served["new"] == pytest.approx(served["old"], rel=0.1)


@pytest.mark.parametrize("key", ["client", "request"])
def test_a_crowd_that_gave_up_hides_nobody(key: str) -> None:
    """Hundreds of flows whose items were all discarded stand before one that waits: it is found at once."""
    queue = planner()
    gone = [flow(key, f"gone {number}", group=number % 2) for number in range(4 * SCAN_LIMIT)]
    for work in gone:
        queue.add(work, 0.0)
    last = [flow(key, name) for name in ("stays", "stays too")]
    for work in last:
        queue.add(work, 0.0)
    for work in gone:
        queue.discard(work)
    assert taken(queue).entries == last


def test_a_batch_is_led_by_what_is_alike_among_thousands() -> None:
    """No more flows are looked through than SCAN_LIMIT, and what is passed over is there next time."""
    queue = planner()
    for number in range(2 * SCAN_LIMIT):
        queue.add(Work(request=number, group=int(number > 0)), 0.0)
    queue.add(Work(request="far", group=0), 0.0)
    assert [len(taken(queue).entries) for _ in range(2)] == [1, 8]


def full_batch(cost: CostModel, items: int, length: int, traffic: TrafficClass, shared: bool, **facts: Any) -> int:
    """Items in the first batch of a backlog of like items."""
    queue = planner(max_batch_size=items, max_batch_tokens=10**9)
    if shared:
        queue.add(Work(), 0.0)
        taken(queue)
    for number in range(items):
        queue.add(Work(cost=length, traffic=traffic, request=number), 0.0)
    engine = EngineFacts(name="r", inputs=(), outputs=(), max_batch_size=items, cost=cost, **facts)
    return len(taken(queue, facts=engine).entries)


@settings(max_examples=200)
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
    """Whatever a call costs, tokens get as much time as it, so that at least half of the best rate is kept; and once a
    call is more than half of max_batch_ms, batches never get smaller as calls get dearer."""
    facts = {"slots": slots[0], "parallel": slots[1]}
    most = 64
    size = full_batch(CostModel(fixed, per_token), most, length, traffic, shared, **facts)
    assert size == most or (size + 1) * length * per_token > fixed * 0.999
    if fixed >= 0.02:
        assert full_batch(CostModel(fixed * dearer, per_token), most, length, traffic, shared, **facts) >= size


def test_companions_are_few_under_dear_calls_too() -> None:
    """A call of 48 ms that an interactive item leads is made a quarter longer by bulk items, not twice as long."""
    queue = planner()
    for number in range(50):
        queue.add(Work(traffic="bulk", request=("b", number)), 0.0)
    queue.add(Work(traffic="interactive", request="i"), 0.0)
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


@settings(max_examples=300)
@given(steps=steps, size=st.integers(1, 6), padded=st.booleans(), share=st.integers(1, 3))
def test_every_item_leaves_exactly_once_and_batches_keep_the_limits(
    steps: list[Any], size: int, padded: bool, share: int
) -> None:
    """Whatever comes, goes and is cancelled: no item is lost, doubled or run after cancel, and limits hold."""
    queue = planner(max_batch_size=size, max_batch_tokens=300, max_batch_ms=5.0)
    facts = EngineFacts(
        name="r", inputs=(), outputs=(), pads_batches=padded, length_buckets=BUCKETS, size_buckets=(1, 2, 4, 8)
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
            queue.add(step, float(now))
            waiting.append(step)
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
    """Texts with these deadlines: how many run, and the deadlines of those that are given up."""
    for number, deadline in enumerate(deadlines):
        queue.add(Work(request=number, deadline=deadline), now)
    batch, late = queue.take(SLOW, now, behind=behind)
    return (len(batch.entries) if isinstance(batch, Batch) else 0), sorted(work.deadline for work in late)


SLOW = EngineFacts(
    name="r", inputs=("ids",), outputs=("v",), max_batch_size=8, length_buckets=BUCKETS, cost=CostModel(0.1, 0.005)
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
def test_what_cannot_be_done_in_time_is_not_begun(deadlines: tuple[float, ...], runs: int, late: list[float]) -> None:
    """It would take the place of what can. Where nothing can, the one with the most time is tried: the prediction may
    be wrong, and would never learn it."""
    assert times(planner(), *deadlines) == (runs, late)


def test_a_batch_in_front_counts() -> None:
    """The slot is free, and what it computes now is not done for another 0.3 s: then nothing is tried in vain."""
    assert times(planner(), 0.4, 1.0, behind=0.3) == (1, [0.4])
    assert times(planner(), 0.4, behind=0.3) == (0, [0.4])


def test_much_in_the_queue_means_full_batches() -> None:
    """An item that would be in time in a small batch is given up where a large one is to run."""
    assert times(planner(), 0.15) == (1, [])
    assert times(planner(), 0.15, *([9.0] * 7)) == (2, [0.15])
