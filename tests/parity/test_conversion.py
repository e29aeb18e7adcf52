"""Models that need the exporter, end to end: from a folder through the exporter's own process into the store, and from
there to vectors and scores equal to those of the libraries that saved them."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import LocalModel, open_local, prepare_local
from shoal.config.settings import Settings
from shoal.core.protocols import Prepared, VectorSet
from shoal.errors import Cancelled, ModelFileError, ShoalError
from shoal.models.convert.verify import min_cosine
from shoal.models.progress import Progress, Stop
from shoal.models.store import Store, StoredModel
from shoal.types import Array, Classify, Embed, Item, VectorKind
from tests.parity import head_models as made
from tests.parity.family_models import FOREIGN, other, words_tokenizer
from tests.parity.reference_models import CASES, LONGEST, _tokenizer, write
from tests.parity.test_cross_encoders import DOCUMENTS, PAIRS, scores
from tests.parity.test_pickled import Evil, pickled
from tests.parity.test_reference import TEXTS, reference

# Warnings of the reference's libraries are not this project's; every export starts a process with PyTorch.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

COSINE = 0.9999
NON_EMPTY = [text for text in TEXTS if text.strip()]


def settings(home: Path, **more: Any) -> Settings:
    plain = Settings(home=str(home), offline=True, engine="openvino", precision="f32", truncate=True)
    return msgspec.structs.replace(plain, **more)


def opened(folder: Path, home: Path, **more: Any) -> LocalModel:
    return asyncio.run(open_local("m", [parse_address(f"file:{folder}")], settings(home, **more)))


def stored(folder: Path, home: Path, **more: Any) -> StoredModel:
    return prepare_local(parse_address(f"file:{folder}"), settings(home, **more))


def rows(local: LocalModel, texts: Sequence[str], kinds: tuple[VectorKind, ...], **options: Any) -> list[VectorSet]:
    """Return the vectors of every text, in batches of five."""
    task = Embed(model="m", inputs=[*texts], outputs=kinds, truncate=True, **options)
    prepared = local.pipeline.prepare([(task, text) for text in texts])
    engine = local.engines[0]
    answers: list[Any] = []
    for start in range(0, len(texts), 5):
        batch = [one for one in prepared[start : start + 5] if isinstance(one, Prepared)]
        assert len(batch) == len(texts[start : start + 5])
        inputs = local.pipeline.collate(batch, engine.facts)
        names = tuple({name for one in batch for name in one.outputs})
        outputs = asyncio.run(engine.infer(inputs, names, {}, time.monotonic() + 60))
        answers.extend(local.pipeline.finish(outputs, batch))
    return [row if isinstance(row, VectorSet) else VectorSet(dense=row) for row in answers]


def dense(local: LocalModel, texts: Sequence[str], **options: Any) -> Array:
    return np.stack([row.dense for row in rows(local, texts, ("dense",), **options) if row.dense is not None])


def sparse(local: LocalModel, texts: Sequence[str], size: int, **options: Any) -> Array:
    """Return sparse vectors as dense rows over the whole vocabulary."""
    dense = np.zeros((len(texts), size), np.float32)
    for row, vectors in zip(dense, rows(local, texts, ("sparse",), **options), strict=True):
        assert vectors.sparse is not None
        row[vectors.sparse.indices] = vectors.sparse.values
    return dense


def close(got: Array, expected: Array) -> None:
    expected = np.asarray(expected, np.float32).reshape(got.shape)
    assert np.abs(got - expected).max() <= 1e-3 * max(1.0, float(np.abs(expected).max()))
    if got.shape[-1] > 1:
        assert min_cosine(got, expected) >= COSINE


def no_pickles(model: StoredModel) -> bool:
    return not [path for path in model.path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_pickled_model_is_built(tmp_path: Path, shards: int) -> None:
    """Its weights become safetensors, Shoal builds its graph, and numpy agrees with it."""
    folder = write(next(case for case in CASES if case.name == "bert-two-dense"), tmp_path)
    expected = reference(folder).encode(TEXTS, convert_to_numpy=True)
    local = opened(pickled(folder, shards=shards), tmp_path / "home")
    assert local.facts.details["graph"] == "built"
    assert "numpy" in local.facts.verified
    close(dense(local, TEXTS, normalize=False), expected)
    model = stored(folder, tmp_path / "home")
    assert no_pickles(model)
    assert len(model.manifest.weights) == 2 + shards
    assert all(".bin" in name for name in model.manifest.weights)
    served = opened(folder, tmp_path / "home", engine="torch")
    close(dense(served, TEXTS, normalize=False), expected)
    assert served.facts.space == local.facts.space


def test_all_kinds_of_bge_m3_from_pickles(tmp_path: Path) -> None:
    """One model file and two heads, as they are published, equal to their formula."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    folder = made.write_m3(tmp_path)
    encoder, tokenizer = AutoModel.from_pretrained(folder).eval(), _tokenizer("xlm-roberta")
    heads = {name: load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert")}
    for name, state in heads.items():
        (folder / f"{name}_linear.safetensors").unlink()
        torch.save(state, folder / f"{name}_linear.pt")
    local = opened(pickled(folder), tmp_path / "home")
    assert local.facts.vectors == ("dense", "sparse", "multi", "tokens")
    without = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for text, row in zip(TEXTS, rows(local, TEXTS, ("dense", "sparse", "multi")), strict=True):
        ids = tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"]
        with torch.no_grad():
            hidden = encoder(torch.tensor([ids])).last_hidden_state[0]
            weights = torch.relu(hidden @ heads["sparse"]["weight"].T + heads["sparse"]["bias"])[:, 0]
            vectors = hidden[1:] @ heads["colbert"]["weight"].T + heads["colbert"]["bias"]
        expected: dict[int, float] = {}
        for token, weight in zip(ids, weights.tolist(), strict=True):
            if weight > 0 and token not in without:
                expected[token] = max(weight, expected.get(token, 0.0))
        assert row.dense is not None and row.sparse is not None and row.multi is not None
        close(row.dense[None], torch.nn.functional.normalize(hidden[:1]).numpy())
        close(row.multi, torch.nn.functional.normalize(vectors).numpy())
        got = dict(zip(row.sparse.indices.tolist(), row.sparse.values.tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    model = stored(folder, tmp_path / "home")
    assert no_pickles(model)
    assert set(model.manifest.weights) == {"pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt"}


def test_an_encoder_without_a_graph(tmp_path: Path) -> None:
    folder = other("megatron-bert", tmp_path)
    local = opened(folder, tmp_path / "home")
    assert local.facts.details["graph"] == "exported"
    assert "agrees with PyTorch" in stored(folder, tmp_path / "home").manifest.conversion
    close(dense(local, NON_EMPTY), reference(folder).encode(NON_EMPTY, convert_to_numpy=True))


def test_a_decoder_with_prompts(tmp_path: Path) -> None:
    """As Qwen3-Embedding: last-token pooling, a reference that pads on the left, queries with an instruction, and a
    config.json that names a language model."""
    folder = other("qwen3", tmp_path)
    prompts = {"query": "where can i renew: ", "document": ""}
    edit(folder / "config_sentence_transformers.json", prompts=prompts)
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    edit(folder / "tokenizer_config.json", padding_side="left")
    (folder / "generation_config.json").write_text("{}")
    model = reference(folder)
    assert model.tokenizer.padding_side == "left"
    local = opened(folder, tmp_path / "home")
    assert (local.facts.pooling, local.facts.details["graph"]) == ("lasttoken", "built")
    close(dense(local, NON_EMPTY), model.encode(NON_EMPTY, convert_to_numpy=True))
    queries = model.encode(NON_EMPTY, prompt_name="query", convert_to_numpy=True)
    close(dense(local, NON_EMPTY, input_type="query"), queries)
    close(dense(local, NON_EMPTY, input_type="document"), model.encode(NON_EMPTY, prompt_name="document"))


def edit(place: Path, **keys: Any) -> None:
    place.write_text(json.dumps(json.loads(place.read_text()) | keys))


def write_scorer(folder: Path, labels: int, *, library: str) -> Path:
    """A classifier, saved by transformers or as a cross-encoder."""
    import torch
    from sentence_transformers import CrossEncoder

    torch.manual_seed(4)
    plain = folder / "plain"
    size = words_tokenizer(plain)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit(plain / "tokenizer_config.json", model_max_length=LONGEST, model_input_names=names)
    model = FOREIGN["megatron-bert"](size, "MegatronBertForSequenceClassification", num_labels=labels)
    made._shake(model)
    model.save_pretrained(plain)
    if library == "transformers":
        return plain
    CrossEncoder(str(plain), device="cpu").save(str(folder / "model"), create_model_card=False)
    return folder / "model"


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_cross_encoder_without_a_graph(tmp_path: Path, engine: str) -> None:
    """Scores of pairs, raw and activated, from an exported graph and from the folder."""
    import torch
    from sentence_transformers import CrossEncoder

    folder = write_scorer(tmp_path, 1, library="sentence-transformers")
    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    local = opened(folder, tmp_path / "home", engine=engine)
    assert local.facts.details["graph"] == ("exported" if engine == "openvino" else "folder")
    assert (local.facts.tasks, local.facts.max_input_tokens) == (("rerank", "classify"), LONGEST)
    for raw in (False, True):
        expected = model.predict(PAIRS, activation_fn=torch.nn.Identity() if raw else None)
        close(scores(local, Classify(model="m", inputs=[], raw_scores=raw), PAIRS), expected)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_a_classifier_without_a_graph(tmp_path: Path, engine: str) -> None:
    """Of texts, by the rules of transformers' pipeline."""
    import transformers

    folder = write_scorer(tmp_path, 3, library="transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = transformers.TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    local = opened(folder, tmp_path / "home", engine=engine)
    names = list(model.config.id2label.values())
    assert (local.facts.tasks, local.facts.labels) == (("classify",), tuple(names))
    texts: list[Item] = [text for text in DOCUMENTS if text]
    answers = [pipeline(text, top_k=None, truncation=True) for text in texts]
    expected = [[{each["label"]: each["score"] for each in one}[name] for name in names] for one in answers]
    close(scores(local, Classify(model="m", inputs=[]), texts), np.array(expected, np.float32))


def write_splade(folder: Path, *, plain: bool = False) -> Path:
    """SPLADE over MegatronBERT, saved by sentence-transformers or as a masked language model whose files declare it."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import modules

    torch.manual_seed(6)
    place = folder / "plain"
    size = words_tokenizer(place)
    model = FOREIGN["megatron-bert"](size, "MegatronBertForMaskedLM")
    made._shake(model)
    model.save_pretrained(place)
    edit(place / "tokenizer_config.json", model_max_length=LONGEST)
    if plain:
        edit(place / "config.json", _name_or_path="org/splade-megatron")
        return place
    transformer = modules.Transformer(str(place), transformer_task="fill-mask")
    SparseEncoder(modules=[transformer, modules.SpladePooling()], device="cpu").save(
        str(folder / "model"), create_model_card=False
    )
    return folder / "model"


@pytest.mark.parametrize(("engine", "plain"), [("openvino", True), ("torch", False)])
def test_splade_without_a_graph(tmp_path: Path, engine: str, plain: bool) -> None:
    """The logits are exported, and Shoal adds its own pooling."""
    from sentence_transformers import SparseEncoder

    folder = write_splade(tmp_path, plain=plain)
    model = SparseEncoder(str(folder), device="cpu")
    local = opened(folder, tmp_path / "home", engine=engine)
    assert local.facts.vectors == ("sparse",)
    assert local.facts.details["graph"] == ("exported" if engine == "openvino" else "folder")
    expected = model.encode(NON_EMPTY, convert_to_tensor=True).to_dense().numpy()
    assert (expected > 0).any()
    close(sparse(local, NON_EMPTY, expected.shape[1]), expected)


def test_late_interaction_without_a_graph(tmp_path: Path) -> None:
    """A vector for each token, from an exported encoder and from the folder; queries and documents differ."""
    import torch
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(6)
    plain, folder = tmp_path / "plain", tmp_path / "model"
    encoder = FOREIGN["megatron-bert"](words_tokenizer(plain))
    made._shake(encoder)
    encoder.save_pretrained(plain)
    edit(plain / "tokenizer_config.json", model_max_length=LONGEST)
    MultiVectorEncoder(str(plain), device="cpu").save(str(folder), create_model_card=False)
    model = MultiVectorEncoder(str(folder), device="cpu")
    for engine in ("openvino", "torch"):
        local = opened(folder, tmp_path / "home", engine=engine)
        assert (local.facts.vectors, local.facts.details["graph"]) == (("multi",), "exported")
        for role in ("query", "document"):
            encode = model.encode_query if role == "query" else model.encode_document
            expected = encode(NON_EMPTY, convert_to_numpy=True)
            for row, right in zip(rows(local, NON_EMPTY, ("multi",), input_type=role), expected, strict=True):
                assert row.multi is not None
                close(row.multi, right)


def test_an_exported_graph_has_variants(tmp_path: Path) -> None:
    """Random weights of 32 dimensions lose accuracy easily: the test only checks that a variant exists and is
    smaller."""
    from shoal.models.convert.variants import make_variant
    from shoal.models.store import Store

    model = stored(other("megatron-bert", tmp_path), tmp_path / "home")
    made_here = make_variant(model, "int8", store=Store(tmp_path / "home"))
    assert made_here.stat().st_size < model.graph.stat().st_size


def evil(folder: Path, ran: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil(ran)}, protocol=2))


def code(folder: Path, ran: Path) -> None:
    pickled(folder)
    edit(folder / "config.json", auto_map={"AutoModel": "mine.Model"})
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(evil, r"pytorch_model\.bin: .*not a pickle of tensors only"), (code, "auto_map.*never runs")],
)
def test_files_that_run_code_are_refused(tmp_path: Path, spoil: Callable[[Path, Path], None], message: str) -> None:
    """The error is clear, no code runs, nothing stays in the store; and the same process serves the next model."""
    folder = write(CASES[0], tmp_path / "bad")
    spoil(folder, tmp_path / "ran")
    with pytest.raises(ModelFileError, match=message):
        stored(folder, tmp_path / "home")
    assert not (tmp_path / "ran").exists()
    assert Store(str(tmp_path / "home")).entries() == []
    good = pickled(write(CASES[0], tmp_path / "good"))
    expected_at = stored(good, tmp_path / "home")
    assert no_pickles(expected_at)


class Stopping(Progress):
    """Stops at the exporter's first report."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.begun = threading.Event()

    def report_work(self, stage: str, fraction: float) -> None:
        if stage == "load":
            self.begun.set()
            self._stop.set()


@pytest.mark.parametrize(
    ("bounds", "message"),
    [({"convert_max_memory_mb": 40}, "more than 40 MiB"), ({"convert_timeout_s": 0.5}, "more than 0 s|took more than")],
)
def test_bounds_end_it(tmp_path: Path, bounds: dict[str, Any], message: str) -> None:
    folder = other("megatron-bert", tmp_path)
    with pytest.raises(ModelFileError, match=message):
        stored(folder, tmp_path / "home", **bounds)
    check_nothing_left(tmp_path / "home")


def test_it_is_stopped(tmp_path: Path) -> None:
    folder, stop = other("megatron-bert", tmp_path), Stop()
    progress = Stopping(stop)
    with pytest.raises(Cancelled):
        prepare_local(parse_address(f"file:{folder}"), settings(tmp_path / "home"), progress=progress, stop=stop)
    assert progress.begun.is_set()
    check_nothing_left(tmp_path / "home")


def check_nothing_left(home: Path) -> None:
    """Assert that no files but locks remain."""
    assert [path for path in home.rglob("*") if path.is_file() and path.parent.name != "locks"] == []


def test_never_means_never(tmp_path: Path) -> None:
    """The setting forbids export although the extra is installed; pickles need none."""
    assert stored(pickled(write(CASES[0], tmp_path)), tmp_path / "home", convert="never").manifest.verification
    with pytest.raises(ShoalError, match="model_type"):
        stored(other("megatron-bert", tmp_path / "other"), tmp_path / "home", convert="never")
