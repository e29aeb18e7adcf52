"""Language models on a server in this process, from schema to chunks, and the models that a server offers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shoal.backends import parse_address
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.models import TritonGenerationRunner
from shoal.backends.triton.open.targets import list_offers
from shoal.config.settings import ModelTable, Settings
from shoal.errors import ConfigError, InvalidValue, ModelFileError, TransportFailed, Unsupported
from shoal.kserve import protocol_pb2 as pb
from shoal.models.address import ServedModel
from shoal.types import Chunk, Embed, Generate, Message, Sampling
from tests.fakes.triton import FakeModel, FakeTriton
from tests.fakes.triton_llm import Script, Talker, talker
from tests.fixtures.tiny_llama import CONTEXT, EOS, IM_END, write_tokenizer
from tests.unit.backends.triton.open.kit import Open, forgotten, requests_of, soon, text_model, until

HELLO = [Message(role="user", content="What is the weather in Paris?")]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The tokenizer and template of a small Llama."""
    write_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


async def chunks(runner: TritonGenerationRunner, **fields: Any) -> list[Chunk]:
    async with aclosing(runner.stream(Generate(model="m", **fields), soon())) as found:
        return [chunk async for chunk in found]


def text_of(found: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in found)


def reasons(found: Sequence[Chunk]) -> list[str]:
    return [chunk.finish_reason for chunk in found if chunk.finish_reason]


def usage(found: Sequence[Chunk]) -> tuple[int, int]:
    last = found[-1].usage
    assert last is not None
    return last.prompt_tokens, last.completion_tokens


class TestTextModels:
    async def test_prompts_without_a_tokenizer(self, triton: FakeTriton, opened: Open) -> None:
        """Only text is accepted; the model counts the tokens."""
        model = _added(triton, talker("vllm"))
        runner = await opened("llm")
        found = await chunks(runner, prompts=["Say hello"], stream=True)
        assert (text_of(found), reasons(found), usage(found)) == ("Hello world", ["stop"], (7, 2))
        assert model.script.requests[0]["text_input"] == "Say hello"
        with pytest.raises(Unsupported, match="no chat template"):
            await chunks(runner, messages=HELLO)
        with pytest.raises(Unsupported, match="only generates text"):
            await runner.run(Embed(model="m", inputs=["a"]), soon())

    async def test_conversations_with_one(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        """The model's own template renders them; the server adds the first token."""
        model = _added(triton, talker("vllm"))
        runner = await opened("llm", table=ModelTable(tokenizer=str(files)))
        found = await chunks(runner, messages=HELLO)
        assert text_of(found) == "Hello world"
        sent = model.script.requests[0]["text_input"]
        assert sent == "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"
        assert runner.facts.context_tokens == CONTEXT

    async def test_facts(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        model = _added(triton, talker("ensemble"))
        model.version = "3"
        table = ModelTable(tokenizer=str(files), context_tokens=99, adapters={"doll": 7})
        facts = (await opened("llm", table=table)).facts
        assert (facts.id, facts.backend, facts.tasks, facts.revision) == ("m", "triton", ("generate",), "3")
        assert (facts.context_tokens, facts.adapters, facts.dimension) == (99, ("doll",), None)
        expected = {
            "model": "llm",
            "servers": [f"triton://{triton.target}#llm"],
            "schema": "trtllm",
            "instances": 1,
            "streams": True,
            "usage": "reported",
        }
        assert {key: facts.details[key] for key in expected} == expected
        assert "top_k" in facts.details["parameters"]

    async def test_who_counts(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        _added(triton, talker("llmapi"))
        assert (await opened("llm")).facts.details["usage"] == "estimated"
        table = ModelTable(tokenizer=str(files))
        assert (await opened("llm", table=table)).facts.details["usage"] == "counted"

    async def test_what_it_cannot_do_is_refused_by_name(self, triton: FakeTriton, opened: Open) -> None:
        model = _added(triton, talker("dynamo"))
        runner = await opened("llm")
        with pytest.raises(Unsupported, match="temperature"):
            await chunks(runner, prompts=["a"], sampling=Sampling(temperature=0.5))
        assert not model.script.requests
        assert text_of(await chunks(runner, prompts=["a"], stream=True)) == "Hello world"

    async def test_an_adapter(self, triton: FakeTriton, opened: Open) -> None:
        model = _added(triton, talker("ensemble"))
        runner = await opened("llm", table=ModelTable(adapters={"doll": 7}))
        await chunks(runner, prompts=["a"], adapter="doll")
        assert model.script.requests[0]["lora_task_id"] == 7
        with pytest.raises(InvalidValue, match="no adapter"):
            await chunks(runner, prompts=["a"], adapter="other")
        with pytest.raises(ConfigError, match="selects adapters by task id"):
            await opened("llm", table=ModelTable(adapters={"doll": "seven"}))


def _added(triton: FakeTriton, model: Talker) -> Talker:
    triton.add(model)
    return model


class TestTokenModels:
    async def test_texts_are_tokenised_and_read_here(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        raw = Tokenizer.from_file(str(files / "tokenizer.json"))
        words = raw.encode(" größer, naïve", add_special_tokens=False).ids
        model = _added(triton, talker("tokens", Script([*words, IM_END])))
        runner = await opened("llm", table=ModelTable(tokenizer=str(files)))
        found = await chunks(runner, prompts=["What is"], sampling=Sampling(stop=["xyz"]), stream=True)
        assert (text_of(found), reasons(found)) == (" größer, naïve", ["stop"])
        expected = raw.encode("What is").ids
        assert model.script.requests[0]["input_ids"] == expected
        assert usage(found)[0] == len(expected)
        ends = {model.script.requests[0]["end_id"], *model.script.requests[0]["stop_words_list"][0]}
        assert {EOS, IM_END} <= ends

    async def test_a_tokenizer_is_needed(self, triton: FakeTriton, opened: Open) -> None:
        _added(triton, talker("tokens"))
        with pytest.raises(ConfigError, match=r'set `tokenizer` in \[models."m"\] of shoal.toml'):
            await opened("llm")
        assert not triton.calls["RepositoryModelUnload"], "it was loaded before"

    async def test_one_without_its_file(self, triton: FakeTriton, opened: Open, files: Path) -> None:
        _added(triton, talker("tokens"))
        (files / "tokenizer.json").unlink()
        with pytest.raises((ConfigError, ModelFileError), match=r"tokenizer"):
            await opened("llm", table=ModelTable(tokenizer=str(files)))


class TestReplicas:
    async def test_another_one_joins_and_takes_over(self, triton: FakeTriton, second: FakeTriton, opened: Open) -> None:
        for server in (triton, second):
            server.add(talker("vllm"))
        runner = await opened("llm", triton, second)
        await until(lambda: all(generator.ready() for generator in runner.generators))
        await triton.stop()
        assert text_of(await chunks(runner, prompts=["a"])) == "Hello world"
        assert runner.ready()
        await triton.start()

    async def test_one_of_another_kind_is_kept_out(self, triton: FakeTriton, second: FakeTriton, opened: Open) -> None:
        triton.add(talker("vllm"))
        second.add(talker("ensemble"))
        runner = await opened("llm", triton, second)
        await until(lambda: "differ from the other replicas'" in runner.generators[1].reason)
        assert runner.ready()

    async def test_statistics_and_unloading(self, triton: FakeTriton, opened: Open) -> None:
        """They work as for an embedder."""
        model = _added(triton, talker("vllm"))
        model.statistics = pb.ModelStatistics(name="llm", version="1", inference_count=5)
        runner = await opened("llm")
        [found] = await runner.statistics()
        assert (found.name, found.inference_count) == ("m", 5)
        await runner.aclose()
        await runner.unload(10.0)
        assert model.state == "UNAVAILABLE"

    async def test_what_was_loaded_in_vain_is_taken_back(self, triton: FakeTriton, opened: Open) -> None:
        model = _added(triton, talker("tokens"))
        forgotten(triton)
        with pytest.raises(ConfigError):
            await opened("llm")
        assert model.state == "UNAVAILABLE"

    async def test_a_server_that_goes_ends_an_answer(self, triton: FakeTriton, opened: Open) -> None:
        _added(triton, talker("vllm", Script(["a"], hold=1)))
        runner = await opened("llm")
        found = []
        with pytest.raises(TransportFailed):
            async for chunk in runner.stream(Generate(model="m", prompts=["x"], stream=True), soon()):
                found.append(chunk.text)
                await triton.stop()
        assert found == ["a"]
        assert not runner.ready()


class TestOffered:
    async def offers(
        self, triton: FakeTriton, tritons: TritonConnections, **tables: ModelTable
    ) -> dict[str, ServedModel | str]:
        address = parse_address(f"triton://{triton.target}")
        return await list_offers(
            await tritons.endpoint(address, ModelTable(), Settings()),
            address,
            lambda name: tables.get(name, ModelTable()),
        )

    def add_ensemble(self, triton: FakeTriton, name: str = "ensemble") -> None:
        model = talker("ensemble", name=name)
        for part in ("preprocessing", "tensorrt_llm", "postprocessing"):
            model.config.ensemble_scheduling.step.add(model_name=part)
        triton.add(model)

    def add_parts(self, triton: FakeTriton) -> None:
        for part in ("preprocessing", "postprocessing"):
            config = pb.ModelConfig(name=part, backend="python", max_batch_size=8)
            config.input.add(name="QUERY", data_type=pb.TYPE_STRING, dims=[1])
            config.output.add(name="OUT", data_type=pb.TYPE_INT32, dims=[-1])
            triton.add(FakeModel(part, config=config))
        triton.add(talker("tokens", name="tensorrt_llm"))

    async def test_both_kinds(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        triton.add(text_model("emb"))
        triton.add(talker("vllm"))
        found = await self.offers(triton, tritons)
        assert [str(each) for each in found.values()] == [
            f"emb=triton://{triton.target}#emb",
            f"llm=triton://{triton.target}#llm",
        ]

    async def test_parts_are_left_out(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        """Parts of ensembles and of BLS models are hidden, as is a BLS beside an ensemble over the same engine."""
        self.add_parts(triton)
        self.add_ensemble(triton)
        bls = talker("bls", name="tensorrt_llm_bls")
        bls.config.parameters["tensorrt_llm_model_name"].string_value = "tensorrt_llm"
        triton.add(bls)
        assert list(await self.offers(triton, tritons)) == ["ensemble"]
        del triton.models["ensemble"]
        assert list(await self.offers(triton, tritons)) == ["tensorrt_llm_bls"]

    async def test_parts_of_what_cannot_be_served_have_their_say(
        self, triton: FakeTriton, tritons: TritonConnections
    ) -> None:
        self.add_parts(triton)
        self.add_ensemble(triton, "load")
        found = await self.offers(triton, tritons)
        assert set(found) == {"preprocessing", "postprocessing", "tensorrt_llm", "load"}
        assert all(isinstance(each, str) for each in found.values())

    async def test_tokens_want_a_tokenizer(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        triton.add(talker("tokens"))
        found = await self.offers(triton, tritons)
        assert 'set `tokenizer` in [models."llm"]' in str(found["llm"])
        found = await self.offers(triton, tritons, llm=ModelTable(tokenizer="hf:org/llm"))
        assert isinstance(found["llm"], ServedModel)

    async def test_what_nobody_knows_how_to_ask(self, triton: FakeTriton, tritons: TritonConnections) -> None:
        config = pb.ModelConfig(name="llm", backend="vllm")
        config.input.add(name="text_input", data_type=pb.TYPE_STRING, dims=[1])
        triton.add(FakeModel("llm", config=config))
        found = await self.offers(triton, tritons)
        assert "generates text (vLLM), but not from text_input to text_output" in str(found["llm"])
        assert not requests_of(triton, "RepositoryModelLoad")
