"""The state of a chat without its terminal: turns, commands and statistics of a reply."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from shoal.errors import SetupError
from shoal.types import Chunk, Message, Usage

QUOTES = '"""'
COMMANDS = {
    "model": "NAME: switch to another model and keep the conversation; without NAME, list the models",
    "system": "TEXT: set the system message; without TEXT, clear it",
    "set": "system TEXT, parameter NAME VALUE, format json or FILE, noformat, think, nothink, think auto, history, "
    "nohistory, verbose or quiet: as in Ollama's chat",
    "show": "info, license, modelfile, parameters, system or template: of the model, and what is set",
    "save": "FILE: save the conversation, as the body of a /v1/chat/completions request",
    "load": "FILE: continue a saved conversation",
    "clear": "clear the conversation (not the system message)",
    "undo": "remove the last question and its answer",
    "stats": "tokens, speed and time to first token of the last reply",
    "help": "show this list (also /?)",
    "exit": "leave (also /bye, or press Ctrl-D)",
}
_COMMAND = re.compile(r"/([a-z]+|\?)(?:\s+(.*))?", re.S)
_CONTROL_CODES = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@dataclass(slots=True)
class Conversation:
    """Alternating questions and answers, preceded by the system message `system` if there is one."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def build_messages(self, question: str) -> list[Message]:
        """Return the messages to send for `question`, which becomes a turn only once it is answered."""
        before = [Message(role="system", content=self.system)] if self.system else []
        return [*before, *self.turns, Message(role="user", content=question)]

    def add_turn(self, question: str, answer: str) -> None:
        """Append a question and its answer, which may be partial."""
        self.turns += [Message(role="user", content=question), Message(role="assistant", content=answer)]

    def save(self, file: Path, model: str, *, replace: bool) -> None:
        """Write the conversation as JSON that only this user can read. Raises SetupError, also for a file that exists
        unless `replace` is set."""
        before = [Message(role="system", content=self.system)] if self.system else []
        messages = [{"role": one.role, "content": one.content} for one in (*before, *self.turns)]
        # A terminal that is not UTF-8 gives lone surrogates, which no UTF-8 file can hold: "?" takes their place.
        body = json.dumps({"model": model, "messages": messages}, indent=2, ensure_ascii=False).encode(errors="replace")
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
        try:
            with open(os.open(file, flags, 0o600), "wb") as opened:
                opened.write(body + b"\n")
        except FileExistsError:
            raise SetupError(f"{file} exists: choose another name") from None
        except OSError as error:
            raise SetupError(f"{file} cannot be written ({error.strerror}): choose another place") from None

    def restore(self, file: Path) -> None:
        """Continue the conversation of a file that `save` wrote. Raises SetupError."""
        try:
            messages = msgspec.json.decode(file.read_bytes(), type=_Saved).messages
        except OSError as error:
            raise SetupError(f"{file} cannot be read ({error.strerror}): check its name") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SetupError(f"{file} is not a saved conversation ({error}): choose one that /save wrote") from None
        system = [one.content for one in messages if one.role == "system"]
        self.system = system[0] if system else ""
        self.turns = [Message(role=one.role, content=one.content) for one in messages if one.role != "system"]

    def clear(self) -> None:
        self.turns.clear()

    def undo(self) -> bool:
        """Remove the last question and answer. Returns False if there was none."""
        found = bool(self.turns)
        del self.turns[-2:]
        return found


class _SavedMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str


class _Saved(msgspec.Struct):
    messages: list[_SavedMessage]


def parse_command(text: str) -> tuple[str, str] | None:
    """Split a line into (name, rest) if it is a command, known or not; return None for a message to the model.

    A path such as /etc/hosts is not a command, nor is a line that begins with a space.
    """
    found = _COMMAND.fullmatch(text)
    return (found[1], (found[2] or "").strip()) if found else None


class MessageReader:
    """Assembles typed lines into messages: each line is one, and so is the text between two triple quotes."""

    def __init__(self) -> None:
        self._open: list[str] | None = None

    @property
    def unfinished(self) -> bool:
        return self._open is not None

    def push(self, line: str) -> str | None:
        """Return the message that ends with this line, or None if it continues or is empty."""
        if self._open is None:
            if not line.lstrip().startswith(QUOTES):
                return line if line.strip() else None
            self._open, line = [], line.lstrip()[len(QUOTES) :]
        text, quotes, _ = line.partition(QUOTES)
        self._open.append(text)
        if not quotes:
            return None
        message = "\n".join(self._open).strip("\n")
        self._open = None
        return message if message.strip() else None

    def drop(self) -> None:
        """Discard the unfinished message."""
        self._open = None


@dataclass(slots=True)
class Reply:
    """A reply as it arrives. Times are in seconds of `clock`; `sent_at` is when the question was sent."""

    clock: Callable[[], float]
    sent_at: float = 0.0
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    text: str = ""
    usage: Usage | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.sent_at = self.clock()

    def add(self, chunk: Chunk) -> None:
        if chunk.text or chunk.reasoning:
            self.last = self.clock()
            self.first = self.last if self.first is None else self.first
            self.pieces += 1
            self.text += chunk.text
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def stats(self) -> str:
        """Return one line of statistics. The speed counts the tokens after the first; a reply of one token has none."""
        if self.first is None:
            return "no reply yet"
        counted = self.usage is not None and self.usage.completion_tokens > 0
        tokens = self.usage.completion_tokens if self.usage is not None and counted else self.pieces
        parts = [f"{tokens} {'token' if counted else 'piece'}{'s' if tokens > 1 else ''}"]
        if tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):,.1f} per second")
        parts.append(f"first token after {self.first - self.sent_at:.2f} s")
        if self.usage is not None and self.usage.prompt_tokens:
            parts.append(f"prompt {self.usage.prompt_tokens} tokens")
        return ", ".join(parts)


def strip_control(text: str) -> str:
    """Remove the characters that move a terminal's cursor or change its state; newlines and tabs stay."""
    return text.translate(_CONTROL_CODES)
