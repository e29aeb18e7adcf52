"""The settings in effect: flag, else environment, else file, else default; nothing is read unless `load` is told to.

`python -m shoal.config` writes `docs/settings.md`.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.errors import ConfigError
from shoal.settings import BY_NAME, ENV_PREFIX, MODEL_KEYS, SETTINGS, ModelTable, Setting, Settings, convert

FILE_NAME = "shoal.toml"
MODELS = "models"
"""What to serve is given as arguments, as SHOAL_MODELS or as the file's tables, by the same precedence as a setting."""

__all__ = ["FILE_NAME", "MODELS", "PRECEDENCE", "Layer", "Loaded", "ModelTable", "Settings", "Source", "check_bind"]
__all__ += ["find_file", "is_loopback", "load", "reference"]

Layer: TypeAlias = Literal["flag", "env", "file", "default"]
PRECEDENCE: tuple[Layer, ...] = ("flag", "env", "file", "default")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from: its layer, and the words for it ("--port", "SHOAL_PORT", "shoal.toml")."""

    layer: Layer
    label: str


DEFAULT = Source("default", "default")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings in effect and where each came from.

    `served`: the addresses to serve, each as on the command line; empty means the default model. `models`: the file's
    tables by name, also those of models that are not served. `warnings`: what the operator should know, in words.
    """

    settings: Settings
    sources: Mapping[str, Source]
    served: tuple[str, ...] = ()
    models: Mapping[str, ModelTable] = field(default_factory=dict)
    file: Path | None = None
    warnings: tuple[str, ...] = ()

    def for_model(self, name: str) -> Settings:
        """The settings for one model: its table stands above the rest of the file, below environment and flags."""
        table = self.models.get(name)
        if table is None:
            return self.settings
        changes = {
            key: value for key, value in table.overrides.items() if self.sources[key].layer in ("file", "default")
        }
        return msgspec.structs.replace(self.settings, **changes)

    def shown(self) -> dict[str, Any]:
        """Everything, ready for JSON, secrets masked."""
        return {
            "file": str(self.file) if self.file else None,
            "settings": {
                setting.name: {
                    "value": setting.mask(getattr(self.settings, setting.name)),
                    "source": self.sources[setting.name].label,
                }
                for setting in SETTINGS
            },
            MODELS: {"value": self.served, "source": self.sources[MODELS].label},
            "tables": {name: msgspec.to_builtins(table) for name, table in self.models.items()},
        }


_Given: TypeAlias = Mapping[str, tuple[Any, Source]]
"""The values that one layer gives, checked, by setting."""


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Loaded:
    """Merge the layers. `flags` holds what the command line gave (None and empty mean not given), `models` included.

    Every layer is checked whole, so that a wrong value does not hide behind a better one. Raises ConfigError, with the
    flag, variable or key at fault as its `param`.
    """
    warnings: list[str] = []
    document = _read_toml(file) if file else {}
    tables = _model_tables(document.pop(MODELS, {}), file)
    layers = (_from_flags(flags), _from_env(environ, warnings), _from_file(document, file))
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for setting in SETTINGS:
        value, source = _first(layers, setting.name, setting.default)
        values[setting.name] = _absolute(value, source, file) if setting.path and value is not None else value
        sources[setting.name] = source
    for keys, key_file in (("api_key", "api_key_file"), ("admin_key", "admin_key_file")):
        if values[key_file] is not None:
            values[keys] += _read_keys(Path(values[key_file]), BY_NAME[keys], warnings)
            sources[keys] = _joined(sources[keys], sources[key_file], values[key_file])
    if file and any(name in document for name, setting in BY_NAME.items() if setting.secret):
        _warn_if_readable(file, warnings)
    served, sources[MODELS] = _served(flags, environ, tables, file)
    return Loaded(Settings(**values), sources, served, tables, file, tuple(warnings))


def find_file(environ: Mapping[str, str], folder: Path) -> Path | None:
    """The settings file when no flag names one: SHOAL_CONFIG, else `shoal.toml` in `folder` if there is one."""
    named = environ.get(ENV_PREFIX + "CONFIG")
    if named:
        return Path(named)
    found = folder / FILE_NAME
    return found if found.is_file() else None


def check_bind(settings: Settings) -> None:
    """Raise ConfigError for an address that others can reach while no key protects it."""
    if settings.insecure or settings.api_key or is_loopback(settings.host):
        return
    raise ConfigError(
        f"host {settings.host} can be reached by others and no API key is set: set one with --api-key-file FILE"
        " (or SHOAL_API_KEY), or say --insecure to serve everybody",
        param="host",
    )


def is_loopback(host: str) -> bool:
    """True for a name or address of this machine alone. Names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _first(layers: Iterable[_Given], name: str, default: Any) -> tuple[Any, Source]:
    return next((layer[name] for layer in layers if name in layer), (default, DEFAULT))


def _from_flags(flags: Mapping[str, Any]) -> _Given:
    given: dict[str, tuple[Any, Source]] = {}
    for name, value in flags.items():
        if name == MODELS or value is None or value in ((), []):
            continue
        flag = BY_NAME[name].flag
        label = f"--no-{flag[2:]}" if value is False else flag
        given[name] = (convert(BY_NAME[name], value, flag), Source("flag", label))
    return given


def _from_env(environ: Mapping[str, str], warnings: list[str]) -> _Given:
    given: dict[str, tuple[Any, Source]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text or _SERVICE_LINK.match(text):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        setting = BY_NAME.get(name)
        if setting is None or setting.env != variable:
            if name not in (MODELS, "config"):
                # Not refused: others may own a variable that begins so, and a pod cannot unset what it inherits.
                near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
                warnings += [f"{variable} is not a setting: did you mean {BY_NAME[near[0]].env}?"] if near else []
            continue
        value = [part.strip() for part in text.split(",") if part.strip()] if setting.repeatable else text
        given[name] = (convert(setting, value, variable), Source("env", variable))
    return given


# Kubernetes gives every pod SHOAL_PORT=tcp://10.0.0.1:80 when a Service is called "shoal".
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")


def _from_file(document: Mapping[str, Any], file: Path | None) -> _Given:
    source = Source("file", str(file))
    return {name: (_from_key(BY_NAME, name, value, f"{file}"), source) for name, value in document.items()}


def _from_key(known: Mapping[str, Setting], key: str, value: Any, where: str) -> Any:
    if key not in known:
        near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/settings.md lists them all"
        raise ConfigError(f"{where}: {key} is not a setting here: {hint}", param=key)
    # A text is taken as text here: `port = "80"` in the file is a mistake worth naming.
    if isinstance(value, str) and not isinstance(
        known[key].kind, msgspec.inspect.StrType | msgspec.inspect.LiteralType
    ):
        raise ConfigError(f"{where}: {key}: must be {known[key].wording}, not text in quotes", param=key)
    return convert(known[key], value, f"{where}: {key}")


def _model_tables(tables: Any, file: Path | None) -> dict[str, ModelTable]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f'{file}: models must be tables: [models."name"]', param=MODELS)
    found = {}
    for name, table in tables.items():
        where = f'{file}: [models."{name}"]'
        values = {key: _from_key(MODEL_KEYS, key, value, where) for key, value in table.items()}
        overrides = {key: values.pop(key) for key in tuple(values) if key in BY_NAME}
        found[name] = ModelTable(**values, overrides=overrides)
    return found


def _served(
    flags: Mapping[str, Any], environ: Mapping[str, str], tables: Mapping[str, ModelTable], file: Path | None
) -> tuple[tuple[str, ...], Source]:
    if flags.get(MODELS):
        return tuple(flags[MODELS]), Source("flag", "arguments")
    variable = ENV_PREFIX + MODELS.upper()
    if environ.get(variable, "").strip():
        return tuple(environ[variable].split()), Source("env", variable)
    backed = tuple(f"{name}={','.join(table.backends)}" for name, table in tables.items() if table.backends)
    return backed, Source("file", str(file)) if backed else DEFAULT


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}", param="config") from error


def _read_keys(file: Path, setting: Setting, warnings: list[str]) -> tuple[str, ...]:
    try:
        # one space between a key and its class, however the file lines them up
        lines = [" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"{setting.name}_file: {file} cannot be read: {reason}", param=f"{setting.name}_file"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # An empty file must not open the server.
        raise ConfigError(f"{setting.name}_file: {file} holds no key", param=f"{setting.name}_file")
    _warn_if_readable(file, warnings)
    found: tuple[str, ...] = convert(setting, keys, f"{setting.name}_file: {file}")
    return found


def _warn_if_readable(file: Path, warnings: list[str]) -> None:
    if file.stat().st_mode & 0o077:
        warnings.append(f"{file} holds secrets and others can read it: chmod 600 {file}")


def _joined(keys: Source, file: Source, path: str) -> Source:
    if keys == DEFAULT:
        return Source(file.layer, path)
    return Source(keys.layer, f"{keys.label}, {path}")


def _absolute(value: str, source: Source, file: Path | None) -> str:
    path = Path(value).expanduser()
    # A path in the file is meant from where the file lies, not from where the command was typed.
    return str(file.parent / path if file and source.layer == "file" else path)


def reference() -> str:
    """`docs/settings.md`."""
    sections = dict.fromkeys(setting.section for setting in SETTINGS)
    parts = [_INTRODUCTION]
    for section in sections:
        rows = [setting for setting in SETTINGS if setting.section == section]
        parts.append(f"## {section}\n\n" + _table(rows))
    parts.append(_MODELS_SECTION.format(rows=_model_rows()))
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Setting]) -> str:
    lines = ["| setting | flag, environment | default | |", "|---|---|---|---|"]
    for row in rows:
        must = "" if row.wording == "text" else f" Must be {row.wording}."
        lines.append(f"| `{row.name}` | `{row.flag}` `{row.env}` | {_default(row)} | {row.help}{must} |")
    return "\n".join(lines)


def _default(row: Setting) -> str:
    if row.default is None or row.default in ((), ""):
        return "none"
    return f"`{str(row.default).lower() if isinstance(row.default, bool) else row.default}`"


def _model_rows() -> str:
    own = [f"| `{row.name}` | {row.help} |" for row in MODEL_KEYS.values() if not row.per_model]
    shared = ", ".join(f"`{row.name}`" for row in MODEL_KEYS.values() if row.per_model)
    return "\n".join(["| key | |", "|---|---|", *own, f"| {shared} | As above, for this model. |"])


_INTRODUCTION = """\
# Settings

Made from the table in `src/shoal/settings.py` by `python -m shoal.config`; edit it there.

Each setting has one name: `max_batch_size` in `shoal.toml`, `--max-batch-size` on the command line and
`SHOAL_MAX_BATCH_SIZE` in the environment. A flag wins over the environment, the environment over the file, the file
over the default. The file is the one that `--config` or `SHOAL_CONFIG` names, else `shoal.toml` in the current folder.
A list is a repeated flag on the command line, commas in the environment, `["a", "b"]` in the file. A switch is turned
off by `--no-...`. An empty variable counts as not set. `shoal config` shows what is in effect, and why."""

_MODELS_SECTION = """\
## Models

What to serve is given as arguments (`shoal serve ADDRESS ...`), else as `SHOAL_MODELS` (separated by spaces), else by
the tables of the file that have `backends`, else it is the default model. A table also applies to a model of its name
that was given as an argument; flags and environment win over it.

```toml
[models."small"]
backends = ["hf:sentence-transformers/all-MiniLM-L6-v2"]
aliases = ["text-embedding-3-small"]
default_for = ["embed"]
max_batch_size = 32
```

{rows}"""


if __name__ == "__main__":
    sys.stdout.write(reference())
