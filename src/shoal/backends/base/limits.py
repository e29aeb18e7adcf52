"""The limits shown in a model's facts."""

from __future__ import annotations

from typing import Any

from shoal.config.settings import Settings


def describe_limits(settings: Settings) -> dict[str, Any]:
    """Return the settings of a model that are useful to its clients, for the facts' details."""
    return {
        "max_batch_size": settings.max_batch_size,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_queue_items": settings.max_queue_items,
        "truncate": settings.truncate,
    }
