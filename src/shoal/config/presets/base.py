"""The types of a preset, and functions that parse values for all presets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.errors import ConfigError

Environ: TypeAlias = Mapping[str, str]
"""Non-empty variables of the environment, and flags, by name; flags include their dashes."""


@dataclass(frozen=True, slots=True)
class PresetValue:
    """A value for a setting or for a key of a model's table, and the variables and flags that it came from.

    Without any of them it is the preset's own default. The caller validates the value. `is_exclusive` marks addresses
    from a flag that excludes further addresses.
    """

    value: Any
    variables: tuple[str, ...] = ()
    is_exclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetSettings:
    """The meaning of an environment under a preset: settings by name, addresses to serve, table keys by model.

    Two mappings name no model: `language_models` applies to models that generate text, `served_model` to the one model
    that the process is started for. A model's own table or files override both.
    """

    settings: Mapping[str, PresetValue] = field(default_factory=dict)
    served: PresetValue | None = None
    tables: Mapping[str, Mapping[str, PresetValue]] = field(default_factory=dict)
    language_models: Mapping[str, PresetValue] = field(default_factory=dict)
    served_model: Mapping[str, PresetValue] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A preset: its defaults and the foreign names that it reads.

    `defaults` rank below the file, the result of `read_settings` above it. `variables` and `flags` map each name to
    what it sets, for the docs; flags include their dashes and take one value each. `switches` are flags that may be
    given without a value, which is then "true". `verbatim` lists names whose values keep surrounding spaces.
    `spellings` maps, by setting, the other server's values of a flag that Shoal has as well to Shoal's.

    `read_settings` raises ConfigError whose `param` is the offending variable or flag.
    """

    name: str
    product: str
    defaults: Mapping[str, Any]
    variables: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    verbatim: frozenset[str] = frozenset()
    spellings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    read_settings: Callable[[Environ], PresetSettings]


HOST = r"\[[0-9A-Fa-f:.]+\]|[^\s/:#?@%=\[\]]+"
"""Regular expression of a host name or address; IPv6 is in brackets."""


RUST_LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warn": "warning", "error": "error", "off": "error"}
"""Maps the levels of RUST_LOG to those of `log_level`."""

_ORIGIN = re.compile(r"https?://[^/\s*?#@]+")


def read_switch(variable: str, environ: Environ) -> bool:
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
        environ[variable].lower()
    )
    if found is None:
        raise invalid_value_error(variable, "true or false", environ)
    return found


def read_int(variable: str, environ: Environ) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", environ[variable]):
        raise invalid_value_error(variable, "a whole number", environ)
    return int(environ[variable])


def read_origins(variable: str, environ: Environ) -> tuple[list[str], list[str]]:
    """Return the origins that are written in full, and a warning about the others, if any."""
    origins = [origin.strip() for origin in environ[variable].split(",") if origin.strip()]
    exact = [origin for origin in origins if _ORIGIN.fullmatch(origin)]
    others = ", ".join(origin for origin in origins if origin not in exact)
    full = "write each origin in full, such as https://app.example.org"
    return exact, [f"{variable}: {others} is ignored: {full}"] if others else []


def invalid_value_error(variable: str, rule: str, environ: Environ) -> ConfigError:
    return ConfigError(f"{variable}: must be {rule}, got {environ[variable]!r}", param=variable)
