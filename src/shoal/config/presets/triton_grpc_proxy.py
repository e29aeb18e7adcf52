"""Preset for triton-grpc-proxy: https://github.com/kozistr/triton-grpc-proxy-rs."""

from __future__ import annotations

import re

from shoal.config.presets.base import (
    HOST,
    RUST_LEVELS,
    Environ,
    Preset,
    PresetSettings,
    PresetValue,
    invalid_value_error,
    read_int,
)
from shoal.names import RESERVED, is_name

_URL = re.compile(rf"(?:(https?|grpcs?)://)?({HOST})/?", re.IGNORECASE)
_MISSPELT_PORT = "TRITON_SERVER_PORT_GRPC"

_PROXY_ADDRESS = {
    "TRITON_SERVER_URL": "http://triton-server",
    "TRITON_SERVER_GRPC_PORT": "8001",
    "MODEL_NAME": "model",
    "MODEL_VERSION": "1",
}


def _read(environ: Environ) -> PresetSettings:
    text = {name: environ.get(name, default) for name, default in _PROXY_ADDRESS.items()}
    url = _URL.fullmatch(text["TRITON_SERVER_URL"])
    if url is None:
        raise invalid_value_error(
            "TRITON_SERVER_URL", "http://host without a port (that is TRITON_SERVER_GRPC_PORT)", environ
        )
    if not re.fullmatch(r"[0-9]{1,5}", text["TRITON_SERVER_GRPC_PORT"]):
        raise invalid_value_error("TRITON_SERVER_GRPC_PORT", "a whole number from 1 to 65535", environ)
    # Shoal writes "~" for the "/" of a served name, which a folder in a model repository cannot contain.
    name = text["MODEL_NAME"].replace("~", "/")
    if "/" in text["MODEL_NAME"] or not is_name(name) or name in RESERVED:
        raise invalid_value_error(
            "MODEL_NAME", "a model's name: ASCII letters, digits, '.', '_', '-' and one '~'", environ
        )
    if not re.fullmatch(r"[1-9][0-9]{0,18}", text["MODEL_VERSION"]):
        raise invalid_value_error("MODEL_VERSION", "a whole number of at least 1", environ)
    scheme = "tritons" if (url[1] or "").lower() in ("https", "grpcs") else "triton"
    place = f"{scheme}://{url[2]}:{text['TRITON_SERVER_GRPC_PORT']}"
    table = {
        "default_for": PresetValue(["embed"]),
        "normalize": PresetValue(False),  # vectors are returned as the model computes them
        "input_names": _tensor_names("text", "INPUT_NAME", "text", environ),
        "output_names": _tensor_names("embedding", "OUTPUT_NAME", "embedding", environ),
    }
    # Do not apply its default of 1024: the original truncated vectors to it, but the model's output declares its own
    # length.
    if "EMBEDDING_SIZE" in environ:
        table["dimension"] = PresetValue(read_int("EMBEDDING_SIZE", environ), ("EMBEDDING_SIZE",))
    settings = {}
    if "SERVER_PORT" in environ:
        settings["port"] = PresetValue(environ["SERVER_PORT"], ("SERVER_PORT",))
    if level := _level(environ.get("RUST_LOG", "")):
        settings["log_level"] = PresetValue(level, ("RUST_LOG",))
    address = f"{name}={place}#{text['MODEL_NAME']}@{text['MODEL_VERSION']}"
    served = PresetValue((address,), tuple(one for one in text if one in environ))
    return PresetSettings(settings=settings, served=served, tables={name: table}, warnings=_warn_misspelt(environ))


def _tensor_names(usual: str, variable: str, default: str, environ: Environ) -> PresetValue:
    return PresetValue({usual: environ.get(variable, default)}, (variable,) if variable in environ else ())


def _warn_misspelt(environ: Environ) -> tuple[str, ...]:
    if _MISSPELT_PORT not in environ or "TRITON_SERVER_GRPC_PORT" in environ:
        return ()
    return (f"{_MISSPELT_PORT} is ignored, as in triton-grpc-proxy: the port is TRITON_SERVER_GRPC_PORT (now 8001)",)


def _level(directives: str) -> str | None:
    """Return the least severity that RUST_LOG sets globally; None if it only names modules of the other program."""
    found = None
    for directive in directives.lower().split(","):
        found = RUST_LEVELS.get(directive.strip(), found)
    return found


TRITON_GRPC_PROXY = Preset(
    name="triton-grpc-proxy",
    product="kozistr/triton-grpc-proxy-rs: `POST /v1/embedding` for one model on Triton",
    defaults={"port": 8080, "proxy_metrics": True},
    variables={
        "SERVER_PORT": "`port`",
        "TRITON_SERVER_URL": "Triton's host, default `http://triton-server`; `https://` uses TLS",
        "TRITON_SERVER_GRPC_PORT": "its gRPC port, default 8001",
        "MODEL_NAME": "the model's name on Triton and in Shoal, default `model`",
        "MODEL_VERSION": "its version, default 1",
        "INPUT_NAME": "`input_names.text`, default `text`",
        "OUTPUT_NAME": "`output_names.embedding`, default `embedding`",
        "EMBEDDING_SIZE": "`dimension`, if set",
        "RUST_LOG": "`log_level`",
    },
    read_settings=_read,
)
