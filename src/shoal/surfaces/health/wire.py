"""The JSON of /health and /health/ready."""

from __future__ import annotations

from typing import Literal

import msgspec


class Running(msgspec.Struct, kw_only=True):
    """As inference-server answers /health."""

    message: str = "The server is running."


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`models` tells the state of each model; of one that cannot serve, why."""

    status: Literal["ok", "ready", "loading", "failed", "draining"]
    version: str
    models: dict[str, str] = {}
