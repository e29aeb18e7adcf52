"""GGUF models run by the library, compared with NumPy: supported models are exact, rejected ones are not."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends.genai import start_generator
from shoal.core.protocols import Prompt
from shoal.models.gguf import read_gguf
from shoal.models.gguf_support import check
from shoal.types import Sampling
from tests.fixtures import tiny_gguf
from tests.fixtures.tiny_gguf import BF16, F16, F32, HIDDEN, Q4_0, Q4_K, Q6_K, Q8_0, Floats, Model
from tests.unit.backends.genai.conftest import EXACT, GGUF, context

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

PROMPT = (1, 50, 60, 70, 200, 300, 17, 99)
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


def difference(model: Model, folder: Path, *, parts: int = 1, **changes: Any) -> float:
    """Return the largest difference of a chosen token's log probability from NumPy's. `parts`: files to write."""
    tokenizer = {key: value for key, value in read_gguf(GGUF).metadata.items() if key.startswith("tokenizer.")}
    model.metadata |= tokenizer
    path = model.write(folder / "x.gguf") if parts == 1 else model.write_parts(folder, "x", parts)[0]
    options = msgspec.structs.replace(EXACT, vocab_size=448, cache_heads=read_gguf(path).cache_heads, **changes)
    ids: list[int] = []
    logs: list[float] = []

    async def answer() -> None:
        generator = await start_generator(path, name="tiny", options=options)
        try:
            async for piece in generator.generate(Prompt(text="", ids=PROMPT), GREEDY, context()):
                ids.extend(piece.ids)
                logs.extend(one.logprob for one in piece.logprobs)
        finally:
            await generator.aclose()

    asyncio.run(answer())
    expected = model.log_probabilities([*PROMPT, *ids[:-1]])[len(PROMPT) - 1 :]
    assert len(ids) == len(logs) == 24
    return float(np.abs(expected[range(24), ids] - logs).max())


def random_bias(size: int) -> Floats:
    return np.random.default_rng(5).standard_normal(size) * 0.3


def llama() -> Model:
    """Return a Llama with every exact type of weights and every bias it may have."""
    model = tiny_gguf.model("llama")
    random = np.random.default_rng(3)
    kinds = {"attn_q": Q4_0, "attn_k": Q8_0, "attn_v": Q6_K, "ffn_gate": Q4_0, "ffn_down": Q6_K}
    for layer in range(2):
        for name, kind in kinds.items():
            rows, columns = model.tensors[f"blk.{layer}.{name}.weight"].shape
            model.tensors[f"blk.{layer}.{name}.weight"] = tiny_gguf.blocks(rows, columns, kind, random)
        for name in ("attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            rows = model.tensors[f"blk.{layer}.{name}.weight"].shape[0]
            model.tensors[f"blk.{layer}.{name}.bias"] = tiny_gguf.tensor(random_bias(rows), F32)
    model.tensors["token_embd.weight"] = tiny_gguf.blocks(448, HIDDEN, BF16, random)
    model.tensors["output.weight"] = tiny_gguf.blocks(448, HIDDEN, F32, random)
    model.metadata["general.file_type"] = 7
    return model


def qwen2() -> Model:
    """Return a Qwen2 with tied embeddings and biases of three types."""
    model = tiny_gguf.model("qwen2")
    del model.tensors["output.weight"]
    for name, kind in (("attn_q", F16), ("attn_k", BF16), ("attn_v", F32)):
        for layer in range(2):
            rows = model.tensors[f"blk.{layer}.{name}.weight"].shape[0]
            model.tensors[f"blk.{layer}.{name}.bias"] = tiny_gguf.tensor(random_bias(rows), kind)
    return model


def qwen3() -> Model:
    """Return a Qwen3 with normalized heads of their own width and quantized, tied embeddings."""
    model = tiny_gguf.model("qwen3", kind=Q8_0, width=64)
    del model.tensors["output.weight"]
    return model


@pytest.mark.parametrize("make", [llama, qwen2, qwen3])
def test_what_is_served_is_exact(tmp_path: Path, make: Any) -> None:
    """Everything on the supported list is exact in f32, except for Q6_K's scales in f16."""
    model = make()
    difference_ = difference(model, tmp_path)
    check(read_gguf(tmp_path / "x.gguf"))
    assert difference_ < (5e-3 if make is llama else 1e-4)


def test_a_split_model_is_exact(tmp_path: Path) -> None:
    """The engine finds the other parts by the name of the first."""
    assert difference(tiny_gguf.model("llama"), tmp_path, parts=3) < 1e-5


def scaled_rotation() -> Model:
    model = tiny_gguf.model("llama")
    model.tensors["rope_freqs.weight"] = tiny_gguf.tensor(np.linspace(1, 8, 16), F32)
    return model


def biased_heads() -> Model:
    model = tiny_gguf.model("llama")
    model.tensors["blk.0.attn_q.bias"] = tiny_gguf.tensor(random_bias(HIDDEN), F32)
    return model


def rounded() -> Model:
    return tiny_gguf.model("llama", kind=Q4_K)


@pytest.mark.parametrize("make", [scaled_rotation, biased_heads, rounded])
def test_what_is_not_served_or_announced_is_not_exact(tmp_path: Path, make: Any) -> None:
    """If this fails, the library supports one of these models, and `gguf_support` can allow it."""
    assert difference(make(), tmp_path) > 0.05


@pytest.mark.parametrize(
    ("changes", "lower", "upper"),
    [
        ({}, 0.0, 1e-4),
        ({"kv_cache_precision": "f16"}, 1e-4, 1e-2),
        ({"kv_cache_precision": "u8"}, 1e-2, 1.0),
        ({"dynamic_quantization": "on"}, 0.0, 1.0),  # processors without VNNI do not round
    ],
)
def test_what_rounding_costs(tmp_path: Path, changes: dict[str, Any], lower: float, upper: float) -> None:
    """With f32 neither contexts nor activations are rounded unless configured."""
    assert lower < difference(tiny_gguf.model("llama", kind=Q8_0), tmp_path, **changes) < upper
