"""Commands and groups of commands: how they parse flags, and what their help shows.

The help of a command lists its own options and the settings that people change most; --help-all lists every one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

HELP_FLAGS = ["-h", "--help", "--help-all"]
CONTEXT = {"help_option_names": HELP_FLAGS, "max_content_width": 100}

SHOWN_AT_ONCE = 14
"""A command with at most this many options shows them all: they fit one screen."""

MORE = "More options"
"""The section of a command's own options that only --help-all lists."""

_HYPHEN = "\u2011"
"""Stands for a hyphen while lines are broken, because a flag or a name is never to be divided at one."""

_SHOW_ALL = "shoal.help_all"
_SWITCH_VALUES = {"true", "false", "1", "0", "yes", "no"}
_FILES_METAVAR = "FILE..."
_SIMILAR, _MISTYPED = 0.6, 0.75
_WIDEST_NAME, _NARROWEST_TEXT = 28, 42
"""Columns of the names and of the texts in the help. A longer name has a line of its own: no name is ever cut."""


class Command(TyperCommand):
    """A command that accepts two kinds of flag that the parser cannot handle.

    Flags of other servers that may stand without a value get "true". A flag whose metavar is FILE... takes every word
    up to the next flag, as a shell expands *.jpg.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from shoal.config.presets import SWITCHES

        words: list[str] = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            words.append(word)
            if word in SWITCHES and following.lower() not in _SWITCH_VALUES:
                words.append("true")
        several = {flag for each in self.params if each.metavar == _FILES_METAVAR for flag in each.opts}
        ctx.meta[_SHOW_ALL] = "--help-all" in args
        _keep_values([each for each in self.get_params(ctx) if ctx.resilient_parsing or _is_setting(each)])
        try:
            return super().parse_args(ctx, _repeat_flags(words, several))
        except typer.TyperException as error:
            _suggest(error, [flag for each in self.params if not getattr(each, "hidden", False) for flag in each.opts])
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        _restore_hyphens(formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        if arguments:
            _write(formatter, "Arguments", [(each.metavar or each.name.upper(), each.help or "") for each in arguments])
        options = [
            each for each in self.params if each.param_type_name == "option" and not getattr(each, "hidden", False)
        ]
        shown = _choose(options, everything=ctx.meta.get(_SHOW_ALL, False))
        brief = len(shown) < len(options)
        for title, rows in _by_panel(shown, ctx, brief=brief).items():
            _write(formatter, title, rows)
        if brief:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` lists all {len(options)} options.")


class Group(TyperGroup):
    """A group of commands. Without the name of a command, `default` runs, if there is one."""

    default: ClassVar[str] = ""
    also: ClassVar[Mapping[str, str]] = {}
    """Names that people try, and the command that they look for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.default and (not args or (args[0] not in self.commands and args[0] not in HELP_FLAGS)):
            if args and not ctx.resilient_parsing and (near := _find_similar(args[0], [*self.commands], _MISTYPED)):
                ctx.fail(f"{args[0]} is not a command: did you mean `{ctx.command_path} {near}`?")
            args = [self.default, *args]
        if ctx.resilient_parsing:
            _keep_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if not ctx.resilient_parsing and args[0] not in names and not args[0].startswith("-"):
            near = self.also.get(args[0]) or _find_similar(args[0], names)
            hint = f"did you mean `{ctx.command_path} {near}`?" if near else f"`{ctx.command_path} --help` lists them"
            ctx.fail(f"{args[0]} is not a command: {hint}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        _restore_hyphens(formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, "Commands", [(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        options = [row for each in self.params if (row := each.get_help_record(ctx))]
        self.format_commands(ctx, formatter)
        _write(formatter, "Options", [*options, ("-h, --help", "Show this message and exit.")])

    def summary(self, ctx: Any, name: str) -> str:
        """Return the line that describes a command in the list."""
        found = self.get_command(ctx, name)
        return str(found.get_short_help_str(limit=200)) if found else ""


def make_group(name: str, about: str, commands: Mapping[str, Callable[..., Any]], *, default: str = "") -> typer.Typer:
    """Make a group of `commands`, whose errors are reported as of any command."""
    from shoal.cli._errors import report_errors

    kind = type("_Group", (Group,), {"default": default})
    made = typer.Typer(
        name=name,
        cls=kind,
        help=about,
        no_args_is_help=not default,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for each, function in commands.items():
        made.command(each, cls=Command)(report_errors(function))
    return made


def _is_setting(option: Any) -> bool:
    """Whether an option is one of the settings table, or another server's."""
    return getattr(option, "rich_help_panel", None) not in (None, MORE) or getattr(option, "hidden", False)


def _keep_values(options: Sequence[Any]) -> None:
    """Let the parser keep the words of these options as they are.

    It would build a validator for each, which takes the hundreds of `serve` 0.3 s. `shoal.config` validates settings,
    and while a shell completes a line, nothing is to be validated or run.
    """
    for each in options:
        each.process_value = lambda ctx, value: value


def _choose(options: Sequence[Any], *, everything: bool) -> list[Any]:
    """Return the options to show: all, or a command's own and the essential settings."""
    if everything or len(options) <= SHOWN_AT_ONCE:
        return list(options)
    from shoal.config.settings import BY_NAME

    own = [each for each in options if each.rich_help_panel is None]
    if len(own) > SHOWN_AT_ONCE - 2:  # with settings, they would not fit one screen
        return own
    return [each for each in options if each in own or (_is_setting(each) and BY_NAME[each.name].essential)]


def _by_panel(options: Sequence[Any], ctx: Any, *, brief: bool) -> dict[str, list[tuple[str, str]]]:
    """Group the rows of options by section; in brief they are one section, with their first sentences."""
    sections: dict[str, list[tuple[str, str]]] = {"Options": []}
    for each in options:
        title = "Options" if brief else each.rich_help_panel or "Options"
        sections.setdefault(title, []).append(_describe(each, ctx, brief=brief))
    sections["Options"].append(("-h, --help", "Show this message and exit."))
    return sections


def _describe(option: Any, ctx: Any, *, brief: bool) -> tuple[str, str]:
    names, text = option.get_help_record(ctx)
    if not brief:
        return names, text
    if option.rich_help_panel is None:
        return names, text.partition(". ")[0].removesuffix(".")
    about, _, source = text.rpartition(" (env ")
    default = source.rstrip(")").partition("default ")[2]
    return names, re.split(r"[.;:] |\.$", about)[0] + (f" [{default}]" if default else "")


def _write(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    with formatter.section(title if plain else typer.style(title, bold=True)):
        rows = [(name, text.replace("-", _HYPHEN)) for name, text in _shorten(rows, formatter.width - 2)]
        formatter.write_dl(rows, col_max=min(_WIDEST_NAME, formatter.width - _NARROWEST_TEXT))


def _restore_hyphens(formatter: Any) -> None:
    formatter.buffer[:] = [part.replace(_HYPHEN, "-") for part in formatter.buffer]


def _shorten(rows: Sequence[tuple[str, str]], width: int) -> Iterator[tuple[str, str]]:
    """Move the choices of an option that is wider than the screen into its text."""
    for names, text in rows:
        name, _, choices = names.partition(" ")
        wide = len(names) > width and "|" in choices
        yield (f"{name} CHOICE", f"{text} Choices: {choices.replace('|', ', ')}.") if wide else (names, text)


def _find_similar(name: str, names: Sequence[str], cutoff: float = _SIMILAR) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, n=1, cutoff=cutoff)), "")


def _suggest(error: Any, flags: Sequence[str]) -> None:
    """Add the flag that was probably meant to the parser's error, or how to find it."""
    if not hasattr(error, "possibilities"):
        return
    error.possibilities = None
    near = _find_similar(error.option_name, [flag for flag in flags if flag.startswith("--")])
    hint = f"did you mean {near}?" if near else "--help-all lists them all"
    error.message = f"{error.message}: {hint}"


def _repeat_flags(args: list[str], flags: set[str]) -> list[str]:
    """Repeat each of `flags` before every one of its values. A lone - is a value."""
    words: list[str] = []
    flag = ""
    for place, word in enumerate(args):
        if word == "--":
            return words + args[place:]
        if word.startswith("-") and word != "-":
            flag = word if word in flags else ""
            # Keep a flag without any value, so that the parser rejects it.
            following = args[place + 1] if place + 1 < len(args) else "--"
            if flag and (following == "-" or not following.startswith("-")):
                continue
        elif flag:
            words.append(flag)
        words.append(word)
    return words
