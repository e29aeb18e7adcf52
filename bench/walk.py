"""The way of one request: the calls of Shoal's own functions and the files that they lie in, in their order.

A server of its own on a thread of this process answers real HTTP requests; of one of them, after some that warm it up,
`sys.setprofile` sees every call in every thread. A coroutine counts once, however often it is resumed, and a
comprehension, which newer versions of Python inline, is no call.

    python bench/walk.py                     one embedding of the embedded engine
    python bench/walk.py fake: --task chat   one token more of a streamed answer
    python bench/walk.py fake: --task burst  bytecode instructions of one of 64 embeddings that arrive in one turn;
                                             --texts 32: of a text of requests of so many

A turn of the event loop is a link of the longest chain of callbacks in which each schedules the next; reading the
socket is the first. A result from another thread begins a new chain, so that an engine in threads shows fewer turns
than a request takes; `fake:` has no threads. Callbacks are what the loop's methods are asked for, by tasks and
futures too; those that uvloop makes for itself are not seen. Reads and writes are those system calls of the loop's
thread, as the kernel counts them (`/proc/self/task/*/io`); waiting for events adds one system call a turn.

`tests/unit/bench/test_walk.py` holds the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import inspect
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from opcode import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

import shoal
from shoal.app import open_app
from shoal.config import load
from shoal.server import HttpServer, bind

SOURCE = str(Path(shoal.__file__).parent) + "/"
GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
BURST = 64
BURSTS = 8
NO_FUNCTIONS = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>"}
WARM_UP = 30
LOOKED_AT = 20
TOKENS = (8, 40)
WORDS = "the quick brown fox jumps over the lazy dog while nobody looks at number"


@dataclass(slots=True)
class Walk:
    """What one request called: `steps` are (depth, place) in their order, of each thread by itself."""

    steps: list[tuple[int, str]] = field(default_factory=list)
    generators: Counter[str] = field(default_factory=Counter)
    """How often each generator was asked for its next value, or went on after waiting."""
    callbacks: Counter[str] = field(default_factory=Counter)
    """What the event loop was asked for, by the method."""
    turns: int = 1
    answered: int = 0
    """The turn that wrote the answer."""
    reads: int = 0
    writes: int = 0

    @property
    def calls(self) -> int:
        return len(self.steps)

    @property
    def files(self) -> set[str]:
        return {place.partition(":")[0] for _, place in self.steps}

    @property
    def functions(self) -> Counter[str]:
        return Counter(place for _, place in self.steps)


class CountingLoop(uvloop.Loop):
    """uvloop's event loop, which notes in the recorder's walk what it is asked for."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.turn = 1
        self._recorder = recorder

    def _note(self, name: str) -> Walk | None:
        walk = self._recorder.walk
        if walk is not None:
            walk.callbacks[name] += 1
        return walk

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        walk = self._note("call_soon")
        if walk is None:
            return super().call_soon(callback, *args, context=context)
        turn = self.turn + 1
        walk.turns = max(walk.turns, turn)

        def run() -> None:
            self.turn = turn
            try:
                callback(*args)
            finally:
                self.turn = 1

        return super().call_soon(run, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        self._note("call_soon_threadsafe")
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self._note("call_later")
        return super().call_later(delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self._note("call_at")
        return super().call_at(when, callback, *args, context=context)

    def create_task(self, *args: Any, **options: Any) -> Any:
        self._note("create_task")
        return super().create_task(*args, **options)

    def create_future(self) -> Any:
        self._note("create_future")
        return super().create_future()


class Recorder:
    """A profile function for `threading.setprofile`, which notes nothing until it is switched on."""

    def __init__(self) -> None:
        self.walk: Walk | None = None
        self.loop = CountingLoop(self)
        self._places: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.walk is None or event != "call":
            return
        place = self._place(frame.f_code)
        if place is None:
            return
        if _is_resumed(frame):
            if frame.f_code.co_flags & GENERATORS:
                self.walk.generators[place] += 1
        else:
            self.walk.steps.append((self._depth(frame), place))
            if place.endswith("_Exchange.send_whole"):
                self.walk.answered = self.loop.turn

    def _place(self, code: CodeType) -> str | None:
        if code not in self._places:
            name = code.co_filename
            own = name.startswith(SOURCE) and code.co_name not in NO_FUNCTIONS
            self._places[code] = f"{name.removeprefix(SOURCE)}:{code.co_qualname}" if own else None
        return self._places[code]

    def _depth(self, frame: FrameType) -> int:
        depth, above = 0, frame.f_back
        while above is not None:
            depth += self._place(above.f_code) is not None
            above = above.f_back
        return depth


def _is_resumed(frame: FrameType) -> bool:
    """Whether a generator or coroutine goes on: at its start the argument of RESUME is 0."""
    code = frame.f_code.co_code
    at = frame.f_lasti
    return code[at] == opmap["RESUME"] and code[at + 1] & 3 != 0


@contextmanager
def recorded() -> Iterator[Recorder]:
    """A recorder of every thread that is started inside."""
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)


@contextmanager
def serving(address: str, loop: asyncio.AbstractEventLoop, **settings: str) -> Iterator[int]:
    """The port of a server with this loop on a thread of this process, once its model is ready."""
    ports: list[int] = []
    ready, stop = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        loaded = load({}, {f"SHOAL_{name.upper()}": value for name, value in settings.items()})
        sockets = bind("127.0.0.1", 0)
        async with open_app(loaded, [address] if address else []) as app:
            await app.wait_until_loaded()
            server = HttpServer(
                app.asgi, sockets, app.asgi.render_error, drain_delay_s=0.0, drain_timeout_s=5.0, drain_idle_s=0.0
            )
            running = asyncio.create_task(server.run(app.gateway, stop))
            ports.append(sockets[0].getsockname()[1])
            ready.set()
            await running

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(main())
        except BaseException as error:  # told by whoever waits
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="server")
    thread.start()
    ready.wait()
    try:
        if failures:
            raise failures[0]
        yield ports[0]
    finally:
        if not failures:
            loop.call_soon_threadsafe(stop.set)
        thread.join()


def walk_embedding(address: str, **settings: str) -> Walk:
    """One short text to POST /v1/embeddings, as an OpenAI client sends it."""
    with recorded() as recorder, serving(address, recorder.loop, **settings) as port:
        return _record(recorder, port, "/v1/embeddings", [{"input": f"{WORDS} {at}"} for at in range(WARM_UP)])


def walk_tokens(address: str, **settings: str) -> tuple[Walk, Walk]:
    """Two streamed chats that differ by TOKENS alone."""
    words = " ".join([WORDS] * 3)  # the fake model repeats them: more than the most of TOKENS
    chat = {"messages": [{"role": "user", "content": words}], "stream": True}
    with recorded() as recorder, serving(address, recorder.loop, **settings) as port:
        few, many = (
            _record(recorder, port, "/v1/chat/completions", [{**chat, "max_tokens": number}] * WARM_UP)
            for number in TOKENS
        )
        return few, many


def _record(recorder: Recorder, port: int, path: str, bodies: Sequence[dict[str, Any]]) -> Walk:
    """The shortest walk of the last LOOKED_AT of these requests; the others warm up. In a longer one something else
    went on at the same time: a timer, a shape that was tried while the engine was idle."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    walks: list[Walk] = []
    try:
        model = _ask(connection, "GET", "/v1/models")["data"][0]["id"]
        for at, body in enumerate(bodies):
            before = _count_io()
            if at >= len(bodies) - LOOKED_AT:
                recorder.walk = Walk()
                walks.append(recorder.walk)
            _ask(connection, "POST", path, {"model": model, **body})
            time.sleep(0.02)  # what is counted behind the answer
            walk, recorder.walk = recorder.walk, None
            if walk is not None:
                after = _count_io()
                walk.reads, walk.writes = after["syscr"] - before["syscr"], after["syscw"] - before["syscw"]
    finally:
        connection.close()
    return min(walks, key=lambda walk: walk.calls)


def _count_io() -> dict[str, int]:
    """The system calls that read and wrote, of the thread of the event loop so far."""
    thread = next(each for each in threading.enumerate() if each.name == "server")
    lines = Path(f"/proc/self/task/{thread.native_id}/io").read_text().splitlines()
    return {name: int(number) for name, number in (line.split(": ") for line in lines)}


class Instructions:
    """A trace function for `threading.settrace`, which counts the bytecode instructions of one thread by function, the
    libraries' included."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.is_on and threading.current_thread().name == "server":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._count
        return None

    def _count(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and self.is_on:
            self.counts[frame.f_code] += 1
        return self._count


def count_instructions(address: str, texts: int = 1, **settings: str) -> tuple[Counter[str], set[int]]:
    """The instructions of BURST * BURSTS texts, by function, and the sizes of the batches. BURST texts at a time arrive
    in one turn, as requests of `texts`.

    The loop is held until all of them are in its sockets. The first bursts connect and warm up.
    """
    counted = Instructions()
    loop = uvloop.new_event_loop()
    sizes: set[int] = set()
    threading.settrace(counted)
    try:
        with serving(address, loop, **settings) as port:
            clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(BURST // texts)]
            model = _ask(clients[0], "GET", "/v1/models")["data"][0]["id"]
            for number in range(2 * BURSTS):
                counted.is_on = False
                is_held, go_on = threading.Event(), threading.Event()
                loop.call_soon_threadsafe(lambda held=is_held, go=go_on: (held.set(), go.wait()))
                is_held.wait()
                for at, client in enumerate(clients):
                    inputs = [f"{WORDS} {number} {at} {text}" for text in range(texts)]
                    body = {"model": model, "input": inputs if texts > 1 else inputs[0]}
                    client.request("POST", "/v1/embeddings", json.dumps(body), {"content-type": "application/json"})
                counted.is_on = number >= BURSTS
                go_on.set()
                for client in clients:
                    with client.getresponse() as answer:
                        answer.read()
                        if counted.is_on:
                            sizes.add(int(answer.headers["x-shoal-batch-size"]))
                time.sleep(0.05)  # what is counted behind the answers
            counted.is_on = False
            for client in clients:
                client.close()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    named: Counter[str] = Counter()
    for code, number in counted.counts.items():
        named[f"{code.co_filename.removeprefix(SOURCE)}:{code.co_qualname}"] += number
    return named, sizes


def _ask(connection: http.client.HTTPConnection, method: str, path: str, body: object = None) -> Any:
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    with connection.getresponse() as answer:
        text = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {text.decode()}")
    return json.loads(text) if answer.getheader("content-type") == "application/json" else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--task", choices=["embed", "chat", "burst"], default="embed")
    parser.add_argument("--texts", type=int, default=1, help="of a request of a burst")
    arguments = parser.parse_args()
    if arguments.task == "embed":
        walk = walk_embedding(arguments.address)
        for depth, place in walk.steps:
            print("  " * depth + place)
        print(f"{walk.turns} turns of the loop, answered in {walk.answered}; {walk.reads} reads, {walk.writes} writes")
        print(", ".join(f"{count} {name}" for name, count in walk.callbacks.most_common()))
        print(f"{walk.calls} calls of {len(walk.functions)} functions in {len(walk.files)} files")
    elif arguments.task == "burst":
        counts, sizes = count_instructions(arguments.address, arguments.texts)
        for place, count in counts.most_common(60):
            print(f"{count / BURST / BURSTS:8.1f}  {place}")
        print(f"{counts.total() / BURST / BURSTS:.0f} instructions a text, in batches of {sorted(sizes)}")
    else:
        few, many = walk_tokens(arguments.address)
        number = TOKENS[1] - TOKENS[0]
        for what in ("functions", "generators"):
            print(what)
            for place, count in (getattr(many, what) - getattr(few, what)).most_common():
                print(f"{count / number:6.2f}  {place}")
        print(f"{(many.calls - few.calls) / number:.1f} calls a token")


if __name__ == "__main__":
    main()
