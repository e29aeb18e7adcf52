"""Language models of every kind behind one `shoal serve`, and one way to script the answer of each.

Most kinds follow a script in the prompt (`triton_models.talker`, `llama`) or repeat the prompt (`fake:`). The embedded
engine runs a real model with random weights: guided decoding makes it answer with a given text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.kserve import protocol_pb2 as pb
from shoal.pipelines.chat.vocabulary import Vocabulary
from tests.fakes.triton import FakeModel, FakeTriton, Refused, reply
from tests.fakes.triton_llm import decode_inputs, talker_config, texts
from tests.fixtures.tiny_llama import CHATML, CONTEXT, write_tokenizer
from tests.integration.llm_kit import free_port, running
from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import serving
from tests.integration.triton_kit import Triton

EMBEDDED = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
PARAMETERS_OF_A_TRTLLM = frozenset(
    {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"length_penalty", "min_tokens", "bad_words", "response_format"}
)
FIELDS_OF_VLLM = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "min_tokens"}
    | {"repetition_penalty", "stop_token_ids", "bad_words", "ignore_eos"}
)
OF_A_FAKE = frozenset(
    {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias"}
    | {"logprobs", "top_logprobs"}
)
IGNORED = FIELDS_OF_VLLM - OF_A_FAKE | {"structured_outputs"}
"""What the server of the kind `kserve` is told to ignore: its tensors are those of vLLM, its model is a fake one."""

ScriptStyle: TypeAlias = Literal["pieces", "ids", "words", "guide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model and its name in these tests. `script_style`: how its answer is scripted: as pieces or token ids
    in the prompt, as the words of the prompt, or by a guide.

    `able`: wire names of the fields it supports. `streams`: it answers in pieces. `counts`: what its usage counts:
    tokens, tokens with the end token, words, or four bytes each without a tokenizer. `reports`: the prompt tokens it
    reports. `sees`: the first word of its notes; "" if it writes none.
    """

    name: str
    model: str = ""
    script_style: ScriptStyle = "pieces"
    able: frozenset[str] = frozenset()
    streams: bool = True
    counts: Literal["tokens", "end", "words", "bytes"] = "tokens"
    reports: int | None = None
    sees: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def knows_context(self) -> bool:
        """Whether it has the files of the tiny tokenizer."""
        return self.counts in ("tokens", "end")


KINDS = (
    Kind(
        name="vllm",
        model="talker_vllm",
        able=FIELDS_OF_VLLM | {"logprobs", "top_logprobs", "response_format"},
        reports=7,
        sees="vllm",
    ),
    Kind(
        name="ensemble",
        model="talker_ensemble",
        able=PARAMETERS_OF_A_TRTLLM,
        reports=7,
        sees="bls",
    ),
    Kind(name="bls", model="talker_bls", able=PARAMETERS_OF_A_TRTLLM, reports=7, sees="bls"),
    Kind(
        name="whole",
        model="talker_whole",
        able=PARAMETERS_OF_A_TRTLLM,
        streams=False,
        reports=7,
        sees="ensemble",
    ),
    Kind(
        name="gpt",
        model="talker_gpt",
        able=frozenset({"temperature", "top_p", "top_k", "seed", "min_tokens", "bad_words"}),
        streams=False,
        sees="gpt",
    ),
    Kind(
        name="tokens",
        model="llama",
        script_style="ids",
        able=frozenset(
            {"temperature", "top_p", "top_k", "seed", "length_penalty", "min_tokens", "stop_token_ids", "bad_words"}
            | {"ignore_eos", "logprobs"}
        ),
        counts="end",
        sees="tokens",
    ),
    Kind(
        name="tokens-whole",
        model="llama_whole",
        script_style="ids",
        able=frozenset(
            {"temperature", "top_p", "top_k", "seed", "length_penalty", "min_tokens", "stop_token_ids", "bad_words"}
            | {"ignore_eos", "logprobs"}
        ),
        streams=False,
        counts="end",
        sees="tokens",
    ),
    Kind(
        name="llmapi",
        model="talker_llmapi",
        able=frozenset({"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"}),
        sees="llmapi",
    ),
    Kind(name="text", model="talker_text", able=frozenset({"temperature"}), streams=False, sees="text"),
    Kind(name="bare", model="talker_bare", streams=False, counts="bytes", sees="text"),
    Kind(name="flow", model="talker_flow", counts="tokens", sees="text"),
    Kind(name="dynamo", counts="tokens"),
    Kind(name="fake", script_style="words", able=OF_A_FAKE, counts="words"),
    Kind(name="upstream", script_style="words", able=OF_A_FAKE, counts="words"),
    Kind(name="kserve", script_style="words", able=FIELDS_OF_VLLM | {"response_format"}, counts="words"),
    Kind(
        name="embedded",
        script_style="guide",
        able=frozenset(
            {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "min_tokens"}
            | {"repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs", "response_format"}
        ),
        counts="end",
    ),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The words of the user and the request fields that make a model answer with a given text."""

    words: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """All kinds behind `front`. `upstream`: the server of the kind `upstream`; `dynamo`: the fake Triton."""

    front: Server
    upstream: Server
    triton: Triton
    dynamo: FakeTriton
    vocabulary: Vocabulary

    def prompt_for(
        self, kind: Kind, text: str, *, first_ms: int = 0, delay_ms: int = 0, fails: int | None = None
    ) -> Prompt:
        """Return the prompt for a text, at a pace, with an error after `fails` pieces. The fake model and the
        embedded engine have no pace, and the latter does not fail."""
        if kind.script_style == "guide":
            return Prompt("say something", {"structured_outputs": {"choice": [text]}})
        if kind.script_style == "words":
            words = text.split()
            return Prompt(" ".join(words if fails is None else [*words[:fails], "poison-item"]))
        pieces = self.pieces(text)
        encoded = "-".join(piece.hex() for piece in pieces)
        if kind.script_style == "ids":
            encoded = "-".join(map(str, self.vocabulary.encode(text, special=False)))
        how = [f"say={encoded}", f"first_ms={first_ms}", f"delay_ms={delay_ms}"]
        return Prompt(" ".join(how if fails is None else [*how, f"fail={fails}"]))

    def pieces(self, text: str) -> list[bytes]:
        """Return the bytes of each token, so that characters are split."""
        return [self.vocabulary.data(token) for token in self.vocabulary.encode(text, special=False)]

    def completion_tokens(self, kind: Kind, text: str) -> int | None:
        """Return the tokens of an answer that ends by itself, or None if the engine may tokenize it differently."""
        if kind.script_style == "guide":
            return None
        if kind.counts == "words":
            return len(text.split())
        if kind.counts == "bytes":
            return -(-len(text.encode()) // 4)
        return len(self.pieces(text)) + (kind.counts == "end")

    def read(self, kind: Kind, words: str, *, chat: bool) -> int:
        """Return the tokens of a prompt: of the rendered conversation, or of the text as it is."""
        if kind.reports is not None:
            return kind.reports
        if kind.counts == "words":
            return len(words.split())
        text = render_chat(words) if chat else words
        if kind.counts == "bytes":
            return len(text.removeprefix("<s>").encode()) // 4
        return len(self.vocabulary.encode(text, special=not chat))


def render_chat(words: str) -> str:
    """Render one user message as CHATML does."""
    return f"<s><|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that a server started."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def cpu_ticks(self) -> int:
        """Return the processor ticks used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


def processes_of(server: Server, module: str) -> list[Process]:
    """Return the processes of a module that a server started."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended in the meantime
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and module in (entry / "cmdline").read_text().split("\0"):
                processes.append(Process(int(entry.name)))
    return processes


@contextmanager
def start_stack(triton: Triton, folder: Path, *flags: str, pace: str = "") -> Iterator[Stack]:
    """Start the servers. `pace`: options of the fake model that a prompt cannot set; `flags`: for the front server."""
    files = folder / "tokenizer"
    write_tokenizer(files)
    (folder / "chatml.jinja").write_text(CHATML)
    with ThreadPoolExecutor() as pool:
        list(pool.map(triton.load, ["talker_trtllm"]))  # before the models that use it
        list(pool.map(triton.load, sorted({kind.model for kind in KINDS if kind.model})))
    with ExitStack() as stack:
        dynamo = stack.enter_context(_dynamo())
        parser = ("--tool-call-parser", "hermes")
        upstream = stack.enter_context(running(folder / "behind", f"far=fake:{pace}", flags=parser))
        grpc = ("--grpc-port", str(grpc_port := free_port()))
        ignored = [each for name in sorted(IGNORED) for each in ("--ignore-parameters", name)]
        stack.enter_context(running(folder / "kserve", f"far=fake:{pace}", flags=(*grpc, *ignored)))
        addresses = {
            "dynamo": f"triton://{dynamo.target}#llm",
            "fake": f"fake:{pace}",
            "upstream": f"openai+{upstream.base_url}/v1#far",
            "kserve": f"triton://127.0.0.1:{grpc_port}#far",
            "embedded": f"file:{EMBEDDED}",
        }
        tables = []
        for kind in KINDS:
            address = addresses.get(kind.name, f"triton://{triton.url}#{kind.model}")
            tables.append(f'[models."{kind}"]\nbackends = ["{address}"]')
            if kind.name in ("fake", "kserve"):
                tables.append('tool_call_parser = "hermes"')
            if kind.name == "kserve":  # the model behind repeats its prompt
                (folder / "last.jinja").write_text("{{ messages[-1].content }}")
                tables.append(f'chat_template = "{folder / "last.jinja"}"')
            elif kind.counts == "bytes":
                tables.append(f'chat_template = "{folder / "chatml.jinja"}"')
            elif kind.script_style in ("pieces", "ids"):
                tables.append(f'tokenizer = "{files}"')
            if kind.name == "bls":  # see triton_models/bls.py
                tables.append("max_streams = 1")
        env = {"SHOAL_HOME": str(folder / "home")}
        names = [kind.name for kind in KINDS]
        front = stack.enter_context(serving(folder / "front", names, *flags, env=env, config="\n".join(tables)))
        yield Stack(front, upstream, triton, dynamo, Vocabulary(files, bos_token="<s>"))


@contextmanager
def _dynamo() -> Iterator[FakeTriton]:
    """Run a fake Dynamo model on its own event loop: Triton's python backend cannot report its platform."""
    servers: list[FakeTriton] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with FakeTriton() as triton:
            triton.add(FakeModel("llm", config=talker_config("dynamo", "llm"), answer=_answers, platform="dynamo"))
            servers.append(triton)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="dynamo")
    thread.start()
    try:
        assert ready.wait(20)
        yield servers[0]
    finally:
        stop.set()
        thread.join()


async def _answers(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
    """Answer as `triton_models.talker` does."""
    inputs = decode_inputs(request)
    prompt = inputs["text_input"]
    pieces = [bytes.fromhex(each) for each in re.findall(r"say=([0-9a-f-]+)", prompt)[-1].split("-")]
    fails = re.search(r"fail=(\d+)", prompt)
    pieces = pieces[: int(fails[1])] if fails else pieces
    for number, piece in enumerate(pieces):
        await asyncio.sleep((_number(prompt, "delay_ms") + (0 if number else _number(prompt, "first_ms"))) / 1000)
        if inputs["streaming"]:
            yield _piece(request, piece, over=number + 1 == len(pieces) and not fails)
    if fails:
        raise Refused("told to fail in the middle")
    if not inputs["streaming"]:
        yield _piece(request, b"".join(pieces), over=True)


def _piece(request: pb.ModelInferRequest, text: bytes, *, over: bool) -> pb.ModelInferResponse:
    return reply(request, text_output=texts(text), finish_reason=texts("stop" if over else "None"))


def _number(prompt: str, name: str) -> int:
    match = re.search(rf"{name}=(\d+)", prompt)
    return int(match[1]) if match else 0


@dataclass(slots=True)
class Completion:
    """An answer: by choice its text, finish reason and tool calls (name, arguments), and the usage.

    `pieces`: events with text. Filled from a complete answer or from a stream.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    usage: Any = None
    pieces: int = 0

    @property
    def text(self) -> str:
        assert list(self.texts) == [0]
        return self.texts[0]

    @property
    def reason(self) -> str:
        return self.reasons[0]

    @property
    def token_counts(self) -> tuple[int, int]:
        """Tokens of the (prompt, answer)."""
        assert self.usage.total_tokens == self.usage.prompt_tokens + self.usage.completion_tokens
        return self.usage.prompt_tokens, self.usage.completion_tokens


async def chat(
    client: Any, kind: Kind, messages: str | Sequence[Any], *, stream: bool = False, **fields: Any
) -> Completion:
    """Send a conversation, or one message. Fields that the client does not know go in `extra_body`."""
    conversation: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    completion = Completion()
    if not stream:
        answer = await client.chat.completions.create(model=kind.name, messages=conversation, **fields)
        for choice in answer.choices:
            completion.texts[choice.index] = choice.message.content or ""
            completion.reasons[choice.index] = choice.finish_reason
            calls = choice.message.tool_calls or []
            completion.calls[choice.index] = [(call.function.name, call.function.arguments) for call in calls]
            completion.ids += [call.id for call in calls]
            completion.logprobs += [each.token for each in (choice.logprobs.content if choice.logprobs else [])]
        completion.usage = answer.usage
        return completion
    options = {"include_usage": True}
    events = await client.chat.completions.create(
        model=kind.name, messages=conversation, stream=True, stream_options=options, **fields
    )
    async for event in events:
        assert completion.usage is None, "an event after the usage"
        completion.usage = event.usage
        assert bool(event.choices) == (event.usage is None)
        for choice in event.choices:
            _add_choice(completion, choice)
    return completion


def _add_choice(completion: Completion, choice: Any) -> None:
    """Add one choice of a chat stream's event."""
    index, delta = choice.index, choice.delta
    assert index not in completion.reasons, "an event after the last one of its choice"
    completion.texts[index] = completion.texts.get(index, "") + (delta.content or "")
    completion.pieces += bool(delta.content)
    calls = completion.calls.setdefault(index, [])
    for call in delta.tool_calls or []:
        if call.index == len(calls):
            calls.append((call.function.name, ""))
            completion.ids.append(call.id)
        name, arguments = calls[call.index]
        calls[call.index] = (name, arguments + (call.function.arguments or ""))
    completion.logprobs += [each.token for each in (choice.logprobs.content if choice.logprobs else [])]
    if choice.finish_reason:
        completion.reasons[index] = choice.finish_reason


async def complete(client: Any, kind: Kind, prompt: Any, *, stream: bool = False, **fields: Any) -> Completion:
    """As `chat`, with the older completions API; `max_tokens` is 400 unless given."""
    completion = Completion()
    fields = {"max_tokens": 400, **fields}
    if not stream:
        answer = await client.completions.create(model=kind.name, prompt=prompt, **fields)
        for choice in answer.choices:
            completion.texts[choice.index] = choice.text
            completion.reasons[choice.index] = choice.finish_reason
            completion.logprobs += (choice.logprobs.tokens or []) if choice.logprobs else []
        completion.usage = answer.usage
        return completion
    options = {"include_usage": True}
    events = await client.completions.create(
        model=kind.name, prompt=prompt, stream=True, stream_options=options, **fields
    )
    async for event in events:
        completion.usage = event.usage
        for choice in event.choices:
            completion.texts[choice.index] = completion.texts.get(choice.index, "") + choice.text
            completion.pieces += bool(choice.text)
            completion.logprobs += (choice.logprobs.tokens or []) if choice.logprobs else []
            if choice.finish_reason:
                completion.reasons[choice.index] = choice.finish_reason
    return completion


ROUTES: dict[str, Callable[..., Coroutine[Any, Any, Completion]]] = {"chat": chat, "completions": complete}
TOO_LONG = "one " * (CONTEXT + 100)
