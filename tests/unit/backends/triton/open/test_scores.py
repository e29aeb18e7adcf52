"""Rerankers and classifiers that Shoal did not write, on a server in this process: token ids, one text, two texts."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends.triton.open.models import TritonRunner
from shoal.backends.triton.open.scores import TextScorePipeline
from shoal.config.settings import ModelTable
from shoal.errors import ConfigError, InvalidValue, Unsupported
from shoal.kserve import protocol_pb2 as pb
from shoal.pipelines.scores import apply_activation
from shoal.pipelines.text.pairing import PairInput, PairTokenizer
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.specs import Activation
from shoal.types import Array, Classify, Rerank, Scored
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, reply
from tests.unit.backends.triton.open.kit import VOCAB, Open, requests_of, soon, table, until
from tests.unit.models.checkpoints import checkpoint
from tests.unit.models.classifiers import classifier

PAIRS = [("what do fish do", "fish"), ("what do fish do", "to gether, a b c"), ("42", "fish")]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A reranker's tokenizer and configuration."""
    made = classifier(tmp_path / "reranker")
    (made / "model.safetensors").unlink()
    return made


def logits_of(ids: Sequence[int], labels: int, seed: int = 0) -> Array:
    """Return the logits of `token_scorer` for these tokens; their order matters."""
    rows = table(labels, seed)[list(ids)]
    return np.asarray((rows * np.linspace(1, 2, len(rows))[:, None]).sum(0), np.float32)


def token_scorer(
    name: str = "rerank", labels: int = 1, *, output: str = "logits", dims: Sequence[int] | None = None, seed: int = 0
) -> FakeModel:
    config = pb.ModelConfig(name=name, backend="onnxruntime", max_batch_size=8)
    for one in ("input_ids", "attention_mask", "token_type_ids"):
        config.input.add(name=one, data_type=pb.TYPE_INT64, dims=[-1])
    config.output.add(name=output, data_type=pb.TYPE_FP32, dims=[labels] if dims is None else dims)

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        inputs = triton_codec.read_inputs(request)
        # Segments differ: the second text's tokens count as other ones.
        ids = (inputs["input_ids"] + 7 * inputs["token_type_ids"]) % VOCAB
        lengths = inputs["attention_mask"].sum(1)
        rows = [logits_of(row[:length], labels, seed) for row, length in zip(ids, lengths, strict=True)]
        return reply(request, final=None, **{output: np.stack(rows)})

    return FakeModel(name, config=config, answer=answer)


def expected(files: Path, pairs: Sequence[tuple[str, str | None]], labels: int = 1) -> Array:
    tokenizer = TextTokenizer(files, "tokenizer.json")
    pairing = PairTokenizer(tokenizer, "tokenizer.json", 30)
    rows = []
    for framed in pairing.read([PairInput(first, second, "right") for first, second in pairs]):
        assert not isinstance(framed, Exception)
        types = pairing.types(framed) if framed.second is not None else [0] * len(framed.ids)
        rows.append(logits_of([(one + 7 * kind) % VOCAB for one, kind in zip(framed.ids, types, strict=True)], labels))
    return np.stack(rows)


async def scores(runner: TritonRunner, items: Sequence[Any] = PAIRS, *, raw: bool = True) -> Array:
    answer = await runner.run(Classify(model="m", inputs=list(items), raw_scores=raw), soon())
    assert isinstance(answer, Scored)
    return answer.scores


class TestTokenModels:
    async def test_its_files_say_what_it_is(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        """Labels, activation and segments come from the files, for pairs, single texts and rerank requests."""
        triton.add(token_scorer())
        runner = await opened("rerank", table=ModelTable(tokenizer=str(files)))
        facts = runner.facts
        assert (facts.tasks, facts.vectors, facts.labels) == (("rerank", "classify"), (), ("LABEL_0",))
        assert (facts.dimension, facts.space, facts.pooling, facts.max_input_tokens) == (None, "", "", 30)
        assert (facts.verified, facts.details["activation"]) == ("4 pairs answered, all finite", "sigmoid")
        assert facts.details["usage"] == "counted"
        assert isinstance(runner.lane.pipeline, PairPipeline)
        wanted = await asyncio.to_thread(expected, files, PAIRS)
        np.testing.assert_allclose(await scores(runner), wanted, rtol=1e-5)
        np.testing.assert_allclose(await scores(runner, raw=False), apply_activation(wanted, "sigmoid"), rtol=1e-4)
        alone = await asyncio.to_thread(expected, files, [("fish", None)])
        np.testing.assert_allclose(await scores(runner, ["fish"]), alone, rtol=1e-5)
        task = Rerank(model="m", queries=["42"], documents=["fish"], raw_scores=True)
        np.testing.assert_allclose((await runner.run(task, soon())).scores, wanted[2:], rtol=1e-5)
        assert [
            token.text for token in (await runner.tokenize(["fish"], add_special_tokens=False, prompt_name=None))[0]
        ]

    async def test_a_classifiers_labels(self, triton: FakeTriton, opened: Open, tmp_path: Path) -> None:
        """In the order of its scores; with such files the output may have any name."""
        made = classifier(tmp_path / "three", labels=3, config={"id2label": {"0": "no", "1": "maybe", "2": "yes"}})
        triton.add(token_scorer("three", 3, output="output"))
        runner = await opened("three", table=ModelTable(tokenizer=str(made)))
        assert (runner.facts.tasks, runner.facts.labels) == (("classify",), ("no", "maybe", "yes"))
        assert runner.facts.verified == "4 texts answered, all finite"
        found = await scores(runner, ["fish", "to"], raw=False)
        np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)

    async def test_the_tables_word_is_enough(self, triton: FakeTriton, opened: Open, tmp_path: Path) -> None:
        """With an embedder's tokenizer and any output name, the table alone makes it a reranker."""
        made = checkpoint(tmp_path / "embedder")
        triton.add(token_scorer("three", 3, output="output", dims=[-1]))
        labels = ("no", "maybe", "yes")
        expected = ModelTable(tokenizer=str(made), tasks=("classify",), labels=labels, activation="identity")
        facts = (await opened("three", table=expected)).facts
        assert (facts.tasks, facts.labels, facts.details["activation"]) == (("classify",), labels, "identity")
        with pytest.raises(ConfigError, match="it is not known whether they are final: set `activation`") as caught:
            await opened("three", table=ModelTable(tokenizer=str(made), tasks=("classify",)))
        assert caught.value.param == "activation"

    async def test_without_labels_they_are_numbered(self, triton: FakeTriton, opened: Open, tmp_path: Path) -> None:
        """The probe finds their number if the configuration does not have it."""
        made = checkpoint(tmp_path / "embedder")
        triton.add(token_scorer("two", 2, dims=[-1]))
        facts = (await opened("two", table=ModelTable(tokenizer=str(made)))).facts
        assert (facts.labels, facts.details["activation"]) == (("LABEL_0", "LABEL_1"), "softmax")

    @pytest.mark.parametrize("dims", [[2], [-1]])
    async def test_labels_that_do_not_fit(self, triton: FakeTriton, opened: Open, files: Path, dims: list[int]) -> None:
        """An error, not wrong labels."""
        triton.add(token_scorer("two", 2, dims=dims))
        with pytest.raises(ConfigError, match=r"m returns 2 scores .* config.json beside its tokenizer has 1 labels"):
            await opened("two", table=ModelTable(tokenizer=str(files)))
        with pytest.raises(ConfigError, match="`labels` of its table has 3 labels"):
            await opened("two", table=ModelTable(tokenizer=str(files), labels=("a", "b", "c")))

    async def test_an_embedder_with_a_rerankers_tokenizer(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        """Its outputs stay vectors."""
        triton.add(token_scorer("emb", 16, output="sentence_embedding"))
        runner = await opened("emb", table=ModelTable(tokenizer=str(files)))
        assert (runner.facts.tasks, runner.facts.dimension) == (("embed",), 16)

    async def test_replicas_must_agree(self, triton: FakeTriton, second: FakeTriton, opened: Open, files: Path) -> None:
        """On the scores of a few pairs."""
        triton.add(token_scorer())
        second.add(token_scorer(seed=1))
        runner = await opened("rerank", triton, second, table=ModelTable(tokenizer=str(files)))
        other = runner.lane.replicas[1].engine
        await until(lambda: "returns different scores than the other replicas" in other.reason)
        assert not other.ready()


def score_of(first: str, second: str | None) -> float:
    return zlib.crc32(f"{first}|{second}".encode()) / 2**32 * 8 - 4


def text_scorer(name: str, inputs: Sequence[str], *, output: str = "scores", size: int = 8) -> FakeModel:
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=size)
    for one in inputs:
        config.input.add(name=one, data_type=pb.TYPE_STRING, dims=[1])
    config.output.add(name=output, data_type=pb.TYPE_FP32, dims=[1])

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        values = triton_codec.read_inputs(request)
        sides = [[each.decode() for each in values[one].ravel()] for one in inputs]
        rows = zip(*sides, strict=True) if len(sides) > 1 else ((one, None) for one in sides[0])
        return reply(request, final=None, **{output: np.array([[score_of(*row)] for row in rows], np.float32)})

    return FakeModel(name, config=config, answer=answer)


class TestTextModels:
    @pytest.mark.parametrize("names", [("query", "passage"), ("query", "document"), ("text", "text_pair")])
    @pytest.mark.parametrize("activation", ["sigmoid", "identity"])
    async def test_two_texts(
        self, triton: FakeTriton, opened: Open, names: tuple[str, str], activation: Activation
    ) -> None:
        """They are sent unchanged and batched; final scores have no raw ones."""
        triton.add(text_scorer("rerank", names))
        runner = await opened("rerank", table=ModelTable(activation=activation))
        assert (runner.facts.tasks, runner.facts.labels) == (("rerank", "classify"), ("LABEL_0",))
        assert (runner.facts.details["schema"], runner.facts.details["usage"]) == ("pairs", "estimated")
        assert isinstance(runner.lane.pipeline, TextScorePipeline)
        logits = np.array([[score_of(*pair)] for pair in PAIRS], np.float32)
        before = len(requests_of(triton, "ModelInfer"))
        np.testing.assert_allclose(await scores(runner, raw=False), apply_activation(logits, activation), rtol=1e-5)
        assert len(requests_of(triton, "ModelInfer")) == before + 1
        if activation == "identity":
            with pytest.raises(Unsupported, match="raw"):
                await scores(runner)
        else:
            np.testing.assert_allclose(await scores(runner), logits, rtol=1e-6)
        with pytest.raises(InvalidValue, match="two texts together"):
            await scores(runner, ["fish"], raw=False)

    async def test_names_of_ones_own(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(text_scorer("rerank", ("q", "d"), output="relevance"))
        with pytest.raises(ConfigError, match="input_names"):
            await opened("rerank")
        names: dict[Any, str] = {"text": "q", "pair": "d"}
        runner = await opened("rerank", table=ModelTable(input_names=names, activation="sigmoid"))
        np.testing.assert_allclose((await scores(runner))[0, 0], score_of(*PAIRS[0]), rtol=1e-6)

    async def test_one_text(self, triton: FakeTriton, opened: Open) -> None:
        """A classifier rejects pairs and reranking."""
        triton.add(text_scorer("class", ("text",), output="logits"))
        runner = await opened("class", table=ModelTable(labels=("spam",)))
        assert (runner.facts.tasks, runner.facts.labels) == (("classify",), ("spam",))
        np.testing.assert_allclose((await scores(runner, ["fish"]))[0, 0], score_of("fish", None), rtol=1e-6)
        with pytest.raises(InvalidValue, match="one text at a time"):
            await scores(runner, PAIRS)

    async def test_a_tokenizer_counts(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        """Its files also define the labels."""
        triton.add(text_scorer("rerank", ("query", "passage")))
        runner = await opened("rerank", table=ModelTable(tokenizer=str(files), max_tokens=12))
        assert (runner.facts.details["usage"], runner.facts.max_input_tokens) == ("counted", 12)
        assert runner.facts.details["activation"] == "sigmoid"
        answer = await runner.run(Rerank(model="m", queries=["fish"], documents=["to"]), soon())
        assert answer.tokens == [5]

    async def test_scores_of_unknown_meaning_are_refused(self, triton: FakeTriton, opened: Open) -> None:
        """`logits` have a known meaning; `scores` do not."""
        triton.add(text_scorer("rerank", ("query", "passage")))
        with pytest.raises(ConfigError, match=r'set `activation` in \[models."m"\]'):
            await opened("rerank")
        triton.add(text_scorer("logits", ("query", "passage"), output="logits"))
        assert (await opened("logits")).facts.details["activation"] == "sigmoid"
