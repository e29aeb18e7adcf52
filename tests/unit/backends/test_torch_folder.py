"""What the torch engine reads of a model's folder itself, without PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import backends
from shoal.backends import EngineOptions, opener
from shoal.backends.torch import engine
from shoal.backends.torch.folder import MODULES, Layout, Step, read_layout, weights_of
from shoal.errors import MissingExtra, ModelFileError
from shoal.types import MultiSpec, ScoreSpec, SparseSpec, TextSpec

Write = Callable[..., None]
SPEC = TextSpec(tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), dimension=8, max_tokens=16)


def spec(*modules: str, **more: Any) -> TextSpec:
    return msgspec.structs.replace(SPEC, modules=modules, **more)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def modules(*entries: tuple[str, str], package: str = "sentence_transformers.models") -> None:
        listed = [{"idx": at, "type": f"{package}.{kind}", "path": path} for at, (kind, path) in enumerate(entries)]
        (tmp_path / MODULES).write_text(json.dumps(listed))

    return modules


def dense(folder: Path, path: str, **config: Any) -> None:
    (folder / path).mkdir()
    (folder / path / "config.json").write_text(json.dumps(config))


def test_a_plain_checkpoint_is_its_own_encoder(tmp_path: Path) -> None:
    """Without modules.json there is nothing but the encoder."""
    assert read_layout(tmp_path, spec()) == Layout("")


def test_places_of_modules_follow_the_pooling(tmp_path: Path, write: Write) -> None:
    """Kinds and activations are the spec's; places, and whether x is added, are the files'. Dropout does nothing."""
    write(
        ("Transformer", "0_T"), ("Pooling", "1_P"), ("Dropout", "2_Drop"), ("Dense", "3_D"), ("LayerNorm", "4_L"),
        ("Normalize", "5_N"),
    )  # fmt: skip
    dense(tmp_path, "3_D", activation_function="torch.nn.Tanh", use_residual=True)
    found = read_layout(tmp_path, spec("dense:gelu", "layer_norm", "normalize"))
    assert found.encoder == "0_T"
    assert found.after == (
        Step("dense", "3_D", "gelu", residual=True),
        Step("layer_norm", "4_L"),
        Step("normalize", "5_N"),
    )


def test_a_cut_has_no_place_of_its_own(tmp_path: Path, write: Write) -> None:
    """ "truncate" may stand anywhere in the spec, and nowhere in modules.json."""
    write(("Transformer", ""), ("Pooling", "1_P"), ("Normalize", "2_N"))
    found = read_layout(tmp_path, spec("truncate", "normalize"))
    assert found.after == (Step("truncate"), Step("normalize", "2_N"))


def test_other_modules_than_were_stored_are_refused(tmp_path: Path, write: Write) -> None:
    """A folder that changed under its manifest would give other vectors."""
    write(("Transformer", ""), ("Pooling", "1_P"), ("Normalize", "2_N"))
    with pytest.raises(ModelFileError, match=r"lists normalize .* stored with nothing; pull the model again"):
        read_layout(tmp_path, spec())


@pytest.mark.parametrize(
    "more", [{"score": ScoreSpec(labels=("a",), activation="sigmoid")}, {"dimension": 0, "sparse": SparseSpec()}]
)
def test_without_a_dense_vector_no_module_follows(tmp_path: Path, write: Write, more: dict[str, Any]) -> None:
    write(("Transformer", ""), ("Pooling", "1_P"), ("Normalize", "2_N"))
    assert read_layout(tmp_path, spec(**more)).after == ()


def test_layers_over_tokens_come_before_any_pooling(tmp_path: Path, write: Write) -> None:
    """Of a model of late interaction; a file without an activation has none."""
    write(("Transformer", ""), ("Dense", "1_D"), ("Dense", "2_D"), package="pylate.models")
    dense(tmp_path, "1_D", activation_function="torch.nn.modules.linear.Identity")
    dense(tmp_path, "2_D")
    found = read_layout(tmp_path, spec(dimension=0, multi=MultiSpec(dimension=4)))
    assert found.tokens == (Step("dense", "1_D", "identity"), Step("dense", "2_D", "identity"))


def test_splade_says_how_it_pools(tmp_path: Path, write: Write) -> None:
    write(("MLMTransformer", "0_M"), ("SpladePooling", "1_S"))
    dense(tmp_path, "1_S", pooling_strategy="sum", activation_function="log1p_relu")
    found = read_layout(tmp_path, spec(dimension=0, sparse=SparseSpec()))
    assert (found.encoder, found.splade) == ("0_M", ("sum", "log1p_relu"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "not a list of modules"),
        ("{}", "not a list of modules"),
        ('[{"type": "x.Dense"}]', "needs a type and a path"),
        ('[{"type": 1, "path": ""}]', "needs a type and a path"),
        ('[{"type": "x.Transformer", "path": "../up"}]', "leaves the model's folder"),
        ('[{"type": "x.Transformer", "path": "/etc"}]', "leaves the model's folder"),
        ('[{"type": "x.Transformer", "path": "a\\\\..\\\\b"}]', "leaves the model's folder"),
        ('[{"type": "x.Dense", "path": "1_D"}]', "1_D/config.json: is not readable"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / MODULES).write_text(text)
    with pytest.raises(ModelFileError, match=complaint):
        read_layout(tmp_path, spec())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    listed=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "path", "x"]), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused(tmp_path: Path, listed: Any) -> None:
    """Never another error than ModelFileError, and never a place outside of the folder."""
    (tmp_path / MODULES).write_text(json.dumps(listed))
    try:
        found = read_layout(tmp_path, spec())
    except ModelFileError:
        return
    assert ".." not in found.encoder.split("/")
    assert not found.encoder.startswith("/")


def test_pickled_weights_are_no_weights(tmp_path: Path) -> None:
    """The error says that the file is there and why it is not read."""
    with pytest.raises(ModelFileError, match=r"1_D/model\.safetensors: is missing; serve a revision"):
        weights_of(tmp_path, "1_D")
    (tmp_path / "1_D").mkdir()
    (tmp_path / "1_D" / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="can hide code"):
        weights_of(tmp_path, "1_D")
    (tmp_path / "1_D" / "model.safetensors").touch()
    assert weights_of(tmp_path, "1_D") == tmp_path / "1_D" / "model.safetensors"


@pytest.mark.parametrize("absent", ["torch", "transformers"])
async def test_without_its_packages_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    """Importing the engine needs neither of them; opening it says how to install both."""
    monkeypatch.setattr(engine, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(MissingExtra, match=r"\[torch\]"):
        await opener("torch")(tmp_path, name="x", options=EngineOptions(spec=SPEC))


def test_torch_is_chosen_last_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs folders, so it is what is left where no engine for graphs is installed."""
    installed = {"torch", "onnxruntime"}
    monkeypatch.setattr(backends, "find_spec", lambda name: object() if name in installed else None)
    assert backends.choose() == "onnxruntime"
    assert backends.choose("torch") == "torch"
    installed.remove("onnxruntime")
    assert backends.choose() == "torch"
    installed.clear()
    with pytest.raises(MissingExtra, match=r"\[torch\]"):
        backends.choose("torch")
