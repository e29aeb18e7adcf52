"""The torch engine reads a model as Shoal's graph does: it takes its heads from the manifest, which keeps the only
reading of the files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.backends import parse_address
from shoal.backends.local.engines import EngineOptions
from shoal.backends.local.open import open_local
from shoal.backends.local.precision import compare
from shoal.backends.local.tensor_inputs import Port
from shoal.config.settings import Settings
from shoal.errors import ModelFileError, VerificationFailed
from shoal.models.convert.as_published import verify_published
from shoal.models.convert.convert import ConversionResult, convert
from shoal.specs import PartsSpec
from shoal.types import Array
from tests.parity.test_torch import infer, opened
from tests.unit.models import head_checkpoints as made
from tests.unit.models.checkpoints import HIDDEN
from tests.unit.models.engines import RUNS

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

IDS = np.array([[2, 10, 11, 12, 3], [2, 9, 3, 0, 0]])
MASK = (IDS != 0).astype(np.int64)
DIFFERENCE = 2e-5


def silent(folder: Path) -> None:
    """A SpladePooling whose file sets nothing: the defaults."""
    (folder / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": null, "activation_function": null}')


def tanh(folder: Path) -> None:
    """A Dense of sentence-transformers over tokens, without an activation: Tanh there, unlike PyLate's none."""
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["type"] = "sentence_transformers.models.Dense"
    listed.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "2_Normalize").mkdir()
    (folder / "2_Normalize" / "config.json").write_text('{"module_input_name": "token_embeddings"}')
    made.edit(folder / "1_Dense" / "config.json", activation_function=None)
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "MultiVectorEncoder"}')


def unused(folder: Path) -> None:
    """A stored bias, although the module's file says that there is none."""
    place = folder / "1_Dense" / "model.safetensors"
    weights = load_file(place)
    save_file(weights | {"linear.bias": np.ones(len(weights["linear.weight"]), np.float32)}, place)


def unbiased(folder: Path) -> None:
    save_file({"weight": made.normal(1, HIDDEN)}, folder / "sparse_linear.safetensors")


def sharded(folder: Path) -> None:
    """A module whose weights are in a shard named by an index."""
    place = folder / "1_Dense"
    (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"linear.weight": "model-00001-of-00001.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def below(folder: Path) -> None:
    """An encoder with its heads in a folder of its own."""
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(inner / path.name)
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["path"] = inner.name
    (folder / "modules.json").write_text(json.dumps(listed))


CASES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], None]]] = {
    "splade without settings": (made.splade, silent),
    "dense with no activation": (made.pylate, tanh),
    "a bias that is not used": (made.pylate, unused),
    "shards of a module": (made.pylate, sharded),
    "m3 without a bias": (lambda folder: made.m3(folder, "bert"), unbiased),
    "m3 in a folder": (lambda folder: made.m3(folder, "bert"), below),
    "stanford": (made.stanford, lambda folder: None),
}


def model(name: str, folder: Path) -> tuple[Path, ConversionResult]:
    make, change = CASES[name]
    make(folder / "model")
    change(folder / "model")
    (folder / "made").mkdir()
    return folder / "model", convert(folder / "model", folder / "made")


def feeds_of(names: tuple[str, ...]) -> dict[str, Array]:
    every = {"input_ids": IDS, "attention_mask": MASK, "pooling_mask": MASK, "token_type_ids": IDS * 0}
    return {name: every[name] for name in names}


def drop_padding(array: Array) -> Array:
    """Remove the vectors of padding."""
    if array.ndim == 3:
        return np.asarray(array[MASK > 0])
    return np.asarray(array * MASK) if array.shape == MASK.shape else array


@pytest.mark.parametrize("name", CASES)
async def test_it_computes_the_same_as_the_graph(tmp_path: Path, name: str) -> None:
    """Every output, for files that rely on the reader's defaults."""
    folder, converted = await asyncio.to_thread(model, name, tmp_path)
    feeds = feeds_of(converted.spec.inputs)
    right = RUNS["onnxruntime"](tmp_path / "made" / converted.graph)(feeds, converted.spec.outputs)
    async with opened(folder, converted.spec) as engine:
        got = await infer(engine, feeds, *converted.spec.outputs)
    for output, expected in right.items():
        np.testing.assert_allclose(drop_padding(got[output]), drop_padding(expected), atol=DIFFERENCE, err_msg=output)


async def test_other_weights_than_were_stored_are_refused(tmp_path: Path) -> None:
    """A module of another size, or one that the manifest does not list."""
    folder, converted = await asyncio.to_thread(model, "shards of a module", tmp_path)
    assert converted.spec.parts is not None
    for spec, complaint in (
        (msgspec.structs.replace(converted.spec, parts=None), "pull the model again"),
        (
            msgspec.structs.replace(
                converted.spec,
                parts=PartsSpec(late=(msgspec.structs.replace(converted.spec.parts.late[0], dimension=5),)),
            ),
            r"linear\.weight: has shape .* stored with \[5",
        ),
    ):
        with pytest.raises(ModelFileError, match=complaint):
            async with opened(folder, spec):
                pass


def test_late_interaction_is_compared_before_it_takes_16_bits(tmp_path: Path) -> None:
    """By its token vectors: it has no others."""
    from shoal.backends.local.torch import engine as module
    from shoal.backends.local.torch.network import Network

    folder, converted = model("stanford", tmp_path)
    spec = converted.spec
    ports = tuple(Port(name, np.dtype(np.int64), (None, None)) for name in spec.inputs)
    options = EngineOptions(spec=spec, max_length=20, samples=[feeds_of(spec.inputs)])
    exact, half = (module._run_samples(Network(folder, spec, name, "cpu"), ports, options) for name in ("f32", "bf16"))
    assert [len(rows) for batch in exact for rows in batch.values()] == [int(MASK.sum())]
    assert 0.9 < compare(exact, half, spec)["low_cosine"] < 1.0


async def test_it_is_compared_with_the_reference_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading from the address reports the comparison; a network that computes something else does not serve."""
    from shoal.backends.local.torch.heads import Heads

    made.m3(tmp_path / "model", "bert")
    settings = msgspec.structs.replace(Settings(home=str(tmp_path / "home"), offline=True), engine="torch")
    address = parse_address(f"file:{tmp_path / 'model'}")
    right = Heads.compute
    monkeypatch.setattr(Heads, "compute", lambda *args: {name: array + 1 for name, array in right(*args).items()})
    with pytest.raises(VerificationFailed, match="torch does not agree"):
        await open_local("m", [address], settings)
    monkeypatch.setattr(Heads, "compute", right)
    local = await open_local("m", [address], settings)
    assert local.facts.verified.startswith("torch agrees with a numpy forward pass")
    await local.engines[0].aclose()


def test_without_a_reference_there_is_nothing_to_compare(tmp_path: Path) -> None:
    folder, converted = model("stanford", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "another"}))

    def run() -> Any:
        raise AssertionError

    assert verify_published(folder, tmp_path / "made", converted.spec, engine="torch", run=run) is None
