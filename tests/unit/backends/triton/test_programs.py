"""The model.py files: the tokenizer returns the ids of Shoal's pipeline, the encoder the rows of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.backends.triton.repository_entry import EntrySpec, triton_models
from shoal.core.protocols import EngineFacts, Prepared
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import TextSpec
from shoal.types import Array, Embed
from tests.contract.engines.tiny import Tiny
from tests.unit.backends.triton.entry_kit import SPEC, entry
from tests.unit.backends.triton.python_backend import (
    InferenceResponse,
    Request,
    TritonModelException,
    install,
    load,
    start,
)
from tests.unit.pipelines.tiny_tokenizers import KINDS, save

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask")
TEXTS = [
    "the quick brown fox",
    "",
    "Größe  слово\t東京",
    "a" * 50,
    "word " * 400,
    "don't you\nthink so, in 2024?",
    " leading and trailing ",
]
PROMPTS = {"query": "query: ", "passage": "Passage: "}


def text_spec(**changes: Any) -> TextSpec:
    fields = {"inputs": INPUTS, "max_tokens": 16, "pad_id": 1, "prompts": PROMPTS, "dimension": 64}
    return msgspec.structs.replace(SPEC, **(fields | changes))


def tokenizer_of(monkeypatch: pytest.MonkeyPatch, folder: Path, spec: EntrySpec) -> Any:
    model = next(model for model in triton_models(spec) if model.part == "tokenizer")
    return start(load(monkeypatch, install(model, folder)), model)


def ask(texts: Sequence[str | bytes], outputs: Sequence[str] = INPUTS) -> Request:
    raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return Request({"text": np.array([[one] for one in raw], dtype=object)}, outputs)


def piped(folder: Path, spec: TextSpec, texts: Sequence[str]) -> dict[str, Array]:
    """Return the tensors that Shoal's own pipeline sends to an engine for these texts."""
    pipeline = TextPipeline(folder, spec, truncate=True)
    task = Embed(model="", inputs=[])
    prepared = pipeline.prepare([(task, text) for text in texts])
    batch = [one for one in prepared if isinstance(one, Prepared)]
    assert len(batch) == len(texts), prepared
    return pipeline.collate(batch, EngineFacts(name="", inputs=(), outputs=()))


def same(answer: InferenceResponse, expected: dict[str, Array]) -> None:
    assert answer.error is None, answer.error
    assert set(answer.outputs) == set(expected)
    for name, array in expected.items():
        assert answer.outputs[name].dtype == np.int64
        np.testing.assert_array_equal(answer.outputs[name], array, err_msg=name)


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("prompt", [None, "query", "passage"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_agrees_with_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, prompt: str | None, lower_case: bool
) -> None:
    """Ids, masks, positions and padding, for short, long and empty texts, with prompts that pooling excludes."""
    text = text_spec(default_prompt_name=prompt, lower_case=lower_case, include_prompt=prompt != "passage")
    spec = entry(tmp_path, text=text, options={"text_in": True})
    save(KINDS[kind](), tmp_path)
    model = tokenizer_of(monkeypatch, tmp_path / "triton", spec)
    requests = [TEXTS, TEXTS[:1], ["Short", "ONE longer"]]
    answers = model.execute([ask(texts) for texts in requests])
    for texts, answer in zip(requests, answers, strict=True):
        same(answer, piped(tmp_path, text, texts))


@pytest.mark.parametrize(("prompt", "task"), [(None, None), (None, "b"), ("a", "b"), ("query", "b")])
def test_the_tokenizer_fills_the_default_adapter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompt: str | None, task: str | None
) -> None:
    """That of the default prompt's name, else of the default task; none without both."""
    text = text_spec(
        inputs=("input_ids", "adapter_ids"),
        prompts={**PROMPTS, "a": "", "b": ""},
        embedding_tasks=("a", "b"),
        default_embedding_task=task,
        default_prompt_name=prompt,
    )
    spec = entry(tmp_path, text=text, options={"text_in": True})
    save(KINDS["wordpiece"](), tmp_path)
    (answer,) = tokenizer_of(monkeypatch, tmp_path / "triton", spec).execute([ask(TEXTS, text.inputs)])
    same(answer, piped(tmp_path, text, TEXTS))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=80), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_agrees_for_any_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, texts: list[str]
) -> None:
    spec = entry(tmp_path, text=text_spec(), options={"text_in": True})
    save(KINDS[kind](), tmp_path)
    model = tokenizer_of(monkeypatch, tmp_path / "triton", spec)
    assert spec.text is not None
    same(model.execute([ask(texts)])[0], piped(tmp_path, spec.text, texts))


def test_the_tokenizer_returns_the_requested_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One output of several."""
    spec = entry(tmp_path, text=text_spec(), options={"text_in": True})
    save(KINDS["wordpiece"](), tmp_path)
    (answer,) = tokenizer_of(monkeypatch, tmp_path / "triton", spec).execute([ask(["a"], ["attention_mask"])])
    assert list(answer.outputs) == ["attention_mask"]


def test_a_bad_text_fails_its_own_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Invalid UTF-8 and a canceled request fail; the request between them succeeds."""
    spec = entry(tmp_path, text=text_spec(), options={"text_in": True})
    save(KINDS["byte_bpe"](), tmp_path)
    model = tokenizer_of(monkeypatch, tmp_path / "triton", spec)
    left = ask(["a"])
    left.cancelled = True
    bad, good, cancelled = model.execute([ask([b"\xff\xfe"]), ask(["a"]), left])
    assert (bad.error.code, bad.error.message) == ("invalid", "the texts must be UTF-8")
    assert good.error is None
    assert cancelled.error.code == "cancelled"


def test_texts_without_tokens_and_without_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without special tokens an empty text has no tokens; without an unknown token the tokenizer fails."""
    from tokenizers import Tokenizer, models

    spec = entry(tmp_path, text=text_spec(), options={"text_in": True})
    Tokenizer(models.WordLevel({"a": 0, "größe": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    model = tokenizer_of(monkeypatch, tmp_path / "triton", spec)
    empty, unknown = model.execute([ask(["a", ""]), ask(["b"])])
    assert empty.error.message == "input 1: the tokenizer returned no tokens"
    assert unknown.error.code == "invalid"
    assert "the tokenizer failed on these texts" in unknown.error.message


@pytest.fixture
def tiny(tmp_path: Path) -> EntrySpec:
    """An entry for the python backend with a small graph."""
    text = text_spec(inputs=("input_ids", "attention_mask"))
    spec = entry(tmp_path, text=text, options={"platform": "python", "instances": 2, "kind": "auto"})
    Tiny().save(spec.graph)
    return spec


def encoder_of(monkeypatch: pytest.MonkeyPatch, folder: Path, spec: EntrySpec, **start_options: Any) -> Any:
    (model,) = triton_models(spec)
    return start(load(monkeypatch, install(model, folder / "triton")), model, **start_options)


def rows(shape: tuple[int, int], *, token: int | None = None) -> dict[str, Array]:
    ids = np.random.default_rng(sum(shape)).integers(0, 100, shape, dtype=np.int64)
    if token is not None:
        ids[0, 0] = token
    return {"input_ids": ids, "attention_mask": np.ones(shape, np.int64)}


def test_the_encoder_answers_each_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: EntrySpec) -> None:
    """With the graph's own rows, for the requested outputs; requests of equal length share a run."""
    model = encoder_of(monkeypatch, tmp_path, tiny)
    shapes = [(2, 5), (1, 7), (3, 5), (1, 5)]
    expected = [["pooled"], ["pooled"], ["pooled"], ["sentence_embedding", "pooled"]]
    requests = [Request(rows(shape), outputs) for shape, outputs in zip(shapes, expected, strict=True)]
    runs: list[int] = []
    session = model.session

    class Counted:
        def run(self, outputs: list[str], feed: dict[str, Array]) -> list[Array]:
            runs.append(len(feed["input_ids"]))
            result: list[Array] = session.run(outputs, feed)
            return result

    model.session = Counted()
    answers = model.execute(requests)
    assert sorted(runs) == [1, 1, 5]
    direct = onnxruntime.InferenceSession(str(tiny.graph), providers=["CPUExecutionProvider"])
    for request, answer in zip(requests, answers, strict=True):
        assert list(answer.outputs) == list(request.outputs)
        for name in request.outputs:
            np.testing.assert_allclose(answer.outputs[name], direct.run([name], request.inputs)[0], atol=1e-6)
            assert answer.outputs[name].flags.c_contiguous


def test_a_bad_request_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: EntrySpec) -> None:
    """A token id outside the graph's vocabulary, in a run with others; and a canceled request."""
    model = encoder_of(monkeypatch, tmp_path, tiny)
    left = Request(rows((1, 5)), ["pooled"], cancelled=True)
    good, bad, cancelled = model.execute(
        [Request(rows((2, 5)), ["pooled"]), Request(rows((1, 5), token=5000), ["pooled"]), left]
    )
    assert good.error is None
    assert good.outputs["pooled"].shape == (2, 64)
    assert bad.error.code == "invalid"
    assert "ONNX Runtime" in bad.error.message
    assert cancelled.error.code == "cancelled"


def test_instances_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: EntrySpec) -> None:
    """Each instance uses its share, and does not spin while it waits."""
    made: list[Any] = []
    session = onnxruntime.InferenceSession

    def watched(path: str, settings: Any, **named: Any) -> Any:
        made.append((settings, named))
        return session(path, settings, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    encoder_of(monkeypatch, tmp_path, tiny)
    ((settings, named),) = made
    assert (settings.intra_op_num_threads, settings.inter_op_num_threads) == (4, 1)
    assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert named == {"providers": ["CPUExecutionProvider"]}


def test_the_gpu_is_taken_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: EntrySpec) -> None:
    """`auto` uses it if Triton assigns one and ONNX Runtime has CUDA; `gpu` reports what is missing; `cpu` never uses
    it."""
    module = load(monkeypatch, install(triton_models(tiny)[0], tmp_path / "triton"))
    cpu = ["CPUExecutionProvider"]
    assert module.providers("auto", "GPU", "1") == cpu
    with pytest.raises(TritonModelException, match="install onnxruntime-gpu"):
        module.providers("gpu", "GPU", "0")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *cpu])
    cuda = [("CUDAExecutionProvider", {"device_id": "1"}), *cpu]
    assert module.providers("auto", "GPU", "1") == module.providers("gpu", "GPU", "1") == cuda
    assert module.providers("auto", "CPU", "0") == module.providers("cpu", "GPU", "0") == cpu
