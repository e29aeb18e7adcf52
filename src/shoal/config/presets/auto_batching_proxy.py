"""Preset for auto-batching-proxy, which reads only flags, as in its src/config.rs:
https://github.com/sitetester/auto-batching-proxy."""

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
    read_switch,
)

_URL, _TIMEOUT, _INPUTS = "--inference-url", "--inference-timeout-secs", "--max-inference-inputs"
_INTERVAL, _INFO, _LOG = "--batch-check-interval-ms", "--include-batch-info", "RUST_LOG"

_PLACE = re.compile(rf"(https?)://((?:{HOST})(?::[0-9]{{1,5}})?)(?:((?:/[A-Za-z0-9._~-]+)*?)/embed)?/?", re.IGNORECASE)


def _read(environ: Environ) -> PresetSettings:
    settings = {}
    for flag, setting in ((_TIMEOUT, "embed_timeout_s"), (_INPUTS, "max_inputs")):
        if flag in environ:
            settings[setting] = PresetValue(_read_positive(flag, environ), (flag,))
    if _INFO in environ:
        settings["batch_info"] = PresetValue(read_switch(_INFO, environ), (_INFO,))
    warnings = []
    if _INTERVAL in environ:
        _read_positive(_INTERVAL, environ)
        warnings.append(f"{_INTERVAL} has no effect: batches are sent without polling")
    if level := environ.get(_LOG, "").lower():
        if level in RUST_LEVELS:
            settings["log_level"] = PresetValue(RUST_LEVELS[level], (_LOG,))
        else:
            warnings.append(f"{_LOG}: only a plain level is supported, one of {', '.join(RUST_LEVELS)}, not {level!r}")
    return PresetSettings(settings=settings, served=_read_served(environ), warnings=tuple(warnings))


def _read_served(environ: Environ) -> PresetValue:
    if _URL not in environ:
        return PresetValue(("tei+http://127.0.0.1:8080",))
    found = _PLACE.fullmatch(environ[_URL])
    if found is None:
        raise invalid_value_error(
            _URL, "http://HOST:PORT/embed, the address of a text-embeddings-inference server", environ
        )
    return PresetValue((f"tei+{found[1].lower()}://{found[2]}{found[3] or ''}",), (_URL,))


def _read_positive(flag: str, environ: Environ) -> int:
    number = read_int(flag, environ)
    if not number:
        raise invalid_value_error(flag, "above 0", environ)
    return number


AUTO_BATCHING_PROXY = Preset(
    name="auto-batching-proxy",
    product="sitetester/auto-batching-proxy: batches requests of many users for text-embeddings-inference",
    defaults={
        "port": 3000,
        "max_wait_time_ms": 500.0,
        "max_batch_size": 8,
        "max_inputs": 32,
        "embed_dialect": "auto-batching-proxy",
    },
    variables={_LOG: "`log_level`, if it is a plain level"},
    flags={
        _URL: "the upstream server, default `http://127.0.0.1:8080/embed`; all of its routes are used",
        _TIMEOUT: "`embed_timeout_s`, for a whole request",
        _INPUTS: "`max_inputs`",
        _INFO: "`batch_info`: `true` or `false`",
        _INTERVAL: "ignored with a warning",
    },
    spellings={"log_level": {"normal": "info", "critical": "error", "off": "error"}},
    read_settings=_read,
)
