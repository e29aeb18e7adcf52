"""Entries that Shoal wrote, on a server in this process that runs their graphs: every kind of stored model, and the
effects of a table and of other files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from shoal.backends import parse_address
from shoal.backends.base.prompts import apply_prompts
from shoal.backends.triton.open.host import build_entry_spec
from shoal.backends.triton.open.models import TritonRunner
from shoal.backends.triton.repository_entry import TritonModel, triton_models
from shoal.backends.triton.response import read_outputs
from shoal.config.settings import ModelTable, Settings
from shoal.errors import ConfigError, ModelFileError
from shoal.kserve import protocol_pb2 as pb
from shoal.models.prepare import prepare
from shoal.models.sources import Access
from shoal.models.space import stored_space
from shoal.models.store import Store, StoredModel
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokenizer import read_tokenizer
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import TextSpec
from shoal.types import Classify, Embed, Embedded, Rerank, VectorKind
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, Refused, reply
from tests.fixtures.tiny_llama import write_tokenizer
from tests.unit.backends.triton.open.kit import Open, requests_of, soon, token_model, until
from tests.unit.models.checkpoints import HIDDEN, checkpoint, dense
from tests.unit.models.classifiers import classifier
from tests.unit.models.family_checkpoints import family_checkpoint
from tests.unit.models.head_checkpoints import m3, native, pylate, splade, static
from tests.unit.models.scoring_checkpoints import answering_checkpoint


def with_dense(folder: Path) -> Path:
    checkpoint(folder, after=("Dense", "Normalize"))
    dense(folder, "2_Dense", HIDDEN, 4)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "cross": classifier,
    "three": lambda folder: classifier(folder, labels=3),
    "splade": splade,
    "m3": m3,
    "pylate": pylate,
    "native": native,
    "static": static,
    "dense": with_dense,
    "plain": checkpoint,
    "tasks": lambda folder: family_checkpoint(folder, "jina-v3"),
    "answers": lambda folder: answering_checkpoint(folder, "qwen3"),
}


class ModelSetup(NamedTuple):
    """A stored model, its entry, and its running graph."""

    stored: StoredModel
    entry: TritonModel
    session: Any

    @property
    def spec(self) -> TextSpec:
        return self.stored.manifest.text_spec


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSetup]:
    """One model of each kind."""
    folder = tmp_path_factory.mktemp("specs")
    found = {}
    for name, make in MAKERS.items():
        address = parse_address(f"file:{make(folder / name)}")
        stored = prepare(address, store=Store(folder / "home"), access=Access(offline=True))
        (entry,) = triton_models(build_entry_spec(name, stored, Settings()))
        session = onnxruntime.InferenceSession(str(stored.graph), providers=["CPUExecutionProvider"])
        found[name] = ModelSetup(stored, entry, session)
    return found


def written(one: ModelSetup, name: str = "m") -> FakeModel:
    """Return an entry's model as Triton serves it."""
    config = pb.ModelConfig()
    config.CopyFrom(one.entry.config)
    config.name = name

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        names = [output.name for output in request.outputs]
        found = one.session.run(names, triton_codec.read_inputs(request))
        return reply(request, final=None, **dict(zip(names, found, strict=True)))

    return FakeModel(name, config=config, answer=answer)


async def embed(runner: TritonRunner, *texts: str, outputs: tuple[VectorKind, ...], **fields: Any) -> Embedded:
    answer = await runner.run(Embed(model="m", inputs=list(texts), outputs=outputs, **fields), soon())
    assert isinstance(answer, Embedded)
    return answer


class TestEntries:
    @pytest.mark.parametrize("name", MAKERS)
    def test_dims_are_those_of_the_graph(self, made: dict[str, ModelSetup], name: str) -> None:
        """Triton's onnxruntime backend rejects others, and -1 where the graph has a fixed size."""
        graph = onnx.load(str(made[name].stored.graph), load_external_data=False).graph
        shapes = {
            one.name: [axis.dim_value or -1 for axis in one.type.tensor_type.shape.dim][1:] for one in graph.output
        }
        assert {one.name: list(one.dims) for one in made[name].entry.config.output} == shapes

    @pytest.mark.parametrize(
        ("name", "tasks", "kinds"),
        [
            ("cross", ("rerank", "classify"), ()),
            ("three", ("classify",), ()),
            ("splade", ("embed",), ("sparse",)),
            ("m3", ("embed",), ("dense", "sparse", "multi", "tokens")),
            ("pylate", ("embed",), ("multi",)),
            ("static", ("embed",), ("dense",)),
            ("dense", ("embed",), ("dense", "tokens")),
            ("tasks", ("embed",), ("dense", "tokens")),
            ("answers", ("rerank", "classify"), ()),
        ],
    )
    async def test_facts_are_those_of_the_store(
        self,
        triton: FakeTriton,
        opened: Open,
        made: dict[str, ModelSetup],
        name: str,
        tasks: tuple[str, ...],
        kinds: tuple[VectorKind, ...],
    ) -> None:
        """Tasks, kinds, labels and space; the pipeline is the local engine's."""
        stored, spec = made[name].stored, made[name].spec
        triton.add(written(made[name]))
        runner = await opened("m", stored=stored)
        facts = runner.facts
        assert (facts.tasks, facts.vectors) == (tasks, kinds) == (spec.tasks, spec.kinds)
        assert facts.labels == (spec.score.labels if spec.score else ())
        assert (facts.dimension or 0, facts.max_input_tokens) == (spec.dimension, spec.max_tokens)
        assert facts.space == stored_space(stored)
        assert facts.embedding_tasks == spec.embedding_tasks
        assert facts.takes_instruction == (name == "answers")
        assert isinstance(runner.lane.pipeline, PairPipeline if spec.score else TextPipeline)
        assert runner.lane.pipeline.spec == spec
        assert facts.verified == f"4 {'pairs' if name in ('cross', 'answers') else 'texts'} answered, all finite"

    async def test_each_text_gets_the_adapter_of_its_task(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        """By name, by role, by the default prompt of the table. A graph without the input has no tasks."""
        assert made["tasks"].spec.embedding_tasks == ("retrieval.query", "text-matching")
        triton.add(written(made["tasks"]))
        runner = await opened("m", stored=made["tasks"].stored, table=ModelTable(default_prompt_name="text-matching"))
        wishes: list[tuple[dict[str, Any], int]] = [
            ({"prompt_name": "text-matching"}, 2),
            ({"input_type": "query"}, 1),
            ({"input_type": "document"}, 0),
            ({}, 2),
        ]
        found = []
        for wish, number in wishes:
            found.append((await embed(runner, "fish", outputs=("dense",), **wish)).vectors[0])
            sent = triton_codec.read_inputs(requests_of(triton, "ModelInfer")[-1])["adapter_ids"]
            assert set(sent.ravel().tolist()) == {number}
        assert np.array_equal(found[0], found[3]) and not np.allclose(found[0], found[1], atol=1e-3)
        triton.add(token_model("folded", HIDDEN))
        assert (await opened("folded", stored=made["tasks"].stored)).facts.embedding_tasks == ()

    async def test_an_instruction_changes_the_scores(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        triton.add(written(made["answers"]))
        runner = await opened("m", stored=made["answers"].stored)
        tasks = [Rerank(model="m", queries=["a"], documents=["fish"], instruction=one) for one in (None, "a b", "fish")]
        plain, other, default = [float((await runner.run(task, soon())).scores[0, 0]) for task in tasks]
        assert plain == default != other

    async def test_only_requested_outputs_are_fetched(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        """One vector per token is much data."""
        triton.add(written(made["m3"]))
        runner = await opened("m", stored=made["m3"].stored)
        expected: list[tuple[tuple[VectorKind, ...], set[str]]] = [
            (("dense",), {"pooled"}),
            (("sparse",), {"token_weights"}),
            (("dense", "multi"), {"pooled", "multi_vectors"}),
            (("tokens",), {"token_embeddings"}),
        ]
        for kinds, outputs in expected:
            answer = await embed(runner, "fish", outputs=kinds)
            assert {one.name for one in requests_of(triton, "ModelInfer")[-1].outputs} == outputs
            assert bool(answer.vectors.size) == ("dense" in kinds)
            assert len(answer.multi_vectors) == ("multi" in kinds)
            assert len(answer.token_vectors) == ("tokens" in kinds)

    async def test_another_shoal_reads_the_entry(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup], tmp_path: Path
    ) -> None:
        """The tokenizer comes from the store, from the model's source, or from preparing the whole model."""
        for name in ("cross", "m3", "splade", "static"):
            stored, spec = made[name].stored, made[name].spec
            triton.add(written(made[name], name))
            for home in (stored.path.parents[2], tmp_path / f"home-{name}"):
                settings = Settings(home=str(home), offline=True)
                facts = (await opened(name, settings=settings)).facts
                assert (facts.tasks, facts.vectors, facts.space) == (spec.tasks, spec.kinds, stored_space(stored))

    async def test_heads_that_the_server_lacks_are_not_offered(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        """As in an entry of an older Shoal; if no head is left, the entry must be rewritten."""
        model = written(made["m3"])
        remaining = [
            one for one in model.config.output if one.name in ("sentence_embedding", "pooled", "token_weights")
        ]
        del model.config.output[:]
        model.config.output.extend(remaining)
        triton.add(model)
        assert (await opened("m", stored=made["m3"].stored)).facts.vectors == ("dense", "sparse")
        other = written(made["cross"], "other")
        other.config.output[0].name = "output"
        triton.add(other)
        with pytest.raises(ConfigError, match="load it through Shoal again"):
            await opened("other", stored=made["cross"].stored)

    async def test_a_specification_that_cannot_be_read(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        """The error names the key, as after a manual edit."""
        model = written(made["cross"])
        model.config.parameters["shoal_text"].string_value = "{"
        triton.add(model)
        with pytest.raises(ModelFileError, match="shoal_text"):
            await opened("m")

    async def test_replicas_are_compared_by_what_they_give(
        self, triton: FakeTriton, second: FakeTriton, opened: Open, made: dict[str, ModelSetup], tmp_path: Path
    ) -> None:
        """By sparse vectors, or the mean of late-interaction vectors; a replica with other weights stays out."""
        for name in ("splade", "pylate"):
            triton.add(written(made[name], name))
            other = written(made[name], name)
            right = other.answer

            def wrong(request: pb.ModelInferRequest, right: Any = right) -> pb.ModelInferResponse:
                found = read_outputs(right(request))
                return reply(request, final=None, **{key: np.roll(rows, 3, axis=-1) for key, rows in found.items()})

            other.answer = wrong
            second.add(other)
            runner = await opened(name, triton, second, stored=made[name].stored)
            engine = runner.lane.replicas[1].engine
            await until(lambda engine=engine: "returns different vectors than the other replicas" in engine.reason)  # type: ignore[misc]
            assert not engine.ready()


class TestPrompts:
    TABLE = ModelTable(prompts={"query": "to fish "}, default_prompt_name="query")

    async def test_a_tables_prompts_stand_above_the_models(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]
    ) -> None:
        """With local files and with the entry alone; the space changes to the local engine's for these prompts."""
        stored = made["plain"].stored
        triton.add(written(made["plain"]))
        runners = [await opened("m", table=self.TABLE, stored=stored), await opened("m", table=self.TABLE)]
        plain = await opened("m")
        meant = await embed(plain, "to fish fish", outputs=("dense",))
        for runner in runners:
            assert (runner.facts.prompts, runner.facts.default_prompt_name) == ({"query": "to fish "}, "query")
            found = await embed(runner, "fish", outputs=("dense",))
            np.testing.assert_allclose(found.vectors, meant.vectors, atol=1e-6)
        spaces = [runner.facts.space for runner in (*runners, plain)]
        assert spaces[0] == stored_space(apply_prompts(stored, self.TABLE))
        assert len(set(spaces)) == 3

    async def test_a_default_that_is_none(self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]) -> None:
        stored = made["plain"].stored
        triton.add(written(made["plain"]))
        for options in ({"stored": stored}, {}):
            with pytest.raises(ConfigError, match="'nope' is not a prompt of"):
                await opened("m", table=ModelTable(default_prompt_name="nope"), **options)

    async def test_a_reranker_has_none(self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup]) -> None:
        """The table's prompts have no effect: a reranker's training determines its prompts."""
        triton.add(written(made["cross"]))
        plain, other = await opened("m"), await opened("m", table=self.TABLE)
        task = Classify(model="m", inputs=[("a", "fish")])
        assert (await plain.run(task, soon())).scores == (await other.run(task, soon())).scores


class TestForeignHeads:
    async def test_token_vectors_beside_a_sentences(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """As in sentence-transformers' own exports."""
        model = triton.add(token_model("tok", HIDDEN))
        hidden = token_model("tok", HIDDEN, pooled=False).answer
        pooled = model.answer
        model.config.output.add(name="token_embeddings", data_type=pb.TYPE_FP32, dims=[-1, HIDDEN])
        model.answer = lambda request: reply(
            request,
            final=None,
            **{**read_outputs(pooled(request)), **read_outputs(hidden(request))},
        )
        runner = await opened("tok", table=ModelTable(tokenizer=str(source)))
        assert runner.facts.vectors == ("dense", "tokens")
        answer = await embed(runner, "fish", "fish to", outputs=("dense", "tokens"), normalize=False)
        assert [len(rows) for rows in answer.token_vectors] == answer.tokens == [3, 4]
        np.testing.assert_allclose(answer.token_vectors[1].mean(0), answer.vectors[1], atol=1e-5)

    async def test_sparse_vectors_by_the_operators_word(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """They are final weights, one per word of the vocabulary."""
        model = triton.add(token_model("tok", 12))
        right = model.answer
        model.answer = lambda request: reply(
            request, sentence_embedding=np.maximum(read_outputs(right(request))["sentence_embedding"], 0)
        )
        table = ModelTable(tokenizer=str(source), output_names={"sparse_embedding": "sentence_embedding"})
        runner = await opened("tok", table=table)
        assert (runner.facts.vectors, runner.facts.dimension) == (("sparse",), None)
        (vector,) = (await embed(runner, "fish", outputs=("sparse",))).sparse
        assert (vector.values > 0).all()
        assert 0 < len(vector.indices) < 12


class TestTokenizersThatDoNotFit:
    async def test_an_entrys_own_note_decides(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup], tmp_path: Path
    ) -> None:
        """A tokenizer that makes other ids is rejected; one that makes the same ids is accepted from any source."""
        triton.add(written(made["plain"]))
        same = checkpoint(tmp_path / "same")
        facts = (await opened("m", table=ModelTable(tokenizer=str(same)))).facts
        assert facts.space == stored_space(made["plain"].stored)
        (tmp_path / "other").mkdir()
        write_tokenizer(tmp_path / "other")
        with pytest.raises(ConfigError, match=rf"m: the tokenizer of {tmp_path}/other makes other token ids"):
            await opened("m", table=ModelTable(tokenizer=str(tmp_path / "other")))

    async def test_an_entry_of_an_older_shoal(
        self, triton: FakeTriton, opened: Open, made: dict[str, ModelSetup], tmp_path: Path
    ) -> None:
        """It has no tokenizer fingerprint, only the vocabulary size."""
        model = written(made["plain"])
        del model.config.parameters["shoal_tokenizer"]
        triton.add(model)
        (tmp_path / "other").mkdir()
        write_tokenizer(tmp_path / "other")
        with pytest.raises(ConfigError, match=r"the tokenizer of .* has \d+ tokens, but the model has \d+: leave"):
            await opened("m", table=ModelTable(tokenizer=str(tmp_path / "other")))

    async def test_a_model_without_a_note(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """Shoal sends it the last token of the configured tokenizer."""
        model = triton.add(token_model("tok", HIDDEN))
        right = model.answer
        tokenizer = await asyncio.to_thread(read_tokenizer, source, "tokenizer.json")

        def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            if triton_codec.read_inputs(request)["input_ids"].max() == tokenizer.get_vocab_size() - 1:
                raise Refused("indices element out of data bounds")
            response: pb.ModelInferResponse = right(request)
            return response

        model.answer = answer
        with pytest.raises(ConfigError, match=rf"m: the tokenizer of {source} does not match the model: it has"):
            await opened("tok", table=ModelTable(tokenizer=str(source)))


def test_specifications_travel_whole(made: dict[str, ModelSetup]) -> None:
    """The entry's specification equals the store's."""
    for one in made.values():
        text = one.entry.config.parameters["shoal_text"].string_value
        assert msgspec.json.decode(text, type=TextSpec) == one.spec
