"""Presets: settings under which Shoal replaces another server (`shoal serve --as NAME`).

A preset is an entry of `PRESETS`: its own defaults, and the names that the other server reads from the environment and
the command line. Those names are read only under their preset, because elsewhere MODEL_NAME or MAX_BATCH_SIZE may mean
anything.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from shoal.config.presets.auto_batching_proxy import AUTO_BATCHING_PROXY
from shoal.config.presets.base import Environ, Preset, PresetSettings, PresetValue
from shoal.config.presets.inference_server import INFERENCE_SERVER
from shoal.config.presets.infinity import INFINITY
from shoal.config.presets.ollama import OLLAMA
from shoal.config.presets.tei import TEI
from shoal.config.presets.triton_grpc_proxy import TRITON_GRPC_PROXY
from shoal.config.presets.triton_openai import TRITON_OPENAI
from shoal.errors import ConfigError

PRESETS: Mapping[str, Preset] = {
    one.name: one
    for one in (TRITON_GRPC_PROXY, INFERENCE_SERVER, TRITON_OPENAI, OLLAMA, TEI, AUTO_BATCHING_PROXY, INFINITY)
}

SWITCHES = frozenset(flag for one in PRESETS.values() for flag in one.switches)
"""Flags of other servers that may be given without a value."""

FLAGS: Mapping[str, Preset] = {flag: one for one in PRESETS.values() for flag in one.flags}
"""Every flag of another server, with the preset that accepts it."""

__all__ = ["FLAGS", "PRESETS", "SWITCHES", "Environ", "Preset", "PresetSettings", "PresetValue", "preset", "read"]


def preset(name: str, where: str) -> Preset:
    """Return the preset called `name`. Raises ConfigError that lists all presets; `where` is the source of the name."""
    found = PRESETS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(PRESETS)}"
        raise ConfigError(f"{where}: {name!r} is not a preset: {hint}", param=where)
    return found


def read(chosen: Preset | None, environ: Environ, flags: Environ) -> PresetSettings:
    """Translate `environ` and the other server's `flags` under the preset; empty values count as not set.

    Raises ConfigError for wrong values, and for flags that belong to another preset or are given without one.
    """
    for flag in flags:
        if chosen is None or flag not in chosen.flags:
            raise ConfigError(f"{flag} is a flag of {FLAGS[flag].name}: add --as {FLAGS[flag].name}", param=flag)
    if chosen is None:
        return PresetSettings()
    return chosen.read_settings(
        {
            name: text if name in chosen.verbatim else text.strip()
            for name, text in {**environ, **flags}.items()
            if text.strip()
        }
    )
