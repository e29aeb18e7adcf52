"""Rows to tensors: buckets, and models that want every text at one length."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.protocols import EngineFacts, Prepared
from shoal.pipelines.text.padding import IDS, pad_batch
from shoal.specs import TextSpec


def spec(pad_to: int = 0) -> TextSpec:
    return TextSpec(tokenizer="t", inputs=(IDS,), dimension=2, max_tokens=16, pad_id=9, pad_to=pad_to)


def item(*ids: int) -> Prepared:
    return Prepared(tensors={IDS: np.array(ids, np.int64)}, cost=len(ids), group=(), outputs=(), tokens=len(ids))


@pytest.mark.parametrize("buckets", [(), (4, 32)])
def test_every_row_is_filled_to_the_stated_length(buckets: tuple[int, ...]) -> None:
    facts = EngineFacts(name="test", inputs=(IDS,), outputs=(), length_buckets=buckets)
    tensors = pad_batch([item(1, 2), item(3)], facts, spec(pad_to=16))
    assert [*tensors] == [IDS]
    assert tensors[IDS].tolist() == [[1, 2, *[9] * 14], [3, *[9] * 15]]
    whole = item(*range(1, 17))
    assert pad_batch([whole], facts, spec(pad_to=16))[IDS].tolist() == [[*range(1, 17)]]


def test_without_one_the_longest_text_and_its_bucket_decide() -> None:
    facts = EngineFacts(name="test", inputs=(IDS,), outputs=(), length_buckets=(4, 32))
    assert pad_batch([item(1, 2), item(3)], facts, spec())[IDS].shape == (2, 4)
    assert pad_batch([item(*range(6))], facts, spec())[IDS].shape == (1, 16)
