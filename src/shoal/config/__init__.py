"""Merges the settings in effect: flag, then environment, then file, then default. Nothing is read before `load`.

A preset (`shoal.config.presets`) adds two layers: the other server's environment below Shoal's own and above the file,
and its defaults above Shoal's.

`python -m shoal.config` writes `docs/settings.md` (`shoal.config.reference`).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.config.presets import Preset, PresetSettings, PresetValue
from shoal.config.presets import preset as find_preset
from shoal.config.presets import read as read_preset
from shoal.config.schema import ENV_PREFIX, Setting, convert
from shoal.config.settings import BY_NAME, MODEL_KEYS, SETTINGS, ModelTable, Settings
from shoal.errors import ConfigError

FILE_NAME = "shoal.toml"

_CLOSE = 0.75
"""How similar a name must be to be suggested for another one: a wrong suggestion is worse than none."""

MODELS = "models"
"""Key of the models to serve: arguments, SHOAL_MODELS or tables of the file, with the precedence of a setting."""

AS = "as"
"""Key of the preset: `--as`, SHOAL_AS, or `as` in the file."""

FOREIGN = "foreign"
"""Key of the other server's flags, by name including their dashes."""

LANGUAGE_MODELS, SERVED_MODEL = "*language models*", "*served model*"
"""Names under which `describe` lists keys of a preset that belong to no named model."""

__all__ = [
    "AS",
    "FILE_NAME",
    "FOREIGN",
    "MODELS",
    "PRECEDENCE",
    "Layer",
    "LoadedConfig",
    "ModelTable",
    "Settings",
    "Source",
    "check_bind",
    "find_file",
    "is_loopback",
    "load",
    "read_key",
    "read_toml",
    "read_variables",
]

Layer: TypeAlias = Literal["flag", "env", "foreign", "file", "preset", "default"]
PRECEDENCE: tuple[Layer, ...] = ("flag", "env", "foreign", "file", "preset", "default")
"""`foreign` is the other server's environment, read only under its preset; its flags belong to `flag`."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from: its layer, and a label such as "--port", "SHOAL_PORT", "shoal.toml", "SERVER_PORT" or
    "preset inference-server"."""

    layer: Layer
    label: str


DEFAULT = Source("default", "default")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings in effect and where each came from.

    `served` holds the addresses to serve, each as on the command line. Empty means the default model, or none if
    `settings.default_model` is off. `models` holds the tables of file and preset by name, including those of models
    that are not served. `language_models` and `served_model` are keys of a preset that name no model (see
    PresetSettings). `table_sources` says where each of these keys came from. `preset` is the name of the preset or "".
    `warnings` are messages for the operator.
    """

    settings: Settings
    sources: Mapping[str, Source]
    served: tuple[str, ...] = ()
    models: Mapping[str, ModelTable] = field(default_factory=dict)
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    preset: str = ""
    table_sources: Mapping[str, Mapping[str, Source]] = field(default_factory=dict)
    language_models: Mapping[str, Any] = field(default_factory=dict)
    served_model: Mapping[str, Any] = field(default_factory=dict)

    def table(self, name: str, *, served: bool = False) -> ModelTable:
        """Return the table of a model. `served` means that the process was started for this model."""
        table = self.models.get(name) or ModelTable()
        if served:
            table = table.with_defaults(self.served_model)
        return msgspec.structs.replace(table, if_language_model=dict(self.language_models))

    def for_model(self, name: str) -> Settings:
        """Return the settings for one model. Its table overrides the rest of the file, but not environment and
        flags."""
        table = self.models.get(name)
        if table is None:
            return self.settings
        below = ("file", "preset", "default")
        changes = {key: value for key, value in table.overrides.items() if self.sources[key].layer in below}
        return msgspec.structs.replace(self.settings, **changes)

    def resolve_argument(self, text: str) -> str:
        """Resolve an argument or a client's model name.

        An alias becomes its table's name, and the name of a table with backends becomes `NAME=ADDRESS,...`.
        """
        if text not in self.models:
            text = next((name for name, table in self.models.items() if text in table.aliases), text)
        table = self.models.get(text)
        return _to_argument(text, table) if table is not None and table.backends else text

    def describe(self) -> dict[str, Any]:
        """Return the whole configuration for JSON, with secrets masked."""
        return {
            "file": str(self.file) if self.file else None,
            "preset": self.preset or None,
            "settings": {
                setting.name: {
                    "value": setting.mask(getattr(self.settings, setting.name)),
                    "source": self.sources[setting.name].label,
                }
                for setting in SETTINGS
            },
            MODELS: {"value": self.served, "source": self.sources[MODELS].label},
            "tables": {
                name: {
                    key: {"value": self._table_value(name, key), "source": source.label} for key, source in keys.items()
                }
                for name, keys in self.table_sources.items()
            },
        }

    def _table_value(self, name: str, key: str) -> Any:
        unnamed = {LANGUAGE_MODELS: self.language_models, SERVED_MODEL: self.served_model}
        if name in unnamed:
            return unnamed[name][key]
        table = self.models[name]
        return table.overrides[key] if key in table.overrides else getattr(table, key)


_LayerValues: TypeAlias = Mapping[str, tuple[Any, Source]]
"""The validated values of one layer, by setting or by key of a table."""


def check_setting_name(name: str) -> None:
    """Raise ConfigError for a name that is not a setting's."""
    if name not in BY_NAME:
        near = find_similar(name, BY_NAME)
        hint = f"did you mean {near}?" if near else "see docs/settings.md"
        raise ConfigError(f"{name} is not a setting: {hint}", param=name)


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
    document: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Merge the layers. `flags` holds the command line's values, including `models`, `as` and `foreign`; None and empty
    values count as not given. `document` is the content of `file`, which is read without it.

    Every layer is validated in full, so that a higher one cannot hide a wrong value. Raises ConfigError whose `param`
    is the offending flag, variable or key.
    """
    warnings: list[str] = []
    document = dict(document) if document is not None else read_toml(file) if file else {}
    chosen = _choose_preset(flags.get(AS), environ, document.pop(AS, None), file)
    found = read_preset(chosen, environ, flags.get(FOREIGN) or {})
    warnings += found.warnings
    tables = _merge_tables(document.pop(MODELS, {}), file, found, chosen)
    foreign = {name: _from_preset(BY_NAME, name, entry, chosen) for name, entry in found.settings.items()}
    layers = (
        _from_flags(flags if chosen is None else _translate_flags(flags, chosen)),
        {name: entry for name, entry in foreign.items() if entry[1].layer == "flag"},
        read_variables(environ, warnings),
        foreign,
        _from_file(document, file),
        {name: (value, _preset_source(chosen)) for name, value in (chosen.defaults if chosen else {}).items()},
    )
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for setting in SETTINGS:
        value, source = _first_layer(layers, setting.name, setting.default)
        values[setting.name] = _to_absolute(value, source, file) if setting.path and value else value
        sources[setting.name] = source
    for keys, key_file in (("api_key", "api_key_file"), ("admin_key", "admin_key_file")):
        if values[key_file] is not None:
            values[keys] += _read_keys(Path(values[key_file]), BY_NAME[keys], warnings)
            sources[keys] = _merge_sources(sources[keys], sources[key_file], values[key_file])
    if file and any(name in document for name, setting in BY_NAME.items() if setting.secret):
        _warn_if_readable(file, warnings)
    models = {name: _to_model_table(table) for name, table in tables.items()}
    unnamed = {
        name: {key: _from_preset(MODEL_KEYS, key, entry, chosen) for key, entry in keys.items()}
        for name, keys in ((LANGUAGE_MODELS, found.language_models), (SERVED_MODEL, found.served_model))
        if keys
    }
    if (values["triton_cert_file"] is None) != (values["triton_key_file"] is None):
        raise ConfigError("triton_cert_file and triton_key_file must be set together", param="triton_cert_file")
    _check_proxies(values, warnings)
    served, sources[MODELS] = _choose_served(
        flags, environ, models, file=file, preset=(found.served, _preset_source(chosen))
    )
    return LoadedConfig(
        Settings(**values),
        sources,
        served,
        models,
        file,
        tuple(warnings),
        chosen.name if chosen else "",
        {name: {key: source for key, (_, source) in table.items()} for name, table in (tables | unnamed).items()},
        *(_strip_sources(unnamed.get(name, {})) for name in (LANGUAGE_MODELS, SERVED_MODEL)),
    )


def _to_argument(name: str, table: ModelTable) -> str:
    return f"{name}={','.join(table.backends)}"


def find_file(environ: Mapping[str, str], folder: Path) -> Path | None:
    """Find the settings file if no flag names one: SHOAL_CONFIG, or else `shoal.toml` in `folder` if it exists."""
    named = environ.get(ENV_PREFIX + "CONFIG")
    if named:
        return Path(named)
    found = folder / FILE_NAME
    return found if found.is_file() else None


def check_bind(settings: Settings) -> None:
    """Raise ConfigError if the host is written as in a URL, or if others can reach it while no key protects it."""
    if found := _URL_HOST.fullmatch(settings.host):
        host, port = found["v6"] or found["name"], found["port6"] or found["port"]
        flags = f"--host {host} --port {port}" if port else f"--host {host}"
        raise ConfigError(f"host {settings.host} must be a name or an address alone: use {flags}", param="host")
    if settings.insecure or settings.api_key or is_loopback(settings.host):
        return
    raise ConfigError(
        f"host {settings.host} is reachable from other machines and no API key is set: set one with --api-key-file "
        "FILE (or SHOAL_API_KEY), or use --insecure to serve everyone",
        param="host",
    )


def _check_proxies(values: Mapping[str, Any], warnings: list[str]) -> None:
    """Raise ConfigError for what is no network; warn of proxies that no header is read from, and of clients who may
    name themselves."""
    proxies, client_header = values["trusted_proxies"], values["client_header"]
    for each in proxies:
        try:
            if getattr(ip_network(each).network_address, "ipv4_mapped", None):
                raise ValueError(f"{each} is an IPv4 address in IPv6's form, in which no peer is seen")
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxies: {error}; name an address such as 10.0.0.7 or a network such as 10.0.0.0/8",
                param="trusted_proxies",
            ) from None
    if proxies and not client_header:
        warnings.append(
            "trusted_proxies without client_header, the proxies' header such as X-Real-IP, only says whose traces are "
            "continued"
        )
    if client_header and not proxies and not values["api_key"] and not is_loopback(values["host"]):
        warnings.append(
            f"every client may take another's name by {client_header}, and read that one's files: list the proxies "
            "that set it in trusted_proxies"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is local to this machine. Names other than localhost are not resolved."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _first_layer(layers: Iterable[_LayerValues], name: str, default: Any) -> tuple[Any, Source]:
    return next((layer[name] for layer in layers if name in layer), (default, DEFAULT))


def _translate_flags(flags: Mapping[str, Any], chosen: Preset) -> dict[str, Any]:
    """Translate values of flags that Shoal shares with the other server into Shoal's values."""
    spelt = chosen.spellings
    return {name: spelt[name].get(value, value) if name in spelt else value for name, value in flags.items()}


def _from_flags(flags: Mapping[str, Any]) -> _LayerValues:
    values: dict[str, tuple[Any, Source]] = {}
    for name, value in flags.items():
        if name in (MODELS, AS, FOREIGN) or value is None or value in ((), []):
            continue
        flag = BY_NAME[name].flag
        label = f"--no-{flag[2:]}" if value is False else flag
        values[name] = (convert(BY_NAME[name], value, flag), Source("flag", label))
    return values


def read_variables(environ: Mapping[str, str], warnings: list[str]) -> _LayerValues:
    """Return the settings that Shoal's variables hold. Raises ConfigError for the first wrong value."""
    values: dict[str, tuple[Any, Source]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text or _SERVICE_LINK.match(text):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        setting = BY_NAME.get(name)
        if setting is None or setting.env != variable:
            if name not in (MODELS, AS, "config"):
                # Only a warning: others may own such a variable, and a pod cannot unset inherited ones.
                near = find_similar(name, BY_NAME)
                warnings += [f"{variable} is not a setting: did you mean {BY_NAME[near].env}?"] if near else []
            continue
        value = [part.strip() for part in text.split(",") if part.strip()] if setting.repeatable else text
        if not value:  # commas alone mean nothing, and must not override the keys of a file
            continue
        values[name] = (convert(setting, value, variable), Source("env", variable))
    return values


_URL_HOST = re.compile(r"\[(?P<v6>.+)\](?::(?P<port6>\d+))?|(?P<name>[^:]+):(?P<port>\d+)")

# Kubernetes gives every pod SHOAL_PORT=tcp://10.0.0.1:80 when a Service is called "shoal".
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")


def _from_file(document: Mapping[str, Any], file: Path | None) -> _LayerValues:
    source = Source("file", str(file))
    return {name: (read_key(BY_NAME, name, value, f"{file}"), source) for name, value in document.items()}


def read_key(known: Mapping[str, Setting], key: str, value: Any, where: str) -> Any:
    """Return the validated value of a key of the file. Raises ConfigError, also for a key that is not `known`."""
    if key not in known:
        hint = _hint(known, key.replace("-", "_"), value)
        raise ConfigError(f"{where}: {key} is not a setting here: {hint}", param=key)
    # In the file, text is not converted: `port = "80"` is a mistake worth reporting.
    if isinstance(value, str) and not isinstance(
        known[key].kind, msgspec.inspect.StrType | msgspec.inspect.LiteralType
    ):
        raise ConfigError(f"{where}: {key}: must be {known[key].wording}, not text in quotes", param=key)
    return convert(known[key], value, f"{where}: {key}")


def find_similar(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that `name` most likely is a misspelling of, "" if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_CLOSE)), "")


def _hint(known: Mapping[str, Setting], key: str, value: Any) -> str:
    """Return advice on a key of the file, with `_` for `-`, that is not spelled as the known ones."""
    at_top = known is BY_NAME
    if key in known:
        return f"did you mean {key}?"
    if at_top and key in MODEL_KEYS:
        return 'it is a setting of a model: move it to the table of the model, [models."name"]'
    if not at_top and key in BY_NAME:
        return "it is a server setting: move it above all tables"
    near = find_similar(key, [*known, MODELS, AS] if at_top else known)
    if near:
        return f"did you mean {near}?"
    if at_top and isinstance(value, dict):
        return 'only tables of models, [models."name"], are allowed; put settings above them'
    return "see docs/settings.md"


def _choose_preset(flag: str | None, environ: Mapping[str, str], key: Any, file: Path | None) -> Preset | None:
    """Return the preset that the highest layer names. Raises ConfigError if any layer names an unknown one."""
    variable = ENV_PREFIX + AS.upper()
    named = ((flag, "--as"), (environ.get(variable, "").strip(), variable), (key, f"{file}: {AS}"))
    found = [find_preset(str(name), where) for name, where in named if name]
    return found[0] if found else None


def _preset_source(chosen: Preset | None) -> Source:
    return Source("preset", f"preset {chosen.name}") if chosen else DEFAULT


def _from_preset(
    known: Mapping[str, Setting], key: str, preset_value: PresetValue, chosen: Preset | None
) -> tuple[Any, Source]:
    """Validate a value of the other server's environment or flags, or one of the preset's own defaults."""
    label = ", ".join(preset_value.variables)
    source = Source("flag" if label.startswith("--") else "foreign", label) if label else _preset_source(chosen)
    return convert(known[key], preset_value.value, label or source.label), source


def _merge_tables(
    document: Any, file: Path | None, found: PresetSettings, chosen: Preset | None
) -> dict[str, dict[str, tuple[Any, Source]]]:
    """Merge the keys of each model's table from file and preset, with the same precedence as settings."""
    if not isinstance(document, dict) or not all(isinstance(table, dict) for table in document.values()):
        raise ConfigError(f'{file}: models must be tables: [models."name"]', param=MODELS)
    source = Source("file", str(file))
    tables: dict[str, dict[str, tuple[Any, Source]]] = {}
    for name, table in document.items():
        where = f'{file}: [models."{name}"]'
        tables[name] = {key: (read_key(MODEL_KEYS, key, value, where), source) for key, value in table.items()}
    for name, keys in found.tables.items():
        table = tables.setdefault(name, {})
        for key, preset_value in keys.items():
            if preset_value.variables or key not in table:
                table[key] = _from_preset(MODEL_KEYS, key, preset_value, chosen)
    return tables


def _strip_sources(layered: _LayerValues) -> dict[str, Any]:
    return {key: value for key, (value, _) in layered.items()}


def _to_model_table(layered: _LayerValues) -> ModelTable:
    values = _strip_sources(layered)
    overrides = {key: values.pop(key) for key in tuple(values) if key in BY_NAME}
    return ModelTable(**values, overrides=overrides)


def _choose_served(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    tables: Mapping[str, ModelTable],
    *,
    file: Path | None,
    preset: tuple[PresetValue | None, Source],
) -> tuple[tuple[str, ...], Source]:
    variable = ENV_PREFIX + MODELS.upper()
    found, default = preset
    label = ", ".join(found.variables) if found else ""
    if flags.get(MODELS):
        if found and found.is_exclusive and label.startswith("--"):
            raise ConfigError(
                f"{label} names the model, and so does {flags[MODELS][0]!r}: use only one of them, and give each other "
                "flag its value",
                param=label,
            )
        return tuple(flags[MODELS]), Source("flag", "arguments")
    if found and label.startswith("--"):
        return found.value, Source("flag", label)
    if environ.get(variable, "").strip():
        return tuple(environ[variable].split()), Source("env", variable)
    if found and label:
        return found.value, Source("foreign", label)
    backed = tuple(_to_argument(name, table) for name, table in tables.items() if table.backends)
    if backed:
        return backed, Source("file", str(file))
    return (found.value, default) if found else ((), DEFAULT)


def read_toml(file: Path) -> dict[str, Any]:
    """Read a settings file without validating its keys. Raises ConfigError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}", param="config") from error


def _read_keys(file: Path, setting: Setting, warnings: list[str]) -> tuple[str, ...]:
    try:
        # a single space between a key and its class, however the file aligns them
        lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"{setting.name}_file: {file} cannot be read: {reason}", param=f"{setting.name}_file"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # An empty key file must not leave the server without authentication.
        raise ConfigError(f"{setting.name}_file: {file} contains no key", param=f"{setting.name}_file")
    _warn_if_readable(file, warnings)
    found: tuple[str, ...] = convert(setting, keys, f"{setting.name}_file: {file}")
    return found


def _warn_if_readable(file: Path, warnings: list[str]) -> None:
    # systemd makes credentials readable for a group of which only the service is a member.
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    others = 0o007 if folder and file.is_relative_to(folder) else 0o077
    if file.stat().st_mode & others:
        warnings.append(f"{file} contains secrets but other users can read it: chmod 600 {file}")


def _merge_sources(keys: Source, file: Source, path: str) -> Source:
    if keys == DEFAULT:
        return Source(file.layer, path)
    return Source(keys.layer, f"{keys.label}, {path}")


def _to_absolute(value: str, source: Source, file: Path | None) -> str:
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(f"{value} ({source.label}): no user of that name has a home: write the whole path") from None
    # A path in the file is relative to that file, not to the current directory.
    return str(file.parent / path if file and source.layer == "file" else path)
