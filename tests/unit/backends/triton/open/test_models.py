"""Models on a server in this process, from schema to vectors: every style, replicas, and the reported facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.backends.triton.open.models import TritonRunner
from shoal.backends.triton.response import read_outputs
from shoal.config.settings import ModelTable
from shoal.errors import ConfigError, NotFinite, Unsupported
from shoal.kserve import protocol_pb2 as pb
from shoal.models.store import StoredModel
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import TextSpec
from shoal.types import Embed
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, reply
from tests.unit.backends.triton.open.kit import (
    DIMENSION,
    Open,
    ask,
    mean_of,
    requests_of,
    text_model,
    token_model,
    vector_of,
    vectors,
)
from tests.unit.models import checkpoints


def pipeline_of(runner: TritonRunner) -> Any:
    return runner.lane.pipeline


class TestTextModels:
    async def test_texts_go_as_they_are(self, triton: FakeTriton, opened: Open) -> None:
        """Vectors are raw or normalized as requested; usage is estimated, because nothing counts tokens."""
        triton.add(text_model("emb"))
        runner = await opened("emb")
        assert np.array_equal(await vectors(runner, "a", "bb"), np.stack([vector_of("a"), vector_of("bb")]))
        assert np.allclose(await vectors(runner, "a", normalize=True), vector_of("a", unit=True), atol=1e-6)
        assert runner.facts.details["usage"] == "estimated"
        assert (await ask(runner, "a" * 40)).tokens == [10]
        with pytest.raises(Unsupported, match="does not expose its tokenizer"):
            await runner.tokenize(["a"], add_special_tokens=True, prompt_name=None)

    async def test_facts_say_what_is_known(self, triton: FakeTriton, opened: Open) -> None:
        model = triton.add(text_model("emb", version="3"))
        model.config.instance_group.add(count=2)
        facts = (await opened("emb")).facts
        assert (facts.id, facts.backend, facts.tasks, facts.revision) == ("m", "triton", ("embed",), "3")
        assert (facts.dimension, facts.max_input_tokens, facts.pooling) == (DIMENSION, None, "")
        assert facts.source == f"triton://{triton.target}#emb"
        assert facts.verified == "4 texts answered, all finite"
        expected = {
            "model": "emb",
            "servers": [facts.source],
            "schema": "text",
            "instances": 2,
            "max_batch_size": 32,
            "usage": "estimated",
        }
        assert {key: facts.details[key] for key in expected} == expected

    async def test_the_probe_settles_what_the_schema_leaves_open(self, triton: FakeTriton, opened: Open) -> None:
        """It finds the dimension, and whether rows are unit vectors, so that raw ones are not available."""
        model = triton.add(text_model("emb", unit=True))
        model.config.output[0].dims[0] = -1
        runner = await opened("emb")
        assert runner.facts.dimension == DIMENSION
        with pytest.raises(Unsupported, match="only returns normalized"):
            pipeline_of(runner).check(Embed(model="m", inputs=["a"], normalize=False))
        assert (await vectors(runner, "a", normalize=True, dimensions=3)).shape == (1, 3)

    async def test_a_dimension_that_was_not_expected_is_refused(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(text_model("emb"))
        with pytest.raises(ConfigError, match=r"8 dimensions, but the configured `dimension` is 16"):
            await opened("emb", table=ModelTable(dimension=16))
        assert (await opened("emb", table=ModelTable(dimension=8))).facts.dimension == 8

    async def test_the_operators_word_on_normalising_and_prompts(self, triton: FakeTriton, opened: Open) -> None:
        """`normalize = false` leaves rows unchanged; the table's prompts are prepended to texts."""
        triton.add(text_model("emb"))
        table = ModelTable(normalize=False, prompts={"q": "query: ", "d": "doc: "}, default_prompt_name="d")
        runner = await opened("emb", table=table)
        assert np.array_equal((await vectors(runner, "a", normalize=True))[0], vector_of("doc: a"))
        assert np.array_equal((await vectors(runner, "a", prompt_name="q"))[0], vector_of("query: a"))
        assert (runner.facts.prompts, runner.facts.default_prompt_name) == (table.prompts, "d")

    async def test_a_tokenizer_of_the_table_counts(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """It also rejects texts longer than the configured maximum."""
        triton.add(text_model("emb"))
        runner = await opened("emb", table=ModelTable(tokenizer=str(source), max_tokens=6))
        assert runner.facts.details["usage"] == "counted"
        assert runner.facts.max_input_tokens == 6
        assert (await ask(runner, "fish to")).tokens == [4]
        with pytest.raises(Exception, match="at most 6"):
            await ask(runner, "a b c d e f g", truncate=False)
        tokens = await runner.tokenize(["fish"], add_special_tokens=False, prompt_name=None)
        assert [token.text for token in tokens[0]] == ["fish"]

    async def test_names_of_ones_own(self, triton: FakeTriton, opened: Open) -> None:
        """Only the table distinguishes two text inputs."""
        model = triton.add(text_model("emb"))
        model.config.input.add(name="title", data_type=pb.TYPE_STRING, dims=[1])
        with pytest.raises(ConfigError, match="input_names"):
            await opened("emb", table=ModelTable(input_names={"text": "text"}))
        model.config.input[1].optional = True
        table = ModelTable(input_names={"text": "text"}, output_names={"embedding": "vectors"})
        runner = await opened("emb", table=table)
        assert np.array_equal((await vectors(runner, "a"))[0], vector_of("a"))

    async def test_rows_that_are_not_finite_end_the_load(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(text_model("emb")).answer = lambda request: reply(
            request, vectors=np.full((request.inputs[0].shape[0], DIMENSION), np.nan, np.float32)
        )
        with pytest.raises(NotFinite):
            await opened("emb")


def nim(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Encodes the request's parameters in its vectors."""
    parameters = {key: triton_codec.get_parameter(request.parameters, key) for key in request.parameters}
    texts = [each.decode() for each in triton_codec.read_inputs(request)["text"].ravel()]
    width = int(parameters.get("dimensions", DIMENSION))  # type: ignore[arg-type]
    rows = np.stack([vector_of(f"{parameters.get('input_type')}|{text}", DIMENSION)[:width] for text in texts])
    return reply(request, embeddings=rows, token_count=np.array([[len(text)] for text in texts], np.int32))


class TestOtherStyles:
    async def test_nim_does_prompts_and_counts_itself(self, triton: FakeTriton, opened: Open) -> None:
        config = pb.ModelConfig(name="nim", max_batch_size=8)
        config.input.add(name="text", data_type=pb.TYPE_STRING, dims=[1])
        config.output.add(name="embeddings", data_type=pb.TYPE_FP32, dims=[DIMENSION])
        config.output.add(name="token_count", data_type=pb.TYPE_INT32, dims=[1])
        triton.add(FakeModel("nim", config=config, answer=nim))
        runner = await opened("nim")
        assert (runner.facts.details["schema"], runner.facts.details["usage"]) == ("nim", "reported")
        answer = await ask(runner, "abc", "de", input_type="query")
        assert answer.tokens == [3, 2]
        assert np.array_equal(answer.vectors[0], vector_of("query|abc"))
        cut = await ask(runner, "abc", input_type="document", dimensions=3)
        assert np.array_equal(cut.vectors[0], vector_of("passage|abc")[:3])
        sent = requests_of(triton, "ModelInfer")[-1].parameters
        assert triton_codec.get_parameter(sent, "truncate") == "END"

    async def test_litellms_names(self, triton: FakeTriton, opened: Open) -> None:
        """The input is `input_text`; the vector is the only float output."""
        config = pb.ModelConfig(name="lite", max_batch_size=8)
        config.input.add(name="input_text", data_type=pb.TYPE_STRING, dims=[1])
        config.output.add(name="embedding_output", data_type=pb.TYPE_FP32, dims=[DIMENSION])

        def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            texts = [each.decode() for each in triton_codec.read_inputs(request)["input_text"].ravel()]
            return reply(request, embedding_output=np.stack([vector_of(text) for text in texts]))

        triton.add(FakeModel("lite", config=config, answer=answer))
        runner = await opened("lite")
        assert runner.facts.details["schema"] == "litellm"
        assert np.array_equal((await vectors(runner, "a"))[0], vector_of("a"))


def ids_of(source: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return list(tokenizer.encode(text).ids)


class TestTokenModels:
    async def test_texts_are_tokenised_here(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """With the tokenizer, limits and prompts of its source; rows of any length share batches."""
        triton.add(token_model("tok", checkpoints.HIDDEN))
        runner = await opened("tok", table=ModelTable(tokenizer=str(source)))
        rows = await vectors(runner, "fish", "fish to fish a b c")
        for row, text in zip(rows, ("fish", "fish to fish a b c"), strict=True):
            assert np.allclose(row, mean_of(ids_of(source, text), checkpoints.HIDDEN), atol=1e-6)
        assert (runner.facts.max_input_tokens, runner.facts.details["usage"]) == (32, "counted")
        assert np.allclose(
            (await vectors(runner, "fish", prompt_name="query"))[0],
            mean_of(ids_of(source, "to fish"), checkpoints.HIDDEN),
            atol=1e-6,
        )
        assert await runner.decode([[ids_of(source, "fish")[1]]], skip_special_tokens=True) == ["fish"]

    async def test_token_vectors_are_pooled_here(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        triton.add(token_model("tok", checkpoints.HIDDEN, pooled=False))
        runner = await opened("tok", table=ModelTable(tokenizer=str(source), pooling="cls"))
        assert runner.facts.pooling == "cls"
        first = ids_of(source, "fish")[:1]
        assert np.allclose((await vectors(runner, "fish"))[0], mean_of(first, checkpoints.HIDDEN), atol=1e-6)

    async def test_a_graph_of_one_length_gets_that_length(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        triton.add(token_model("tok", checkpoints.HIDDEN, length=10))
        runner = await opened("tok", table=ModelTable(tokenizer=str(source)))
        assert runner.facts.max_input_tokens == 10
        expected = mean_of(ids_of(source, "fish"), checkpoints.HIDDEN)
        assert np.allclose((await vectors(runner, "fish"))[0], expected, atol=1e-6)
        assert {tuple(request.inputs[0].shape)[1] for request in requests_of(triton, "ModelInfer")} == {10}

    async def test_unit_rows_are_noticed(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """Even if the files of the tokenizer's source have no Normalize module."""
        triton.add(token_model("tok", checkpoints.HIDDEN, unit=True))
        runner = await opened("tok", table=ModelTable(tokenizer=str(source)))
        with pytest.raises(Unsupported):
            pipeline_of(runner).check(Embed(model="m", inputs=["a"], normalize=False))
        triton.add(token_model("raw", checkpoints.HIDDEN))
        raw = await opened("raw", table=ModelTable(tokenizer=str(source)))
        pipeline_of(raw).check(Embed(model="m", inputs=["a"], normalize=False))

    async def test_the_error_without_a_tokenizer_names_the_setting(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(token_model("tok"))
        with pytest.raises(ConfigError, match=r'set `tokenizer` in \[models."m"\] of shoal.toml'):
            await opened("tok")

    async def test_the_notes_of_the_tokenizers_source_are_logged(
        self, triton: FakeTriton, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Assumptions are logged as warnings."""
        bare = tmp_path / "bare"
        bare.mkdir()
        checkpoints.tokenizer("roberta").save(str(bare / "tokenizer.json"))
        triton.add(token_model("tok", pooled=False))
        await opened("tok", table=ModelTable(tokenizer=str(bare)))
        assert "m: no modules.json defines the pooling of token vectors: using mean" in caplog.text

    async def test_what_shoal_wrote_into_the_entry_is_enough(
        self, triton: FakeTriton, opened: Open, source: Path
    ) -> None:
        """The parameters of an entry from another machine's Shoal contain specification, source and space."""
        spec = TextSpec(
            tokenizer="tokenizer.json",
            inputs=("input_ids", "attention_mask"),
            dimension=checkpoints.HIDDEN,
            max_tokens=12,
            prompts={"p": "to "},
            pooled="sentence_embedding",
        )
        model = triton.add(token_model("tok", checkpoints.HIDDEN))
        for key, value in {
            "shoal_text": msgspec.json.encode(spec).decode(),
            "shoal_source": f"file:{source}",
            "shoal_space": "5face",
            "shoal_precision": "f32",
        }.items():
            model.config.parameters[key].string_value = value
        facts = (await opened("tok")).facts
        assert (facts.space, facts.max_input_tokens, facts.prompts, facts.precision) == (
            "5face",
            12,
            {"p": "to "},
            "f32",
        )
        other = (await opened("tok", table=ModelTable(tokenizer=str(source)))).facts
        assert other.max_input_tokens == 12  # the entry decides; a tokenizer from elsewhere must match it

    async def test_files_of_this_machine_are_taken_first(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """If this process wrote the entry, its store has the tokenizer and the specification."""
        spec = TextSpec(
            tokenizer="tokenizer.json",
            inputs=("input_ids", "attention_mask"),
            dimension=checkpoints.HIDDEN,
            max_tokens=9,
            pooled="pooled",
        )
        manifest = type("Made", (), {"id": "org/made", "text_spec": spec})()
        triton.add(token_model("tok", checkpoints.HIDDEN))
        runner = await opened("tok", stored=StoredModel(source, manifest))
        assert runner.facts.max_input_tokens == 9
        assert isinstance(pipeline_of(runner), TextPipeline)

    async def test_both_outputs_are_kept_apart(self, triton: FakeTriton, opened: Open, source: Path) -> None:
        """With `pooled` beside a normalized `sentence_embedding`, raw vectors come from `pooled`."""
        model = triton.add(token_model("tok", checkpoints.HIDDEN))
        model.config.output.add(name="pooled", data_type=pb.TYPE_FP32, dims=[checkpoints.HIDDEN])
        answer = model.answer

        def both(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            rows = read_outputs(answer(request))["sentence_embedding"]
            unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            return reply(request, sentence_embedding=unit, pooled=rows)

        model.answer = both
        runner = await opened("tok", table=ModelTable(tokenizer=str(source)))
        expected = mean_of(ids_of(source, "fish"), checkpoints.HIDDEN)
        assert np.allclose((await vectors(runner, "fish"))[0], expected, atol=1e-6)


class TestSpaces:
    async def test_equal_only_for_equal_models(self, triton: FakeTriton, opened: Open) -> None:
        """Name, version, tensors and text processing matter; the server does not."""
        triton.add(text_model("emb"))
        first = (await opened("emb")).facts.space
        assert len(first) == 16
        assert (await opened("emb")).facts.space == first
        triton.models["emb"].version = "2"
        assert (await opened("emb")).facts.space != first
        triton.models["emb"].version = "1"
        triton.models["emb"].config.output[0].data_type = pb.TYPE_FP64
        triton.models["emb"].answer = lambda request: reply(
            request,
            vectors=np.stack([vector_of(t.decode()) for t in triton_codec.read_inputs(request)["text"].ravel()]).astype(
                np.float64
            ),
        )
        assert (await opened("emb")).facts.space != first

    async def test_the_same_model_on_another_server_or_day(
        self, triton: FakeTriton, second: FakeTriton, opened: Open
    ) -> None:
        for server in (triton, second):
            server.add(text_model("emb"))
        spaces = {(await opened("emb", each)).facts.space for each in (triton, second)}
        assert len(spaces) == 1

    async def test_prompts_are_part_of_it(self, triton: FakeTriton, opened: Open) -> None:
        triton.add(text_model("emb"))
        tables = (ModelTable(), ModelTable(prompts={"q": "query: "}, default_prompt_name="q"))
        spaces = {(await opened("emb", table=table)).facts.space for table in tables}
        assert len(spaces) == 2
