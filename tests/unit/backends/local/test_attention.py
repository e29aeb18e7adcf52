"""How much of a model is attention, and what ONNX Runtime keeps of its memory."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.local.attention import EVEN_LENGTH, read_attention
from shoal.backends.local.onnxruntime import _SessionWorker
from shoal.specs import PartsSpec, TextSpec

SPEC = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids",), dimension=8, max_tokens=512)


@pytest.mark.parametrize("name", ["hidden_size", "dim", "d_model", "n_embd"])
def test_the_width_decides(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 384, "model_type": "x"}))
    assert read_attention(tmp_path, SPEC) == 1 / (EVEN_LENGTH * 384)


def test_the_encoder_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "config.json").write_text('{"hidden_size": 768}')
    spec = TextSpec(
        tokenizer="t", inputs=("input_ids",), dimension=8, max_tokens=512, parts=PartsSpec(encoder="0_Transformer")
    )
    assert read_attention(tmp_path, spec) == 1 / (EVEN_LENGTH * 768)


@pytest.mark.parametrize("config", [None, "{}", '{"hidden_size": "wide"}', '{"hidden_size": 0}'])
def test_a_model_of_unknown_width_counts_as_linear(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert read_attention(tmp_path, SPEC) == 0.0


def test_a_static_model_has_no_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 384}')
    spec = TextSpec(tokenizer="t", inputs=("input_ids",), dimension=8, max_tokens=512, frame_tokens=False)
    assert read_attention(tmp_path, spec) == 0.0


class _Pool(Executor):
    def submit(self, *args: Any, **options: Any) -> Any:
        """Run nothing."""


class _Session:
    def __init__(self, provider: str) -> None:
        self._provider = provider

    def get_providers(self) -> list[str]:
        return [self._provider]


@pytest.mark.parametrize(
    ("provider", "shape", "returned"),
    [
        ("CPUExecutionProvider", (1, 2048), True),
        ("CPUExecutionProvider", (16, 512), True),
        ("CPUExecutionProvider", (1, 2047), False),
        ("CPUExecutionProvider", (32,), False),
        ("CUDAExecutionProvider", (2, 8192), False),
    ],
)
def test_memory_of_long_texts_is_returned(provider: str, shape: tuple[int, ...], returned: bool) -> None:
    """The scores of attention are large from 2,048 tokens on; small batches keep their memory, which is faster."""
    worker = _SessionWorker(_Session(provider), _Pool())  # type: ignore[arg-type]  # no thread is needed
    worker.start({"input_ids": np.zeros(shape, np.int64)}, (), lambda: None)
    key = "memory.enable_memory_arena_shrinkage"
    if returned:
        assert worker._current.get_run_config_entry(key) == "cpu:0"
    else:
        with pytest.raises(RuntimeError):
            worker._current.get_run_config_entry(key)
