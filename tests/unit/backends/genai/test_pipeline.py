"""Options passed to the library, as OpenVINO reports them of the compiled model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends.genai import GenaiOptions, pipeline, start_generator
from shoal.backends.genai.memory import BLOCK_TOKENS, block_bytes
from shoal.backends.genai.pipeline import (
    cache_precision,
    choose_precision,
    compile_properties,
    count_threads,
    quantization_group,
)
from shoal.errors import ConfigError
from shoal.machine_limits import usable_cores
from tests.unit.backends.genai.conftest import EXACT, IR

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

from shoal.backends.local.compile import import_openvino


@pytest.fixture(scope="module")
def openvino() -> Any:
    return import_openvino()


@pytest.mark.parametrize(
    ("options", "cached", "rounded"),
    [
        (GenaiOptions(precision="f32"), "float32", False),
        (GenaiOptions(precision="f32", kv_cache_precision="u8"), "uint8_t", False),
        (GenaiOptions(precision="f32", dynamic_quantization="on"), "float32", True),
        (GenaiOptions(), "float16", None),
        (GenaiOptions(kv_cache_precision="f32", dynamic_quantization="off"), "float32", False),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_properties_of_the_compiled_model(
    openvino: Any, options: GenaiOptions, cached: str, rounded: bool | None, threads: int
) -> None:
    """The configuration decides, not the file's f16 or the library's default u8."""
    group = quantization_group(openvino, None, options)
    precision = choose_precision(openvino, options, threads)
    properties = compile_properties(precision, threads, cache_precision(options), group)
    compiled = openvino.Core().compile_model(str(IR / "openvino_model.xml"), "CPU", properties)
    for name in ("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"):
        assert cached in str(compiled.get_property(name))
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == group
    assert rounded is None or bool(group) == rounded
    computed = {"f32": "float32", "bf16": "bfloat16"}[precision]
    assert computed in str(compiled.get_property("INFERENCE_PRECISION_HINT"))


@pytest.mark.parametrize(("native", "threads", "expected"), [(True, 2, "bf16"), (True, 1, "f32"), (False, 2, "f32")])
def test_bf16_needs_a_processor_that_has_it_and_two_threads(
    openvino: Any, monkeypatch: pytest.MonkeyPatch, native: bool, threads: int, expected: str
) -> None:
    """With one thread, OpenVINO kills the process on a processor with AMX."""
    monkeypatch.setattr(pipeline, "has_bf16", lambda _: native)
    monkeypatch.setattr(pipeline, "count_threads", lambda *_: threads)
    assert choose_precision(openvino, GenaiOptions(), 2) == expected
    assert choose_precision(openvino, GenaiOptions(precision="f32"), 2) == "f32"
    if expected == "f32":
        with pytest.raises(ConfigError, match="needs two threads" if native else "no bf16 arithmetic"):
            choose_precision(openvino, GenaiOptions(precision="bf16"), 2)


def test_the_library_tells_the_threads_that_it_uses(openvino: Any) -> None:
    assert count_threads(openvino, 1) == 1
    assert 1 <= count_threads(openvino, 1024) <= usable_cores()


def test_what_its_author_wants_of_activations(openvino: Any) -> None:
    """The group size of the file is used, unless the configuration or f32 decides."""
    assert quantization_group(openvino, 64, GenaiOptions()) == 64
    assert quantization_group(openvino, 0, GenaiOptions()) == 0
    assert quantization_group(openvino, 0, GenaiOptions(dynamic_quantization="on")) == 32
    assert quantization_group(openvino, 64, GenaiOptions(dynamic_quantization="off")) == 0
    assert quantization_group(openvino, 64, GenaiOptions(precision="f32")) == 0


@pytest.mark.parametrize(("precision", "expected"), [("auto", "f32"), ("f16", "f16"), ("u8", "u8")])
async def test_what_the_cache_takes(tmp_path: Path, precision: Any, expected: str) -> None:
    """The memory of the running pipeline matches the reported precision."""
    made = await start_generator(IR, name="kept", options=msgspec.structs.replace(EXACT, kv_cache_precision=precision))
    details = made.facts.details
    await made.aclose()
    assert details["kv_cache_precision"] == expected
    assert details["dynamic_quantization"] is False
    blocks = details["kv_cache_tokens"] / BLOCK_TOKENS
    assert details["kv_cache_mb"] == round(blocks * block_bytes([(4, 8)] * 4, expected) / 2**20, 1)
