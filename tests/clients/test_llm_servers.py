"""Anthropic's and OpenAI's clients through Shoal, with real servers of language models behind it.

For `make test-llm-servers`. The environment variables LLAMA_CPP and VLLM name the Python of an environment that has the
server. Each runs small models whose answer is known. Where Shoal passes requests on, answers are compared with the
server's own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.fixtures.chain_model import CONTEXT, Kind, write_checkpoint, write_gguf
from tests.integration.llm_kit import free_port, metric, running, until
from tests.integration.server_kit import Server, environment

pytestmark = pytest.mark.timeout(1800)
"""vLLM takes half a minute of processor time to start."""

PYTHONS = {name: python for name in ("LLAMA_CPP", "VLLM") if (python := os.environ.get(name))}
ANSWER = "A shoal is a group of fish."
THOUGHT = "Fish come to mind."
HI: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = [{"role": "user", "content": "Hello " * 5000}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris"]}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": CITY}
FUNCTION: Any = {"name": "get_weather", "description": "The weather of a city", "parameters": CITY}
CALLED: Any = {"city": "Paris"}
WORD: Any = {"type": "string", "enum": ["Paris"]}
"""A form without whitespace, which a model without sense would write until it is cut."""
OWN = frozenset({"id", "created", "created_at", "model", "system_fingerprint", "timings", "prompt_tokens_details"})
"""What two equal answers differ in."""

LLAMA_CPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.model_alias = sys.argv[1], int(sys.argv[2]), {"tiny"}
params.n_parallel, params.n_ctx, params.endpoint_metrics = 2, 2 * int(sys.argv[3]), True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
time.sleep(86400)
"""
VLLM_FLAGS = (
    *("--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
    *("--max-num-seqs", "4", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
VLLM_VARIABLES = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
}
RUNNING = {
    "LLAMA_CPP": re.compile(r"^llamacpp:requests_processing (\S+)", re.MULTILINE),
    "VLLM": re.compile(r"^vllm:num_requests_running{.*} (\S+)", re.MULTILINE),
}


class Setup(NamedTuple):
    """A server, its process, and Shoal before it."""

    name: str
    process: subprocess.Popen[bytes]
    direct: str
    shoal: Server

    def messages_client(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.shoal.base_url, api_key="any", max_retries=0)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.shoal.base_url}/v1", api_key="any", max_retries=0)

    def direct_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.direct}/v1", api_key="any", max_retries=0)

    def is_idle(self) -> bool:
        with urllib.request.urlopen(f"{self.direct}/metrics") as reply:
            found = RUNNING[self.name].search(reply.read().decode())
        return found is not None and float(found[1]) == 0


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server; vLLM's engine is a process of its own in the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def serving(name: str, kind: Kind, folder: Path) -> Iterator[Setup]:
    port = free_port()
    if name == "LLAMA_CPP":
        model = write_gguf(kind, folder / "tiny.gguf")
        command = ["-c", LLAMA_CPP, str(model), str(port), str(CONTEXT)]
    else:
        model = write_checkpoint(kind, folder / "tiny")
        parser = ("--reasoning-parser", "qwen3") if kind == "thinks" else ()
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        command += [*VLLM_FLAGS, *parser]
    log = folder / "engine.log"
    with ExitStack() as stack:
        file = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [PYTHONS[name], *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(VLLM_VARIABLES),
            start_new_session=True,
        )
        stack.callback(process.wait)
        stack.callback(kill, process)
        # Shoal waits for a server that is not there yet.
        address = f"tiny=openai+http://127.0.0.1:{port}/v1#tiny"
        shoal = stack.enter_context(running(folder / "shoal", address, wait=False))
        while not shoal.ready():
            try:
                process.wait(1)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(log.read_text()[-4000:])
        yield Setup(name, process, f"http://127.0.0.1:{port}", shoal)


@pytest.fixture(scope="module", params=PYTHONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def thinker(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A model that thinks before its answer."""
    with serving(name, "thinks", tmp_path_factory.mktemp(name)) as setup:
        yield setup


@pytest.fixture(scope="module")
def caller(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A model that calls a tool at once."""
    with serving(name, "calls", tmp_path_factory.mktemp(name)) as setup:
        yield setup


def comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: comparable(each) for key, each in value.items() if key not in OWN}
    return [comparable(each) for each in value] if isinstance(value, list) else value


def blocks_of(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    found = [(block.type, getattr(block, values[block.type])) for block in message.content]
    return [(kind, value.strip() if isinstance(value, str) else value) for kind, value in found]


def ask(**fields: Any) -> Any:
    return {"model": "tiny", "max_tokens": 64, "messages": HI, "extra_body": {"temperature": 0}, **fields}


def test_messages_with_thinking(thinker: Setup) -> None:
    """Whole and as a stream; thinking can be switched off."""
    thinking: Any = {"type": "adaptive"}
    with thinker.messages_client() as client:
        message = client.messages.create(**ask(thinking=thinking, system="Be brief."))
        with client.messages.stream(**ask(thinking=thinking, system="Be brief.")) as stream:
            streamed = stream.get_final_message()
        without = client.messages.create(**ask(thinking={"type": "disabled"}))
    assert blocks_of(message) == blocks_of(streamed) == [("thinking", THOUGHT), ("text", ANSWER)]
    assert message.stop_reason == streamed.stop_reason == without.stop_reason == "end_turn"
    assert message.usage.output_tokens == streamed.usage.output_tokens
    assert blocks_of(without) == [("text", ANSWER)]


def test_where_messages_end(thinker: Setup) -> None:
    """llama.cpp does not say which stop text was met."""
    disabled: Any = {"type": "disabled"}
    with thinker.messages_client() as client:
        cut = client.messages.create(**ask(thinking=disabled, max_tokens=3))
        stopped = client.messages.create(**ask(thinking=disabled, stop_sequences=[" of"]))
    assert (cut.stop_reason, cut.usage.output_tokens, blocks_of(cut)) == ("max_tokens", 3, [("text", "A shoal is a")])
    assert blocks_of(stopped) == [("text", "A shoal is a group")]
    expected = ("end_turn", None) if thinker.name == "LLAMA_CPP" else ("stop_sequence", " of")
    assert (stopped.stop_reason, stopped.stop_sequence) == expected


def test_forms_of_answers(thinker: Setup) -> None:
    """Every API has its own field for a JSON schema."""
    output: Any = {"format": {"type": "json_schema", "schema": WORD}}
    with thinker.messages_client() as client, thinker.client() as other:
        message = client.messages.create(**ask(extra_body={"temperature": 0, "output_config": output}))
        completion = other.chat.completions.create(
            model="tiny",
            messages=HI,
            response_format={"type": "json_schema", "json_schema": {"name": "word", "schema": WORD}},
        )
        form: Any = {"format": {"type": "json_schema", "name": "word", "schema": WORD}}
        response = other.responses.create(model="tiny", input="Hello", text=form)
    assert [value for kind, value in blocks_of(message) if kind == "text"] == ['"Paris"']
    assert (completion.choices[0].message.content or "").strip() == '"Paris"'
    assert response.output_text.strip() == '"Paris"'


def test_tokens_are_counted_by_the_server(thinker: Setup) -> None:
    asked = {"model": "tiny", "messages": HI, "system": "Be brief."}
    with thinker.messages_client() as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_refusals(thinker: Setup) -> None:
    """A prompt beyond the context, in the words of each API, and a model that nobody serves."""
    with thinker.messages_client() as client, thinker.client() as other:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(**ask(messages=LONG))
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**ask(model="nobody"))
        with pytest.raises(openai.BadRequestError):
            other.chat.completions.create(model="tiny", messages=LONG)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(model="tiny", input="Hello " * 5000)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"stop": [" of"]},
        {"n": 2, "temperature": 1, "seed": 1},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    ],
)
def test_chat_completions_are_the_server_s_own(thinker: Setup, fields: dict[str, Any]) -> None:
    """Whole, and as a stream."""
    asked: Any = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 64, **fields}
    with thinker.client() as client, thinker.direct_client() as direct:
        found, own = (comparable(each.chat.completions.create(**asked).to_dict()) for each in (client, direct))
        assert found == own
        assert joined(client, asked) == joined(direct, asked)


def joined(client: openai.OpenAI, asked: Any) -> Any:
    """Return the texts, reasons and usage of a stream: a busy server puts several tokens into one event."""
    choices: dict[int, dict[str, str]] = {}
    usage: Any = None
    options: Any = {"include_usage": True}
    for event in client.chat.completions.create(**asked, stream=True, stream_options=options):
        usage = event.usage or usage
        for choice in event.choices:
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            tokens = "".join(f"{each.token} {each.logprob:.3f} " for each in logprobs or ())
            parts = {**choice.delta.to_dict(), "reason": choice.finish_reason, "logprobs": tokens}
            made = choices.setdefault(choice.index, {})
            for name, value in parts.items():
                made[name] = made.get(name, "") + str(value or "")
    assert usage is not None
    return choices, usage.completion_tokens


def test_responses(thinker: Setup) -> None:
    """Whole, as a stream, and going on from a stored one."""
    with thinker.client() as client:
        first = client.responses.create(model="tiny", input="Hello", temperature=0)
        *_, last = client.responses.create(model="tiny", input="Hello", temperature=0, stream=True)
        second = client.responses.create(model="tiny", input="And?", previous_response_id=first.id, temperature=0)
        cut = client.responses.create(model="tiny", input="Hello", max_output_tokens=8, temperature=0)
    assert last.type == "response.completed"
    assert {first.output_text.strip(), second.output_text.strip(), last.response.output_text.strip()} == {ANSWER}
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens // 2
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_ollama_s_chat(thinker: Setup) -> None:
    asked = {"model": "tiny", "messages": HI, "stream": False, "options": {"temperature": 0}}
    for fields, thought in (({"think": True}, THOUGHT), ({"think": False}, "")):
        status, _, body = thinker.shoal.request("POST", "/api/chat", {**asked, **fields})
        message = json.loads(body)["message"]
        assert (status, message["content"].strip()) == (200, ANSWER)
        assert message.get("thinking", "").strip() == thought


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_clients_that_leave(thinker: Setup, path: str) -> None:
    """The server stops computing."""
    body = ask(max_tokens=900, stream=True, ignore_eos=True)
    body.pop("extra_body")
    request = urllib.request.Request(
        f"{thinker.shoal.base_url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        assert reply.readline()
    until(thinker.is_idle)
    until(lambda: metric(thinker.shoal, "shoal_active_streams") == 0)


def test_tools_of_messages(caller: Setup) -> None:
    """Called, called in a stream, ruled out, and answered."""
    with caller.messages_client() as client:
        called = client.messages.create(**ask(tools=[TOOL]))
        with client.messages.stream(**ask(tools=[TOOL])) as stream:
            streamed = stream.get_final_message()
        none = client.messages.create(**ask(tools=[TOOL], tool_choice={"type": "none"}))
        turns = [*HI, {"role": "assistant", "content": called.content}]
        turns.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "21 degrees"}],
            }
        )
        answered = client.messages.create(**ask(messages=turns, tools=[TOOL]))
    assert blocks_of(called) == blocks_of(streamed) == blocks_of(answered) == [("tool_use", CALLED)]
    assert called.stop_reason == streamed.stop_reason == "tool_use"
    assert "tool_use" not in {kind for kind, _ in blocks_of(none)}
    assert answered.usage.input_tokens + (answered.usage.cache_read_input_tokens or 0) > called.usage.input_tokens


def test_a_choice_of_one_tool(caller: Setup) -> None:
    """The other one is never called. vLLM binds a model to the schema of a strict tool only."""
    tools: Any = [{**TOOL, "name": "get_time"}, {**TOOL, "strict": True}]
    with caller.messages_client() as client:
        message = client.messages.create(
            **ask(tools=tools, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=200)
        )
    assert [(block.type, getattr(block, "name", "")) for block in message.content] == [("tool_use", "get_weather")]
    assert blocks_of(message) == [("tool_use", CALLED)]


def test_tools_of_the_other_apis(caller: Setup) -> None:
    """Chat completions, responses and Ollama's."""
    functions = [{"type": "function", "function": FUNCTION}]
    asked: Any = {"model": "tiny", "messages": HI, "temperature": 0, "tools": functions}
    with caller.client() as client, caller.direct_client() as direct:
        found, own = (comparable(each.chat.completions.create(**asked).to_dict()) for each in (client, direct))
        assert found == own
        with client.chat.completions.stream(**asked) as stream:
            completion = stream.get_final_completion()
        tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
        response = client.responses.create(model="tiny", input="Hello", tools=tools, temperature=0)
        *_, last = client.responses.create(model="tiny", input="Hello", tools=tools, temperature=0, stream=True)
    calls = completion.choices[0].message.tool_calls
    assert calls
    (call,) = calls
    assert json.loads(call.function.arguments) == CALLED
    assert last.type == "response.completed"
    for each in (response, last.response):
        (item,) = each.output
        assert item.type == "function_call"
        assert (item.name, json.loads(item.arguments)) == ("get_weather", CALLED)
    body = {"model": "tiny", "messages": HI, "stream": False, "tools": functions, "options": {"temperature": 0}}
    _, _, answer = caller.shoal.request("POST", "/api/chat", body)
    (called,) = json.loads(answer)["message"]["tool_calls"]
    assert called["function"]["arguments"] == CALLED


def test_a_server_that_ends_in_mid_stream(caller: Setup) -> None:
    """Its clients get an error at once, and so does the next one."""
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 900}
    with caller.client() as client:
        with pytest.raises(openai.APIError, match="before the answer was complete"):
            for _ in client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
                kill(caller.process)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**asked)
