"""Built graphs compared with the numpy forward pass: every family, pooling and module, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.contract import Contract, read_contract
from shoal.models.convert.graphs import builder
from shoal.models.convert.graphs.text import build_text_graph, graph_inputs
from shoal.models.convert.reference import embed
from shoal.models.convert.verify import min_cosine
from shoal.types import Array
from tests.unit.models.checkpoints import (
    HIDDEN,
    KINDS,
    MEAN,
    POSITIONS,
    checkpoint,
    dense,
    encoder_tensors,
    layer_norm,
    save_bfloat16,
)
from tests.unit.models.engines import RUNS, onnxruntime_run

TEXTS = [np.array([2, 7, 8, 3]), np.array([2, 9, 3]), np.array([2, 30, 31, 32, 33, 34, 35, 36, 3]), np.array([2])]
SKIPS = [1, 2, 4, 0]
BOTH = ("sentence_embedding", "pooled")
WIDTH = {"word_embedding_dimension": HIDDEN}
POOLINGS: dict[str, dict[str, Any]] = {
    "mean": MEAN,
    "cls": WIDTH | {"pooling_mode": "cls"},
    "max": WIDTH | {"pooling_mode": "max"},
    "mean_sqrt": WIDTH | {"pooling_mode": "mean_sqrt_len_tokens"},
    "weighted": WIDTH | {"pooling_mode": "weightedmean"},
    "last": WIDTH | {"pooling_mode": "lasttoken"},
    "two": WIDTH | {"pooling_mode": ["max", "cls"]},
}


def build(folder: Path, **options: Any) -> tuple[Contract, Path]:
    contract = read_contract(folder)
    build_text_graph(folder, contract, folder / "built.onnx", **options)
    return contract, folder / "built.onnx"


def padded(contract: Contract, texts: list[Array], skips: list[int], width: int = 0) -> dict[str, Array]:
    """A right-padded batch with all inputs of the graph."""
    width = width or max(map(len, texts))
    ids = np.full((len(texts), width), contract.pad_id, np.int64)
    mask = np.zeros_like(ids)
    pooling = np.zeros_like(ids)
    for row, (text, skip) in enumerate(zip(texts, skips, strict=True)):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
        pooling[row, skip : len(text)] = 1
    inputs = {"input_ids": ids, "attention_mask": mask, "pooling_mask": pooling}
    return {name: inputs[name] for name in graph_inputs(contract)}


def assert_agrees(folder: Path, engine: str, skips: list[int] | None = None) -> None:
    contract, path = build(folder)
    assert contract.encoder is not None
    got = RUNS[engine](path)(padded(contract, TEXTS, skips or [0] * len(TEXTS)), BOTH)
    expected = embed(folder, contract, contract.encoder, TEXTS, skips)
    assert got["sentence_embedding"].dtype == np.float32
    for name, other in (("sentence_embedding", expected.sentence), ("pooled", expected.pooled)):
        assert got[name].shape == (len(TEXTS), contract.dimension)
        assert np.abs(got[name] - other).max() < 2e-5 * max(1.0, float(np.abs(other).max()))


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_families(tmp_path: Path, kind: str, engine: str) -> None:
    """Each family's tensors, positions and attention match the reference."""
    assert_agrees(checkpoint(tmp_path, kind), engine)


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings(tmp_path: Path, pooling: str, engine: str) -> None:
    """Each pooling over padded rows equals the pooling of the text alone."""
    assert_agrees(checkpoint(tmp_path, pooling=POOLINGS[pooling]), engine)


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_poolings_that_leave_the_prompt_out(tmp_path: Path, pooling: str, engine: str) -> None:
    """pooling_mask replaces attention_mask in the pooling only."""
    folder = checkpoint(tmp_path, "roberta", pooling=POOLINGS[pooling] | {"include_prompt": False})
    assert_agrees(folder, engine, SKIPS)


def test_a_prompt_that_fills_the_text_gives_zeros(tmp_path: Path) -> None:
    """With no tokens to pool the result is zeros, never NaN; CLS falls back to the first token, as the reference
    does."""
    modes = ["max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "cls"]
    folder = checkpoint(tmp_path, pooling=WIDTH | {"pooling_mode": modes, "include_prompt": False})
    contract, path = build(folder)
    pooled = onnxruntime_run(path)(padded(contract, TEXTS[:2], [4, 3]), ("pooled",))["pooled"]
    assert not pooled[:, : 5 * HIDDEN].any()
    assert np.abs(pooled[:, 5 * HIDDEN :]).sum() > 0


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("activation", ["Tanh", "Identity", "ReLU", "GELU", "Sigmoid", "SiLU"])
def test_dense_activations(tmp_path: Path, activation: str, engine: str) -> None:
    """Each torch activation of a Dense."""
    checkpoint(tmp_path, after=("Dense",))
    dense(tmp_path, "2_Dense", HIDDEN, 10, activation=activation, bias=activation != "ReLU")
    assert_agrees(tmp_path, engine)


@pytest.mark.parametrize("engine", RUNS)
def test_a_chain_of_modules(tmp_path: Path, engine: str) -> None:
    """Dense, Normalize, Dense, LayerNorm, Normalize: only the last Normalize is after `pooled`."""
    checkpoint(tmp_path, after=("Dense", "Normalize", "Dense", "LayerNorm", "Normalize"))
    dense(tmp_path, "2_Dense", HIDDEN, 20)
    dense(tmp_path, "4_Dense", 20, 6, activation="Identity")
    layer_norm(tmp_path, "5_LayerNorm", 6)
    assert_agrees(tmp_path, engine)


@pytest.mark.parametrize("name", ["gelu_new", "relu", "silu", "gelu_pytorch_tanh"])
def test_hidden_activations(tmp_path: Path, name: str) -> None:
    """Each activation of the feed-forward layers except plain gelu."""
    assert_agrees(checkpoint(tmp_path, config={"hidden_act": name}), "onnxruntime")


def test_without_a_normalize_both_outputs_are_equal(tmp_path: Path) -> None:
    """`pooled` then has the same values."""
    contract, path = build(checkpoint(tmp_path, after=()))
    got = onnxruntime_run(path)(padded(contract, TEXTS, [0] * 4), BOTH)
    assert np.array_equal(got["sentence_embedding"], got["pooled"])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_row(tmp_path: Path, kind: str) -> None:
    """A text alone, in a batch, and in a batch padded to the last position agree to 1e-6."""
    contract, path = build(checkpoint(tmp_path, kind))
    assert contract.encoder is not None
    run = onnxruntime_run(path)
    batch = run(padded(contract, TEXTS, [0] * 4), BOTH)["sentence_embedding"]
    wide = run(padded(contract, TEXTS, [0] * 4, contract.encoder.usable_positions), BOTH)["sentence_embedding"]
    alone = np.concatenate([run(padded(contract, [text], [0]), BOTH)["sentence_embedding"] for text in TEXTS])
    assert np.abs(batch - alone).max() < 1e-6
    assert np.abs(wide - alone).max() < 1e-6


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_rows_of_padding_are_finite(tmp_path: Path, pooling: str, engine: str) -> None:
    """Empty rows without attended tokens are finite and do not affect the others."""
    contract, path = build(checkpoint(tmp_path, "mpnet", pooling=POOLINGS[pooling]))
    inputs = padded(contract, TEXTS[:2], [0, 0])
    run = RUNS[engine](path)
    plain = run(inputs, BOTH)["sentence_embedding"]
    inputs = {
        name: np.concatenate([value, np.full_like(value[:1], contract.pad_id if name == "input_ids" else 0)])
        for name, value in inputs.items()
    }
    got = run(inputs, BOTH)["sentence_embedding"]
    assert np.isfinite(got).all()
    assert np.abs(got[:2] - plain).max() < 1e-6


def test_a_padding_id_inside_a_text_keeps_its_row(tmp_path: Path) -> None:
    """RoBERTa's positions skip padding ids anywhere, also in a client's token ids."""
    contract, path = build(checkpoint(tmp_path, "roberta"))
    assert contract.encoder is not None
    text = np.array([0, 9, 1, 10, 2])
    got = onnxruntime_run(path)(padded(contract, [text], [0]), BOTH)["sentence_embedding"]
    assert min_cosine(got, embed(tmp_path, contract, contract.encoder, [text]).sentence) > 0.999999


def test_the_longest_text_fits(tmp_path: Path) -> None:
    """As many tokens as the position table has rows."""
    for kind in ("bert", "roberta", "mpnet"):
        contract, path = build(checkpoint(tmp_path / kind, kind))
        assert contract.encoder is not None
        text = np.arange(contract.encoder.usable_positions) % 50 + 5
        got = onnxruntime_run(path)(padded(contract, [text], [0]), BOTH)["sentence_embedding"]
        expected = embed(tmp_path / kind, contract, contract.encoder, [text])
        assert min_cosine(got, expected.sentence) > 0.999999


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_token_vectors_are_given_as_well(tmp_path: Path, kind: str, engine: str) -> None:
    """Before pooling and modules, one row per token; rows of padding have no meaning."""
    contract, path = build(checkpoint(tmp_path, kind))
    assert contract.encoder is not None
    texts = [np.array([2, 9, 10, 11, 3]), np.array([2, 3])]
    got = RUNS[engine](path)(padded(contract, texts, [0, 0]), ("token_embeddings",))["token_embeddings"]
    assert got.shape[0] == 2 and got.shape[2] == HIDDEN
    for row, tokens in zip(got, embed(tmp_path, contract, contract.encoder, texts).tokens, strict=True):
        assert np.abs(row[: len(tokens)] - tokens).max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_puts_a_prefix_before_the_names(tmp_path: Path, kind: str) -> None:
    """Weights saved with a language model head give the same graph, byte for byte."""
    prefix = {"bert": "bert.", "mpnet": "mpnet.", "distilbert": "distilbert."}.get(kind, "roberta.")
    _, plain = build(checkpoint(tmp_path / "plain", kind))
    _, prefixed = build(checkpoint(tmp_path / "prefixed", kind, prefix=prefix))
    assert plain.read_bytes() == prefixed.read_bytes()


def test_building_is_deterministic(tmp_path: Path) -> None:
    """Equal files give equal bytes."""
    _, first = build(checkpoint(tmp_path / "a"))
    _, second = build(checkpoint(tmp_path / "b"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("engine", RUNS)
def test_constants_may_lie_in_a_file_of_their_own(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models over 2 GB need it: model.onnx with external data gives the same results."""
    contract, inline = build(checkpoint(tmp_path))
    expected = RUNS[engine](inline)(padded(contract, TEXTS, [0] * 4), BOTH)
    path = tmp_path / "big.onnx"
    monkeypatch.setattr(builder, "INLINE_BYTES", 1000)
    built = build_text_graph(tmp_path, contract, path)
    assert built.files == ("big.onnx", "big.onnx_data")
    assert path.stat().st_size < inline.stat().st_size
    got = RUNS[engine](path)(padded(contract, TEXTS, [0] * 4), BOTH)
    assert np.array_equal(got["pooled"], expected["pooled"])


def test_gamma_and_beta_are_old_names(tmp_path: Path) -> None:
    """Checkpoints from TensorFlow use these names for norms."""
    from safetensors.numpy import save_file

    _, path = build(checkpoint(tmp_path))
    expected = path.read_bytes()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in encoder_tensors("bert").items()
    }
    save_file(old, tmp_path / "model.safetensors")
    assert build(tmp_path)[1].read_bytes() == expected
    assert_agrees(tmp_path, "onnxruntime")


def test_bfloat16_weights_are_widened(tmp_path: Path) -> None:
    """Stored in bfloat16, computed in float32."""
    checkpoint(tmp_path)
    save_bfloat16(encoder_tensors("bert"), tmp_path / "model.safetensors")
    assert_agrees(tmp_path, "onnxruntime")


def test_parameters_are_counted(tmp_path: Path) -> None:
    """All learned values except the second token type, which no embedding uses."""
    contract = read_contract(checkpoint(tmp_path))
    built = build_text_graph(tmp_path, contract, tmp_path / "built.onnx")
    stored = sum(tensor.size for tensor in encoder_tensors("bert").values())
    assert built.parameters == stored - 2 * HIDDEN


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """Fractions rise to 1."""
    reports: list[float] = []
    build(checkpoint(tmp_path), progress=reports.append)
    assert reports == sorted(reports)
    assert reports[-1] == 1.0


@pytest.mark.parametrize(
    "name", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias", "embeddings.LayerNorm.weight"]
)
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    """A checkpoint without a tensor is refused by the tensor's name."""
    from safetensors.numpy import save_file

    tensors = encoder_tensors("bert")
    del tensors[name]
    save_file(tensors, checkpoint(tmp_path) / "model.safetensors")
    with pytest.raises(ModelFileError) as caught:
        build(tmp_path)
    assert (caught.value.file, caught.value.key) == ("model.safetensors", name)


def test_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    """Configuration and weights must match."""
    with pytest.raises(ModelFileError, match="shape") as caught:
        build(checkpoint(tmp_path, config={"max_position_embeddings": POSITIONS + 1}, sentence={"max_seq_length": 8}))
    assert caught.value.key == "embeddings.position_embeddings.weight"


def test_an_unknown_architecture_is_not_built(tmp_path: Path) -> None:
    """Only its shipped graph can run."""
    folder = checkpoint(tmp_path, config={"model_type": "xlnet"})
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelFileError) as caught:
        build(folder)
    assert caught.value.key == "model_type"


def test_weights_of_another_family_are_refused(tmp_path: Path) -> None:
    """No word embeddings under any of the family's names."""
    folder = checkpoint(tmp_path, prefix="other.")
    with pytest.raises(ModelFileError) as caught:
        build(folder)
    assert (caught.value.file, caught.value.key) == ("model.safetensors", "embeddings.word_embeddings.weight")
