"""The terminal of `shoal chat`: it reads lines, streams replies and runs slash commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TextIO

from shoal.cli._conversation import COMMANDS, Conversation, MessageReader, Reply, parse_command, strip_control
from shoal.cli._errors import say
from shoal.cli._talking import ChatSource
from shoal.errors import ShoalError
from shoal.types import Message, Sampling

PROMPT = ">>> "
CONTINUATION_PROMPT = "... "
STOPPED = "(stopped)"
CUT = "(truncated at --max-tokens)"


class Terminal:
    """An interactive chat between one person and one model.

    `read` prompts for a line and raises EOFError at the end of input. `show_stats` prints statistics after each reply.
    `dim` means that `out` understands ANSI codes: everything but the answer is then dimmed.

    Ctrl-C stops a reply and keeps its partial text in the conversation. At the prompt, Ctrl-C exits.
    """

    def __init__(
        self,
        talks: ChatSource,
        conversation: Conversation,
        sampling: Sampling,
        *,
        out: TextIO,
        dim: bool = False,
        read: Callable[[str], str] = input,
        show_stats: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chat = talks
        self._conversation = conversation
        self._sampling = sampling
        self._out = out
        # Raw escape codes: Ctrl-C could interrupt a buffered console in the middle of a write.
        self._dim = ("\x1b[2m", "\x1b[0m") if dim else ("", "")
        self._read = read
        self._show_stats = show_stats
        self._clock = clock
        self._last_reply: Reply | None = None

    def run(self) -> None:
        """Read and answer messages until the user exits."""
        self._note("/help lists commands, Ctrl-C stops a reply, Ctrl-D leaves")
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
        with closing(self._chat.ask(messages, self._sampling)) as chunks:
            for chunk in chunks:
                reply.add(chunk)
                if chunk.reasoning:
                    thinking = True
                    self._write(strip_control(chunk.reasoning).join(self._dim))
                if chunk.text:
                    self._write(f"\n\n{strip_control(chunk.text.lstrip())}" if thinking else strip_control(chunk.text))
                    thinking = False

    def _run_command(self, name: str, rest: str) -> None:
        conversation = self._conversation
        if name == "clear":
            conversation.clear()
            self._note("conversation cleared")
        elif name == "system":
            conversation.system = rest
            self._note("system message set" if rest else "system message cleared")
        elif name == "undo":
            self._note("last question removed" if conversation.undo() else "nothing to remove")
        elif name == "stats":
            self._note(self._last_reply.stats() if self._last_reply else "no reply yet")
        else:
            if name != "help":
                self._note(f"unknown command /{name}")
            for each, what in COMMANDS.items():
                self._note(f"/{each:<8}{what}")
            self._note('"""      starts and ends a message of several lines')

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        self._write(text.join(self._dim) + "\n")
