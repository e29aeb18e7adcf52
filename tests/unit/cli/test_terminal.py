"""`shoal chat` on a terminal: output, Ctrl-C and commands, with a scripted model."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from shoal.cli._conversation import Conversation
from shoal.cli._model_switch import ModelSwitch
from shoal.cli._talking import ModelDescription
from shoal.cli._terminal import CONTINUATION_PROMPT, PROMPT, Terminal
from shoal.errors import EngineFailed, SetupError
from shoal.types import Chunk, Guide, Message, Sampling, Usage

Step = Chunk | type[BaseException] | Exception


class Script:
    """Plays `steps` as the answer of every question, raises those that are exceptions, and records the requests."""

    def __init__(self, *steps: Step) -> None:
        self.steps: Sequence[Step] = steps or (Chunk(text="Yes"), Chunk(text=", sir.", finish_reason="stop"))
        self.requests: list[list[tuple[str, object]]] = []
        self.sampling: list[Sampling] = []
        self.thinks: list[bool | None] = []
        self.closed = 0
        self.description = ModelDescription({"precision": "int4"}, modelfile="FROM hf:org/m", template="{{ x }}\n")

    def describe(self) -> ModelDescription:
        return self.description

    def ask(
        self, messages: Sequence[Message], sampling: Sampling, think: bool | None = None
    ) -> Generator[Chunk, None, None]:
        self.requests.append([(one.role, one.content) for one in messages])
        self.sampling.append(sampling)
        self.thinks.append(think)
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
    models: ModelSwitch | None = None,
    shown: io.StringIO | None = None,
    keep_lines: Callable[[bool], None] | None = None,
) -> tuple[str, TypedLines]:
    """Return the terminal's output of a conversation."""
    shown, typed, ticks = shown or io.StringIO(), TypedLines(*lines), count()
    Terminal(
        script, Conversation(system), Sampling(temperature=0.5, max_tokens=9), out=shown, dim=colour, read=typed,
        model="first", models=models, keep_lines=keep_lines,
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


class TestModels:
    def test_another_model_continues_the_conversation(self) -> None:
        """The next model gets the turns of the last one, which is closed once the next one is open."""
        events: list[str] = []
        second = Script()

        def open_chat(stack: contextlib.ExitStack, name: str) -> Script:
            events.append(f"open {name}")
            stack.callback(events.append, f"close {name}")
            return second

        with ModelSwitch(open_chat, lambda: ["first", "second"]) as models:
            models.open("first")
            talk(second, "a", "/model second", "b", models=models)
            assert events == ["open first", "open second", "close first"]
        assert events[-1] == "close second"
        assert second.requests[-1] == [("user", "a"), ("assistant", "Yes, sir."), ("user", "b")]

    def test_a_model_that_cannot_be_opened_costs_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The error is shown once, and the model that was open answers the next question."""
        script = Script()

        def open_chat(stack: contextlib.ExitStack, name: str) -> Script:
            if name == "gone":
                raise SetupError("gone is not a model: check its name")
            return script

        with ModelSwitch(open_chat) as models:
            models.open("first")
            talk(script, "/model gone", "a", models=models)
        assert capsys.readouterr().err.count("gone is not a model") == 1
        assert script.requests == [[("user", "a")]]

    def test_without_a_name_the_models_are_listed(self) -> None:
        """The present one first, each other as the command that switches to it."""
        with ModelSwitch(lambda stack, name: Script(), lambda: ["first", "second"]) as models:
            models.open("first")
            shown, _ = talk(Script(), "/model", models=models)
        assert shown == "first\n  /model second\n\n"


class TestSaving:
    def test_a_saved_conversation_continues(self, tmp_path: Path) -> None:
        """The file is the body of a request, readable by its owner alone; saving it again replaces it."""
        file, script = tmp_path / "talk.json", Script()
        talk(script, "a", f"/save {file}", "b", f"/save {file}", system="be polite")
        saved = json.loads(file.read_text())
        assert saved["model"] == "first"
        assert [one["content"] for one in saved["messages"]] == ["be polite", "a", "Yes, sir.", "b", "Yes, sir."]
        assert file.stat().st_mode & 0o777 == 0o600
        shown, _ = talk(script, f"/load {file}", "c")
        assert shown.startswith("4 messages loaded\n")
        assert script.requests[-1][0] == ("system", "be polite")
        assert script.requests[-1][-1] == ("user", "c")
        assert len(script.requests[-1]) == 6

    def test_a_text_that_is_not_utf8(self, tmp_path: Path) -> None:
        """Its stray bytes, which Python reads as lone surrogates, do not keep the rest from being saved."""
        talk(Script(), "caf\udce9", f"/save {tmp_path / 'talk.json'}")
        saved = json.loads((tmp_path / "talk.json").read_bytes())
        assert [one["content"] for one in saved["messages"]] == ["caf?", "Yes, sir."]

    @pytest.mark.parametrize(
        ("command", "error"),
        [
            ("/save", "name a file: /save FILE"),
            ("/save there", "there exists: choose another name"),
            ("/save no/such/folder", "no/such/folder cannot be written (No such file or directory)"),
            ("/load missing", "missing cannot be read (No such file or directory)"),
            ("/load there", "there is not a saved conversation"),
            ("/load latin1", "latin1 is not a saved conversation"),
            ("/load nested", "nested is not a saved conversation"),
            ("/load ~nouser/x", "'~nouser/x' is not a path (Could not determine home directory.): choose another name"),
            ("/save ~nouser/x", "'~nouser/x' is not a path"),
            ("/set format ~nouser/x", "'~nouser/x' is not a path"),
            ("/load a\0b", r"'a\x00b' is not a path (a null character)"),
            ("/save a\0b", "is not a path"),
            ("/set format a\0b", "is not a path"),
        ],
    )
    def test_errors_name_the_next_step(self, command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A file that is there already is not replaced, and the chat goes on."""
        Path("there").write_text("mine")
        Path("latin1").write_bytes(b'{"messages": [{"role": "user", "content": "\xe9"}]}')
        Path("nested").write_text('{"more": ' + "[" * 100_000)
        script = Script()
        talk(script, command, "a")
        assert error in " ".join(capsys.readouterr().err.split())
        assert Path("there").read_text() == "mine"
        assert len(script.requests) == 1


def test_what_ollama_sets_and_shows() -> None:
    """/set changes what the next question is sent with, and /show shows it."""
    script = Script()
    shown, _ = talk(
        script,
        *("/set parameter temperature 0.25", "/set parameter num_predict 7", "/set parameter stop . END"),
        *('/set system "Be brief."', "/set verbose", "Well?", "/set quiet", "/show info", "/show system"),
        *("/set parameter num_predict -1", "/show parameters", "Again?"),
    )
    first, last = script.sampling
    assert (first.temperature, first.max_tokens, first.stop) == (0.25, 7, [".", "END"])
    assert (last.temperature, last.max_tokens) == (0.25, None)
    assert script.requests[0][0] == ("system", "Be brief.")
    after = shown.partition("no statistics after replies")[2]
    assert "per second" in shown.partition("no statistics")[0] and "per second" not in after
    assert "Be brief." in after and "messages            2" in after
    assert after.splitlines().count("stop                . END") >= 1


def test_the_format_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any JSON, a schema from a file, or none again; a file that holds none changes nothing."""
    schema, text, array = tmp_path / "schema.json", tmp_path / "text", tmp_path / "array"
    schema.write_text('{"type": "object"}')
    text.write_text("{")
    array.write_text("[]")
    script = Script()
    lines = ("/set format json", "a", f"/set format {schema}", f"/set format {text}", f"/set format {array}", "b")
    shown, _ = talk(script, *lines, "/set noformat", "c")
    assert [one.guide for one in script.sampling] == [
        Guide(kind="json_object", field="format"),
        Guide(kind="json_schema", value='{"type": "object"}', field="format"),
        None,
    ]
    told = " ".join(capsys.readouterr().err.split())
    assert "is not JSON" in told and "is not a JSON schema" in told
    assert "answers are json" in shown and "no set format" in shown


def test_reasoning_on_and_off() -> None:
    """Where it is off, it is not shown either, whatever the model does."""
    script = Script(Chunk(reasoning="Hm."), Chunk(text="Yes."))
    shown, _ = talk(script, "a", "/set nothink", "b", "/set think", "c", "/set think auto", "d")
    assert script.thinks == [None, False, True, None]
    assert shown.count("Hm.\n\nYes.") == 3 and shown.count("Yes.") == 4
    assert "reasoning is as the model has it\n" in shown


def test_lines_that_are_not_kept() -> None:
    kept: list[bool] = []
    talk(Script(), "/set nohistory", "/set history", keep_lines=kept.append)
    assert kept == [False, True]


def test_what_is_shown_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is told as such, and a server that describes nothing does not end the chat."""
    script = Script()
    shown, _ = talk(script, "/show info", "/show modelfile", "/show template", "/show license")
    assert shown.splitlines() == [
        *("model               first", "precision           int4", "messages            0"),
        *("FROM hf:org/m", "{{ x }}", "no license is known of first", ""),
    ]

    class Silent(Script):
        def describe(self) -> ModelDescription:
            raise SetupError("it does not describe its models")

    shown, _ = talk(Silent(), "/show template", "/show info", "a")
    assert "messages            0" in shown and "Yes, sir." in shown
    assert capsys.readouterr().err.count("it does not describe its models") == 1


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/set", "write /set system"),
        ("/set loud", "write /set system"),
        ("/set history", "this terminal keeps no history"),
        ("/set format", "write /set format json"),
        ("/set format nosuch", "nosuch cannot be read"),
        ("/show", "write /show info"),
        ("/show licence", "write /show info"),
        ("/set parameter", "write /set parameter NAME"),
        ("/set parameter top_k", "write /set parameter NAME"),
        ("/set parameter num_ctx 5", "num_ctx is no parameter"),
        ("/set parameter top_k 1.5", "top_k must be a whole number (got 1.5)"),
        ("/set parameter top_p nan", "top_p must be between 0 and 1"),
        (f"/set parameter top_k {'9' * 400}", "top_k must be between 0"),
        ("/set parameter repeat_penalty 0", "repeat_penalty must be between 0.01"),
        ("/set parameter seed 1 2", "seed must be a whole number (got 1 2)"),
    ],
)
def test_settings_that_cannot_be(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what can be written, and the conversation goes on."""
    script = Script()
    talk(script, line, "Well?")
    assert answer in " ".join(capsys.readouterr().err.split())
    assert script.sampling == [Sampling(temperature=0.5, max_tokens=9)]
