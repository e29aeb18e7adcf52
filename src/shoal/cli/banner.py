"""The startup banner of `shoal serve`: where it listens, what it serves, and an example request."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal import __version__
from shoal.config import is_loopback
from shoal.config.settings import Settings

if TYPE_CHECKING:
    from shoal.core.protocols import ModelFacts
    from shoal.core.registry import ModelCard
    from shoal.types import TaskKind

_log = logging.getLogger("shoal")


def announce(settings: Settings, port: int, cards: Sequence[ModelCard]) -> None:
    """Show the banner on a terminal; elsewhere log it, one record a line."""
    if not sys.stderr.isatty():
        for label, text in banner_lines(settings, port, cards):
            _log.info("%s: %s", label, text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print()
    for label, text in banner_lines(settings, port, cards):
        # With soft wrapping, a line that the terminal breaks still copies as one.
        console.print(Text.assemble("  ", (f"{label:<7}", "bold cyan"), text), soft_wrap=True)
    console.print()


def banner_lines(settings: Settings, port: int, cards: Sequence[ModelCard]) -> Iterator[tuple[str, str]]:
    """Yield the banner as (label, text) pairs."""
    address = browser_url(settings.host, port)
    yield "shoal", f"{__version__} on {address}"
    yield "docs", f"{address}/docs"
    if not cards:
        yield "model", f"none yet: shoal load NAME --url {address}"
    claimed: dict[TaskKind, str] = {}
    for card in cards:
        for task in card.default_for:
            claimed.setdefault(task, card.name)
        yield "model", f"{card.name}  {_describe_model(card, claimed)}"
    yield "auth", _describe_auth(settings)
    for label, task, path, asks in _EXAMPLES:
        example_card = next((card for card in cards if card.facts and task in card.facts.tasks), None)
        if example_card:
            body = json.dumps({"model": example_card.name, **asks})
            yield label, _curl(address + path, body, authorised=bool(settings.api_key))


def browser_url(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches the server."""
    if host in ("0.0.0.0", "::", ""):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _describe_model(card: ModelCard, claimed: Mapping[TaskKind, str]) -> str:
    """Describe a model. `claimed` maps each task to its actual default model, in case several claim the same task."""
    if card.facts is None:
        from shoal.core.lifecycle.loading import is_blocked  # late: the banner's address is needed without it

        return "waiting for its server" if is_blocked(card.note) else card.status_text  # the log has the reason
    parts = list(_describe_facts(card.facts))
    parts += [f"alias {alias}" for alias in card.aliases]
    for task in card.default_for:
        first = claimed[task]
        parts += [f"default for {task}" if first == card.name else f"not default for {task}: {first} is listed first"]
    return ", ".join(parts)


def _describe_facts(facts: ModelFacts) -> Iterator[str]:
    if facts.dimension:
        yield f"{facts.dimension} dimensions"
    if facts.labels:
        yield "reranker" if "rerank" in facts.tasks else f"{len(facts.labels)} labels"
    if facts.max_input_tokens:
        yield f"{facts.max_input_tokens} tokens"
    streams, threads = facts.details.get("streams"), facts.details.get("threads")
    shape = f" {threads} threads x {streams} streams" if streams and threads else ""
    yield (f"{facts.precision} on {facts.backend}" if facts.precision else facts.backend) + shape


def _describe_auth(settings: Settings) -> str:
    if settings.api_key:
        return f"on, {len(settings.api_key)} key{'s' if len(settings.api_key) > 1 else ''}"
    if is_loopback(settings.host):
        return "off, only this machine can connect"
    return "OFF, and other machines can connect (--insecure)"


def _curl(address: str, body: str, *, authorised: bool) -> str:
    key = '-H "authorization: Bearer $SHOAL_API_KEY" ' if authorised else ""
    return f"curl -s {address} {key}-H 'content-type: application/json' -d '{body}'"


_EXAMPLES: Sequence[tuple[str, TaskKind, str, dict[str, Any]]] = (
    ("try", "embed", "/v1/embeddings", {"input": "Hello, world"}),
    ("rank", "rerank", "/v1/rerank", {"query": "What swims?", "documents": ["A fish.", "A stone."]}),
    ("class", "classify", "/classify", {"input": "Hello, world"}),
    ("chat", "generate", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
)
