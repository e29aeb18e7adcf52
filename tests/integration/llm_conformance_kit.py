"""Language models of every kind behind one `shoal serve`, and one way to tell each of them what to answer.

Most kinds follow a script within the prompt (`triton_models.talker`, `llama`), or repeat the prompt (`fake:`). The
embedded engine has a real model with random weights: it is made to say a text by guided decoding.
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

from shoal.backends.triton import protocol_pb2 as pb
from shoal.pipelines.chat.vocabulary import Vocabulary
from tests.fakes.triton import FakeModel, FakeTriton, Refused, reply
from tests.fakes.triton_llm import held, talker_config, texts
from tests.fixtures.tiny_llama import CHATML, CONTEXT, write_tokenizer
from tests.integration.llm_kit import running
from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import serving
from tests.integration.triton_kit import Triton

EMBEDDED = Path(__file__).parents[1] / "fixtures" / "tiny_llama_ir"
PARAMETERS_OF_A_TRTLLM = frozenset(
    {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"length_penalty", "min_tokens", "bad_words", "response_format"}
)
OF_A_FAKE = frozenset(
    {"temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias"}
    | {"logprobs", "top_logprobs"}
)

Told: TypeAlias = Literal["pieces", "ids", "words", "guide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model under its name here. `told`: how it is made to say a text: by a script of pieces or of token ids,
    by the words of the prompt, or by a guide.

    `able`: fields that it honours, by the names of the wire. `streams`: it answers in pieces. `counts`: what its usage
    counts: tokens, tokens and the one that ends the answer, words, or four bytes each for want of a tokenizer.
    `reports`: what it says the prompt had. `sees`: the first word of its notes; "" where they are elsewhere.
    """

    name: str
    model: str = ""
    told: Told = "pieces"
    able: frozenset[str] = frozenset()
    streams: bool = True
    counts: Literal["tokens", "end", "words", "bytes"] = "tokens"
    reports: int | None = None
    sees: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def knows_context(self) -> bool:
        """It has the files of the tiny tokenizer."""
        return self.counts in ("tokens", "end")


KINDS = (
    Kind(
        name="vllm",
        model="talker_vllm",
        able=frozenset(
            {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "min_tokens"}
            | {"repetition_penalty", "stop_token_ids", "bad_words", "ignore_eos", "logprobs", "top_logprobs"}
            | {"response_format"}
        ),
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
        told="ids",
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
        told="ids",
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
    Kind(name="fake", told="words", able=OF_A_FAKE, counts="words"),
    Kind(name="upstream", told="words", able=OF_A_FAKE, counts="words"),
    Kind(
        name="embedded",
        told="guide",
        able=frozenset(
            {"temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "min_tokens"}
            | {"repetition_penalty", "stop_token_ids", "ignore_eos", "logprobs", "response_format"}
        ),
        counts="end",
    ),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What makes a model say a text: the words of the user, and what goes beside them."""

    words: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class House:
    """All kinds behind `front`. `behind`: the server behind the kind `upstream`; `dynamo`: the fake Triton."""

    front: Server
    behind: Server
    triton: Triton
    dynamo: FakeTriton
    vocabulary: Vocabulary

    def says(self, kind: Kind, text: str, *, first_ms: int = 0, delay_ms: int = 0, fails: int | None = None) -> Asked:
        """What makes it say a text, at a pace, with an error after `fails` pieces. The fake model and the embedded
        one have no pace of their own, and the latter does not fail."""
        if kind.told == "guide":
            return Asked("say something", {"structured_outputs": {"choice": [text]}})
        if kind.told == "words":
            words = text.split()
            return Asked(" ".join(words if fails is None else [*words[:fails], "poison-item"]))
        pieces = self.pieces(text)
        said = "-".join(piece.hex() for piece in pieces)
        if kind.told == "ids":
            said = "-".join(map(str, self.vocabulary.encode(text, special=False)))
        how = [f"say={said}", f"first_ms={first_ms}", f"delay_ms={delay_ms}"]
        return Asked(" ".join(how if fails is None else [*how, f"fail={fails}"]))

    def pieces(self, text: str) -> list[bytes]:
        """What a model says one by one: the bytes of each token, so that characters are cut in two."""
        return [self.vocabulary.data(token) for token in self.vocabulary.encode(text, special=False)]

    def used(self, kind: Kind, text: str) -> int | None:
        """Tokens of an answer that ends by itself. None: the engine may spell it as it likes."""
        if kind.told == "guide":
            return None
        if kind.counts == "words":
            return len(text.split())
        if kind.counts == "bytes":
            return -(-len(text.encode()) // 4)
        return len(self.pieces(text)) + (kind.counts == "end")

    def read(self, kind: Kind, words: str, *, chat: bool) -> int:
        """Tokens of a prompt: of the conversation as the template renders it, or of the text as it is."""
        if kind.reports is not None:
            return kind.reports
        if kind.counts == "words":
            return len(words.split())
        text = rendered(words) if chat else words
        if kind.counts == "bytes":
            return len(text.removeprefix("<s>").encode()) // 4
        return len(self.vocabulary.encode(text, special=not chat))


def rendered(words: str) -> str:
    """What CHATML makes of a message of the user's."""
    return f"<s><|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Process:
    """One that a server has started."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def worked(self) -> int:
        """Ticks of a processor that it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


def processes_of(server: Server, module: str) -> list[Process]:
    """Those that a server has started of a module."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and module in (entry / "cmdline").read_text().split("\0"):
                found.append(Process(int(entry.name)))
    return found


@contextmanager
def house_of(triton: Triton, folder: Path, *flags: str, pace: str = "") -> Iterator[House]:
    """The servers. `pace`: options of the fake model, which a prompt cannot set; `flags`: of the front."""
    files = folder / "tokenizer"
    write_tokenizer(files)
    (folder / "chatml.jinja").write_text(CHATML)
    with ThreadPoolExecutor() as pool:
        list(pool.map(triton.load, ["talker_trtllm"]))  # before what is made of it
        list(pool.map(triton.load, sorted({kind.model for kind in KINDS if kind.model})))
    with ExitStack() as stack:
        dynamo = stack.enter_context(_dynamo())
        parser = ("--tool-call-parser", "hermes")
        behind = stack.enter_context(running(folder / "behind", f"far=fake:{pace}", flags=parser))
        addresses = {
            "dynamo": f"triton://{dynamo.target}#llm",
            "fake": f"fake:{pace}",
            "upstream": f"openai+{behind.base_url}/v1#far",
            "embedded": f"file:{EMBEDDED}",
        }
        tables = []
        for kind in KINDS:
            address = addresses.get(kind.name, f"triton://{triton.url}#{kind.model}")
            tables.append(f'[models."{kind}"]\nbackends = ["{address}"]')
            if kind.name == "fake":
                tables.append('tool_call_parser = "hermes"')
            elif kind.counts == "bytes":
                tables.append(f'chat_template = "{folder / "chatml.jinja"}"')
            elif kind.told in ("pieces", "ids"):
                tables.append(f'tokenizer = "{files}"')
            if kind.name == "bls":  # the server's own calls among models crash with many at once
                tables.append("max_streams = 1")
        env = {"SHOAL_HOME": str(folder / "home")}
        names = [kind.name for kind in KINDS]
        front = stack.enter_context(serving(folder / "front", names, *flags, env=env, config="\n".join(tables)))
        yield House(front, behind, triton, dynamo, Vocabulary(files, bos_token="<s>"))


@contextmanager
def _dynamo() -> Iterator[FakeTriton]:
    """A model of Dynamo's, in a loop of its own: Triton's python backend cannot pass for its platform."""
    found: list[FakeTriton] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with FakeTriton() as triton:
            triton.add(FakeModel("llm", config=talker_config("dynamo", "llm"), answer=_answers, platform="dynamo"))
            found.append(triton)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="dynamo")
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        stop.set()
        thread.join()


async def _answers(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
    """As `triton_models.talker` does it."""
    said = held(request)
    prompt = said["text_input"]
    pieces = [bytes.fromhex(each) for each in re.findall(r"say=([0-9a-f-]+)", prompt)[-1].split("-")]
    fails = re.search(r"fail=(\d+)", prompt)
    pieces = pieces[: int(fails[1])] if fails else pieces
    for number, piece in enumerate(pieces):
        await asyncio.sleep((_number(prompt, "delay_ms") + (0 if number else _number(prompt, "first_ms"))) / 1000)
        if said["streaming"]:
            yield _piece(request, piece, over=number + 1 == len(pieces) and not fails)
    if fails:
        raise Refused("told to fail in the middle")
    if not said["streaming"]:
        yield _piece(request, b"".join(pieces), over=True)


def _piece(request: pb.ModelInferRequest, text: bytes, *, over: bool) -> pb.ModelInferResponse:
    return reply(request, text_output=texts(text), finish_reason=texts("stop" if over else "None"))


def _number(prompt: str, name: str) -> int:
    found = re.search(rf"{name}=(\d+)", prompt)
    return int(found[1]) if found else 0


@dataclass(slots=True)
class Heard:
    """An answer: of each choice its text, its reason and the calls of tools (name, arguments), and the usage.

    `pieces`: events with a text. Filled from a whole answer or from a stream alike.
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
    def counted(self) -> tuple[int, int]:
        """(of the prompt, of the answer)."""
        assert self.usage.total_tokens == self.usage.prompt_tokens + self.usage.completion_tokens
        return self.usage.prompt_tokens, self.usage.completion_tokens


async def chat(client: Any, kind: Kind, messages: str | Sequence[Any], *, stream: bool = False, **fields: Any) -> Heard:
    """A conversation, of one message where it is a text. Fields that the client does not know go in `extra_body`."""
    given: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    heard = Heard()
    if not stream:
        answer = await client.chat.completions.create(model=kind.name, messages=given, **fields)
        for choice in answer.choices:
            heard.texts[choice.index] = choice.message.content or ""
            heard.reasons[choice.index] = choice.finish_reason
            calls = choice.message.tool_calls or []
            heard.calls[choice.index] = [(call.function.name, call.function.arguments) for call in calls]
            heard.ids += [call.id for call in calls]
            heard.logprobs += [each.token for each in (choice.logprobs.content if choice.logprobs else [])]
        heard.usage = answer.usage
        return heard
    options = {"include_usage": True}
    events = await client.chat.completions.create(
        model=kind.name, messages=given, stream=True, stream_options=options, **fields
    )
    async for event in events:
        assert heard.usage is None, "an event after the usage"
        heard.usage = event.usage
        assert bool(event.choices) == (event.usage is None)
        for choice in event.choices:
            _hear(heard, choice)
    return heard


def _hear(heard: Heard, choice: Any) -> None:
    """One choice of an event of a chat's stream."""
    index, delta = choice.index, choice.delta
    assert index not in heard.reasons, "an event after the last one of its choice"
    heard.texts[index] = heard.texts.get(index, "") + (delta.content or "")
    heard.pieces += bool(delta.content)
    calls = heard.calls.setdefault(index, [])
    for call in delta.tool_calls or []:
        if call.index == len(calls):
            calls.append((call.function.name, ""))
            heard.ids.append(call.id)
        name, arguments = calls[call.index]
        calls[call.index] = (name, arguments + (call.function.arguments or ""))
    heard.logprobs += [each.token for each in (choice.logprobs.content if choice.logprobs else [])]
    if choice.finish_reason:
        heard.reasons[index] = choice.finish_reason


async def complete(client: Any, kind: Kind, prompt: Any, *, stream: bool = False, **fields: Any) -> Heard:
    """As `chat`, by the older road; it ends after 16 tokens where `max_tokens` does not say otherwise."""
    heard = Heard()
    fields = {"max_tokens": 400, **fields}
    if not stream:
        answer = await client.completions.create(model=kind.name, prompt=prompt, **fields)
        for choice in answer.choices:
            heard.texts[choice.index] = choice.text
            heard.reasons[choice.index] = choice.finish_reason
            heard.logprobs += (choice.logprobs.tokens or []) if choice.logprobs else []
        heard.usage = answer.usage
        return heard
    options = {"include_usage": True}
    events = await client.completions.create(
        model=kind.name, prompt=prompt, stream=True, stream_options=options, **fields
    )
    async for event in events:
        heard.usage = event.usage
        for choice in event.choices:
            heard.texts[choice.index] = heard.texts.get(choice.index, "") + choice.text
            heard.pieces += bool(choice.text)
            heard.logprobs += (choice.logprobs.tokens or []) if choice.logprobs else []
            if choice.finish_reason:
                heard.reasons[choice.index] = choice.finish_reason
    return heard


ROADS: dict[str, Callable[..., Coroutine[Any, Any, Heard]]] = {"chat": chat, "completions": complete}
TOO_LONG = "one " * (CONTEXT + 100)
