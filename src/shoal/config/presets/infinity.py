"""Preset for Infinity, whose variables are those of libs/infinity_emb/infinity_emb/env.py in
https://github.com/michaelfeil/infinity.

Its command line is not read: `infinity_emb v2 --model-id NAME` is `shoal serve --as infinity NAME`.
"""

from __future__ import annotations

from itertools import zip_longest

from shoal.config.presets.base import Environ, Preset, PresetSettings, PresetValue, invalid_value_error, read_int
from shoal.errors import ConfigError

_MODELS, _NAMES, _REVISIONS = "INFINITY_MODEL_ID", "INFINITY_SERVED_MODEL_NAME", "INFINITY_REVISION"
_BATCH, _KEY, _HOST, _LOG = "INFINITY_BATCH_SIZE", "INFINITY_API_KEY", "INFINITY_HOST", "INFINITY_LOG_LEVEL"
_PREFIX = "INFINITY_URL_PREFIX"
_COUNTS = {
    "INFINITY_PORT": "port",
    "INFINITY_QUEUE_SIZE": "max_queue_items",
    "INFINITY_MAX_CLIENT_BATCH_SIZE": "max_inputs",
}
_LEVELS = {
    "critical": "error",
    "error": "error",
    "warning": "warning",
    "info": "info",
    "debug": "debug",
    "trace": "debug",
}
_NO_EFFECT = {
    "INFINITY_ENGINE": "`engine` selects it",
    "INFINITY_DEVICE": "`engine` selects it",
    "INFINITY_DTYPE": "`precision` selects it",
    "INFINITY_EMBEDDING_DTYPE": "requests select it with `output_dtype`",
    "INFINITY_POOLING_METHOD": "a model's files define its pooling",
    "INFINITY_VECTOR_DISK_CACHE": "`cache_disk_mb` stores vectors",
    "INFINITY_REDIRECT_SLASH": "/ shows the start page",
}
"""Variables of Infinity that a user may rely on, and why they have no effect here."""


def _read(environ: Environ) -> PresetSettings:
    settings = {
        setting: PresetValue(read_int(variable, environ), (variable,))
        for variable, setting in _COUNTS.items()
        if variable in environ
    }
    if _KEY in environ:
        settings["api_key"] = PresetValue([environ[_KEY]], (_KEY,))
    if _HOST in environ:
        settings["host"] = PresetValue(environ[_HOST], (_HOST,))
    if _BATCH in environ:
        settings["max_batch_size"] = PresetValue(_read_batch_size(environ), (_BATCH,))
    if _LOG in environ:
        if (level := environ[_LOG].lower()) not in _LEVELS:
            raise invalid_value_error(_LOG, f"one of {', '.join(_LEVELS)}", environ)
        settings["log_level"] = PresetValue(_LEVELS[level], (_LOG,))
    warnings = [f"{name} has no effect: {why}" for name, why in _NO_EFFECT.items() if name in environ]
    if environ.get(_PREFIX, "/").rstrip("/") not in ("", "/v1"):
        warnings.append(f"{_PREFIX}: routes are at the root and under /v1, not under {environ[_PREFIX]}")
    warnings += [f"{name} requires {_MODELS}" for name in (_NAMES, _REVISIONS) if _alone(name, environ)]
    return PresetSettings(settings=settings, served=_read_served(environ), warnings=tuple(warnings))


def _alone(variable: str, environ: Environ) -> bool:
    return variable in environ and _MODELS not in environ


def _split(variable: str, environ: Environ) -> list[str]:
    text = environ.get(variable, "").removesuffix(";")
    return [each.strip() for each in text.split(";")] if text else []


def _read_batch_size(environ: Environ) -> int:
    """Return the largest of the models' batch sizes: `max_batch_size` applies to all of them."""
    return max(read_int(_BATCH, {_BATCH: each}) for each in environ[_BATCH].removesuffix(";").split(";"))


def _read_served(environ: Environ) -> PresetValue | None:
    models = _split(_MODELS, environ)
    if not models:
        return None
    for variable in (_NAMES, _REVISIONS):
        if len(_split(variable, environ)) > len(models):
            raise ConfigError(f"{variable}: has more entries than {_MODELS}", param=variable)
    addresses = []
    for model, name, revision in zip_longest(
        models, _split(_NAMES, environ), _split(_REVISIONS, environ), fillvalue=""
    ):
        address = model if ":" in model else f"hf:{model}"
        address += f"@{revision}" if revision else ""
        addresses.append(f"{name}={address}" if name else address)
    return PresetValue(tuple(addresses), (_MODELS,))


INFINITY = Preset(
    name="infinity",
    product="Infinity: several models, OpenAI's embeddings, /rerank and /classify",
    defaults={"port": 7997, "max_batch_size": 32, "max_queue_items": 32_000, "status_dialect": "infinity"},
    variables={
        _MODELS: "the models to serve, separated by semicolons: names on the Hub, or addresses",
        _NAMES: "their served names, in the same order",
        _REVISIONS: "their revisions, in the same order",
        "INFINITY_PORT": "`port`",
        _HOST: "`host`",
        _KEY: "`api_key`",
        _BATCH: "`max_batch_size`; of several values, the largest",
        "INFINITY_QUEUE_SIZE": "`max_queue_items`",
        "INFINITY_MAX_CLIENT_BATCH_SIZE": "`max_inputs`",
        _LOG: "`log_level`",
        _PREFIX: "ignored: routes are at the root and under /v1; other prefixes cause a warning",
        **{name: f"ignored with a warning: {why}" for name, why in _NO_EFFECT.items()},
    },
    read_settings=_read,
)
