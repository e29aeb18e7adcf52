"""Ollama's own Python client against `shoal serve --as ollama`, with a model that repeats its input."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import ollama
import pytest

from shoal.names import quantized_name
from tests.integration.server_kit import Server, ShoalServer, wait_until
from tests.integration.triton_app_kit import hub_with

MODEL = "talker"
ANSWER = "three little words"
MESSAGES = [{"role": "user", "content": ANSWER}]
PULLED = "small"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(shoal_server: ShoalServer, tmp_path: Path) -> Server:
    (tmp_path / "shoal.toml").write_text(f'[models."{PULLED}"]\nbackends = ["fake:dimension=8"]\n')
    flags = ("--as", "ollama", "--reasoning-parser", "think", "--tool-call-parser", "hermes")
    return shoal_server([f"{MODEL}=fake:token_ms=1"], *flags, env={"SHOAL_HOME": str(tmp_path / "home")})


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.base_url) as client:
        yield client


def test_a_chat_in_one_piece(client: ollama.Client) -> None:
    """The client finds all fields that it reads: text, counts, times."""
    reply = client.chat(MODEL, messages=MESSAGES)
    assert reply.message.content == ANSWER
    assert (reply.model, reply.message.role, reply.done, reply.done_reason) == (MODEL, "assistant", True, "stop")
    assert (reply.eval_count, reply.prompt_eval_count) == (3, 3)
    assert reply.total_duration is not None
    assert reply.eval_duration is not None
    assert reply.total_duration >= reply.eval_duration > 0
    assert reply.created_at is not None
    assert abs((datetime.fromisoformat(reply.created_at) - datetime.now(UTC)).total_seconds()) < 60


def test_a_chat_as_a_stream(client: ollama.Client) -> None:
    """Chunks as they come, the counts on the last one."""
    pieces = list(client.chat(f"{MODEL}:latest", messages=MESSAGES, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == 3


async def test_the_asynchronous_client(server: Server) -> None:
    """Several concurrent chats."""
    async with ollama.AsyncClient(server.base_url) as client:
        pieces = [piece async for piece in await client.chat(MODEL, messages=MESSAGES, stream=True)]
        assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
        assert (await client.generate(MODEL, "one")).response == "one"


def test_prompts(client: ollama.Client) -> None:
    """Rendered or raw, limited by num_predict, and with log probabilities."""
    assert client.generate(MODEL, ANSWER).response == ANSWER
    assert client.generate(MODEL, ANSWER, raw=True, system="").response == ANSWER
    cut = client.generate(MODEL, ANSWER, options={"num_predict": 2, "temperature": 0, "num_ctx": 4096})
    assert (cut.response, cut.done_reason) == ("three little", "length")
    pieces = list(client.generate(MODEL, ANSWER, stream=True, logprobs=True, top_logprobs=1))
    logprobs = [each for piece in pieces for each in piece.logprobs or []]
    assert [each.token for each in logprobs] == ["three", " little", " words"]
    assert all(len(each.top_logprobs or []) == 1 for each in logprobs)


def test_adapters(client: ollama.Client) -> None:
    """An adapter is listed beside its model, and called by the same name."""
    assert {each.model for each in client.list().models} == {f"{MODEL}:latest", f"{MODEL}:loud"}
    assert client.generate(f"{MODEL}:loud", ANSWER).response == ANSWER.upper()


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Where.
    """
    return f"rain in {city}"


def test_tools(client: ollama.Client) -> None:
    """A call has its arguments as an object, and its result is sent back."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    messages = [{"role": "user", "content": call}]
    for message in (
        client.chat(MODEL, messages=messages, tools=[weather]).message,
        next(
            p.message
            for p in client.chat(MODEL, messages=messages, tools=[weather], stream=True)
            if p.message.tool_calls
        ),
    ):
        (tool_call,) = message.tool_calls or []
        assert (tool_call.function.name, tool_call.function.arguments) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "content": weather("Oslo"), "tool_name": "weather"}
    assert client.chat(MODEL, messages=[*messages, message, result], tools=[weather]).message.content == "rain in Oslo"


def test_thinking(client: ollama.Client) -> None:
    """Reasoning is a separate field, and left out when not requested."""
    thought = [{"role": "user", "content": "<think>let me see</think> forty two"}]
    reply = client.chat(MODEL, messages=thought, think=True)
    assert (reply.message.thinking or "").strip() == "let me see"
    assert (reply.message.content or "").strip() == "forty two"
    assert client.chat(MODEL, messages=thought, think=False).message.thinking is None


def test_embeddings(client: ollama.Client) -> None:
    """Vectors of unit length, in order, equal to those of single requests."""
    reply = client.embed(MODEL, ["one fish", "two fish"])
    vectors = np.array(reply.embeddings)
    assert vectors.shape == (2, 32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert np.allclose(client.embed(MODEL, "two fish").embeddings, vectors[1:], atol=1e-6)
    assert reply.prompt_eval_count == 4
    assert len(client.embeddings(MODEL, "one fish").embedding) == 32


def test_lists(client: ollama.Client) -> None:
    """Available models, loaded models, and details of one."""
    first = client.list().models[0]
    assert (first.model, len(first.digest or "")) == (f"{MODEL}:latest", 64)
    assert {each.model for each in client.ps().models} == {f"{MODEL}:latest"}
    shown = client.show(f"{MODEL}:latest")
    assert "completion" in (shown.capabilities or [])
    assert shown.modelinfo is not None
    assert "general.architecture" in shown.modelinfo


def test_a_model_that_is_not_there_is_pulled(client: ollama.Client) -> None:
    """As programs do it: 404, pull, chat again, delete."""
    with pytest.raises(ollama.ResponseError, match=r"model 'small' not found") as caught:
        client.embed(PULLED, "one fish")
    assert caught.value.status_code == 404
    lines = list(client.pull(PULLED, stream=True))
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    assert client.pull(PULLED).status == "success"
    assert len(client.embed(PULLED, "one fish").embeddings[0]) == 8


def test_loading_and_unloading(client: ollama.Client, server: Server) -> None:
    """Requests without a prompt load and unload."""
    assert client.generate(MODEL, keep_alive="10m").done_reason == "load"
    assert client.chat(MODEL, messages=[], keep_alive=0).done_reason == "unload"
    assert client.generate(MODEL, "still there").response == "still there"
    assert "Traceback" not in server.log.read_text()


def test_errors(client: ollama.Client) -> None:
    """The client raises its own error, with the message, also in mid-stream."""
    with pytest.raises(ollama.ResponseError, match="not supported") as caught:
        client.generate(MODEL, "a", suffix="b")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="not create models"):
        client.create("mine", from_=MODEL)
    with pytest.raises(ollama.ResponseError, match="not copy models"):
        client.copy(MODEL, "mine")
    pieces = client.generate(MODEL, "one poison-item", stream=True)
    assert next(iter(pieces)).response == "one"
    with pytest.raises(ollama.ResponseError, match="without a reason"):
        list(pieces)


def test_a_client_that_leaves(client: ollama.Client, server: Server) -> None:
    """Generation stops: the server has no stream left soon after."""
    pieces = client.generate(MODEL, "a " * 100_000, stream=True)
    next(iter(pieces))
    pieces.close()  # type: ignore[attr-defined]  # a generator, whatever its annotation says
    left = "shoal_requests_total{" + f'model="{MODEL}",outcome="cancelled",surface="ollama",task="generate"' + "} 1.0"
    wait_until(lambda: _counted(server, left), server.process, server.log)


def _counted(server: Server, line: str) -> bool:
    return line in server.request("GET", "/metrics")[2].decode()


class TestPullFromTheHub:
    """GGUF files of a hub on this machine."""

    REPOSITORY = "org/tiny-GGUF"

    @pytest.fixture
    def client(self, shoal_server: ShoalServer, tmp_path: Path) -> Iterator[ollama.Client]:
        gguf = (Path(__file__).parents[1] / "fixtures" / "tiny_llama.gguf").read_bytes()
        files = {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf, "README.md": b"# tiny"}
        with hub_with({self.REPOSITORY: files}) as hub:
            env = {"SHOAL_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub}
            server = shoal_server([f"{MODEL}=fake:"], "--as", "ollama", env=env)
            with ollama.Client(server.base_url) as client:
                yield client

    def test_by_quantization(self, client: ollama.Client) -> None:
        """The client sees each step, and the model answers to the name it was pulled by."""
        name = f"hf.co/{self.REPOSITORY}:Q8_0"
        steps = list(client.pull(name, stream=True))
        assert [steps[0].status, steps[-1].status] == ["pulling manifest", "success"]
        assert [step.status for step in steps[-3:-1]] == ["verifying sha256 digest", "writing manifest"]
        assert f"{self.REPOSITORY}:Q8_0" in [each.model for each in client.list().models]
        assert client.generate(name, "one", options={"num_predict": 2, "temperature": 0}).eval_count == 2
        source = client.show(name).modelfile
        assert source is not None
        assert source.startswith(f"FROM hf:{self.REPOSITORY}:Q8_0")
        client.pull(f"hf.co/{self.REPOSITORY}:latest")
        assert {quantized_name(self.REPOSITORY, "Q8_0"), self.REPOSITORY} <= {
            str(each.model).replace(":latest", "").replace(":", "-") for each in client.list().models
        }
        client.delete(name)
        assert f"{self.REPOSITORY}:Q8_0" not in [each.model for each in client.list().models]

    def test_what_the_hub_does_not_have(self, client: ollama.Client) -> None:
        """A repository, or a quantization: the client raises the server's reason."""
        with pytest.raises(ollama.ResponseError, match="pull model manifest: file does not exist"):
            client.pull("hf.co/org/none:Q8_0")
        with pytest.raises(ollama.ResponseError, match=r"0 of its GGUF files are Q5_K_M.*Q8_0"):
            list(client.pull(f"hf.co/{self.REPOSITORY}:Q5_K_M", stream=True))
