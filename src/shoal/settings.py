"""The table of settings, and of the keys of a model in `shoal.toml`: names, types, bounds, defaults, help.

Flags, environment names, file keys, help texts and `docs/settings.md` are all made from it. A setting is
`--kebab-case` on the command line, `SHOAL_UPPER_CASE` in the environment and its own name in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, inspect

from shoal.errors import ConfigError

ENV_PREFIX = "SHOAL_"

# A key travels in a header: visible ASCII only. (\Z, as $ would let a line break pass at the end.)
Key: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[\x21-\x7e]+( (bulk|interactive))?\Z",
        title="ASCII without spaces, or such a KEY with its class (`KEY bulk`, `KEY interactive`)",
    ),
]
Origin: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^/\s*?#@]+\Z",
        title="an exact origin as https://app.example.org (* would let every page on the web use this server)",
    ),
]
Name: TypeAlias = Annotated[str, Meta(min_length=1)]

_SERVER = {"section": "Server"}
_SERVER_PATH = {**_SERVER, "path": True}
_SERVER_SECRET = {**_SERVER, "secret": True}
_LIMITS = {"section": "Limits"}
_BATCHING = {"section": "Batching", "per_model": True}
_TIMES = {"section": "Deadlines"}
_ENGINE = {"section": "Engine", "per_model": True}
_FILES = {"section": "Model files"}
_LOGS = {"section": "Logs"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting: type with bounds, help, default. `repr` shows no secret."""

    host: Annotated[str, Meta(description="Address to listen on.", min_length=1, extra=_SERVER)] = "127.0.0.1"
    port: Annotated[
        int, Meta(description="Port to listen on; 0 lets the system choose.", ge=0, le=65535, extra=_SERVER)
    ] = 8080
    insecure: Annotated[
        bool, Meta(description="Allow an address that others can reach without any API key.", extra=_SERVER)
    ] = False
    api_key: Annotated[
        tuple[Key, ...],
        Meta(description="Key that clients must send as `Authorization: Bearer`; repeatable.", extra=_SERVER_SECRET),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of such keys, one a line, as KEY, `KEY bulk` or `KEY interactive`; lines that begin with"
            " # are comments.",
            extra=_SERVER_PATH,
        ),
    ] = None
    admin_key: Annotated[
        tuple[Key, ...],
        Meta(description="Key for routes that change the server; repeatable.", extra=_SERVER_SECRET),
    ] = ()
    admin_key_file: Annotated[
        str | None, Meta(description="File of such keys, as `api_key_file`.", extra=_SERVER_PATH)
    ] = None
    cors_origins: Annotated[
        tuple[Origin, ...],
        Meta(description="Web origins whose pages may call this server; repeatable.", extra=_SERVER),
    ] = ()
    client_header: Annotated[
        str,
        Meta(
            description="Header that names the user, set by a proxy that you trust; fairness then counts per user.",
            pattern=r"^[A-Za-z0-9-]*\Z",
            title="the name of a header",
            extra=_SERVER,
        ),
    ] = ""

    max_body_bytes: Annotated[int, Meta(description="Largest request body.", ge=1024, extra=_LIMITS)] = 33554432
    max_inputs: Annotated[int, Meta(description="Most inputs in one request.", ge=1, extra=_LIMITS)] = 2048
    max_queue_items: Annotated[
        int,
        Meta(
            description="Most items waiting or running for a model; one client may hold at most half.",
            ge=1,
            extra={**_LIMITS, "per_model": True},
        ),
    ] = 16384

    max_batch_size: Annotated[int, Meta(description="Most items in one batch.", ge=1, extra=_BATCHING)] = 64
    max_batch_tokens: Annotated[
        int, Meta(description="Most tokens in one batch, padding included.", ge=1, extra=_BATCHING)
    ] = 16384
    max_batch_ms: Annotated[
        float, Meta(description="Longest time that a batch may be expected to run.", gt=0, extra=_BATCHING)
    ] = 40.0
    max_wait_time_ms: Annotated[
        float,
        Meta(
            description="Longest time that a free engine waits for more items; 0 sends what is there at once.",
            ge=0,
            extra=_BATCHING,
        ),
    ] = 0.0
    max_age_ms: Annotated[
        float,
        Meta(description="Age at which an item goes next, whatever its class or client.", gt=0, extra=_BATCHING),
    ] = 250.0
    truncate: Annotated[
        bool,
        Meta(description="Cut inputs that are too long for the model (the answer says so), or refuse.", extra=_ENGINE),
    ] = True

    embed_timeout_s: Annotated[
        float, Meta(description="Time for one embedding request, from its arrival.", gt=0, extra=_TIMES)
    ] = 30.0
    load_timeout_s: Annotated[
        float, Meta(description="Time for a model to load, download included.", gt=0, extra=_TIMES)
    ] = 600.0
    body_timeout_s: Annotated[
        float, Meta(description="Time for a client to send its request's body.", gt=0, extra=_TIMES)
    ] = 30.0
    drain_timeout_s: Annotated[
        float, Meta(description="Time for requests in flight to finish after SIGTERM.", ge=0, extra=_TIMES)
    ] = 30.0
    drain_delay_s: Annotated[
        float,
        Meta(
            description="Time to go on accepting after SIGTERM while readiness already says no; give load balancers"
            " their probe period here.",
            ge=0,
            extra=_TIMES,
        ),
    ] = 0.0

    engine: Annotated[
        Literal["auto", "openvino", "onnxruntime"], Meta(description="What runs local models.", extra=_ENGINE)
    ] = "auto"
    precision: Annotated[
        Literal["auto", "f32", "bf16"],
        Meta(
            description="Arithmetic of local models; auto takes bf16 where the processor has it and the check at"
            " load time agrees with f32.",
            extra=_ENGINE,
        ),
    ] = "auto"
    streams: Annotated[
        int, Meta(description="Batches that a local engine runs side by side; 0 chooses.", ge=0, extra=_ENGINE)
    ] = 0
    threads: Annotated[
        int, Meta(description="Processor threads for a local engine; 0 chooses.", ge=0, extra=_ENGINE)
    ] = 0

    home: Annotated[
        str,
        Meta(description="Folder of downloaded and converted models.", min_length=1, extra={**_FILES, "path": True}),
    ] = "~/.cache/shoal"
    offline: Annotated[
        bool, Meta(description="Use only models that are in the folder already; never download.", extra=_FILES)
    ] = False
    hf_token: Annotated[
        str | None,
        Meta(description="Token for private models of the Hugging Face hub.", extra={**_FILES, "secret": True}),
    ] = None

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.", extra=_LOGS)
    ] = "info"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Meta(description="Form of log lines; auto is text on a terminal, JSON elsewhere.", extra=_LOGS),
    ] = "auto"
    access_log: Annotated[bool, Meta(description="Log one line per request.", extra=_LOGS)] = True

    def __repr__(self) -> str:
        shown = ", ".join(f"{setting.name}={setting.mask(getattr(self, setting.name))!r}" for setting in SETTINGS)
        return f"Settings({shown})"


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """`[models."name"]` of the file. `overrides` holds settings that this model has differently."""

    backends: Annotated[
        tuple[Name, ...], Meta(description="Addresses of the model's replicas, as on the command line.")
    ] = ()
    aliases: Annotated[tuple[Name, ...], Meta(description="Other names that requests may use.")] = ()
    default_for: Annotated[
        tuple[Literal["embed", "generate"], ...],
        Meta(description="Tasks for which it is the model when a request names none."),
    ] = ()
    overrides: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `section` groups rows in help; `per_model` ones may stand in a model's table."""

    name: str
    type: Any
    default: Any
    help: str
    section: str = ""
    secret: bool = False
    path: bool = False
    per_model: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def kind(self) -> inspect.Type:
        """The type without its description; for an optional setting that of a given value."""
        return _bare(inspect.type_info(self.type))

    @property
    def wording(self) -> str:
        """What a value must be, in words."""
        return _wording(inspect.type_info(self.type))

    @property
    def repeatable(self) -> bool:
        return isinstance(self.kind, inspect.VarTupleType)

    def mask(self, value: Any) -> Any:
        """`value` as it may be shown: a secret keeps neither text nor length."""
        if not self.secret or not value:
            return value
        return tuple("****" for _ in value) if self.repeatable else "****"


def _rows(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    return tuple(
        Setting(row.name, row.type, row.default, meta.description or "", **(meta.extra or {}))
        for row in msgspec.structs.fields(struct)
        for meta in getattr(row.type, "__metadata__", ())
    )


SETTINGS = _rows(Settings)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}
MODEL_KEYS: Mapping[str, Setting] = {
    **{row.name: row for row in _rows(ModelTable)},
    **{setting.name: setting for setting in SETTINGS if setting.per_model},
}


def convert(setting: Setting, value: Any, where: str) -> Any:
    """Check one value; text is read as the setting's type. Raises ConfigError that starts with `where`, its `param`."""
    try:
        found = msgspec.convert(value, setting.type, strict=not isinstance(value, str))
        if isinstance(found, float) and not math.isfinite(found):
            raise msgspec.ValidationError
    except msgspec.ValidationError:
        got = "" if setting.secret else f", got {value!r}"
        raise ConfigError(f"{where}: must be {setting.wording}{got}", param=where) from None
    return found


def _bare(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        kind = next(part for part in kind.types if not isinstance(part, inspect.NoneType))
    return kind


def _wording(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata) and "title" in (kind.extra_json_schema or {}):
        return str((kind.extra_json_schema or {})["title"])
    match _bare(kind):
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.IntType(ge=ge, le=le):
            return f"a whole number from {ge} to {le}" if le is not None else f"a whole number of at least {ge}"
        case inspect.FloatType(ge=ge, gt=gt):
            return f"a number above {gt:g}" if gt is not None else f"a number of at least {ge:g}"
        case inspect.VarTupleType(item):
            return f"a list, each {_wording(item)}"
        case _:
            return "text"
