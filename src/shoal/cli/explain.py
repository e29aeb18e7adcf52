"""`shoal explain`: what happened to one of a running server's last requests."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from shoal.cli._options import with_settings
from shoal.cli._running import CONNECTION_SETTINGS, RunningServer
from shoal.cli._tables import print_json, print_table
from shoal.cli.running import Url
from shoal.config import LoadedConfig


@with_settings(*CONNECTION_SETTINGS)
def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="Value of the `x-request-id` header.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = "",
    *,
    loaded: LoadedConfig,
) -> None:
    """Show where one of the last requests spent its time: queue, batch, backend, retries."""
    found = RunningServer.from_settings(loaded.settings, url).explain(request_id)
    if as_json:
        print_json(found)
        return
    print_table(None, _describe_request(found))
    for work in found["tasks"]:
        typer.echo("")
        print_table(None, _describe_task(work))
        if work["attempts"]:
            typer.echo("")
            print_table(("START", "TOOK", "REPLICA", "BATCH", "OUTCOME"), map(_describe_attempt, work["attempts"]))


def _describe_request(found: dict[str, Any]) -> list[tuple[str, str]]:
    if not found["method"]:
        return [("request", f"{found['id']}, whose own record is not there: it is not answered yet, or is displaced")]
    status = f"{found['status']} {found['error']}".rstrip()
    arrived = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["time"]))
    return [
        ("request", f"{found['method']} {found['path']} ({found['surface']})"),
        ("status", f"{status} after {_duration(found['ms'])}"),
        ("arrived", f"{arrived} from {found['client']}"),
        *(() if found["tasks"] else [("model", _describe_missing_tasks(found))]),
    ]


def _describe_missing_tasks(found: dict[str, Any]) -> str:
    if found["status"] < 400 and found["model"]:
        return f"{found['model']}; newer requests displaced the record of its work"
    return "none was asked: the request ended before it reached one"


def _describe_task(work: dict[str, Any]) -> list[tuple[str, str]]:
    tokens = f"{work['input_tokens']} tokens in"
    if work["task"] == "generate":
        tokens += f", {work['output_tokens']} out"
    cached = f", {work['cached']} of them from the cache" if work["cached"] else ""
    stages = [f"{name} {_duration(work[f'{name}_ms'])}" for name in ("prepare", "queue", "infer") if work[f"{name}_ms"]]
    if work["first_token_ms"] is not None:
        stages.append(f"first token {_duration(work['first_token_ms'])}")
    return [
        (work["task"], f"{work['model']}: {work['outcome']} after {_duration(work['ms'])}"),
        ("size", f"{_count(work['items'], 'item')}{cached}, {tokens}"),
        ("stages", ", ".join(stages)),
        ("retries", str(work["retries"])),
    ]


def _describe_attempt(one: dict[str, Any]) -> tuple[str, ...]:
    batch = "-"
    if "batch" in one:
        counts = ", ".join(_count(one[f"{name}s"], name) for name in ("item", "request", "token"))
        batch = f"{one['batch']}: {counts}"
        batch += f" ({one['flush']})"
    outcome = " -> ".join(filter(None, (one.get("error", "ok"), one.get("step"))))
    return (f"+{_duration(one['start_ms'])}", _duration(one["ms"]), one["replica"], batch, outcome)


def _duration(ms: float) -> str:
    """Format milliseconds: "3.2 ms", "1.50 s"."""
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
