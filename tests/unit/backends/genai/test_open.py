"""Local language models, from an address to an answer."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends import parse_address
from shoal.backends.base.generation_options import build_generation_options
from shoal.backends.genai import GenaiGenerator, open
from shoal.backends.genai.open import model_kind
from shoal.backends.local.open import prepare_async
from shoal.config.settings import ModelTable, Settings
from shoal.core.generation.runner import GenerationRunner
from shoal.core.protocols import ChatPipeline, ModelFacts
from shoal.core.threads import Threads
from shoal.errors import AddressError, ConfigError, InvalidValue, MissingExtra, ModelFileError, TooLong
from shoal.models.address import Address
from shoal.models.manifest import GenerationSpec
from shoal.models.store import Store, StoredModel
from shoal.types import Chunk, Context, Generate, Guide, Message, Sampling
from tests.unit.models.test_manifest import manifest

FIXTURES = Path(__file__).parents[3] / "fixtures"
IR = FIXTURES / "tiny_llama_ir"
GGUF = FIXTURES / "tiny_llama.gguf"
OpenedModel = tuple[ChatPipeline, GenaiGenerator, ModelFacts]

installed = pytest.mark.skipif(find_spec("openvino_genai") is None, reason="needs the 'llm' extra")


async def open_llm(name: str, address: Address, settings: Settings, table: ModelTable) -> OpenedModel:
    """Open a model from an address, as a load plan does."""
    return await open.open_llm(name, await prepare_async(address, settings), settings, table)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path / "home"), precision="f32", threads=1, kv_cache_mb=4, offline=True)


@pytest.fixture
async def opened(settings: Settings) -> AsyncIterator[OpenedModel]:
    made = await open_llm("tiny", parse_address(f"file:{IR}"), settings, ModelTable())
    yield made
    await made[1].aclose()


def runner_of(opened: OpenedModel, settings: Settings) -> GenerationRunner:
    pipeline, generator, facts = opened
    options = build_generation_options("tiny", settings, ModelTable(), generator.facts, Threads("test", 1))
    return GenerationRunner(pipeline, [generator], facts, options)


async def chunks(runner: GenerationRunner, task: Generate) -> list[Chunk]:
    ctx = Context(id="test", deadline=time.monotonic() + 30)
    return [chunk async for chunk in runner.stream(task, ctx)]


def text_of(made: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in made if chunk.index == index)


def make_task(text: str = "Hello", **fields: Any) -> Generate:
    sampling = Sampling(**({"max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | fields))
    return Generate(model="tiny", messages=[Message(role="user", content=text)], sampling=sampling)


@installed
class TestOpened:
    async def test_facts(self, opened: OpenedModel) -> None:
        """The facts state its kind, source and capacity."""
        _, generator, facts = opened
        assert (facts.backend, facts.tasks, facts.id) == ("genai", ("generate",), "tiny_llama_ir")
        assert (facts.context_tokens, facts.precision, facts.dimension) == (2048, "f32", None)
        assert len(facts.space) == 16
        assert facts.details["kv_cache_tokens"] == 8192
        assert (facts.details["kv_cache_precision"], facts.details["dynamic_quantization"]) == ("f32", False)
        assert facts.details["architecture"] == "LlamaForCausalLM"
        assert facts.details["engine"].startswith("openvino-genai 20")
        assert generator.ready()

    async def test_a_conversation(self, opened: OpenedModel, settings: Settings) -> None:
        """The model's own template is used, tokens are counted, and streamed answers equal whole ones."""
        runner = runner_of(opened, settings)
        made = await chunks(runner, make_task("naïve 東京"))
        at_once = await chunks(runner, msgspec.structs.replace(make_task("naïve 東京"), stream=True))
        assert text_of(made)
        assert text_of(made) == text_of(at_once)
        usage = made[-1].usage
        assert usage is not None
        assert usage.completion_tokens == 20
        assert usage.prompt_tokens > 10
        assert [chunk.finish_reason for chunk in made if chunk.finish_reason] == ["length"]

    async def test_a_stop_text_ends_it(self, opened: OpenedModel, settings: Settings) -> None:
        """The answer is cut there, and generation stops."""
        runner = runner_of(opened, settings)
        whole = text_of(await chunks(runner, make_task()))
        stop = whole[6:9]
        made = await chunks(runner, make_task(stop=[stop], max_tokens=1500))
        assert text_of(made) == whole[: whole.index(stop)]
        assert [chunk.finish_reason for chunk in made if chunk.finish_reason] == ["stop"]
        usage = made[-1].usage
        assert usage is not None
        assert usage.completion_tokens < 1000, "however busy the machine is"

    async def test_several_choices(self, opened: OpenedModel, settings: Settings) -> None:
        """The choices run in parallel and differ."""
        task = msgspec.structs.replace(make_task(temperature=1.5, seed=1), n=3)
        made = await chunks(runner_of(opened, settings), task)
        assert len({text_of(made, index) for index in range(3)}) == 3

    async def test_a_form(self, opened: OpenedModel, settings: Settings) -> None:
        """Guided decoding and its errors work through all layers."""
        runner = runner_of(opened, settings)
        made = await chunks(runner, make_task(guide=Guide(kind="choice", value='["größe"]'), ignore_eos=None))
        assert text_of(made) == "größe"
        with pytest.raises(InvalidValue, match="output format"):
            await chunks(runner, make_task(guide=Guide(kind="regex", value="(")))

    async def test_prompts_that_are_too_long(self, opened: OpenedModel, settings: Settings) -> None:
        """The error for a prompt that is too long has both token counts."""
        with pytest.raises(TooLong, match="2048"):
            await chunks(runner_of(opened, settings), make_task("word " * 3000))


@installed
class TestOpening:
    async def test_a_gguf(self, tmp_path: Path, settings: Settings) -> None:
        """One file is a model with its tokenizer, template and end-of-answer tokens."""
        folder = tmp_path / "one"
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread(shutil.copyfile, GGUF, folder / "tiny-f16.gguf")
        opened = await open_llm("tiny", parse_address(f"file:{folder}"), settings, ModelTable())
        made = text_of(await chunks(runner_of(opened, settings), make_task()))
        await opened[1].aclose()
        assert opened[2].precision == "F16"
        assert opened[2].context_tokens == 2048
        other = await open_llm("tiny", parse_address(f"file:{IR}"), settings, ModelTable())
        assert made == text_of(await chunks(runner_of(other, settings), make_task()))
        await other[1].aclose()

    async def test_the_operators_context(self, settings: Settings) -> None:
        """The configured context takes precedence over the files."""
        opened = await open_llm("tiny", parse_address(f"file:{IR}"), settings, ModelTable(context_tokens=100))
        await opened[1].aclose()
        assert opened[2].context_tokens == 100

    async def test_adapters_are_refused(self, settings: Settings) -> None:
        """The error names the setting."""
        with pytest.raises(ConfigError, match="adapters"):
            await open_llm("tiny", parse_address(f"file:{IR}"), settings, ModelTable(adapters={"a": 1}))

    async def test_a_broken_template_leaves_no_process(
        self, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process is closed when a later step fails."""
        closed: list[GenaiGenerator] = []
        original = GenaiGenerator.aclose

        async def aclose(self: GenaiGenerator) -> None:
            closed.append(self)
            await original(self)

        monkeypatch.setattr(GenaiGenerator, "aclose", aclose)
        (tmp_path / "broken.jinja").write_text("{% if %}")
        broken = msgspec.structs.replace(settings, chat_template=str(tmp_path / "broken.jinja"))
        with pytest.raises(ConfigError):
            await open_llm("tiny", parse_address(f"file:{IR}"), broken, ModelTable())
        assert len(closed) == 1
        assert not closed[0].ready()


class TestKinds:
    async def test_the_extra_is_named(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the library the model is prepared, and the error has the pip command."""
        monkeypatch.setattr("shoal.backends.genai.generator.find_spec", lambda name: None)
        with pytest.raises(MissingExtra, match=r"\[llm\]"):
            await open_llm("tiny", parse_address(f"file:{IR}"), settings, ModelTable())
        stored = (await asyncio.to_thread(Store(settings.home).entries))[0]
        assert model_kind(stored) == "generate"

    async def test_safetensors_alone(self, tmp_path: Path, settings: Settings) -> None:
        """The error has the next step and the file."""
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (tmp_path / "model.safetensors").write_bytes(b"x")
        with pytest.raises(ModelFileError, match=r"config\.json.*optimum-cli export openvino"):
            await open_llm("tiny", parse_address(f"file:{tmp_path}"), settings, ModelTable())

    async def test_an_embedder(self, settings: Settings) -> None:
        """A model that embeds is not opened as a language model."""
        stored = StoredModel(Path("/nowhere"), manifest({}))

        assert model_kind(stored) == "embed"
        with pytest.raises(AddressError, match="embedding model"):
            await open.open_llm("tiny", stored, settings, ModelTable())

    @pytest.mark.parametrize(
        ("name", "precision"),
        [
            ("llama-3.2-1b-instruct-q4_k_m.gguf", "Q4_K_M"),
            ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
            ("m.BF16.gguf", "BF16"),
            ("f16ish.gguf", ""),
            ("model.gguf", ""),
        ],
    )
    def test_precision_by_name(self, name: str, precision: str) -> None:
        """The precision is read from usual file names."""
        spec = GenerationSpec(format="gguf", tokenizer="tokenizer.json", place="/m")
        stored = StoredModel(Path("/s"), msgspec.structs.replace(manifest({}), text=None, generation=spec, graph=name))
        assert open._precision(stored, spec) == precision
        assert open.model_path(stored, spec) == Path("/m") / name

    @pytest.mark.parametrize(
        ("written", "precision"),
        [
            ('{"quantization_config": {"bits": 4}}', "int4"),
            ('{"quantization_config": {"bits": "4"}}', ""),
            ('{"quantization_config": null}', ""),
            ("[]", ""),
            ("{", ""),
            (None, ""),
        ],
    )
    def test_precision_of_an_export(self, tmp_path: Path, written: str | None, precision: str) -> None:
        """The precision is read from optimum's metadata if present."""
        if written is not None:
            (tmp_path / "openvino_config.json").write_text(written)
        spec = GenerationSpec(format="ir", tokenizer="tokenizer.json", place=str(tmp_path))
        changed = msgspec.structs.replace(manifest({}), text=None, generation=spec, graph="openvino_model.xml")
        assert open._precision(StoredModel(Path("/s"), changed), spec) == precision
        assert open.model_path(StoredModel(Path("/s"), changed), spec) == tmp_path
