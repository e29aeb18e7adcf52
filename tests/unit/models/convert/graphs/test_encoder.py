"""Constants of the encoder graph whose errors no f32 comparison would show."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.models.convert.graphs.layers import MASKED


@pytest.mark.parametrize("kept_bits", [0xFFFF0000, 0xFFFFE000])
def test_the_mask_is_exact_in_half_precision(kept_bits: int) -> None:
    """Its lowest 16 bits (bfloat16), or 13 (float16), are zero: M - mask * M is 0 for a token however it is rounded."""
    assert int(np.float32(MASKED).view(np.uint32)) & ~kept_bits == 0
    assert np.isfinite(np.float16(MASKED))


def test_padding_has_no_weight() -> None:
    """exp() of the mask is zero in float32 against the largest float16 scores."""
    assert np.exp(np.float32(MASKED + 30000.0)) == 0.0
