"""`shoal doctor`: check this machine, the configuration and every configured server, with the next step."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from shoal import config
from shoal.backends import parse_served
from shoal.cli import _machine_checks as machine
from shoal.cli import _network_checks as network
from shoal.cli._finding import COLOURS, Finding
from shoal.cli._options import As, ConfigFile
from shoal.cli.progress import Waiting
from shoal.config.check import find_problems
from shoal.errors import ConfigError

Check: TypeAlias = "Callable[[config.LoadedConfig], Iterator[Finding]]"

CHECKS: dict[str, Check] = {
    "python": machine.check_python,
    "engines": machine.check_engines,
    "processor": machine.check_processor,
    "memory": machine.check_memory,
    "gpu": machine.check_gpu,
    "descriptors": machine.check_descriptors,
    "disk": machine.check_disk,
    "ports": network.check_ports,
    "hub": network.check_hub,
    "backends": network.check_backends,
}


def doctor(
    addresses: Annotated[list[str] | None, typer.Argument(metavar="ADDRESS", help="As for serve.")] = None,
    config_file: ConfigFile = None,
    preset: As = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, the settings and each configured backend. Exit code 1 if something is broken.

    Every line that is not ok ends with what to do next.
    """
    findings: list[Finding] = []
    for each in _examine(addresses, config_file, preset):
        findings.append(each)
        if not as_json:
            _show(each)
    failed = any(each.state == "fail" for each in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(each) for each in findings]}, indent=2))
    if failed:
        raise typer.Exit(1)


def _examine(addresses: list[str] | None, file: Path | None, preset: str | None) -> Iterator[Finding]:
    place = file or config.find_file(os.environ, Path.cwd())
    flags = {config.MODELS: addresses, config.AS: preset}
    yield from _check_settings(flags, place)
    loaded = _load_what_is_valid(flags, place)
    for name, check in CHECKS.items():
        with Waiting(f"checking {name}"):  # servers that do not answer take seconds
            found = [*_run_check(name, check, loaded)]
        yield from found


def _run_check(name: str, check: Check, loaded: config.LoadedConfig) -> Iterator[Finding]:
    """Run one check. Whatever it raises is a finding, so that it does not hide those of the other checks."""
    try:
        yield from check(loaded)
    except Exception as error:  # of a library or of the system
        text = f"cannot be checked: {type(error).__name__}: {error}"
        yield Finding(name, "fail", text, "correct what this names; otherwise report it as a bug in Shoal")


def _check_settings(flags: Mapping[str, Any], place: Path | None) -> Iterator[Finding]:
    problems = find_problems(place, os.environ, parse_served)
    for each in problems:
        where = each.place if each.line is None else f"{each.place}:{each.line}"
        text, _, advice = each.message.rpartition(": ")
        yield Finding("settings", "fail" if each.is_error else "warn", f"{where}: {text}", advice)
    if not problems:
        yield Finding("settings", "ok", f"{place or 'no settings file; the defaults and the environment'}")


def _load_what_is_valid(flags: Mapping[str, Any], place: Path | None) -> config.LoadedConfig:
    """Load the settings; while they are wrong, the defaults, so that the machine is checked all the same."""
    try:
        return config.load(flags, os.environ, place)
    except ConfigError as error:
        if error.param == "--as":
            raise
        return config.load({config.MODELS: flags[config.MODELS]}, {})


def _show(finding: Finding) -> None:
    first, *more = finding.lines(shutil.get_terminal_size().columns)
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    state = f"{finding.state:<6}"
    typer.echo((state if plain else typer.style(state, fg=COLOURS[finding.state])) + first)
    for line in more:
        typer.echo(line)
