"""Build model lists in the form of Infinity, which is OpenAI's with `stats` and `capabilities`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from shoal.http.request import Options
from shoal.surfaces.shared import wire_models as wire

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

Capability = Literal["embed", "image_embed", "rerank", "classify"]


def build_list(gateway: Gateway, entries: Sequence[wire.ModelEntry], options: Options) -> wire.InfinityModelList:
    """Convert the entries of served models. They keep Shoal's own fields, which Infinity's client ignores."""
    return wire.InfinityModelList(data=[_convert(gateway, entry, options) for entry in entries])


def _convert(gateway: Gateway, entry: wire.ModelEntry, options: Options) -> wire.InfinityModelEntry:
    model = gateway.registry.get(entry.parent or entry.id)
    inflight = model.inflight if model is not None else 0
    stats = wire.InfinityStats(
        queue_fraction=min(1.0, inflight / options.max_queue_items),
        queue_absolute=inflight,
        results_pending=inflight,
        batch_size=options.max_batch_size,
    )
    own = msgspec.structs.asdict(entry)
    return wire.InfinityModelEntry(
        **{**own, "owned_by": "infinity"}, stats=stats, capabilities=_list_capabilities(entry)
    )


def _list_capabilities(entry: wire.ModelEntry) -> list[Capability]:
    modalities = entry.modalities or ["text"]
    found: dict[Capability, bool] = {
        "embed": "embed" in entry.tasks and "text" in modalities,
        "image_embed": "embed" in entry.tasks and "image" in modalities,
        "rerank": "rerank" in entry.tasks,
        "classify": "classify" in entry.tasks,
    }
    return [name for name, has in found.items() if has]
