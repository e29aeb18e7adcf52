"""The contract of `Engine`, on every engine: those of this process, and Triton's over a server in this process.

Tests that do not apply to remote engines run on `local` ones only: a server rejects wrong inputs and outputs in its own
words, and tensors that a pipeline cannot produce are a bug, not the input's fault. Closing a remote engine leaves
batches in flight to the server, which still answers them. Its answers may be read-only views of the received message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from shoal.errors import DeadlineExceeded, InputRejected, TransportFailed
from shoal.types import Array
from tests.contract.engines.conftest import Subject
from tests.contract.engines.tiny import OUTPUTS, batch

TOLERANCE = 1e-5
"""Maximum difference of f32 values between engines and between batches."""


async def infer(
    subject: Subject, inputs: dict[str, Array], outputs: Sequence[str] = OUTPUTS, seconds: float = 240.0
) -> dict[str, Array]:
    return await subject.engine.infer(inputs, outputs, {}, time.monotonic() + seconds)


async def is_right(subject: Subject, inputs: dict[str, Array]) -> None:
    got, right = await infer(subject, inputs), subject.model.answer(inputs)
    for name in OUTPUTS:
        np.testing.assert_allclose(got[name], right[name], atol=TOLERANCE)


def large() -> dict[str, Array]:
    return batch(*[512] * 16)


async def test_it_computes_the_model(subject: Subject) -> None:
    """Every row of every output equals the model's, for any mix of lengths."""
    for lengths in ((1,), (5, 3, 9), (2,) * 17, (64,)):
        await is_right(subject, batch(*lengths))


async def test_only_the_requested_outputs_are_returned(subject: Subject) -> None:
    """One output, the other, or both in any order."""
    inputs = batch(4, 2)
    for outputs in (["pooled"], ["sentence_embedding"], ["pooled", "sentence_embedding"]):
        assert list(await infer(subject, inputs, outputs)) == outputs


async def test_rows_keep_their_order(subject: Subject) -> None:
    """Reversing the batch reverses the answer."""
    inputs = batch(3, 8, 5, 1, 6)
    forward = await infer(subject, inputs)
    backward = await infer(subject, {name: array[::-1] for name, array in inputs.items()})
    np.testing.assert_allclose(forward["pooled"], backward["pooled"][::-1], atol=TOLERANCE)


async def test_answers_belong_to_the_caller(subject: Subject) -> None:
    """Later calls do not change an answer, and changing an answer does not change later calls."""
    inputs = batch(6, 4)
    answer = await infer(subject, inputs)
    copy = {name: array.copy() for name, array in answer.items()}
    for seed in range(1, 6):
        await infer(subject, batch(6, 4, seed=seed))
    for name, array in copy.items():
        np.testing.assert_array_equal(answer[name], array)
        if answer[name].flags.writeable:
            answer[name][:] = -1.0
    await is_right(subject, inputs)


async def test_batches_in_flight_do_not_mix(subject: Subject) -> None:
    """With more concurrent batches than slots, each gets its own answer."""
    batches = [batch(*range(1, 4 + seed), seed=seed) for seed in range(subject.engine.facts.slots * 4)]
    await asyncio.gather(*(is_right(subject, inputs) for inputs in batches))


async def test_a_row_does_not_depend_on_its_batch(subject: Subject) -> None:
    """A text alone, in a batch, padded further, or beside rows of padding: the same vector within the tolerance."""
    alone = (await infer(subject, batch(7)))["sentence_embedding"][0]
    for lengths, width in (((7,), 32), ((7, 40, 3), 0), ((7, *[1] * 30), 16)):
        rows = (await infer(subject, batch(*lengths, width=width)))["sentence_embedding"]
        np.testing.assert_allclose(rows[0], alone, atol=TOLERANCE)


async def test_rows_of_padding_spoil_no_other(subject: Subject) -> None:
    """A row that attends to nothing makes no NaN beside it."""
    rows = (await infer(subject, batch(5, 0, 3)))["sentence_embedding"]
    assert np.isfinite(rows[[0, 2]]).all()
    np.testing.assert_allclose(rows, subject.model.answer(batch(5, 0, 3))["sentence_embedding"], atol=TOLERANCE)


def bad_inputs() -> dict[str, dict[str, Array]]:
    good = batch(4, 4)
    return {
        "missing": {"input_ids": good["input_ids"]},
        "unknown": good | {"pixels": good["input_ids"]},
        "floats": good | {"input_ids": good["input_ids"].astype(np.float32)},
        "flat": {name: array[0] for name, array in good.items()},
        "empty": {name: array[:0] for name, array in good.items()},
        "rows": good | {"attention_mask": good["attention_mask"][:1]},
        "lengths": good | {"attention_mask": good["attention_mask"][:, :3]},
        "too long": batch(513),
    }


@pytest.mark.parametrize("what", bad_inputs())
async def test_bad_inputs_are_refused_alone(local: Subject, what: str) -> None:
    """Invalid inputs raise InputRejected; the batches beside and after them are correct."""
    neighbour = asyncio.create_task(is_right(local, batch(9, 2)))
    with pytest.raises(InputRejected):
        await infer(local, bad_inputs()[what])
    await neighbour
    await is_right(local, batch(4, 4))


async def test_a_batch_that_fails_in_the_graph_fails_alone(short: Subject) -> None:
    """Errors that only the engine can detect are input errors too; later batches of any shape are correct."""
    await is_right(short, batch(4, 4))
    for _ in range(2):
        with pytest.raises(InputRejected):
            await infer(short, batch(17))
        for lengths in ((4, 4), (16,), (3, 3, 3)):
            await asyncio.gather(*(is_right(short, batch(*lengths, seed=seed)) for seed in range(3)))


async def test_unknown_outputs_are_refused(local: Subject) -> None:
    """An output that the graph lacks raises InputRejected with its name."""
    with pytest.raises(InputRejected, match="logits"):
        await infer(local, batch(3), ["logits"])


async def test_the_loop_turns_while_it_computes(slow: Subject) -> None:
    """A long batch does not block the event loop."""
    running = asyncio.create_task(infer(slow, large()))
    iterations = 0
    while not running.done():
        await asyncio.sleep(0.001)
        iterations += 1
    await running
    assert iterations > 3


async def test_the_deadline_ends_a_batch(slow: Subject) -> None:
    """Past the deadline the call raises DeadlineExceeded, and the engine keeps serving others."""
    with pytest.raises(DeadlineExceeded):
        await infer(slow, large(), seconds=0.005)
    with pytest.raises(DeadlineExceeded):
        await infer(slow, batch(1), seconds=-1.0)
    await is_right(slow, batch(3, 5))


async def test_cancelling_frees_the_slot(slow: Subject) -> None:
    """Cancelled batches end with CancelledError, and all slots serve again."""
    running = [asyncio.create_task(infer(slow, large())) for _ in range(slow.engine.facts.slots)]
    await asyncio.sleep(0.005)
    for task in running:
        task.cancel()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * len(running)
    await asyncio.gather(*(is_right(slow, batch(3, seed=seed)) for seed in range(slow.engine.facts.slots)))


async def test_closing_waits_for_batches_in_flight(slow: Subject) -> None:
    """A batch in flight is answered before the engine closes; closing twice is the same as once; then nothing runs."""
    assert slow.engine.ready()
    inputs = batch(*[64] * 4)
    running = asyncio.create_task(is_right(slow, inputs))
    await asyncio.sleep(0.001)
    await slow.engine.aclose()
    await running
    await slow.engine.aclose()
    assert not slow.engine.ready()
    with pytest.raises(TransportFailed):
        await infer(slow, batch(1))


async def test_facts_match_the_graph(subject: Subject) -> None:
    """Names, at least one slot, ascending buckets, and the same object while nothing changes."""
    facts = subject.engine.facts
    assert (facts.inputs, facts.outputs) == (("input_ids", "attention_mask"), OUTPUTS)
    assert facts.slots >= 1
    assert facts.precision == "f32"
    for buckets in (facts.length_buckets, facts.size_buckets):
        assert list(buckets) == sorted(set(buckets))
    assert subject.engine.facts is facts
