"""The parts of the torch engine that read a model's folder, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.backends.local import engines
from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.backends.local.torch import engine
from shoal.backends.local.torch.folder import find_parts, find_weights
from shoal.errors import MissingExtra, ModelFileError
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.spec import text_spec
from shoal.specs import LayerSpec, MultiSpec, PartsSpec, ScoreSpec, SparseSpec, TextSpec
from tests.unit.models.head_checkpoints import m3, pylate, splade

SPEC = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), dimension=8, max_tokens=16)


DENSE = LayerSpec(kind="dense", takes=8, dimension=4, path="2_D", activation="tanh")


def spec(*modules: str, **more: Any) -> TextSpec:
    return msgspec.structs.replace(SPEC, modules=modules, **more)


def test_a_plain_checkpoint_is_its_own_encoder() -> None:
    """Without parts in the spec there is only the encoder."""
    assert find_parts(spec()) == PartsSpec()
    assert find_parts(spec(dimension=0, score=ScoreSpec(labels=("a",), activation="sigmoid"))) == PartsSpec()


def test_the_spec_lists_the_modules_around_the_encoder() -> None:
    parts = PartsSpec(encoder="0_T", after=(DENSE, LayerSpec(kind="normalize")))
    assert find_parts(spec("dense:tanh", "normalize", parts=parts)) is parts


@pytest.mark.parametrize(
    "unsaid",
    [
        spec("normalize"),
        spec("normalize", parts=PartsSpec()),
        spec(parts=PartsSpec(after=(DENSE,))),
        spec("dense:tanh", "normalize", parts=PartsSpec(after=(LayerSpec(kind="normalize"), DENSE))),
        spec(dimension=0, sparse=SparseSpec()),
        spec(dimension=0, multi=MultiSpec(dimension=4)),
        spec(sparse=SparseSpec(per="token"), parts=PartsSpec()),
    ],
)
def test_parts_that_nobody_read_are_refused(unsaid: TextSpec) -> None:
    """A manifest without the parts is rejected, since guessing them could give other vectors."""
    with pytest.raises(ModelFileError, match=r"manifest\.json: parts: .*pull the model again"):
        find_parts(unsaid)


@pytest.mark.parametrize(
    ("make", "modules"),
    [
        (partial(splade, pooling={"pooling_strategy": "sum", "activation_function": "log1p_relu"}), 0),
        (pylate, 0),
        (partial(m3, kind="bert"), 1),
    ],
)
def test_the_spec_matches_the_contract(tmp_path: Path, make: Callable[..., Any], modules: int) -> None:
    """The spec has the parts of every kind of head."""
    folder = make(tmp_path / "model")
    contract = read_contract(folder)
    parts = find_parts(text_spec(contract, tokenizer="t", inputs=SPEC.inputs, pooled="pooled"))
    assert len(parts.after) == modules
    layers = [*parts.late, *([parts.token_weights] if parts.token_weights else [])]
    read = [*(contract.late.layers if contract.late else ())]
    read += [contract.token_weights.layer] if contract.token_weights else []
    assert [(one.path, one.file, one.stem, one.activation, one.bias, one.residual) for one in layers] == [
        (one.path, one.file, one.stem, one.activation, one.bias, one.residual) for one in read
    ]
    assert [(one.takes, one.dimension) for one in layers] == [(one.in_features, one.out_features) for one in read]
    if contract.splade is not None:
        assert parts.splade == ("sum", "log1p_relu")


def test_only_safetensors_are_weights(tmp_path: Path) -> None:
    """Pickles of a stored model were converted before."""
    with pytest.raises(ModelFileError, match=r"1_D/model\.safetensors: is missing; serve a revision"):
        find_weights(tmp_path, "1_D", "linear.weight")
    (tmp_path / "1_D").mkdir()
    (tmp_path / "1_D" / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="is missing"):
        find_weights(tmp_path, "1_D", "linear.weight")
    (tmp_path / "1_D" / "model.safetensors").touch()
    assert find_weights(tmp_path, "1_D", "linear.weight") == tmp_path / "1_D" / "model.safetensors"


def test_an_index_names_the_shard(tmp_path: Path) -> None:
    """The index maps each tensor to a shard in the same folder."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "../x"}}))
    (tmp_path / "one.safetensors").touch()
    assert find_weights(tmp_path, "", "a") == tmp_path / "one.safetensors"
    for name, complaint in (
        ("b", "not a file in the same folder"),
        ("c", "not a file in the same folder"),
        ("d", "in no shard"),
    ):
        with pytest.raises(ModelFileError, match=complaint):
            find_weights(tmp_path, "", name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=20)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["weight_map", "a"]), inner, max_size=2)
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_index_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    """Any index gives a path inside the folder or a ModelFileError."""
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    try:
        found = find_weights(tmp_path, "", "a")
    except ModelFileError:
        return
    assert found.parent == tmp_path


@pytest.mark.parametrize("absent", ["torch", "transformers"])
async def test_without_its_packages_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    """Importing the engine needs neither package; opening it names the extra that installs both."""
    monkeypatch.setattr(engine, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(MissingExtra, match=r"\[torch\]"):
        await load_opener("torch")(tmp_path, name="x", options=EngineOptions(spec=SPEC))


def test_torch_is_chosen_last_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` selects torch only if no graph engine is installed."""
    installed = {"torch", "onnxruntime"}
    monkeypatch.setattr(engines, "find_spec", lambda name: object() if name in installed else None)
    assert engines.choose_engine() == "onnxruntime"
    assert engines.choose_engine("torch") == "torch"
    installed.remove("onnxruntime")
    assert engines.choose_engine() == "torch"
    installed.clear()
    with pytest.raises(MissingExtra, match=r"\[torch\]"):
        engines.choose_engine("torch")
