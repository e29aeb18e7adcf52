"""`shoal run` and `shoal chat`: talk to a language model in this process or on a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli._completion import complete_model
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from shoal.cli._conversation import Conversation
    from shoal.cli._model_switch import ModelSwitch
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
            autocompletion=complete_model,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Model, as for serve; with --url, its name on the server (default: the first one).",
            autocompletion=complete_model,
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
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    _talk(loaded, lambda name: (url, name), model, arguments, Conversation(system), sampling, show_stats=stats)


@with_settings("Engine", "Generation", "Model files", "port", "host", "api_key", "admin_key")
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Address of the model, or its name on a server.", autocompletion=complete_model
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Question; without it, starts a conversation.", show_default=False),
    ] = None,
    url: Annotated[str, typer.Option(help="Use this server (default: one at `port` that has the model).")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tokens and speed after each reply.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Run a language model, as `ollama run` does, downloading it first if necessary.

    A running server that has the model answers; otherwise the model runs in this process. /? lists the commands of a
    conversation.
    """
    from shoal.cli._conversation import Conversation
    from shoal.types import Sampling

    locate = partial(_locate, loaded, url)
    _talk(loaded, locate, model, prompt or [], Conversation(), Sampling(), show_stats=verbose)


def _locate(loaded: LoadedConfig, url: str, model: str) -> tuple[str, str]:
    """Return the server that has the model, "" if it runs in this process, and its name there."""
    if url:
        return url, model
    from shoal.cli.banner import browser_url

    name = _load_on_server(loaded, model)
    return (browser_url(loaded.settings.host, loaded.settings.port), name) if name else ("", model)


def _load_on_server(loaded: LoadedConfig, model: str) -> str:
    """Load the model on the server at the configured port, and return its name there; "" if none there has it.

    Raises SetupError if that server cannot load it, or refuses the key: a model beside it would be a surprise.
    """
    from shoal.backends import parse_address
    from shoal.cli._asking import KeyRefused
    from shoal.cli._running import RunningServer
    from shoal.cli.progress import TerminalProgress
    from shoal.errors import AddressError, TransportFailed

    names = {model}
    with contextlib.suppress(AddressError):  # a server's name need not be an address
        names.add(parse_address(model).id)
    if not loaded.settings.port:
        return ""
    try:
        server = RunningServer.from_settings(loaded.settings, "")
        found = next((each for each in server.models() if each["id"] in names), None)
    except KeyRefused:
        raise
    except (TransportFailed, SetupError):  # no server there, or one of another kind
        return ""
    if found is None:
        return ""
    if (found.get("status") or {}).get("value") == "unloaded":
        with TerminalProgress(doing=f"loading {found['id']}") as progress:
            server.load(found["id"], {}, progress)
    return str(found["id"])


def _talk(
    loaded: LoadedConfig,
    locate: Callable[[str], tuple[str, str]],
    model: str,
    words: Sequence[str],
    conversation: Conversation,
    sampling: Sampling,
    *,
    show_stats: bool,
) -> None:
    """Answer the question in `words` or on standard input, or hold a conversation on a terminal."""
    from shoal.cli._model_switch import ModelSwitch, check_listed

    question = _read_question(words)
    opened: list[ChatSource] = []

    def open_chat(stack: contextlib.ExitStack, name: str) -> ChatSource:
        if opened and not {"/", ":"} & set(name):  # a name and no address, so it must be one of those listed
            check_listed(name, _list_names(loaded, opened[0]))
        url, there = locate(name)
        opened[:] = [_open_chat(stack, loaded, url, there)]
        return opened[0]

    with ModelSwitch(open_chat, lambda: _list_names(loaded, opened[0])) as models:
        talks = models.open(model)
        if question is None:
            _converse(
                talks, conversation, sampling, models, model or getattr(talks, "model", ""), show_stats=show_stats
            )
        else:
            _answer_once(talks, conversation, sampling, question, show_stats=show_stats)


def _list_names(loaded: LoadedConfig, talks: ChatSource) -> list[str]:
    """Return the language models beside this one: of its server, or on this machine's disk."""
    from shoal.cli._talking import RemoteChat
    from shoal.models.store import Store

    if isinstance(talks, RemoteChat):
        return talks.list_names()
    stored = Store(loaded.settings.home).entries()
    return [each.manifest.address for each in stored if each.manifest.generation is not None]


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

    with TerminalProgress(doing=f"loading {model}") as progress:  # the bars end before the conversation begins
        return stack.enter_context(open_local_chat(open_app(loaded, (model,), progress), progress.report_note))


def _converse(
    talks: ChatSource,
    conversation: Conversation,
    sampling: Sampling,
    models: ModelSwitch,
    model: str,
    *,
    show_stats: bool,
) -> None:
    keep_lines = None
    with contextlib.suppress(ImportError):  # not on every platform; the terminal then edits lines
        import readline  # input() edits lines and keeps their history once this is loaded

        keep_lines = readline.set_auto_history
    from rich.console import Console

    from shoal.cli._terminal import Terminal

    dim = Console().color_system is not None
    Terminal(
        talks,
        conversation,
        sampling,
        model=model,
        models=models,
        out=sys.stdout,
        dim=dim,
        keep_lines=keep_lines,
        show_stats=show_stats,
    ).run()


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
