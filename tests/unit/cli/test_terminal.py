"""`shoal chat` on a terminal: output, Ctrl-C and commands, with a scripted model."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Sequence
from itertools import count

import pytest

from shoal.cli._conversation import Conversation
from shoal.cli._terminal import CONTINUATION_PROMPT, PROMPT, Terminal
from shoal.errors import EngineFailed
from shoal.types import Chunk, Message, Sampling, Usage

Step = Chunk | type[BaseException] | Exception


class Script:
    """Plays `steps` as the answer of every question, raises those that are exceptions, and records the requests."""

    def __init__(self, *steps: Step) -> None:
        self.steps: Sequence[Step] = steps or (Chunk(text="Yes"), Chunk(text=", sir.", finish_reason="stop"))
        self.requests: list[list[tuple[str, object]]] = []
        self.sampling: list[Sampling] = []
        self.closed = 0

    def ask(self, messages: Sequence[Message], sampling: Sampling) -> Generator[Chunk, None, None]:
        self.requests.append([(one.role, one.content) for one in messages])
        self.sampling.append(sampling)
        try:
            for step in self.steps:
                if not isinstance(step, Chunk):
                    raise step
                yield step
        finally:
            self.closed += 1


class TypedLines:
    """A user who types these lines, and Ctrl-D at the end; an exception is raised as a key press."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines: Iterator[str | type[BaseException]] = iter(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


class InterruptedOutput(io.StringIO):
    """Simulates Ctrl-C while `word` is written."""

    word = " twice"

    def write(self, text: str) -> int:
        if text == self.word:
            self.word = ""
            raise KeyboardInterrupt
        return super().write(text)


def talk(
    script: Script,
    *lines: str | type[BaseException],
    system: str = "",
    stats: bool = False,
    colour: bool = False,
    shown: io.StringIO | None = None,
) -> tuple[str, TypedLines]:
    """Return the terminal's output of a conversation."""
    shown, typed, ticks = shown or io.StringIO(), TypedLines(*lines), count()
    Terminal(
        script, Conversation(system), Sampling(temperature=0.5, max_tokens=9), out=shown, dim=colour, read=typed,
        show_stats=stats, clock=lambda: float(next(ticks)),
    ).run()  # fmt: skip
    greeting, _, rest = shown.getvalue().partition("\n")
    assert "Ctrl-D leaves" in greeting
    return rest, typed


def test_a_reply_is_shown_and_remembered() -> None:
    """The second question is sent with the system message and the first question and answer."""
    script = Script()
    shown, _ = talk(script, "Ready?", "", "Sure?", system="be polite")
    assert shown == "Yes, sir.\nYes, sir.\n\n"
    assert script.requests[0] == [("system", "be polite"), ("user", "Ready?")]
    turns = [("user", "Ready?"), ("assistant", "Yes, sir.")]
    assert script.requests[1] == [("system", "be polite"), *turns, ("user", "Sure?")]
    assert script.sampling[0] == Sampling(temperature=0.5, max_tokens=9)


def test_text_is_shown_as_it_stands() -> None:
    """Text is not wrapped, and escapes of the model are removed."""
    text = "[bold]x[/bold] :smile: " + "long " * 20
    shown, _ = talk(Script(Chunk(text=text + "\x1b[2J")), "a")
    assert shown.splitlines()[0] == text + "[2J"


def test_reasoning_is_dimmed_and_not_part_of_the_conversation() -> None:
    """An empty line separates reasoning and answer."""
    script = Script(Chunk(reasoning="Hm."), Chunk(text="\n\nYes."))
    shown, _ = talk(script, "a", "b", colour=True)
    assert shown.startswith("\x1b[2mHm.\x1b[0m\n\nYes.\n")
    assert ("assistant", "\n\nYes.") in script.requests[1]


def test_ctrl_c_stops_a_reply_and_keeps_its_text() -> None:
    """The generator is closed, so the model stops too; the conversation continues."""
    script = Script(Chunk(text="Once upon"), KeyboardInterrupt)
    shown, _ = talk(script, "a story", "go on")
    assert shown.startswith("Once upon\n(stopped)\n")
    assert script.closed == 2
    assert script.requests[1][:2] == [("user", "a story"), ("assistant", "Once upon")]


def test_ctrl_c_in_the_middle_of_a_write() -> None:
    """A write is completed before the interrupt takes effect."""
    script = Script(Chunk(text="once"), Chunk(text=" twice"), Chunk(text=" thrice"))
    shown, _ = talk(script, "a", "b", shown=InterruptedOutput())
    assert shown == "once\n(stopped)\nonce twice thrice\n\n"


def test_a_reply_stopped_before_its_start_is_dropped() -> None:
    """The question is dropped too."""
    script = Script(KeyboardInterrupt)
    talk(script, "a story", "another")
    assert script.requests[1] == [("user", "another")]


def test_ctrl_c_at_the_prompt_leaves() -> None:
    """A second Ctrl-C after a stopped reply exits."""
    script = Script(Chunk(text="Once"), KeyboardInterrupt)
    _, typed = talk(script, "a story", KeyboardInterrupt, "never read")
    assert len(script.requests) == 1
    assert typed.prompts == [PROMPT, PROMPT]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_exit_commands(word: str) -> None:
    """No request is sent."""
    script = Script()
    talk(script, word, "never read")
    assert script.requests == []


def test_several_lines() -> None:
    """The prompt shows the continuation; Ctrl-C there drops the lines and stays."""
    script = Script()
    _, typed = talk(script, '"""one', 'two"""', '"""lost', KeyboardInterrupt, "three")
    assert [messages[-1][1] for messages in script.requests] == ["one\ntwo", "three"]
    assert typed.prompts == [PROMPT, CONTINUATION_PROMPT, PROMPT, CONTINUATION_PROMPT, PROMPT, PROMPT]


def test_an_error_is_shown_and_the_chat_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one line; a question without an answer is dropped, a partial answer is kept."""
    script = Script(EngineFailed("the model ran out of memory: ask for less"))
    talk(script, "a", "b")
    assert capsys.readouterr().err.count("error: the model ran out of memory: ask for less") == 2
    assert script.requests[1] == [("user", "b")]
    script = Script(Chunk(text="half"), EngineFailed("gone"))
    talk(script, "a", "b")
    assert script.requests[1] == [("user", "a"), ("assistant", "half"), ("user", "b")]


def test_a_bug_is_raised() -> None:
    """A bug keeps its traceback."""
    with pytest.raises(ZeroDivisionError):
        talk(Script(ZeroDivisionError()), "a")


def test_commands_change_the_conversation() -> None:
    """/system, /undo and /clear are confirmed."""
    script = Script()
    shown, _ = talk(script, "a", "/system be brief", "b", "/undo", "c", "/clear", "d", "/system", "e", "/undo", "/undo")
    pairs = [[content for _, content in messages] for messages in script.requests]
    assert pairs[1] == ["be brief", "a", "Yes, sir.", "b"]
    assert pairs[2] == ["be brief", "a", "Yes, sir.", "c"]
    assert pairs[3] == ["be brief", "d"]
    assert pairs[4] == ["d", "Yes, sir.", "e"]
    for message in ("last question removed", "cleared", "system message cleared"):
        assert message in shown


def test_empty_undo_and_unknown_commands() -> None:
    """The error lists the commands; nothing is sent to the model."""
    script = Script()
    shown, _ = talk(script, "/undo", "/nosuch", "/help")
    assert "nothing to remove" in shown
    assert "unknown command /nosuch" in shown
    assert shown.count("/stats") == 2
    assert script.requests == []


def test_figures_of_a_reply() -> None:
    """Statistics are shown with /stats, or after each reply if configured."""
    steps = (Chunk(text="a"), Chunk(text="b", finish_reason="length"), Chunk(usage=Usage(completion_tokens=2)))
    shown, _ = talk(Script(*steps), "/stats", "a", "/stats")
    assert "no reply yet" in shown
    assert shown.count("2 tokens, 1.0 per second, first token after 1.00 s") == 1
    assert "(truncated" in shown
    shown, _ = talk(Script(*steps), "a", stats=True)
    assert shown.count("2 tokens") == 1
