"""Weights pickled by PyTorch itself, read without it: `torch.save` in all of its forms."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ModelFileError
from shoal.models.convert.pickled import read_tensors, write_safetensors

# Warnings of the reference's libraries are not this project's; importing them takes seconds in every process.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

FORMS: list[dict[str, Any]] = [
    {},
    {"_use_new_zipfile_serialization": False},
    {"pickle_protocol": 4},
    {"pickle_protocol": 5},
]


def pickled(folder: Path, *, shards: int = 1) -> Path:
    """The same model with all its weights pickled by PyTorch."""
    import torch
    from safetensors.torch import load_file

    for place in folder.rglob("model.safetensors"):
        state = load_file(place)
        place.unlink()
        if shards == 1 or place.parent != folder:
            torch.save(state, place.with_name("pytorch_model.bin"))
            continue
        names = sorted(state)
        places: dict[str, str] = {}
        for number in range(shards):
            file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
            part = names[number::shards]
            torch.save({name: state[name] for name in part}, folder / file)
            places |= dict.fromkeys(part, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def states() -> dict[str, dict[str, Any]]:
    """State dictionaries with views, ties and every type, as modules, trainers and open_clip save them."""
    import torch

    random = torch.randn(4, 5)
    tensors = {
        "whole": random,
        "tied": random,
        "transposed": random.t(),
        "sliced": random[1:3, ::2],
        "expanded": torch.arange(5).expand((1, -1)),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
        **{str(kind): random.to(kind) for kind in (torch.bfloat16, torch.float16, torch.float64)},
        **{str(kind): torch.arange(9, dtype=kind) for kind in (torch.uint8, torch.int8, torch.int16, torch.int32)},
    }
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return {
        "tensors": tensors,
        "module": layer.state_dict(),
        "parameters": dict(layer.named_parameters()),
        "training": {"epoch": 3, "state_dict": wrapped, "scaler": {"scale": 1.5, "on": None, "pair": (1, [2])}},
    }


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["tensors", "module", "parameters", "training"])
def test_tensors_are_those_of_torch(tmp_path: Path, name: str, form: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file

    state = states()[name]
    torch.save(state, tmp_path / "a.bin", **form)
    write_safetensors(tmp_path / "b", read_tensors(tmp_path / "a.bin", "a.bin"), lambda: None)
    got = load_file(tmp_path / "b")
    expected = {name.removeprefix("module."): tensor for name, tensor in state.get("state_dict", state).items()}
    assert set(got) == set(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype
        assert torch.equal(got[key], tensor)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_everything_else_is_refused_by_name(tmp_path: Path, form: dict[str, Any]) -> None:
    import torch

    random = torch.randn(2, 2)
    others: list[tuple[Any, str]] = [
        (torch.nn.Linear(2, 2), r"names 'torch\.nn\.modules\.linear\.Linear'"),
        ({"w": torch.quantize_per_tensor(random, 0.1, 0, torch.qint8)}, "names 'torch._utils._rebuild_qtensor'"),
        ({"w": random.to(torch.float8_e4m3fn)}, "names 'torch._utils._rebuild_tensor_v3'"),
        ({"w": random.to(torch.complex64)}, "names 'torch.ComplexFloatStorage'"),
        ({"w": random.to_sparse()}, "names 'torch._utils._rebuild_sparse_tensor'"),
        ({"w": torch.zeros(1).expand(1000)}, "larger than its storage|share too much memory"),
        ({"w": 1}, "has 'w', which is no tensor"),
        ([random], "not a dictionary of tensors"),
        ({"w": Evil(tmp_path / "ran")}, "names "),
    ]
    for value, words in others:
        torch.save(value, tmp_path / "a.bin", **form)
        with pytest.raises(ModelFileError, match=words):
            read_tensors(tmp_path / "a.bin", "a.bin")
    (tmp_path / "a.bin").write_bytes(pickle.dumps({"weight": Evil(tmp_path / "ran")}, protocol=2))
    with pytest.raises(ModelFileError, match="not a pickle of tensors only"):
        read_tensors(tmp_path / "a.bin", "a.bin")
    assert not (tmp_path / "ran").exists()
