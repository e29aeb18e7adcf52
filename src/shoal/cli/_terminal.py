"""The terminal of `shoal chat`: it reads lines, streams replies and runs slash commands."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from shoal.cli._chat_settings import change_parameter, describe_parameters, expand_path, read_format
from shoal.cli._conversation import COMMANDS, Conversation, MessageReader, Reply, parse_command, strip_control
from shoal.cli._errors import say
from shoal.cli._talking import ChatSource
from shoal.errors import SetupError, ShoalError
from shoal.types import Message, Sampling

if TYPE_CHECKING:
    from shoal.cli._model_switch import ModelSwitch

PROMPT = ">>> "
CONTINUATION_PROMPT = "... "
STOPPED = "(stopped)"
UNNAMED = "the server's first model"
CUT = "(truncated at --max-tokens)"


class Terminal:
    """An interactive chat between one person and one model.

    `read` prompts for a line and raises EOFError at the end of input. `keep_lines` says whether later lines can be
    recalled with the arrow keys. `show_stats` prints statistics after each reply.
    `model` is named in the greeting; /model switches to another one of `models`. `dim` means that `out` understands
    ANSI codes: everything but the answer is then dimmed.

    Ctrl-C stops a reply and keeps its partial text in the conversation. At the prompt, Ctrl-C exits.
    """

    def __init__(
        self,
        talks: ChatSource,
        conversation: Conversation,
        sampling: Sampling,
        *,
        out: TextIO,
        model: str = "",
        models: ModelSwitch | None = None,
        dim: bool = False,
        read: Callable[[str], str] = input,
        keep_lines: Callable[[bool], None] | None = None,
        show_stats: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chat = talks
        self._conversation = conversation
        self._sampling = sampling
        self._out = out
        self._model = model
        self._models = models
        self._saved: set[Path] = set()
        # Raw escape codes: Ctrl-C could interrupt a buffered console in the middle of a write.
        self._dim = ("\x1b[2m", "\x1b[0m") if dim else ("", "")
        self._read = read
        self._keep_lines = keep_lines
        self._think: bool | None = None
        self._show_stats = show_stats
        self._clock = clock
        self._last_reply: Reply | None = None

    def run(self) -> None:
        """Read and answer messages until the user exits."""
        self._note(f"{self._model or UNNAMED}: /? lists commands, Ctrl-C stops a reply, Ctrl-D leaves")
        lines = MessageReader()
        while True:
            try:
                message = lines.push(self._read(CONTINUATION_PROMPT if lines.unfinished else PROMPT))
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n")
                if not lines.unfinished:
                    return
                lines.drop()
                continue
            if message is None:
                continue
            command = parse_command(message)
            if command is None:
                self._answer(message)
            elif command[0] in ("exit", "quit", "bye"):
                return
            else:
                self._run_command(*command)

    def _answer(self, question: str) -> None:
        messages = self._conversation.build_messages(question)
        reply = self._last_reply = Reply(self._clock)
        try:
            self._show(messages, reply)
        except KeyboardInterrupt:
            self._note(f"\n{STOPPED}")
        except ShoalError as error:
            self._write("\n")
            say("error", error.message, "bold red")
        else:
            self._write("\n")
            if reply.finish_reason == "length":
                self._note(CUT)
        if reply.text:
            self._conversation.add_turn(question, reply.text)
        if self._show_stats:
            self._note(reply.stats())

    def _show(self, messages: list[Message], reply: Reply) -> None:
        thinking = False
        with closing(self._chat.ask(messages, self._sampling, self._think)) as chunks:
            for chunk in chunks:
                reply.add(chunk)
                if chunk.reasoning and self._think is not False:
                    thinking = True
                    self._write(strip_control(chunk.reasoning).join(self._dim))
                if chunk.text:
                    self._write(f"\n\n{strip_control(chunk.text.lstrip())}" if thinking else strip_control(chunk.text))
                    thinking = False

    def _run_command(self, name: str, rest: str) -> None:
        conversation = self._conversation
        if name in ("set", "show"):
            self._try(self._set if name == "set" else self._show_setting, rest)
        elif name == "clear":
            conversation.clear()
            self._note("conversation cleared")
        elif name == "system":
            conversation.system = rest
            self._note("system message set" if rest else "system message cleared")
        elif name == "undo":
            self._note("last question removed" if conversation.undo() else "nothing to remove")
        elif name in ("model", "save", "load"):
            self._try(self._switch_model if name == "model" else self._save if name == "save" else self._load, rest)
        elif name == "stats":
            self._note(self._last_reply.stats() if self._last_reply else "no reply yet")
        else:
            if name not in ("help", "?"):
                self._note(f"unknown command /{name}")
            for each, what in COMMANDS.items():
                self._note(f"/{each:<8}{what}")
            self._note('"""      starts and ends a message of several lines')

    def _try(self, command: Callable[[str], None], rest: str) -> None:
        """Run a command that may fail; the conversation goes on all the same."""
        try:
            command(rest)
        except ShoalError as error:
            say("error", error.message, "bold red")
        except KeyboardInterrupt:
            self._note(f"\n{STOPPED}")

    def _set(self, text: str) -> None:
        what, _, rest = text.partition(" ")
        if what == "system":
            self._run_command("system", rest.strip().strip('"').strip())
        elif what == "parameter":
            self._sampling = change_parameter(self._sampling, rest)
            self._show_setting("parameters")
        elif what in ("verbose", "quiet"):
            self._show_stats = what == "verbose"
            self._note("statistics after each reply" if self._show_stats else "no statistics after replies")
        elif what in ("format", "noformat"):
            guide = read_format(rest.strip()) if what == "format" else None
            self._sampling = msgspec.structs.replace(self._sampling, guide=guide)
            self._note(f"answers are {rest.strip()}" if guide else "answers have no set format")
        elif what in ("think", "nothink"):
            automatic = what == "think" and rest.strip() == "auto"
            self._think = None if automatic else what == "think"
            state = "as the model has it" if automatic else "on" if self._think else "off"
            self._note(f"reasoning is {state}" + ("" if automatic else ", if the model has such a switch"))
        elif what in ("history", "nohistory"):
            if self._keep_lines is None:
                raise SetupError("this terminal keeps no history of lines")
            self._keep_lines(what == "history")
            self._note("the next lines are kept for the arrow keys" if what == "history" else "lines are not kept")
        else:
            raise SetupError(
                "write /set system TEXT, parameter NAME VALUE, format json or FILE, noformat, think, nothink, "
                "think auto, history, nohistory, verbose or quiet"
            )

    def _show_setting(self, what: str) -> None:
        if what == "info":
            self._note(f"{'model':<20}{self._model or UNNAMED}")
            with contextlib.suppress(ShoalError):  # a server that does not describe its models
                for name, value in self._chat.describe().info.items():
                    self._note(strip_control(f"{name:<20}{value}"))
            self._note(f"{'messages':<20}{len(self._conversation.turns)}")
        elif what == "parameters":
            for line in describe_parameters(self._sampling) or ["no parameter is set: the model has its own"]:
                self._note(strip_control(line))
        elif what == "system":
            self._note(strip_control(self._conversation.system) or "no system message is set")
        elif what in ("license", "modelfile", "template"):
            text = getattr(self._chat.describe(), what)
            self._note(strip_control(text).strip("\n") or f"no {what} is known of {self._model or UNNAMED}")
        else:
            raise SetupError("write /show info, license, modelfile, parameters, system or template")

    def _switch_model(self, name: str) -> None:
        if name and self._models is not None:
            self._chat = self._models.open(name)
            self._model = name
        self._note(self._model or UNNAMED)
        if not name and self._models is not None:
            for each in self._models.list_names():
                if each != self._model:
                    self._note(f"  /model {each}")

    def _save(self, name: str) -> None:
        file = _to_path(name, "save")
        self._conversation.save(file, self._model, replace=file in self._saved)
        self._saved.add(file)
        self._note(f"saved to {file}; /load {name} continues it")

    def _load(self, name: str) -> None:
        self._conversation.restore(_to_path(name, "load"))
        self._note(f"{len(self._conversation.turns)} messages loaded")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        self._write(text.join(self._dim) + "\n")


def _to_path(name: str, command: str) -> Path:
    if not name:
        raise SetupError(f"name a file: /{command} FILE")
    return expand_path(name)
