"""Reports a failed command as one line that names the next step, and as an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from shoal.errors import AddressError, ConfigError, ShoalError

P = ParamSpec("P")
R = TypeVar("R")


def exit_code(error: ShoalError) -> int:
    """Return 2 if the command line itself is wrong, as for any other bad flag; otherwise 1."""
    flag = isinstance(error, ConfigError) and (error.param or "").startswith("--")
    return 2 if flag or isinstance(error, AddressError) else 1


def explain_os_error(error: OSError) -> str:
    """Return the message for an error of a standard stream or of the current folder, "" for any other."""
    if error.filename is None and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
        return f"the output cannot be written: {error.strerror}"
    if error.filename is None and error.errno == errno.ENOENT:
        return "the current folder no longer exists: change to another one"
    return ""


def say(label: str, message: str, colour: str) -> None:
    """Print one line on standard error; color only on a terminal and without NO_COLOR."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble((f"{label}: ", colour), message), soft_wrap=True)


def warn(message: str) -> None:
    say("warning", message, "yellow")


def report_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Report expected errors of a command as one line. Any other exception is a bug and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ShoalError as error:
            say("error", error.message, "bold red")
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped
