"""`shoal chat`: talk to a language model in this process or on a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from shoal.cli._conversation import Conversation
    from shoal.cli._talking import ChatSource
    from shoal.types import Sampling

STDIN = "-"


@with_settings("Engine", "Generation", "Model files")
def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [QUESTION]",
            help="Address of the model, as for serve (omit it with --url or --model), and a question; - reads it "
            "from standard input. Without a question, starts a conversation.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Model, as for serve; with --url, its name on the server (default: the first one)."
        ),
    ] = "",
    url: Annotated[str, typer.Option(help="Use this server, which can be any with OpenAI's API.")] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, metavar="NUMBER", help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum tokens to generate.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show tokens and speed after each reply.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Chat with a language model. /help lists the commands of a conversation.

    With a question, or text piped in, only the answer goes to standard output.
    """
    from shoal.cli._conversation import Conversation
    from shoal.types import Sampling

    arguments = list(words or ())
    if not url and not model:
        if not arguments and not loaded.served:
            raise ConfigError("name a model: shoal chat MODEL, or --url of a server", param="--")
        model = arguments.pop(0) if arguments else loaded.served[0]
    question = _read_question(arguments)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    with contextlib.ExitStack() as stack:
        talks = _open_chat(stack, loaded, url, model)
        conversation = Conversation(system)
        if question is None:
            _converse(talks, conversation, sampling, show_stats=stats)
        else:
            _answer_once(talks, conversation, sampling, question, show_stats=stats)


def _read_question(parts: Sequence[str]) -> str | None:
    """Return the question, or None for an interactive conversation. Raises ConfigError if neither is possible."""
    if not parts and sys.stdin.isatty():
        if not sys.stdout.isatty():
            raise ConfigError("give the question as an argument, or pipe it in", param="--")
        return None
    question = " ".join(_read_stdin() if part == STDIN else part for part in parts) if parts else _read_stdin()
    if not question.strip():
        raise SetupError("the question is empty: give it as an argument, or pipe it in")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ConfigError("the question is not UTF-8: convert it first", param="--") from None
    return question


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise SetupError(f"standard input is not UTF-8 (byte {error.start + 1}): convert it first") from None


def _open_chat(stack: contextlib.ExitStack, loaded: LoadedConfig, url: str, model: str) -> ChatSource:
    from shoal.cli._asking import first_key
    from shoal.cli._talking import RemoteChat, open_local_chat

    if url:
        settings = loaded.settings
        return RemoteChat(url, model, settings.upstream_api_key or first_key(*settings.api_key))
    from shoal.app import open_app
    from shoal.cli.progress import TerminalProgress

    with TerminalProgress() as progress:  # the bars end before the conversation begins
        return stack.enter_context(open_local_chat(open_app(loaded, (model,), progress), progress.report_note))


def _converse(talks: ChatSource, conversation: Conversation, sampling: Sampling, *, show_stats: bool) -> None:
    with contextlib.suppress(ImportError):  # not on every platform; the terminal then edits lines
        import readline  # noqa: F401 - input() edits lines and keeps their history once this is loaded
    from rich.console import Console

    from shoal.cli._terminal import Terminal

    dim = Console().color_system is not None
    Terminal(talks, conversation, sampling, out=sys.stdout, dim=dim, show_stats=show_stats).run()


def _answer_once(
    talks: ChatSource, conversation: Conversation, sampling: Sampling, question: str, *, show_stats: bool
) -> None:
    """Print only the answer, byte for byte if standard output is not a terminal. Raises the model's errors."""
    from shoal.cli._conversation import Reply, strip_control

    plain = not sys.stdout.isatty()
    reply = Reply(time.perf_counter)
    try:
        with contextlib.closing(talks.ask(conversation.build_messages(question), sampling)) as chunks:
            for chunk in chunks:
                reply.add(chunk)
                sys.stdout.write(chunk.text if plain else strip_control(chunk.text))
                sys.stdout.flush()
    finally:
        if reply.text and not reply.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    if reply.finish_reason == "length":
        typer.echo("the answer was truncated at --max-tokens", err=True)
    if show_stats:
        typer.echo(reply.stats(), err=True)
