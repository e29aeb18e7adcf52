"""Guides compiled by the library itself, with the tokenizer of a tiny model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec

import msgspec
import pytest

from shoal.backends.genai import grammar
from shoal.backends.genai.grammar import GuideCompiler
from shoal.backends.genai.messages import LENGTH, Verdict
from shoal.backends.genai.pipeline import import_libraries
from shoal.errors import InvalidValue, OutOfMemory, ShoalError
from shoal.types import Guide
from tests.unit.backends.genai.conftest import IR

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

WIDTH = 448


@pytest.fixture(scope="module")
def grammars() -> GuideCompiler:
    openvino, genai = import_libraries()
    return GuideCompiler(openvino, genai, genai.Tokenizer(str(IR)), WIDTH)


def regex(text: str) -> Guide:
    return Guide(kind="regex", value=text, field="guided_regex")


class TestTrying:
    @pytest.mark.parametrize(
        "guide",
        [
            regex("[0-9"),
            Guide(kind="choice", value="[]", field="guided_regex"),
            Guide(kind="grammar", value='root ::= "\xe9a"', field="guided_regex"),
        ],
    )
    def test_refusals_name_the_field(self, grammars: GuideCompiler, guide: Guide) -> None:
        """Errors name the field, also those found before the library is called."""
        for tried in (grammars.structured_output, grammars.try_out):
            with pytest.raises(InvalidValue) as caught:
                tried(guide)
            assert caught.value.param == "guided_regex"

    def test_short_forms_pass(self, grammars: GuideCompiler) -> None:
        """A guide passes even if its answers are shorter than a trial."""
        grammars.try_out(Guide(kind="choice", value='["a"]'))

    def test_slow_ones_do_not(self, grammars: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error has the time per token and the limit."""
        monkeypatch.setattr(grammar, "STEP_S", 0.0)
        with pytest.raises(InvalidValue, match="ms per token"):
            grammars.try_out(regex("a"))

    def test_no_more_are_kept_than_that(self, grammars: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least recently used guide is evicted."""
        monkeypatch.setattr(grammar, "MAX_REMEMBERED", 2)
        grammars._accepted.clear()
        for text in ("a", "b", "a", "c"):
            grammars.structured_output(regex(text))
        assert [value for _, value in grammars._accepted] == ["a", "c"]


class TestPreparing:
    def prepared(self, grammars: GuideCompiler, guide: Guide) -> ShoalError | None:
        done = threading.Event()
        errors: list[ShoalError | None] = []

        def then(error: ShoalError | None) -> None:
            errors.append(error)
            done.set()

        grammars.prepare(guide, then)
        assert done.wait(20)
        (error,) = errors
        return error

    def test_what_came_of_it(self, grammars: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        """The callback gets None, the error, or OutOfMemory."""
        assert self.prepared(grammars, regex("prepared")) is None
        assert ("regex", "prepared") in grammars._accepted
        assert isinstance(self.prepared(grammars, regex("[")), InvalidValue)

        def full(guide: Guide) -> None:
            raise MemoryError

        monkeypatch.setattr(grammars, "structured_output", full)
        assert isinstance(self.prepared(grammars, regex("a")), OutOfMemory)

    def test_what_is_known_waits_for_nobody(self, grammars: GuideCompiler) -> None:
        """A compiled guide is available while another one compiles."""
        grammars.structured_output(regex("known"))
        with grammars._trial_lock:
            grammars.structured_output(regex("known"))


class Talk:
    """A trial process and its socket, closed at the end."""

    def __init__(self, run: list[str]) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *run, str(theirs.fileno()), IR, str(WIDTH), "3"],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"MALLOC_ARENA_MAX": "2"},
            )

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        self._ours.close()

    def verdict(self) -> Verdict:
        (length,) = LENGTH.unpack(self._ours.recv(LENGTH.size, socket.MSG_WAITALL))
        return msgspec.msgpack.decode(self._ours.recv(length, socket.MSG_WAITALL), type=Verdict)

    def say(self, guide: Guide) -> None:
        body = msgspec.msgpack.encode(guide)
        self._ours.sendall(LENGTH.pack(len(body)) + body)

    def ask(self, guide: Guide) -> Verdict:
        self.say(guide)
        return self.verdict()


class TestProcess:
    def test_its_limits(self) -> None:
        """Valid and invalid guides alternate; then the process ends by its own alarm, without a parent."""
        with Talk(["-P", "-m", "shoal.backends.genai.guide_trial"]) as talk:
            assert talk.verdict() == Verdict()
            assert not talk.ask(regex("[a-z]{3}")).refused
            assert "invalid output format" in talk.ask(regex("[")).refused
            assert "too large" in talk.ask(regex("((a{1,1000}){1,1000}){1,1000}")).refused
            talk.say(regex("((.*){1,50}){1,50}"))
        assert talk.process.wait(60) == -signal.SIGALRM

    def test_memory(self) -> None:
        """A guide beyond the memory limit is rejected, and the process ends."""
        code = (
            "import socket, sys; from pathlib import Path; from shoal.backends.genai import guide_trial; "
            "guide_trial.ROOM_BYTES, guide_trial.guide_bounds.check = 2**24, lambda guide: None; "
            "guide_trial.main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), 9.0)"
        )
        with Talk(["-c", code]) as talk:
            assert talk.verdict() == Verdict()
            verdict = talk.ask(regex("((a{1,1000}){1,1000}){1,1000}"))
        assert "too much memory" in verdict.refused
        assert verdict.needs_restart
        assert talk.process.wait(60) == 0
