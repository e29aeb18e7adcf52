"""Language models on a real Triton: every kind of model through its generator, and one token model through the whole
pipeline."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shoal.backends.triton.client import Client
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.llm import TritonGenerator
from shoal.backends.triton.llm_request import Adapter, ModelTokenizer
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.core.protocols import Piece, Prompt
from shoal.errors import DeadlineExceeded, EngineFailed
from shoal.types import Context, Sampling
from tests.integration.triton_kit import PATIENCE_S, Triton
from tests.integration.triton_models import WEIGHTS
from tests.unit.backends.triton.open.kit import grpc_in_use, until

pytestmark = pytest.mark.timeout(PATIENCE_S)

TEXTS = (
    "talker_vllm",
    "talker_trtllm",
    "talker_ensemble",
    "talker_whole",
    "talker_gpt",
    "talker_llmapi",
    "talker_text",
)
TOKENS = ("llama", "llama_whole")
WHOLE = ("talker_whole", "talker_gpt", "talker_text", "llama_whole")
END = 3
WORDS = ModelTokenizer(encode=lambda text: [ord(letter) for letter in text], piece=chr, ends=(END,))


@pytest.fixture(scope="module")
def loaded(triton: Triton) -> Triton:
    triton.load(*TEXTS, *TOKENS)
    return triton


Open = Callable[..., Any]


@pytest.fixture
async def opened(loaded: Triton) -> AsyncIterator[Open]:
    """Generators of models by name."""
    async with grpc_in_use():
        client = Client(loaded.url)
        generators: list[TritonGenerator] = []

        async def open_(model: str, adapters: Mapping[str, Adapter] | None = None) -> TritonGenerator:
            target = Endpoint(client=client, control=Control(client), address=f"triton://{loaded.url}", model=model)
            schema = await target.find()
            assert isinstance(schema, LlmSchema)
            generators.append(
                TritonGenerator(target, model, schema=schema, words=WORDS, adapters=adapters, serving=True)
            )
            return generators[-1]

        yield open_
        for generator in generators:
            await generator.aclose()
        await client.aclose()


def soon(seconds: float = 60.0) -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds)


async def collect(
    generator: TritonGenerator, prompt: str | Prompt, *, stream: bool = True, adapter: str = "", **sampling: Any
) -> list[Piece]:
    request = Prompt(text=prompt) if isinstance(prompt, str) else prompt
    pieces = generator.generate(request, Sampling(**sampling), soon(), adapter=adapter, stream=stream)
    return [piece async for piece in pieces]


def text_of(generator: TritonGenerator, found: list[Piece]) -> str:
    if generator.facts.output_mode == "cumulative":
        return found[-1].text
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", TEXTS)
async def test_every_kind_answers(opened: Open, model: str, stream: bool) -> None:
    """In pieces where the kind can, else complete; without the prompt, and with a finish reason."""
    generator = await opened(model)
    output = await collect(generator, "Say hello", stream=stream)
    assert text_of(generator, output) == "Hello from Triton."
    assert [piece.finish_reason for piece in output if piece.finish_reason] == ["stop"]
    pieces = [piece for piece in output if piece.text]
    assert (len(pieces) >= 3) == (stream and model not in WHOLE)
    if generator.schema.flags and model != "talker_llmapi":
        assert [piece.prompt_tokens for piece in output if piece.prompt_tokens] == [7]
        assert sum(piece.tokens or 0 for piece in output) == 3


async def test_an_ensemble_is_decoupled_when_its_parts_are(opened: Open) -> None:
    """Its configuration says nothing of it: Triton itself adds that."""
    assert (await opened("talker_ensemble")).schema.decoupled


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("talker_vllm", {"sampling_parameters", "exclude_input_in_output", "stream", "return_finish_reason"}),
        ("talker_ensemble", {"max_tokens", "temperature", "top_k", "seed", "stop_words", "stream"}),
        ("talker_whole", {"max_tokens", "temperature", "top_k", "seed", "stop_words"}),
        ("talker_gpt", {"max_tokens", "temperature", "top_k", "random_seed", "stop_words", "bad_words"}),
        ("talker_llmapi", {"sampling_param_max_tokens", "sampling_param_seed", "sampling_param_stop", "streaming"}),
        ("talker_text", {"max_tokens", "temperature"}),
    ],
)
async def test_sampling_arrives(opened: Open, model: str, expected: set[str]) -> None:
    """Sampling fields are tensors of the right types: a real server rejects all others."""
    generator = await opened(model)
    request: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_k": 4, "seed": -1, "stop": ["END", "\n"]}
    able = {name: value for name, value in request.items() if name in generator.facts.parameters}
    reply = json.loads(text_of(generator, await collect(generator, "echo", **able)))
    assert expected <= reply.keys()
    assert reply["text_input"] == "echo"
    if "seed" in reply:
        assert reply["seed"] == 2**64 - 1
    if "stop_words" in reply:
        assert reply["stop_words"] == ["END", "\n"]
        assert reply.get("bad_words", "") == ""
    if "sampling_parameters" in reply:
        assert json.loads(reply["sampling_parameters"]) == request


async def test_an_adapter_arrives(opened: Open) -> None:
    for model, adapters, name, expected in (
        ("talker_ensemble", {"doll": 7}, "lora_task_id", 7),
        ("talker_llmapi", {"doll": "/loras/doll"}, "lora_path", "/loras/doll"),
    ):
        generator = await opened(model, adapters)
        reply = json.loads(text_of(generator, await collect(generator, "echo", adapter="doll")))
        assert reply[name] == expected


async def test_log_probabilities(opened: Open) -> None:
    generator = await opened("talker_vllm")
    pieces = await collect(generator, "Say hello", logprobs=1)
    assert [each.token for piece in pieces for each in piece.logprobs] == ["Hello", " from", " Triton."]


async def test_cut_at_its_length(opened: Open) -> None:
    """TensorRT-LLM reports no reason; the token count gives it."""
    pieces = await collect(await opened("talker_ensemble"), "count=9", max_tokens=2)
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


@pytest.mark.parametrize("model", ["talker_vllm", "talker_ensemble", "talker_llmapi", "talker_gpt"])
async def test_a_failure_in_the_middle(opened: Open, model: str) -> None:
    """It comes after the text before it; the next request is answered."""
    generator = await opened(model)
    output: list[Piece] = []
    with pytest.raises(EngineFailed, match="told to fail in the middle"):
        async with aclosing(generator.generate(Prompt(text="count=9 fail=2"), Sampling(), soon())) as pieces:
            async for piece in pieces:
                output.append(piece)  # noqa: PERF401 - an error must not lose them
    if model not in WHOLE:
        assert text_of(generator, output) == "w0 w1 "
    assert generator.ready()
    assert text_of(generator, await collect(generator, "Say hello")) == "Hello from Triton."


def ids_in_notes(loaded: Triton, kind: str, word: str) -> list[str]:
    return [line.split()[2] for line in loaded.noted() if line.startswith(f"{kind} {word} ")]


@pytest.mark.parametrize(
    ("model", "kind"), [("talker_vllm", "vllm"), ("talker_ensemble", "bls"), ("talker_llmapi", "llmapi")]
)
async def test_a_reader_that_leaves_ends_the_work(loaded: Triton, opened: Open, model: str, kind: str) -> None:
    """The end of the call stops it; for an ensemble, whose running step that does not reach, a request with its id
    does."""
    generator = await opened(model)
    before = set(ids_in_notes(loaded, kind, "cancelled"))
    stops = set(ids_in_notes(loaded, kind, "stopped"))
    async with aclosing(generator.generate(Prompt(text="count=600 delay_ms=20"), Sampling(), soon())) as pieces:
        assert (await anext(pieces)).text == "w0 "
    await until(lambda: len(set(ids_in_notes(loaded, kind, "cancelled")) - before) == 1)
    [ended] = set(ids_in_notes(loaded, kind, "cancelled")) - before
    if kind != "vllm":
        await until(lambda: set(ids_in_notes(loaded, kind, "stopped")) - stops == {ended})


async def test_a_non_streaming_call_is_cancelled(loaded: Triton, opened: Open) -> None:
    """When its reader leaves, and past its deadline."""
    generator = await opened("talker_whole")
    before = len(ids_in_notes(loaded, "ensemble", "cancelled"))
    prompt = Prompt(text="count=600 delay_ms=20")
    reading = asyncio.create_task(anext(generator.generate(prompt, Sampling(max_tokens=999), soon())))
    await asyncio.sleep(0.2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: len(ids_in_notes(loaded, "ensemble", "cancelled")) == before + 1)
    with pytest.raises(DeadlineExceeded):
        await anext(generator.generate(prompt, Sampling(max_tokens=999), soon(0.2)))
    await until(lambda: len(ids_in_notes(loaded, "ensemble", "cancelled")) == before + 2)


async def test_many_at_once(opened: Open) -> None:
    """More than one connection takes; each gets its own words, in order."""
    generator = await opened("talker_vllm")
    answers = await asyncio.gather(*(collect(generator, f"count={3 + n % 5} delay_ms=5") for n in range(150)))
    for number, pieces in enumerate(answers):
        assert text_of(generator, pieces) == "".join(f"w{at} " for at in range(3 + number % 5))


@pytest.fixture(scope="module")
def llama() -> Any:
    """The model that runs in Triton, in this process."""
    backend: Any = ModuleType("triton_python_backend_utils")
    backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    sys.modules[backend.__name__] = backend
    try:
        path = Path(__file__).parent / "triton_models" / "llama.py"
        spec = importlib.util.spec_from_file_location("llama_model", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules[backend.__name__]
    return module.Llama(int(WEIGHTS["vocabulary"]), int(WEIGHTS["seed"]))


def continued(
    llama: Any, ids: list[int], length: int, *, temperature: float = 1.0, top_k: int = 1, seed: int = 0
) -> list[int]:
    draw = np.random.default_rng(seed)
    so_far = list(ids)
    for _ in range(length):
        so_far.append(llama.next(so_far, temperature, top_k, draw)[0])
        if so_far[-1] == END:
            break
    return so_far[len(ids) :]


PROMPT = Prompt(text="", ids=(17, 40, 99, 300), tokens=4)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", TOKENS)
class TestTokens:
    async def test_tokens_equal_those_of_the_model(self, opened: Open, llama: Any, model: str, stream: bool) -> None:
        """Greedy, and sampled with a seed."""
        generator = await opened(model)
        sampled: tuple[tuple[dict[str, Any], list[int]], ...] = (
            ({"temperature": 0.0}, continued(llama, list(PROMPT.ids or ()), 12)),
            (
                {"temperature": 0.7, "seed": 5},
                continued(llama, list(PROMPT.ids or ()), 12, temperature=0.7, top_k=0, seed=5),
            ),
        )
        for options, expected in sampled:
            pieces = await collect(generator, PROMPT, stream=stream, max_tokens=12, **options)
            ids = [id for piece in pieces for id in piece.ids]
            assert ids == expected
            assert sum(piece.tokens or 0 for piece in pieces) == len(ids)
            assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
            assert (sum(1 for piece in pieces if piece.ids) > 1) == (stream and model not in WHOLE)

    async def test_stop_texts(self, opened: Open, llama: Any, model: str, stream: bool) -> None:
        """The stop text is two consecutive tokens of the model's answer."""
        generator = await opened(model)
        expected = continued(llama, list(PROMPT.ids or ()), 8)
        stop = "".join(map(chr, expected[3:5]))
        pieces = await collect(generator, PROMPT, stream=stream, max_tokens=8, temperature=0.0, stop=[stop])
        assert [id for piece in pieces for id in piece.ids] == expected[:5]

    async def test_log_probabilities(self, opened: Open, model: str, stream: bool) -> None:
        generator = await opened(model)
        pieces = await collect(generator, PROMPT, stream=stream, max_tokens=3, temperature=0.0, logprobs=0)
        logprobs = [each for piece in pieces for each in piece.logprobs]
        assert len(logprobs) == 3
        assert all(each.logprob < 0 for each in logprobs)
        assert [each.token for each in logprobs] == [chr(id) for piece in pieces for id in piece.ids]
