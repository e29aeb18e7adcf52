"""Loading by the torch engine: rejected files, precisions, warm-up, closing; and a model from its address to
vectors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.backends.local.open import open_local
from shoal.backends.local.tensor_inputs import Port
from shoal.config.settings import Settings
from shoal.core.protocols import CostModel, Prepared
from shoal.errors import ConfigError, InputRejected, ModelFileError
from shoal.models.convert.verify import min_cosine
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import ScoreSpec
from shoal.types import Embed
from tests.contract.engines.tiny import batch
from tests.parity.family_models import FOREIGN, HIDDEN, other
from tests.parity.reference_models import CASES, write
from tests.parity.test_reference import TEXTS
from tests.parity.test_torch import close, infer, opened, reference
from tests.parity.torch_models import TinyBert

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


async def test_ids_outside_the_table_are_refused(tmp_path: Path) -> None:
    """They fail before they reach the device: on a GPU such an id would break all later work."""
    model = TinyBert(tmp_path)
    async with opened(tmp_path, model.spec) as engine:
        for bad in (100, -1):
            inputs = batch(4)
            inputs["input_ids"][0, 1] = bad
            with pytest.raises(InputRejected, match="input_ids"):
                await infer(engine, inputs, "pooled")


async def test_missing_weights_are_not_randomized(tmp_path: Path) -> None:
    """transformers would initialize them randomly, with a warning."""
    from safetensors.torch import load_file, save_file

    model = TinyBert(tmp_path)
    place = tmp_path / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(place).items()}
    missing = next(name for name in tensors if "query.weight" in name)
    save_file({name: value for name, value in tensors.items() if name != missing}, place, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=f"{missing}.*fetch the model again"):
        async with opened(tmp_path, model.spec):
            pass


async def test_pickles_and_code_are_refused(tmp_path: Path) -> None:
    """A pytorch_model.bin is never read, and code beside the weights is never run."""
    import torch

    model = TinyBert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match="safetensors"):
        async with opened(tmp_path, model.spec):
            pass
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelFileError, match="architecture transformers supports"):
        async with opened(tmp_path, model.spec):
            pass


async def test_precisions(tmp_path: Path) -> None:
    """bf16 on request, f32 by default on the CPU, fp16 only on a GPU."""
    import torch

    model = TinyBert(tmp_path)
    exact = model.answer(batch(7, 3))["pooled"]
    async with opened(tmp_path, model.spec, precision="bf16") as engine:
        assert engine.facts.precision == "bf16"
        assert min_cosine((await infer(engine, batch(7, 3), "pooled"))["pooled"], exact) > 0.99
    if not torch.cuda.is_available():
        async with opened(tmp_path, model.spec, samples=[batch(4, 8)]) as engine:
            assert (engine.facts.precision, engine.facts.slots) == ("f32", 1)
        with pytest.raises(ConfigError, match="fp16 requires a GPU"):
            async with opened(tmp_path, model.spec, precision="fp16"):
                pass


async def test_a_graph_is_no_folder(tmp_path: Path) -> None:
    """Without a folder or a spec the error names the setting to change."""
    with pytest.raises(ConfigError, match="use another engine"):
        await load_opener("torch")(tmp_path / "model.onnx", name="x", options=EngineOptions())


async def test_warming_measures_the_cost(tmp_path: Path) -> None:
    model = TinyBert(tmp_path)
    async with opened(tmp_path, model.spec, max_length=32, max_batch_size=4, warm_up_s=20.0) as engine:
        assert engine.facts.cost != CostModel()


async def test_closing_frees_the_weights(tmp_path: Path) -> None:
    """Closing releases them at once, without waiting for the garbage collector."""
    import gc
    import weakref

    import torch

    model = TinyBert(tmp_path)
    engine = await load_opener("torch")(tmp_path, name="x", options=EngineOptions(warm_up_s=0.0, spec=model.spec))
    shape = torch.Size((100, HIDDEN))
    live = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, torch.nn.Parameter) and one.shape == shape]
    assert len(live) >= 2, "the model's own and the reference's"
    await engine.aclose()
    assert sum(one is not None and one.shape == shape for one in (ref() for ref in live)) == len(live) - 1


ALONE = """
import asyncio, os, sys, time
from pathlib import Path
seen = []
FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "socket.sendto")
sys.addaudithook(lambda event, args: seen.append((event, args)) if event in FORBIDDEN else None)
from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.backends.local.tensor_inputs import Port
from shoal.specs import TextSpec
import numpy as np

async def main():
    spec = TextSpec(tokenizer="", inputs=("input_ids", "attention_mask"), dimension=32, max_tokens=512,
                    ends_normalized=False)
    engine = await load_opener("torch")(Path(sys.argv[1]), name="x", options=EngineOptions(warm_up_s=0.0, spec=spec))
    ones = np.ones((1, 3), np.int64)
    await engine.infer({"input_ids": ones, "attention_mask": ones}, ["pooled"], {}, time.monotonic() + 30)
    await engine.aclose()

asyncio.run(main())
assert not seen, seen
"""


def test_loading_and_running_opens_no_connection(tmp_path: Path) -> None:
    """Loading, running and closing the engine opens no connection and leaves nothing in the home directory."""
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "model"
    TinyBert(folder)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(home.iterdir())


@pytest.mark.parametrize("score", [False, True])
async def test_auto_takes_16_bits_that_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: bool) -> None:
    """The selection on a GPU at load: fp16 or bf16 if the samples agree with f32, a stored outcome, and f32 for a model
    that loses too much accuracy; a 16-bit checkpoint runs as published."""
    from shoal.backends.local.torch import engine as module

    monkeypatch.setattr(module._Device, "cuda", property(lambda self: True))
    spec, options = TinyBert(tmp_path).spec, {"samples": [batch(4, 8), batch(30, 12)]}
    if score:
        _save_classifier(tmp_path)
        spec = msgspec.structs.replace(spec, dimension=0, score=ScoreSpec(labels=("a", "b"), activation="softmax"))

    def load(**more: Any) -> Any:
        engine_options = EngineOptions(spec=spec, **options | more)
        ports = [Port(name, np.dtype(np.int64), (None, None)) for name in spec.inputs]
        return module._load(tmp_path, spec, ports, engine_options)

    first = await asyncio.to_thread(load)
    assert first.network.precision == ("fp16" if first.precision_check.agrees else "f32")
    again = await asyncio.to_thread(load, precision_check=first.precision_check)
    assert (again.network.precision, again.reason) == (first.network.precision, first.reason)
    monkeypatch.setattr(module, "compare", lambda *_: {"mean_cosine": 0.5})
    exact = await asyncio.to_thread(load)
    assert exact.network.precision == "f32"
    assert "bf16" in exact.precision_check.key
    assert (await asyncio.to_thread(load, samples=())).reason == "no samples for the 16-bit check"
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("float32", "bfloat16"))
    assert (await asyncio.to_thread(load)).network.precision == "bf16"


def _save_classifier(folder: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=100, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.parametrize("name", ["megatron-bert", "bert"])
async def test_a_folder_is_served_from_its_address(tmp_path: Path, name: str) -> None:
    """From `file:` and the setting to vectors: an architecture without a graph, and one with a graph that runs from its
    folder all the same."""
    folder = other(name, tmp_path) if name in FOREIGN else write(CASES[0], tmp_path)
    settings = msgspec.structs.replace(Settings(home=str(tmp_path / "home"), offline=True), engine="torch")
    local = await open_local("mini", [parse_address(f"file:{folder}")], settings)
    assert isinstance(local.pipeline, TextPipeline)
    assert (local.facts.backend, local.facts.precision) == ("torch", "f32")
    assert local.facts.details["graph"] == ("folder" if name in FOREIGN else "built")
    texts = [text for text in TEXTS if text.strip()]
    task = Embed(model="m", inputs=[*texts], truncate=True)
    prepared = local.pipeline.prepare([(task, text) for text in texts])
    batch = [one for one in prepared if isinstance(one, Prepared)]
    engine = local.engines[0]
    outputs = await infer(engine, local.pipeline.collate(batch, engine.facts), local.pipeline.spec.pooled)
    rows = [row for row in local.pipeline.finish(outputs, batch) if isinstance(row, np.ndarray)]
    await engine.aclose()
    close(np.stack(rows), reference(folder).encode(texts, convert_to_numpy=True))


async def test_a_known_name_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers' implementation of "bert" is not the author's."""
    model = TinyBert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "mine.Model"}}))
    with pytest.raises(ModelFileError, match=r"auto_map.*never runs"):
        async with opened(tmp_path, model.spec):
            pass
