"""The code of a language model's process, run in this one: messages in, steps, events out."""

from __future__ import annotations

import fcntl
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.backends.genai import worker
from shoal.backends.genai.messages import (
    LENGTH,
    Cancel,
    GenaiOptions,
    LoadRefused,
    Open,
    Opened,
    Ping,
    Produced,
    Start,
    decode_first,
    decode_produced,
    encode_frame,
)
from shoal.backends.genai.pipeline import Pipeline
from shoal.backends.genai.worker import GatewayGone, GenerationLoop, MessageSocket
from shoal.errors import MissingExtra
from shoal.types import Guide, Sampling
from tests.unit.backends.genai.conftest import EXACT, IR

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

STOP = 2


@dataclass
class Handle:
    """One request of the pipeline below: its prompt ids, and the ids still to produce, a list per step."""

    ids: tuple[int, ...]
    rules: Any
    scripted: list[list[int]]
    status: str = "RUNNING"
    outputs: list[Any] = field(default_factory=list)

    def get_status(self) -> Any:
        return SimpleNamespace(name=self.status)

    def can_read(self) -> bool:
        return bool(self.outputs)

    def read(self) -> dict[int, Any]:
        return {0: self.outputs.pop(0)}

    def cancel(self) -> None:
        self.status = "CANCEL"

    def step(self) -> None:
        ids = self.scripted.pop(0)
        reason = "NONE"
        if not self.scripted:
            self.status = "FINISHED"
            reason = "STOP" if ids[-1] in self.rules.stop_token_ids else "LENGTH"
        output = SimpleNamespace(
            generated_ids=ids, generated_log_probs=[-1.0] * len(ids), finish_reason=SimpleNamespace(name=reason)
        )
        self.outputs.append(output)


class Library:
    """Produces scripted ids. `drops`: steps at which all requests are preempted; `fails`: a step that raises."""

    def __init__(
        self, script: dict[tuple[int, ...], list[list[int]]], drops: tuple[int, ...] = (), fails: int = 0
    ) -> None:
        self.script = script
        self.drops = drops
        self.fails = fails
        self.handles: list[Handle] = []
        self.steps = 0
        self.grammars: Any = None
        self.capacity = 100
        self.tokenizer = SimpleNamespace(get_vocab=lambda: {b"five": 5, b"\xff": 6})
        self.cb = self

    def rules(self) -> Any:
        return SimpleNamespace(stop_token_ids={STOP}, do_sample=False)

    def add(self, number: int, ids: tuple[int, ...], rules: Any) -> Handle:
        assert number > len(self.handles)
        if ids not in self.script:
            raise RuntimeError("/src/config.cpp:12:\nno such prompt")
        self.handles.append(Handle(ids, SimpleNamespace(**vars(rules)), [list(ids) for ids in self.script[ids]]))
        return self.handles[-1]

    def running(self) -> list[Handle]:
        return [handle for handle in self.handles if handle.status == "RUNNING"]

    def has_non_finished_requests(self) -> bool:
        return any(handle.status in ("RUNNING", "CANCEL") for handle in self.handles)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.fails:
            raise RuntimeError("/src/pipeline.cpp:7:\nout of luck")
        for handle in self.handles:
            if handle.status == "CANCEL":
                handle.status = "GONE"
        for handle in self.running():
            if self.steps in self.drops:
                handle.status = "IGNORED"
            else:
                handle.step()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, MessageSocket]]:
    """The gateway's end of a socket, and the process's."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs:
        yield ours, MessageSocket(theirs)


def run(library: Library, ends: tuple[socket.socket, MessageSocket], *messages: Any) -> list[Produced]:
    """Return all events for these messages, after which the gateway disconnects."""
    ours, line = ends
    for message in messages:
        ours.sendall(encode_frame(message))
    steps = GenerationLoop(cast(Pipeline, library), line)
    for message in line.pending():
        steps._dispatch(message)
    while steps._answers or steps._cancelled:
        steps._step()
    steps._flush()
    ours.setblocking(False)
    results = []
    try:
        while data := ours.recv(LENGTH.size):
            results += decode_produced(ours.recv(LENGTH.unpack(data)[0]))
    except BlockingIOError:
        pass
    return results


def start(number: int, *ids: int, **fields: Any) -> Start:
    return Start(id=number, ids=ids, sampling=Sampling(**fields))


def made(events: list[Produced], number: int) -> tuple[list[int], int, str | None]:
    own = [each for each in events if each.id == number]
    return [one for each in own for one in each.ids], sum(each.tokens for each in own), own[-1].finish


class TestAnswers:
    def test_two_side_by_side(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """Each request gets its own ids; the ending token is counted and not returned."""
        events = run(Library({(1,): [[5], [6], [STOP]], (3,): [[7, 8], [9]]}), ends, start(1, 1), start(2, 3))
        assert made(events, 1) == ([5, 6], 3, "stop")
        assert made(events, 2) == ([7, 8, 9], 3, "length")

    def test_log_probabilities_name_their_tokens(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """Tokens are bytes, as in the tokenizer."""
        events = run(Library({(1,): [[5], [6], [99, STOP]]}), ends, start(1, 1, logprobs=0))
        assert [pair for each in events for pair in each.logprobs] == [(b"five", -1.0), (b"\xff", -1.0), (b"", -1.0)]

    def test_a_cancelled_answer_gets_no_more_events(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """Its slot is free at the next step, and cancelling an ended answer is not an error."""
        library = Library({(1,): [[5]] * 9, (3,): [[7], [STOP]]})
        events = run(library, ends, start(1, 1), Cancel(id=1), Cancel(id=77), start(2, 3))
        assert {each.id for each in events} == {2}
        assert library.handles[0].status == "GONE"

    def test_a_place_is_given_up_before_the_next_one_begins(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A step runs between a cancelled and a new request, which might not fit otherwise."""
        library = Library({(1,): [[5]] * 9, (3,): [[7], [STOP]]})
        _, line = ends
        steps = GenerationLoop(cast(Pipeline, library), line)
        steps._dispatch(start(1, 1))
        steps._dispatch(Cancel(id=1))
        steps._dispatch(start(2, 3))
        assert library.steps == 1

    def test_what_the_library_refuses(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """The request gets the error without the library's file names, and others continue."""
        events = run(Library({(1,): [[STOP]]}), ends, start(1, 4, 4), start(2, 1))
        assert events[0].error == ("invalid_value", "the model rejected these parameters: no such prompt", None)
        assert made(events, 2) == ([], 1, "stop")

    def test_a_guide_without_a_vocabulary(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A model whose tokenizer the library does not know is not guided."""
        events = run(Library({(1,): [[STOP]]}), ends, start(1, 1, guide=Guide(kind="json_object")))
        assert events[0].error is not None
        assert events[0].error[::2] == ("invalid_value", "response_format")


class TestLostPlaces:
    def test_one_that_waited_begins_again(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A preempted request without output restarts unnoticed."""
        library = Library({(1,): [[5], [6], [STOP]]}, drops=(1, 2))
        events = run(library, ends, start(1, 1, max_tokens=9))
        assert made(events, 1) == ([5, 6], 3, "stop")
        assert len(library.handles) == 3

    def test_one_that_spoke_goes_on_where_it_was(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A preempted request continues with its output as part of the prompt, and a shorter limit."""
        library = Library({(1,): [[5], [6], [7]], (1, 5): [[6], [STOP]]}, drops=(2,))
        events = run(library, ends, start(1, 1, max_tokens=9, min_tokens=4))
        assert made(events, 1) == ([5, 6], 3, "stop")
        assert (library.handles[1].rules.max_new_tokens, library.handles[1].rules.min_new_tokens) == (8, 3)

    def test_a_guided_one_that_spoke_fails(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A guide cannot resume in the middle."""
        library = Library({(1,): [[5], [6], [7]]}, drops=(2,))
        library.grammars = SimpleNamespace(structured_output=lambda guide: guide)
        events = run(library, ends, start(1, 1, guide=Guide(kind="json_object")))
        assert events[-1].error is not None
        assert events[-1].error[0] == "out_of_memory"

    def test_one_with_an_optional_guide_goes_on_without_it(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        library = Library({(1,): [[5], [6], [7]], (1, 5): [[6], [STOP]]}, drops=(2,))
        library.grammars = SimpleNamespace(structured_output=lambda guide: guide)
        guide = Guide(kind="structural_tag", optional=True)
        events = run(library, ends, start(1, 1, guide=guide))
        assert made(events, 1) == ([5, 6], 3, "stop")
        assert library.handles[1].rules.structured_output_config is None

    def test_one_that_needs_more_than_there_is(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """The error names the setting to change."""
        library = Library({(1,): [[5], [6], [7]]}, drops=(2,))
        library.capacity = 2
        events = run(library, ends, start(1, 1))
        assert events[-1].error is not None
        assert "kv_cache_mb" in events[-1].error[1]

    def test_a_prompt_that_fits_nowhere(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A prompt larger than the cache is not started."""
        library = Library({})
        library.capacity = 3
        events = run(library, ends, start(1, 1, 2, 3))
        assert events[0].error is not None
        assert events[0].error[0] == "out_of_memory"

    def test_not_for_ever(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """A request that is preempted again and again fails in the end."""
        library = Library({(1,): [[5]]}, drops=tuple(range(1, 100)))
        events = run(library, ends, start(1, 1))
        assert events[-1].error is not None
        assert len(library.handles) == worker.MAX_RESTARTS + 1


class TestProcess:
    def talk(self, monkeypatch: pytest.MonkeyPatch, opened: Any) -> tuple[socket.socket, threading.Thread, list[int]]:
        """Run the process in a thread, with `open_pipeline` replaced."""
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        monkeypatch.setattr(worker, "open_pipeline", opened)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(worker.main(theirs)))
        thread.start()
        ours.sendall(encode_frame(Open(path=str(IR), options=GenaiOptions())))
        return ours, thread, codes

    def hear(self, ours: socket.socket) -> bytes:
        (length,) = LENGTH.unpack(ours.recv(LENGTH.size, socket.MSG_WAITALL))
        return ours.recv(length, socket.MSG_WAITALL)

    def opened(self, library: Library) -> Any:
        facts = Opened(
            version="1",
            precision="f32",
            kv_cache_precision="f32",
            quantized_together=0,
            threads=1,
            vocab_size=9,
            guided=False,
            cache_tokens=9,
            cache_bytes=9,
        )
        library.facts = facts  # type: ignore[attr-defined]
        return lambda path, options: library

    def test_from_the_first_message_to_the_end_of_the_socket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process sends facts, then answers, then ends without output."""
        ours, thread, codes = self.talk(monkeypatch, self.opened(Library({(1,): [[5], [STOP]]})))
        with ours:
            assert isinstance(decode_first(self.hear(ours)), Opened)
            ours.sendall(encode_frame(start(1, 1)))
            events = decode_produced(self.hear(ours)) + decode_produced(self.hear(ours))
        thread.join(10)
        assert made(events, 1) == ([5], 2, "stop")
        assert codes == [0]

    def test_every_message_gets_an_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A ping, a Cancel of an ended request and a step without output are answered by an empty list."""
        ours, thread, codes = self.talk(monkeypatch, self.opened(Library({(1,): [[], [STOP]]})))
        with ours:
            self.hear(ours)
            for message in (Ping(), Cancel(id=9), start(1, 1)):
                ours.sendall(encode_frame(message))
                assert decode_produced(self.hear(ours)) == []
            assert [each.finish for each in decode_produced(self.hear(ours))] == ["stop"]
        thread.join(10)
        assert codes == [0]

    def test_a_step_that_fails(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        """All requests fail and the process ends, since no later step would succeed."""
        ours, thread, codes = self.talk(monkeypatch, self.opened(Library({(1,): [[5], [6], [7]]}, fails=2)))
        with ours:
            self.hear(ours)
            ours.sendall(encode_frame(start(1, 1)))
            events = decode_produced(self.hear(ours)) + decode_produced(self.hear(ours))
            thread.join(10)
        assert events[-1].error == ("backend", "the language model failed (out of luck); load it again", None)
        assert codes == [1]
        assert "out of luck" in capfd.readouterr().err

    def test_a_model_that_cannot_be_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The reason is sent, and the process ends."""

        def refuse(path: Any, options: Any) -> Any:
            raise MissingExtra("a language model on this machine", "llm")

        ours, thread, codes = self.talk(monkeypatch, refuse)
        with ours:
            refused = decode_first(self.hear(ours))
        thread.join(10)
        assert isinstance(refused, LoadRefused)
        assert refused.kind == "missing_extra"
        assert codes == [0]

    def test_a_frame_in_pieces(self, ends: tuple[socket.socket, MessageSocket]) -> None:
        """Messages are reassembled from parts; an incomplete one at the end of the stream is dropped."""
        ours, line = ends
        data = encode_frame(Cancel(id=5)) + encode_frame(Cancel(id=6))
        for at in range(len(data) - 1):
            ours.sendall(data[at : at + 1])
        assert line.pending() == [Cancel(id=5)]
        assert line.pending() == []
        ours.close()
        with pytest.raises(GatewayGone):
            line.pending()
        with pytest.raises(GatewayGone):
            line.send(encode_frame([Produced(id=1)]) * 100_000)


def test_a_socket_with_a_high_number() -> None:
    """Descriptors above 1023, which select() does not support, work."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 2000:
        pytest.skip("this system allows no 2000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)) as high:
        line = MessageSocket(high)
        assert line.pending() == []
        ours.sendall(encode_frame(Cancel(id=5)))
        assert line.pending() == [Cancel(id=5)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_telemetry_is_sent() -> None:
    """The vendor's telemetry package is blocked when the libraries are imported."""
    code = (
        "import sys; from shoal.backends.genai.pipeline import import_libraries; import_libraries(); "
        "import socket; assert sys.modules['openvino_telemetry'] is None; "
        "assert 'requests' not in sys.modules and 'urllib3' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_real_library_here(ends: tuple[socket.socket, MessageSocket]) -> None:
    """The pipeline of the tiny model runs in this process."""
    from shoal.backends.genai.pipeline import open_pipeline

    pipeline = open_pipeline(IR, EXACT)
    assert pipeline.stop_ids == {2, 4}
    assert pipeline.facts.cache_tokens == pipeline.capacity == 8192
    assert pipeline.facts.cache_bytes == 4 * 2**20
    events = run(cast(Library, pipeline), ends, start(1, 1, 50, 60, max_tokens=5, temperature=0.0, ignore_eos=True))
    assert made(events, 1)[1:] == (5, "length")
