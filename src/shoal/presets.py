"""Presets: the settings under which Shoal takes the place of another server (`shoal serve --as NAME`).

A preset is a row of `PRESETS`: defaults of its own, and the environment names that the other server reads. Those names
are read under their preset alone: elsewhere MODEL_NAME or MAX_BATCH_SIZE may mean anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.errors import ConfigError
from shoal.names import is_part

Environ: TypeAlias = Mapping[str, str]
"""What is set and not empty, by name."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value for a setting or for a key of a model's table, and the variables that it came from.

    No variable: it is the preset's own default. The value is checked by whoever takes it.
    """

    value: Any
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an environment means under a preset: settings by name, addresses to serve, keys of tables by model."""

    settings: Mapping[str, Given] = field(default_factory=dict)
    served: Given | None = None
    tables: Mapping[str, Mapping[str, Given]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """`defaults` stand below the file, what `read` finds above it. `variables`: name to what it sets, for the docs.

    `read` raises ConfigError, with the variable at fault as its `param`.
    """

    name: str
    stands_for: str
    defaults: Mapping[str, Any]
    variables: Mapping[str, str]
    read: Callable[[Environ], Found]


def preset(name: str, where: str) -> Preset:
    """Raises ConfigError that lists the presets; `where` says who named it."""
    found = PRESETS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
        raise ConfigError(f"{where}: {name!r} is not a preset: {hint}", param=where)
    return found


def read(chosen: Preset, environ: Environ) -> Found:
    """What `environ` means under the preset; an empty variable counts as not set. Raises ConfigError."""
    return chosen.read({name: text.strip() for name, text in environ.items() if text.strip()})


# triton-grpc-proxy: https://github.com/kozistr/triton-grpc-proxy-rs

_URL = re.compile(r"(?:(https?|grpcs?)://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:#?@%=\[\]]+)/?", re.IGNORECASE)
_MISSPELT_PORT = "TRITON_SERVER_PORT_GRPC"

_PROXY_ADDRESS = {
    "TRITON_SERVER_URL": "http://triton-server",
    "TRITON_SERVER_GRPC_PORT": "8001",
    "MODEL_NAME": "model",
    "MODEL_VERSION": "1",
}

_LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warn": "warning", "error": "error", "off": "error"}


def _read_proxy(environ: Environ) -> Found:
    text = {name: environ.get(name, default) for name, default in _PROXY_ADDRESS.items()}
    url = _URL.fullmatch(text["TRITON_SERVER_URL"])
    if url is None:
        raise _wrong("TRITON_SERVER_URL", "http://host without a port (that is TRITON_SERVER_GRPC_PORT)", environ)
    if not re.fullmatch(r"[0-9]{1,5}", text["TRITON_SERVER_GRPC_PORT"]):
        raise _wrong("TRITON_SERVER_GRPC_PORT", "a whole number from 1 to 65535", environ)
    if not is_part(text["MODEL_NAME"]):
        raise _wrong("MODEL_NAME", "a model's name: ASCII letters, digits, '.', '_' and '-'", environ)
    if not re.fullmatch(r"[1-9][0-9]{0,18}", text["MODEL_VERSION"]):
        raise _wrong("MODEL_VERSION", "a whole number of at least 1", environ)
    scheme = "tritons" if (url[1] or "").lower() in ("https", "grpcs") else "triton"
    name = text["MODEL_NAME"]
    place = f"{scheme}://{url[2]}:{text['TRITON_SERVER_GRPC_PORT']}"
    table = {
        "default_for": Given(["embed"]),
        "normalize": Given(False),  # the vectors are answered as the model gives them
        "input_names": _named("text", "INPUT_NAME", "text", environ),
        "output_names": _named("embedding", "OUTPUT_NAME", "embedding", environ),
    }
    # Never its default of 1024: the original cut its answers by it, and the model's output says its own length.
    if "EMBEDDING_SIZE" in environ:
        table["dimension"] = Given(_whole("EMBEDDING_SIZE", environ), ("EMBEDDING_SIZE",))
    settings = {}
    if "SERVER_PORT" in environ:
        settings["port"] = Given(environ["SERVER_PORT"], ("SERVER_PORT",))
    if level := _level(environ.get("RUST_LOG", "")):
        settings["log_level"] = Given(level, ("RUST_LOG",))
    served = Given((f"{name}={place}#{name}@{text['MODEL_VERSION']}",), tuple(one for one in text if one in environ))
    return Found(settings=settings, served=served, tables={name: table}, warnings=_misspelt(environ))


def _named(usual: str, variable: str, default: str, environ: Environ) -> Given:
    return Given({usual: environ.get(variable, default)}, (variable,) if variable in environ else ())


def _misspelt(environ: Environ) -> tuple[str, ...]:
    if _MISSPELT_PORT not in environ or "TRITON_SERVER_GRPC_PORT" in environ:
        return ()
    return (f"{_MISSPELT_PORT} is not read, as in triton-grpc-proxy: the port is TRITON_SERVER_GRPC_PORT (now 8001)",)


def _level(directives: str) -> str | None:
    """The least severity of RUST_LOG for everything; None when it only names modules, which are another program's."""
    found = None
    for directive in directives.lower().split(","):
        found = _LEVELS.get(directive.strip(), found)
    return found


# inference-server: https://github.com/OwenPendrighElliott/inference_server, with the environment of its successor

_KINDS = {"KIND_CPU": "cpu", "KIND_GPU": "gpu"}


def _read_inference_server(environ: Environ) -> Found:
    settings = {
        setting: Given(environ[variable], (variable,))
        for variable, setting in (("MAX_LOADED_MODELS", "max_loaded_models"), ("MAX_BATCH_SIZE", "max_batch_size"))
        if variable in environ
    }
    if "TRITON_GRPC_URL" in environ:
        settings["triton_url"] = Given(_triton_url(environ["TRITON_GRPC_URL"]), ("TRITON_GRPC_URL",))
    if "DYNAMIC_BATCHING" in environ:
        settings["triton_dynamic_batching"] = Given(_switch("DYNAMIC_BATCHING", environ), ("DYNAMIC_BATCHING",))
    kind = environ.get("INSTANCE_KIND", "")
    if kind and kind not in _KINDS:
        raise _wrong("INSTANCE_KIND", "one of KIND_CPU, KIND_GPU", environ)
    if kind:
        settings["triton_kind"] = Given(_KINDS[kind], ("INSTANCE_KIND",))
    instances = _whole("MODEL_INSTANCES", environ) if "MODEL_INSTANCES" in environ else 0
    if instances and kind:
        settings["triton_instances"] = Given(instances, ("MODEL_INSTANCES",))
    for variable, setting, on in (
        ("TENSORRT_ENABLED", "triton_accelerator", "tensorrt"),
        ("FP16_ENABLED", "triton_fp16", True),
    ):
        if variable in environ and _switch(variable, environ):
            if kind != "KIND_GPU":
                raise ConfigError(f"{variable}: set INSTANCE_KIND=KIND_GPU with it, or leave it out", param=variable)
            settings[setting] = Given(on, (variable,))
    warned = instances and not kind
    warnings = ("MODEL_INSTANCES counts only together with INSTANCE_KIND: set KIND_CPU or KIND_GPU",) if warned else ()
    return Found(settings=settings, warnings=warnings)


def _triton_url(text: str) -> str:
    scheme, _, place = text.rstrip("/").rpartition("://")
    return f"tritons://{place}" if scheme.lower() in ("https", "grpcs") else place


def _switch(variable: str, environ: Environ) -> bool:
    found = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
        environ[variable].lower()
    )
    if found is None:
        raise _wrong(variable, "true or false", environ)
    return found


def _whole(variable: str, environ: Environ) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", environ[variable]):
        raise _wrong(variable, "a whole number", environ)
    return int(environ[variable])


def _wrong(variable: str, rule: str, environ: Environ) -> ConfigError:
    return ConfigError(f"{variable}: must be {rule}, got {environ[variable]!r}", param=variable)


PRESETS: Mapping[str, Preset] = {
    one.name: one
    for one in (
        Preset(
            name="triton-grpc-proxy",
            stands_for="kozistr/triton-grpc-proxy-rs: `POST /v1/embedding` over one model of a Triton",
            defaults={"port": 8080},
            variables={
                "SERVER_PORT": "`port`",
                "TRITON_SERVER_URL": "the Triton's host, default `http://triton-server`; `https://` is TLS",
                "TRITON_SERVER_GRPC_PORT": "its gRPC port, default 8001",
                "MODEL_NAME": "the model, there and here, default `model`",
                "MODEL_VERSION": "its version, default 1",
                "INPUT_NAME": "`input_names.text`, default `text`",
                "OUTPUT_NAME": "`output_names.embedding`, default `embedding`",
                "EMBEDDING_SIZE": "`dimension`, where it is given",
                "RUST_LOG": "`log_level`",
            },
            read=_read_proxy,
        ),
        Preset(
            name="inference-server",
            stands_for="OwenPendrighElliott/inference_server: models loaded, used and deleted over `infer`'s routes",
            defaults={
                "port": 8686,
                "backend": "triton",
                "triton_url": "localhost:8001",
                "triton_repository": "model_repository",
                "max_loaded_models": 5,
                "max_batch_size": 32,
                "default_model": False,
                "metrics_default": "json",
            },
            variables={
                "TRITON_GRPC_URL": "`triton_url`",
                "MAX_LOADED_MODELS": "`max_loaded_models`",
                "MAX_BATCH_SIZE": "`max_batch_size`",
                "DYNAMIC_BATCHING": "`triton_dynamic_batching`",
                "INSTANCE_KIND": "`triton_kind`: KIND_CPU or KIND_GPU",
                "MODEL_INSTANCES": "`triton_instances`; needs INSTANCE_KIND, 0 leaves it to Triton",
                "TENSORRT_ENABLED": "`triton_accelerator`; needs KIND_GPU",
                "FP16_ENABLED": "`triton_fp16`; needs KIND_GPU",
            },
            read=_read_inference_server,
        ),
    )
}
