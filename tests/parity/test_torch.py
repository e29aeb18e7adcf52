"""The torch engine's vectors are those of sentence-transformers, from the same folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.backends.local.torch.engine import _Device
from shoal.core.protocols import Engine
from shoal.errors import InputRejected
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.spec import text_spec
from shoal.models.convert.verify import min_cosine
from shoal.specs import LayerSpec, MultiSpec, PartsSpec, ScoreSpec, SparseSpec, TextSpec
from shoal.types import Array
from tests.contract.engines.tiny import batch
from tests.parity.family_models import HIDDEN, MODELS, other, words_tokenizer
from tests.parity.reference_models import CASES, LONGEST, Case, write
from tests.parity.test_reference import TEXTS
from tests.parity.torch_models import TinyBert, modules

# Warnings of the reference's libraries are not this project's.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

COSINE = 0.99999
DIFFERENCE = 2e-5


async def spec_of(folder: Path, **changes: Any) -> TextSpec:
    """The spec that Shoal reads from the folder, for any architecture."""
    contract = await asyncio.to_thread(read_contract, folder, elsewhere=True)
    inputs = ["input_ids", "attention_mask"]
    if not contract.pooling.include_prompt:
        inputs.append("pooling_mask")
    spec = text_spec(contract, tokenizer="tokenizer.json", inputs=inputs, pooled="pooled")
    return msgspec.structs.replace(spec, **changes)


@asynccontextmanager
async def opened(folder: Path, spec: TextSpec, **options: Any) -> AsyncIterator[Engine]:
    engine = await load_opener("torch")(
        folder, name="x", options=EngineOptions(**{"warm_up_s": 0.0} | options, spec=spec)
    )
    try:
        yield engine
    finally:
        await engine.aclose()


async def infer(engine: Engine, feeds: dict[str, Array], *outputs: str) -> dict[str, Array]:
    return await engine.infer(feeds, outputs, {}, time.monotonic() + 60)


def feeds(model: Any, texts: list[str], prompt: str = "", *, left: bool = False) -> dict[str, Array]:
    """Tokenize with the reference's own tokenizer, padded on the right, or on the left."""
    tokenizer = model.tokenizer
    rows = [tokenizer(prompt + text, truncation=True, max_length=model.max_seq_length)["input_ids"] for text in texts]
    rows = [row or [tokenizer.pad_token_id] for row in rows]
    width = max(map(len, rows)) + 3
    ids = np.full((len(rows), width), tokenizer.pad_token_id or 0, np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def reference(folder: Path) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def close(got: Array, expected: Array, *, difference: float = DIFFERENCE) -> None:
    assert got.shape == expected.shape
    assert min_cosine(got, expected) >= COSINE
    assert np.abs(got - expected).max() <= difference * max(1.0, float(np.abs(expected).max()))


PLAIN = [case for case in CASES if case.include_prompt and not case.lower_case]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
async def test_vectors_equal_those_of_sentence_transformers(tmp_path: Path, case: Case) -> None:
    """Every pooling, module and weight format, for every family that has a graph."""
    folder = write(case, tmp_path)
    model = reference(folder)
    async with opened(folder, await spec_of(folder)) as engine:
        got = await infer(engine, feeds(model, TEXTS), "sentence_embedding", "pooled")
    expected = model.encode(TEXTS, convert_to_numpy=True)
    close(got["sentence_embedding"], expected)
    unit = got["pooled"] / np.linalg.norm(got["pooled"], axis=-1, keepdims=True)
    close(unit, expected / np.linalg.norm(expected, axis=-1, keepdims=True))


@pytest.mark.parametrize("case", [case for case in CASES if not case.include_prompt], ids=lambda case: case.name)
async def test_prompts_are_left_out_of_pooling(tmp_path: Path, case: Case) -> None:
    """pooling_mask excludes the same tokens as sentence-transformers."""
    folder = write(case, tmp_path)
    model = reference(folder)
    (name, prompt) = next(iter(case.prompts.items()))
    texts = [text for text in TEXTS if text.strip()]
    inputs = feeds(model, texts, prompt)
    pooled = inputs["attention_mask"].copy()
    head = model.tokenizer(prompt)["input_ids"]
    pooled[:, : len(head) - (head[-1] in model.tokenizer.all_special_ids)] = 0
    async with opened(folder, await spec_of(folder)) as engine:
        got = await infer(engine, inputs | {"pooling_mask": pooled}, "sentence_embedding")
    close(got["sentence_embedding"], model.encode(texts, prompt_name=name, convert_to_numpy=True))


@pytest.mark.parametrize("name", MODELS)
async def test_every_family(tmp_path: Path, name: str) -> None:
    """Architectures that transformers supports are served, in any batch, with the vectors of sentence-transformers."""
    folder = other(name, tmp_path)
    model = reference(folder)
    texts = [text for text in TEXTS if text.strip()]
    async with opened(folder, await spec_of(folder)) as engine:
        together = await infer(engine, feeds(model, texts), "sentence_embedding")
        alone = [await infer(engine, feeds(model, [text]), "sentence_embedding") for text in texts]
    expected = model.encode(texts, convert_to_numpy=True)
    close(together["sentence_embedding"], expected)
    close(np.concatenate([one["sentence_embedding"] for one in alone]), expected)


async def test_a_decoder_pads_on_either_side(tmp_path: Path) -> None:
    """The last token in the mask is pooled, on whichever side the padding is."""
    folder = other("qwen3", tmp_path)
    model = reference(folder)
    async with opened(folder, await spec_of(folder)) as engine:
        rows = [(await infer(engine, feeds(model, TEXTS[:3], left=left), "pooled"))["pooled"] for left in (False, True)]
    close(*rows)


async def test_token_vectors_are_those_of_the_encoder(tmp_path: Path) -> None:
    """The token vectors equal sentence-transformers' token_embeddings, at every attended token."""
    folder = write(CASES[0], tmp_path)
    model = reference(folder)
    inputs = feeds(model, TEXTS)
    async with opened(folder, await spec_of(folder, tokens="token_embeddings")) as engine:
        rows = (await infer(engine, inputs, "token_embeddings"))["token_embeddings"]
    expected = model.encode(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    for row, mask, right in zip(rows, inputs["attention_mask"], expected, strict=True):
        close(row[mask > 0], right.cpu().numpy()[: mask.sum()])


@pytest.mark.parametrize("labels", [1, 3])
async def test_classifiers_give_their_logits(tmp_path: Path, labels: int) -> None:
    """Pairs with their segments, scored one by one by AutoModelForSequenceClassification."""
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_labels=labels, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    spec = TextSpec(
        tokenizer="tokenizer.json",
        inputs=("input_ids", "attention_mask", "token_type_ids"),
        dimension=0,
        max_tokens=512,
        score=ScoreSpec(labels=tuple(map(str, range(labels))), activation="identity"),
    )
    inputs = batch(9, 4, 17)
    inputs["token_type_ids"] = (np.arange(17) > 2).astype(np.int64) * inputs["attention_mask"]
    async with opened(tmp_path, spec) as engine:
        got = (await infer(engine, inputs, "logits"))["logits"]
        with pytest.raises(InputRejected, match="token_type_ids"):
            await infer(engine, inputs | {"token_type_ids": inputs["token_type_ids"] + 1}, "logits")
    with torch.inference_mode():
        for row, length in enumerate((9, 4, 17)):
            one = {name: torch.from_numpy(array[row : row + 1, :length]) for name, array in inputs.items()}
            np.testing.assert_allclose(got[row], model(**one).logits[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
async def test_splade_weights_are_those_of_sentence_transformers(
    tmp_path: Path, strategy: str, activation: str
) -> None:
    import torch
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    torch.manual_seed(5)
    encoder = tmp_path / "encoder"
    size = words_tokenizer(encoder)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(encoder)
    first = Transformer(str(encoder), transformer_task="fill-mask", max_seq_length=LONGEST)
    model = SparseEncoder(
        modules=[first, SpladePooling(pooling_strategy=strategy, activation_function=activation)], device="cpu"
    )
    model.save(str(tmp_path / "model"), create_model_card=False)
    contract = await asyncio.to_thread(read_contract, tmp_path / "model")
    spec = text_spec(contract, tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), pooled="pooled")
    async with opened(tmp_path / "model", spec) as engine:
        got = (await infer(engine, feeds(model, TEXTS[:4]), "sparse_embedding"))["sparse_embedding"]
    close(got, model.encode(TEXTS[:4], convert_to_tensor=True).to_dense().numpy())


def beside(name: str, dimension: int, activation: str) -> LayerSpec:
    """Write a head of bge-m3 to a file beside the encoder."""
    return LayerSpec(
        kind="dense", takes=HIDDEN, dimension=dimension, file=f"{name}_linear.safetensors", stem="",
        activation=activation,
    )  # fmt: skip


async def test_bge_m3_gives_all_kinds_in_one_call(tmp_path: Path) -> None:
    """Dense, sparse and multi vectors from one run of the encoder, each equal to its formula."""
    import torch
    from safetensors.torch import save_file

    model = TinyBert(tmp_path)
    modules(tmp_path, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    torch.manual_seed(3)
    heads = {name: (torch.randn(size, HIDDEN), torch.randn(size)) for name, size in (("sparse", 1), ("colbert", 12))}
    for name, (weight, bias) in heads.items():
        save_file({"weight": weight, "bias": bias}, tmp_path / f"{name}_linear.safetensors")
    spec = msgspec.structs.replace(
        model.spec,
        pooling="cls",
        modules=("normalize",),
        ends_normalized=True,
        sparse=SparseSpec(output="token_weights", per="token"),
        multi=MultiSpec(dimension=12, drop_first=True),
        tokens="token_embeddings",
        parts=PartsSpec(
            after=(LayerSpec(kind="normalize"),),
            token_weights=beside("sparse", 1, "relu"),
            late=(beside("colbert", 12, "identity"),),
        ),
    )
    feeds = batch(6, 3)
    async with opened(tmp_path, spec) as engine:
        got = await infer(engine, feeds, *spec.outputs)
    tokens, mask = got["token_embeddings"], feeds["attention_mask"]
    assert set(got) == set(spec.outputs)
    close(got["pooled"], tokens[:, 0])
    sparse = np.maximum(tokens @ heads["sparse"][0].numpy().T + heads["sparse"][1].numpy(), 0)[..., 0] * mask
    np.testing.assert_allclose(got["token_weights"], sparse, atol=1e-4)
    multi = tokens @ heads["colbert"][0].numpy().T + heads["colbert"][1].numpy()
    np.testing.assert_allclose(got["multi_vectors"], multi / np.linalg.norm(multi, axis=-1, keepdims=True), atol=1e-4)


def test_streams_share_the_threads() -> None:
    """torch has threads of their own for each thread that calls it."""
    import torch

    before = torch.get_num_threads()
    try:
        _Device("cpu", "cpu", slots=2, threads=8, version="").init_thread()
        assert torch.get_num_threads() == 4
        _Device("cpu", "cpu", slots=4, threads=2, version="").init_thread()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
