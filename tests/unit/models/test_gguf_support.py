"""GGUF features that the engine supports: others are refused by name when the header is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ModelFileError
from shoal.models.gguf import read_gguf
from shoal.models.gguf_support import check, rounded_kinds
from tests.fixtures import tiny_gguf
from tests.fixtures.tiny_gguf import BF16, F16, F32, Q4_1, Q4_K, Q8_0, Model

FIXTURES = Path(__file__).parents[2] / "fixtures"


def refused(model: Model, folder: Path) -> str:
    """Return the error message for a refused file."""
    with pytest.raises(ModelFileError) as caught:
        check(read_gguf(model.write(folder / "x.gguf")))
    assert caught.value.file == "x.gguf"
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [F16, Q8_0, Q4_K])
def test_models_that_are_computed(tmp_path: Path, architecture: str, kind: int) -> None:
    check(read_gguf(tiny_gguf.model(architecture, kind=kind).write(tmp_path / "x.gguf")))


def test_the_tiny_model() -> None:
    check(read_gguf(FIXTURES / "tiny_llama.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.dimension_count", 32),
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.scaling.factor", 1.0),
        ("llama.attention.value_length", 32),
        ("llama.attention.causal", True),
        ("llama.attention.sliding_window", 512),
        ("llama.expert_count", 0),
        ("llama.vocab_size", 448),
        ("general.quantized_by", "somebody"),
        ("general.type", "model"),
        ("publisher.note", "text"),
    ],
)
def test_keys_that_change_nothing(tmp_path: Path, key: str, value: Any) -> None:
    """Descriptive keys, and keys with their default value."""
    model = tiny_gguf.model()
    model.metadata[key] = value
    check(read_gguf(model.write(tmp_path / "x.gguf")))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.factor", 8.0),
        ("llama.rope.scale_linear", 4.0),
        ("llama.rope.scaling.attn_factor", 1.2),
        ("llama.rope.dimension_count", 16),
        ("llama.rope.dimension_sections", [1, 2]),
        ("llama.attention.value_length", 64),
        ("llama.attention.sliding_window", 128),
        ("llama.attention.sliding_window", "wide"),
        ("llama.attention.scale", 0.1),
        ("llama.attention.causal", False),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.logit_scale", 0.5),
        ("llama.embedding_scale", 12.0),
        ("llama.residual_scale", 0.2),
        ("llama.expert_count", 8),
        ("llama.expert_used_count", 2),
        ("llama.pooling_type", 3),
        ("llama.a_key_of_tomorrow", 1),
    ],
)
def test_keys_that_the_engine_ignores(tmp_path: Path, key: str, value: Any) -> None:
    """They would change the output: the message names the key and the next step."""
    model = tiny_gguf.model()
    model.metadata[key] = value
    message = refused(model, tmp_path)
    assert f"{key}: the engine ignores this key" in message
    assert "optimum-cli export openvino" in message


@pytest.mark.parametrize("kind", ["adapter", "mmproj", 3])
def test_files_that_are_no_model(tmp_path: Path, kind: Any) -> None:
    model = tiny_gguf.model()
    model.metadata["general.type"] = kind
    assert f"general.type: {kind!r} cannot be served on its own" in refused(model, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "rope_freqs.weight"),
        ("llama", "output.bias"),
        ("llama", "output_norm.bias"),
        ("llama", "blk.0.attn_q.bias"),
        ("llama", "blk.1.attn_k.bias"),
        ("llama", "blk.0.attn_q_norm.weight"),
        ("qwen2", "blk.0.attn_k_norm.weight"),
        ("qwen3", "blk.0.attn_sinks.weight"),
        ("llama", "blk.0.ffn_gate_exps.weight"),
        ("llama", "blk.2.attn_norm.weight"),
        ("llama", "blk." + "9" * 5000 + ".attn_norm.weight"),
        ("qwen3", "cls.output.weight"),
    ],
)
def test_tensors_that_the_engine_ignores(tmp_path: Path, architecture: str, name: str) -> None:
    """Llama 3's scaled rotation is a tensor; an unexpected bias would be ignored."""
    model = tiny_gguf.model(architecture)
    model.tensors[name] = tiny_gguf.tensor(np.ones(16), F32)
    assert f"{name[:60]}: the engine ignores this tensor" in refused(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.0.attn_q.weight", F32),
        ("blk.0.ffn_down.weight", BF16),
        ("blk.1.attn_norm.weight", F16),
        ("output_norm.weight", BF16),
    ],
)
def test_tensors_of_a_kind_that_the_engine_cannot_load(tmp_path: Path, name: str, kind: int) -> None:
    """The message lists the supported types."""
    model = tiny_gguf.model()
    model.tensors[name] = tiny_gguf.tensor(model.tensors[name].values, kind)
    message = refused(model, tmp_path)
    assert f"{name}: is in {'F32' if kind == F32 else 'F16' if kind == F16 else 'BF16'}" in message
    assert "Q8_0 or F16" in message


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_v.weight"])
def test_tensors_that_are_missing(tmp_path: Path, name: str) -> None:
    model = tiny_gguf.model()
    del model.tensors[name]
    assert f"{name}: this tensor is missing" in refused(model, tmp_path)


def test_head_norms_are_part_of_a_qwen3(tmp_path: Path) -> None:
    """Without them the library would continue silently."""
    model = tiny_gguf.model("qwen3")
    del model.tensors["blk.1.attn_k_norm.weight"]
    assert "blk.1.attn_k_norm.weight: this tensor is missing" in refused(model, tmp_path)


def test_rows_that_are_not_whole_blocks(tmp_path: Path) -> None:
    """The library writes past its buffer for these."""
    model = tiny_gguf.model(kind=Q4_K)
    table = model.tensors["output.weight"]
    table.shape = (2 * table.shape[0], table.shape[1] // 2)
    assert "output.weight: has rows that are not whole blocks" in refused(model, tmp_path)


def test_a_file_type_that_is_not_true(tmp_path: Path) -> None:
    """The library reads scales only if this key announces them, and requires the key."""
    model = tiny_gguf.model(kind=Q8_0)
    model.metadata["general.file_type"] = 1
    assert "general.file_type: is 1, for unquantized weights, but token_embd.weight is Q8_0" in refused(model, tmp_path)
    del model.metadata["general.file_type"]
    assert "general.file_type: must be a whole number" in refused(model, tmp_path)


@pytest.mark.parametrize(("kind", "names"), [(F16, []), (Q8_0, []), (Q4_1, ["Q4_1"]), (Q4_K, ["Q4_K"])])
def test_kinds_whose_minima_are_rounded(tmp_path: Path, kind: int, names: list[str]) -> None:
    assert rounded_kinds(read_gguf(tiny_gguf.model(kind=kind).write(tmp_path / "x.gguf"))) == names
