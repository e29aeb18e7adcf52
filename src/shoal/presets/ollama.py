"""In the place of Ollama: https://github.com/ollama/ollama, envconfig/config.go and docs/faq.mdx."""

from __future__ import annotations

import re

from shoal.durations import parse_duration
from shoal.presets.base import HOST, Environ, Found, Given, Preset, whole, wrong

_ADDRESS = re.compile(rf"(?:(https?)://)?({HOST})?(?::([0-9]{{1,5}}))?(?:/.*)?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[^/\s*?#@]+")
_TRUE = {"1", "t", "true"}

_COUNTS = {
    "OLLAMA_MAX_LOADED_MODELS": "max_loaded_models",
    "OLLAMA_MAX_QUEUE": "max_queued_streams",
    "OLLAMA_NUM_PARALLEL": "max_streams",
}
_SOON_S = 1.0


def _read(environ: Environ) -> Found:
    settings = _address(environ) if "OLLAMA_HOST" in environ else {}
    warnings = []
    for variable, setting in _COUNTS.items():
        count = whole(variable, environ) if variable in environ else 0
        if count or (variable in environ and variable == "OLLAMA_MAX_QUEUE"):  # of the others 0 means any number
            settings[setting] = Given(count, (variable,))
    if "OLLAMA_KEEP_ALIVE" in environ:
        settings["keep_alive_s"] = Given(_keep_alive(environ), ("OLLAMA_KEEP_ALIVE",))
    if "OLLAMA_ORIGINS" in environ:
        origins = [text.strip() for text in environ["OLLAMA_ORIGINS"].split(",") if text.strip()]
        exact = [origin for origin in origins if _ORIGIN.fullmatch(origin)]
        settings["cors_origins"] = Given(exact, ("OLLAMA_ORIGINS",))
        if others := [origin for origin in origins if origin not in exact]:
            warnings.append(
                f"OLLAMA_ORIGINS: {', '.join(others)} is not used: name every origin in full, as https://app.example.org"
            )
    if environ.get("OLLAMA_DEBUG", "0").lower() in _TRUE or re.fullmatch(
        "0*[1-9][0-9]*", environ.get("OLLAMA_DEBUG", "")
    ):
        settings["log_level"] = Given("debug", ("OLLAMA_DEBUG",))
    if "OLLAMA_MODELS" in environ:
        warnings.append(
            "OLLAMA_MODELS is not read: the files in it are Ollama's own; Shoal keeps models in `home` (SHOAL_HOME)"
        )
    return Found(settings=settings, every=_context(environ), warnings=tuple(warnings))


def _address(environ: Environ) -> dict[str, Given]:
    found = _ADDRESS.fullmatch(environ["OLLAMA_HOST"])
    if found is None:
        raise wrong("OLLAMA_HOST", "host, host:port or :port", environ)
    if (found[1] or "").lower() == "https":
        raise wrong("OLLAMA_HOST", "without https: Shoal speaks HTTP, behind a proxy for TLS", environ)
    given = {}
    if found[2]:
        given["host"] = Given(found[2].strip("[]"), ("OLLAMA_HOST",))
    if found[3] or found[1]:
        given["port"] = Given(found[3] or "80", ("OLLAMA_HOST",))
    return given


def _keep_alive(environ: Environ) -> float:
    """`keep_alive_s`, where 0 is for ever; Ollama's 0 is no longer than needed."""
    text = environ["OLLAMA_KEEP_ALIVE"]
    seconds = float(text) if re.fullmatch("[+-]?[0-9]{1,9}", text) else parse_duration(text)
    if seconds is None:
        raise wrong("OLLAMA_KEEP_ALIVE", "seconds, or a duration as 5m; below 0 is for ever", environ)
    return 0.0 if seconds < 0 else max(seconds, _SOON_S)


def _context(environ: Environ) -> dict[str, Given]:
    tokens = whole("OLLAMA_CONTEXT_LENGTH", environ) if "OLLAMA_CONTEXT_LENGTH" in environ else 0
    return {"context_tokens": Given(tokens, ("OLLAMA_CONTEXT_LENGTH",))} if tokens else {}


OLLAMA = Preset(
    name="ollama",
    stands_for="Ollama: its API under /api, models got by `pull`",
    defaults={
        "port": 11434,
        "default_model": False,
        "keep_alive_s": 300.0,
        "max_queued_streams": 512,
    },
    variables={
        "OLLAMA_HOST": "`host` and `port`",
        "OLLAMA_KEEP_ALIVE": "`keep_alive_s`: seconds or 5m; below 0 is for ever, 0 one second",
        "OLLAMA_MAX_LOADED_MODELS": "`max_loaded_models`",
        "OLLAMA_MAX_QUEUE": "`max_queued_streams`",
        "OLLAMA_NUM_PARALLEL": "`max_streams`; 0 leaves it",
        "OLLAMA_CONTEXT_LENGTH": "`context_tokens` of every model without one in its table; 0 leaves it",
        "OLLAMA_ORIGINS": "`cors_origins`, those that are written in full",
        "OLLAMA_DEBUG": "`log_level` debug",
        "OLLAMA_MODELS": "nothing, and a warning says so: `home` is Shoal's folder",
    },
    read=_read,
)
