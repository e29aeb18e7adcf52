"""Build model lists in the form of Anthropic's API, for clients that send its version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from shoal.http.request import Request
from shoal.surfaces.shared import wire_models as wire


def is_requested(request: Request) -> bool:
    """Whether the client speaks Anthropic's API, whose clients always name its version."""
    return b"anthropic-version" in request.headers


def build_list(entries: Sequence[wire.ModelEntry]) -> wire.AnthropicModelList:
    """Convert the entries of served models: one page, whatever the limit."""
    names = [entry.id for entry in entries]
    return wire.AnthropicModelList(
        data=[build_entry(entry) for entry in entries],
        first_id=names[0] if names else None,
        last_id=names[-1] if names else None,
    )


def build_entry(entry: wire.ModelEntry) -> wire.AnthropicModelEntry:
    created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return wire.AnthropicModelEntry(id=entry.id, display_name=entry.id, created_at=created)
