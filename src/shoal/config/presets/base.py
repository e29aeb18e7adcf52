"""What a preset is, and what all of them read values with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.errors import ConfigError

Environ: TypeAlias = Mapping[str, str]
"""What is set and not empty, by name: variables of the environment, and flags with their dashes."""


@dataclass(frozen=True, slots=True)
class PresetValue:
    """A value for a setting or for a key of a model's table, and the variables and flags that it came from.

    None of them: it is the preset's own default. The value is checked by whoever takes it. `alone`: of addresses that a
    flag gave, that none may be named beside them.
    """

    value: Any
    variables: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetSettings:
    """What an environment means under a preset: settings by name, addresses to serve, keys of tables by model.

    Keys that name no model: `language_models` apply to models that generate text, `served_model` to the one model that
    the process is started for. What a model's own table or files say wins over both.
    """

    settings: Mapping[str, PresetValue] = field(default_factory=dict)
    served: PresetValue | None = None
    tables: Mapping[str, Mapping[str, PresetValue]] = field(default_factory=dict)
    language_models: Mapping[str, PresetValue] = field(default_factory=dict)
    served_model: Mapping[str, PresetValue] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`defaults` stand below the file, what `read` finds above it. `variables`, and `flags` with their dashes, which
    take one value each: name to what it sets, for the docs. `switches`: flags that may stand without a value, which is
    "true" then. `verbatim`: names whose values keep the spaces around them. `spellings`: values that a flag of Shoal's
    has in the original as well, by setting: the original's word to Shoal's.

    `read` raises ConfigError, with the variable or flag at fault as its `param`.
    """

    name: str
    stands_for: str
    defaults: Mapping[str, Any]
    variables: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    verbatim: frozenset[str] = frozenset()
    spellings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    read: Callable[[Environ], PresetSettings]


HOST = r"\[[0-9A-Fa-f:.]+\]|[^\s/:#?@%=\[\]]+"
"""A host's name or address as a regular expression; IPv6 in brackets."""


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


def invalid_value_error(variable: str, rule: str, environ: Environ) -> ConfigError:
    return ConfigError(f"{variable}: must be {rule}, got {environ[variable]!r}", param=variable)
