"""Preset for Ollama: https://github.com/ollama/ollama, envconfig/config.go and docs/faq.mdx."""

from __future__ import annotations

import re
from ipaddress import IPv6Address

from shoal.config.presets.base import (
    HOST,
    Environ,
    Preset,
    PresetSettings,
    PresetValue,
    invalid_value_error,
    read_int,
    read_origins,
)
from shoal.durations import parse_duration

_ADDRESS = re.compile(rf"(?:(https?)://)?({HOST})?(?::([0-9]{{1,5}}))?(?:/.*)?", re.IGNORECASE)
_TRUE = {"1", "t", "true"}

_COUNTS = {
    "OLLAMA_MAX_LOADED_MODELS": "max_loaded_models",
    "OLLAMA_MAX_QUEUE": "max_queued_streams",
    "OLLAMA_NUM_PARALLEL": "max_streams",
}
_CACHE_TYPES = {"f32": "f32", "f16": "f16", "q8_0": "u8"}
_SOON_S = 1.0
_ENDLESS_S = 365 * 86400.0

_NO_EFFECT = {
    "OLLAMA_FLASH_ATTENTION": "the engine chooses",
    "OLLAMA_GPU_OVERHEAD": "models on this machine run on the CPU",
    "OLLAMA_SCHED_SPREAD": "models on this machine run on the CPU",
    "OLLAMA_LLM_LIBRARY": "each kind of model has one engine",
    "OLLAMA_NEW_ENGINE": "each kind of model has one engine",
    "OLLAMA_MULTIUSER_CACHE": "prefixes are shared between users (`prefix_caching`)",
    "OLLAMA_NOPRUNE": "nothing is pruned at startup",
    "OLLAMA_REMOTES": "requests are not forwarded to other hosts",
}
"""Variables of Ollama that a user may rely on, and why they have no effect here."""


def _read(environ: Environ) -> PresetSettings:
    settings = _address(environ) if "OLLAMA_HOST" in environ else {}
    warnings = []
    for variable, setting in _COUNTS.items():
        count = read_int(variable, environ) if variable in environ else 0
        # 0 means unlimited for the other variables
        if count or (variable in environ and variable == "OLLAMA_MAX_QUEUE"):
            settings[setting] = PresetValue(count, (variable,))
    if "OLLAMA_KEEP_ALIVE" in environ:
        settings["keep_alive_s"] = PresetValue(_keep_alive(environ), ("OLLAMA_KEEP_ALIVE",))
    if "OLLAMA_LOAD_TIMEOUT" in environ:
        settings["load_timeout_s"] = PresetValue(_load_timeout(environ), ("OLLAMA_LOAD_TIMEOUT",))
    if kept := environ.get("OLLAMA_KV_CACHE_TYPE", "").lower():
        if kept in _CACHE_TYPES:
            settings["kv_cache_precision"] = PresetValue(_CACHE_TYPES[kept], ("OLLAMA_KV_CACHE_TYPE",))
        else:
            warnings.append(f"OLLAMA_KV_CACHE_TYPE: {kept} is not supported; use {', '.join(_CACHE_TYPES)}")
    if "OLLAMA_ORIGINS" in environ:
        exact, inexact = read_origins("OLLAMA_ORIGINS", environ)
        settings["cors_origins"] = PresetValue(exact, ("OLLAMA_ORIGINS",))
        warnings += inexact
    if environ.get("OLLAMA_DEBUG", "0").lower() in _TRUE or re.fullmatch(
        "0*[1-9][0-9]*", environ.get("OLLAMA_DEBUG", "")
    ):
        settings["log_level"] = PresetValue("debug", ("OLLAMA_DEBUG",))
    if "OLLAMA_MODELS" in environ:
        warnings.append(
            "OLLAMA_MODELS is ignored: its files are in Ollama's own format; Shoal keeps models in `home` (SHOAL_HOME)"
        )
    warnings += [f"{name} has no effect: {why}" for name, why in _NO_EFFECT.items() if name in environ]
    return PresetSettings(settings=settings, language_models=_context(environ), warnings=tuple(warnings))


def _address(environ: Environ) -> dict[str, PresetValue]:
    """Parse `host` and `port`.

    As in Ollama, surrounding quotes are ignored, and an IPv6 address without a port needs no brackets. Text that looks
    like an address with a port but without brackets is an IPv6 address as well, or invalid.
    """
    text = environ["OLLAMA_HOST"].strip("\"' ")
    scheme, separator, place = text.rpartition("://")
    bare = place.rstrip("/")
    if _is_ipv6(bare):
        text = f"{scheme}{separator}[{bare}]"
    found = _ADDRESS.fullmatch(text)
    if found is None or ((found[2] or "").startswith("[") and not _is_ipv6(found[2].strip("[]"))):
        raise invalid_value_error(
            "OLLAMA_HOST", "host, host:port or :port, with [brackets] around IPv6 before a port", environ
        )
    if (found[1] or "").lower() == "https":
        raise invalid_value_error("OLLAMA_HOST", "without https: Shoal serves HTTP, with TLS in a proxy", environ)
    settings = {}
    if found[2]:
        settings["host"] = PresetValue(found[2].strip("[]"), ("OLLAMA_HOST",))
    if found[3] or found[1]:
        settings["port"] = PresetValue(found[3] or "80", ("OLLAMA_HOST",))
    return settings


def _is_ipv6(text: str) -> bool:
    try:
        return bool(IPv6Address(text)) and "%" not in text
    except ValueError:
        return False


def _keep_alive(environ: Environ) -> float:
    """Return `keep_alive_s`, where 0 means forever; in Ollama 0 unloads at once."""
    seconds = _seconds("OLLAMA_KEEP_ALIVE", environ)
    return 0.0 if seconds < 0 else max(seconds, _SOON_S)


def _load_timeout(environ: Environ) -> float:
    """Return `load_timeout_s`, which is finite; in Ollama 0 and negative values mean forever."""
    seconds = _seconds("OLLAMA_LOAD_TIMEOUT", environ)
    return seconds if seconds > 0 else _ENDLESS_S


def _seconds(variable: str, environ: Environ) -> float:
    text = environ[variable]
    seconds = float(text) if re.fullmatch("[+-]?[0-9]{1,9}", text) else parse_duration(text)
    if seconds is None:
        for_ever = "below 0" if variable == "OLLAMA_KEEP_ALIVE" else "0 or less"
        raise invalid_value_error(variable, f"seconds, or a duration such as 5m; {for_ever} means forever", environ)
    return seconds


def _context(environ: Environ) -> dict[str, PresetValue]:
    tokens = read_int("OLLAMA_CONTEXT_LENGTH", environ) if "OLLAMA_CONTEXT_LENGTH" in environ else 0
    return {"context_tokens": PresetValue(tokens, ("OLLAMA_CONTEXT_LENGTH",))} if tokens else {}


OLLAMA = Preset(
    name="ollama",
    product="Ollama: its API under /api, models from `pull`",
    defaults={
        "port": 11434,
        "default_model": False,
        "keep_alive_s": 300.0,
        "max_queued_streams": 512,
    },
    variables={
        "OLLAMA_HOST": "`host` and `port`",
        "OLLAMA_KEEP_ALIVE": "`keep_alive_s`: seconds or 5m; below 0 means forever, 0 means one second",
        "OLLAMA_MAX_LOADED_MODELS": "`max_loaded_models`",
        "OLLAMA_MAX_QUEUE": "`max_queued_streams`",
        "OLLAMA_NUM_PARALLEL": "`max_streams`; 0 keeps the default",
        "OLLAMA_CONTEXT_LENGTH": "maximum `context_tokens` of language models that set none in their table; 0 keeps "
        "the default",
        "OLLAMA_ORIGINS": "`cors_origins`, only origins written in full",
        "OLLAMA_DEBUG": "`log_level` debug",
        "OLLAMA_LOAD_TIMEOUT": "`load_timeout_s`, download included: seconds or 5m; 0 or less means a year",
        "OLLAMA_KV_CACHE_TYPE": "`kv_cache_precision`: f32, f16, or q8_0 as u8; a warning for others",
        "OLLAMA_MODELS": "ignored with a warning: `home` is Shoal's folder",
        **{name: f"ignored with a warning: {why}" for name, why in _NO_EFFECT.items()},
    },
    read_settings=_read,
)
