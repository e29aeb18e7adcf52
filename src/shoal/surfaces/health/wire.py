"""JSON types of /health and /health/ready."""

from __future__ import annotations

from typing import Literal

import msgspec


class Running(msgspec.Struct, kw_only=True):
    """The reply of inference-server's /health."""

    message: str = "The server is running."


class Clock(msgspec.Struct, kw_only=True):
    """The reply of Infinity's /health."""

    unix: float


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The health of the server. `models` maps each model to its state, or to the reason why it cannot serve."""

    status: Literal["ok", "ready", "loading", "failed", "draining"]
    version: str
    models: dict[str, str] = {}
