"""Preset for triton-openai, which reads only flags: https://github.com/visitsb/triton-inference-server-openai-api."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shoal.config.presets.base import (
    HOST,
    Environ,
    Preset,
    PresetSettings,
    PresetValue,
    invalid_value_error,
    read_int,
    read_switch,
)
from shoal.errors import ConfigError

_PROTO, _HOST, _PORT = "--triton_http_proto", "--triton_http_host", "--triton_http_port"
_TOKENIZER, _ENGINE, _TOKENS, _VERBOSE = "--tokenizer_dir", "--engine_dir", "--default_max_tokens", "--verbose"

_HTTP_PORT = "8000"
_GRPC_PORT = "8001"
"""Triton's port, which the original has no flag for."""

# The original drops these, or sends them to models that ignore them. Its clients send them and must not be rejected.
_DROPPED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


def _read(environ: Environ) -> PresetSettings:
    proto = environ.get(_PROTO, "http")
    if proto not in ("http", "https"):
        raise invalid_value_error(_PROTO, "http or https", environ)
    host = environ.get(_HOST, "127.0.0.1")
    if not re.fullmatch(HOST, host):
        raise invalid_value_error(_HOST, "a host without a port", environ)
    place = f"{'tritons' if proto == 'https' else 'triton'}://{host}:{_GRPC_PORT}"
    settings, language_models = {}, {}
    if _TOKENS in environ:
        settings["default_max_tokens"] = PresetValue(read_int(_TOKENS, environ), (_TOKENS,))
    if _VERBOSE in environ and read_switch(_VERBOSE, environ):
        settings["log_level"] = PresetValue("debug", (_VERBOSE,))
    if _TOKENIZER in environ:
        language_models["tokenizer"] = PresetValue(f"file:{_folder(_TOKENIZER, environ)}", (_TOKENIZER,))
    if _ENGINE in environ:
        language_models["context_tokens"] = PresetValue(_context(_folder(_ENGINE, environ) / "config.json"), (_ENGINE,))
    return PresetSettings(
        settings=settings,
        served=PresetValue((place,), tuple(flag for flag in (_PROTO, _HOST) if flag in environ)),
        language_models=language_models,
        warnings=_port(environ, place),
    )


def _port(environ: Environ, place: str) -> tuple[str, ...]:
    if environ.get(_PORT, _HTTP_PORT) == _HTTP_PORT:
        return ()
    named = place.removesuffix(_GRPC_PORT) + "PORT"
    return (
        f"{_PORT} is ignored: Shoal uses gRPC with Triton, on port {_GRPC_PORT}; for another port, give the server "
        f"as an address: shoal serve --as triton-openai {named}",
    )


def _folder(flag: str, environ: Environ) -> Path:
    folder = Path(environ[flag]).expanduser().absolute()
    if not folder.is_dir():
        raise invalid_value_error(flag, "an existing folder", environ)
    return folder


def _context(file: Path) -> int:
    """Return the maximum length of prompt and answer together that a TensorRT-LLM engine was built for."""
    instead = "omit the flag, and set context_tokens in the model's table in shoal.toml"
    try:
        found: Any = json.loads(file.read_bytes())["build_config"]
        whole_length, parts = found.get("max_seq_len"), (found.get("max_input_len"), found.get("max_output_len"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "it is not an engine configuration"
        raise ConfigError(f"{_ENGINE}: {file} cannot be read ({reason}): {instead}", param=_ENGINE) from None
    if isinstance(whole_length, int) and whole_length > 0:
        return whole_length
    if all(isinstance(part, int) and part > 0 for part in parts):
        return sum(parts)
    raise ConfigError(f"{_ENGINE}: {file} does not set max_seq_len: {instead}", param=_ENGINE)


TRITON_OPENAI = Preset(
    name="triton-openai",
    product="visitsb/triton-inference-server-openai-api: OpenAI's chat API for the language models on Triton",
    defaults={"port": 11434, "ignore_parameters": _DROPPED},
    variables={},
    flags={
        _PROTO: "`https`: use TLS to Triton",
        _HOST: "Triton's host, default 127.0.0.1; its models are served over gRPC on port 8001",
        _PORT: "ignored with a warning if not 8000",
        _TOKENIZER: "`tokenizer` of language models that set none; embedders and rerankers keep their own",
        _ENGINE: "`context_tokens` of language models that report none, from the folder's `config.json`",
        _TOKENS: "`default_max_tokens`",
        _VERBOSE: "`log_level` debug; `False` is false",
    },
    read_settings=_read,
)
