"""Preset for text-embeddings-inference, whose flags are those of router/src/main.rs in
https://github.com/huggingface/text-embeddings-inference.

Every flag there also exists as an environment variable in upper case. Flags that Shoal has under the same name and with
the same meaning (--port, --api-key, --hf-token, --max-batch-tokens) are Shoal's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from shoal.config.presets.base import (
    Environ,
    Preset,
    PresetSettings,
    PresetValue,
    invalid_value_error,
    read_int,
    read_origins,
    read_switch,
)
from shoal.errors import ConfigError

_COUNTS = {
    "PORT": "port",
    "MAX_CONCURRENT_REQUESTS": "max_queue_items",
    "MAX_BATCH_TOKENS": "max_batch_tokens",
    "MAX_BATCH_REQUESTS": "max_batch_size",
    "MAX_CLIENT_BATCH_SIZE": "max_inputs",
    "PAYLOAD_LIMIT": "max_body_bytes",
}
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "auto"}
_POOLINGS = ("cls", "mean", "splade", "last-token")

_NO_EFFECT = {
    "TOKENIZATION_WORKERS": "texts are tokenized together, in two threads",
    "DENSE_PATH": "a model's modules.json lists its modules",
    "UDS_PATH": "models run in this process",
    "HUGGINGFACE_HUB_CACHE": "models are kept in `home` (SHOAL_HOME)",
    "DISABLE_SPANS": "the log contains no spans",
    "OTLP_ENDPOINT": "no traces are sent; see `/metrics` and the `server-timing` header",
    "OTLP_SERVICE_NAME": "no traces are sent",
    "PROMETHEUS_PORT": "`/metrics` is on the server's own port",
}
"""Options of the original that have no effect here, and why."""

_OWN = ("PORT", "MAX_BATCH_TOKENS", "API_KEY", "HF_TOKEN")
_SWITCHES = ("AUTO_TRUNCATE", "JSON_OUTPUT", "DISABLE_SPANS")

_MEANINGS = {
    "MODEL_ID": "the model to serve: a name on the Hugging Face hub, a folder, or any address",
    "REVISION": "its revision; requires MODEL_ID",
    "SERVED_MODEL_NAME": "its served name; requires MODEL_ID",
    "DTYPE": "`precision`: `float32`, `bfloat16`; `float16` keeps `auto`",
    "POOLING": "ignored with a warning: a model's files define its pooling",
    "DEFAULT_PROMPT_NAME": "`default_prompt_name` of the served model",
    "DEFAULT_PROMPT": "`prompts.default` and `default_prompt_name` of the served model",
    "AUTO_TRUNCATE": "`truncate`",
    "HOSTNAME": "`host`, if it is an IP address",
    "PORT": "`port`",
    "API_KEY": "`api_key`",
    "HF_TOKEN": "`hf_token`",
    "HF_API_TOKEN": "`hf_token`, if HF_TOKEN is not set",
    "MAX_CONCURRENT_REQUESTS": "`max_queue_items`",
    "MAX_BATCH_TOKENS": "`max_batch_tokens`",
    "MAX_BATCH_REQUESTS": "`max_batch_size`",
    "MAX_CLIENT_BATCH_SIZE": "`max_inputs`",
    "PAYLOAD_LIMIT": "`max_body_bytes`",
    "JSON_OUTPUT": "`log_format` json",
    "CORS_ALLOW_ORIGIN": "`cors_origins`, comma-separated full origins only",
    **{name: f"ignored with a warning: {why}" for name, why in _NO_EFFECT.items()},
}


def _flag(variable: str) -> str:
    return "--" + variable.lower().replace("_", "-")


class _Inputs:
    """The given values by environment name. A flag overrides its variable, and is the name that messages use."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ

    def __contains__(self, variable: str) -> bool:
        return bool({variable, _flag(variable)} & self.environ.keys())

    def name(self, variable: str) -> str:
        return _flag(variable) if _flag(variable) in self.environ else variable

    def text(self, variable: str) -> str:
        return self.environ[self.name(variable)]

    def to_value(self, variable: str, value: object) -> PresetValue:
        return PresetValue(value, (self.name(variable),))


def _read(environ: Environ) -> PresetSettings:
    inputs = _Inputs(environ)
    settings = {
        setting: inputs.to_value(variable, read_int(inputs.name(variable), environ))
        for variable, setting in _COUNTS.items()
        if variable in inputs
    }
    if "AUTO_TRUNCATE" in inputs:
        settings["truncate"] = inputs.to_value("AUTO_TRUNCATE", read_switch(inputs.name("AUTO_TRUNCATE"), environ))
    if "JSON_OUTPUT" in inputs and read_switch(inputs.name("JSON_OUTPUT"), environ):
        settings["log_format"] = inputs.to_value("JSON_OUTPUT", "json")
    if "API_KEY" in inputs:
        settings["api_key"] = inputs.to_value("API_KEY", [inputs.text("API_KEY")])
    if token := next((name for name in ("HF_TOKEN", "HF_API_TOKEN") if name in inputs), ""):
        settings["hf_token"] = inputs.to_value(token, inputs.text(token))
    if "DTYPE" in inputs:
        settings["precision"] = inputs.to_value("DTYPE", _precision(inputs))
    settings |= _host(inputs)
    if "CORS_ALLOW_ORIGIN" in inputs:
        exact, _ = read_origins(inputs.name("CORS_ALLOW_ORIGIN"), environ)
        settings["cors_origins"] = inputs.to_value("CORS_ALLOW_ORIGIN", exact)
    return PresetSettings(
        settings=settings, served=_read_served(inputs), served_model=_prompts(inputs), warnings=tuple(_warnings(inputs))
    )


def _read_served(inputs: _Inputs) -> PresetValue | None:
    if "MODEL_ID" not in inputs:
        return None
    model = inputs.text("MODEL_ID")
    folder = Path(model).expanduser()
    if folder.is_dir():
        address = f"file:{folder.absolute()}"
    else:
        address = model if ":" in model else f"hf:{model}"
        if "REVISION" in inputs:
            address += f"@{inputs.text('REVISION')}"
    if "SERVED_MODEL_NAME" in inputs:
        address = f"{inputs.text('SERVED_MODEL_NAME')}={address}"
    return PresetValue((address,), (inputs.name("MODEL_ID"),), is_exclusive=True)


def _precision(inputs: _Inputs) -> str:
    found = _PRECISIONS.get(inputs.text("DTYPE"))
    if found is None:
        raise invalid_value_error(inputs.name("DTYPE"), f"one of {', '.join(_PRECISIONS)}", inputs.environ)
    return found


def _host(inputs: _Inputs) -> dict[str, PresetValue]:
    """Parse the host. Containers set HOSTNAME to their own name, which the original ignores as well."""
    if "HOSTNAME" not in inputs:
        return {}
    try:
        ip_address(inputs.text("HOSTNAME"))
    except ValueError:
        if inputs.name("HOSTNAME").startswith("--"):
            raise invalid_value_error(inputs.name("HOSTNAME"), "an IP address", inputs.environ) from None
        return {}
    return {"host": inputs.to_value("HOSTNAME", inputs.text("HOSTNAME"))}


def _prompts(inputs: _Inputs) -> dict[str, PresetValue]:
    if "DEFAULT_PROMPT" in inputs and "DEFAULT_PROMPT_NAME" in inputs:
        name = inputs.name("DEFAULT_PROMPT")
        raise ConfigError(f"{name}: {inputs.name('DEFAULT_PROMPT_NAME')} is also set: use only one of them", param=name)
    if "DEFAULT_PROMPT_NAME" in inputs:
        return {"default_prompt_name": inputs.to_value("DEFAULT_PROMPT_NAME", inputs.text("DEFAULT_PROMPT_NAME"))}
    if "DEFAULT_PROMPT" in inputs:
        return {
            "prompts": inputs.to_value("DEFAULT_PROMPT", {"default": inputs.text("DEFAULT_PROMPT")}),
            "default_prompt_name": inputs.to_value("DEFAULT_PROMPT", "default"),
        }
    return {}


def _warnings(inputs: _Inputs) -> Iterator[str]:
    for variable in ("REVISION", "SERVED_MODEL_NAME"):
        if variable in inputs and "MODEL_ID" not in inputs:
            yield f"{inputs.name(variable)} requires {_flag('MODEL_ID')} or MODEL_ID"
    if "POOLING" in inputs:
        if inputs.text("POOLING") not in _POOLINGS:
            raise invalid_value_error(inputs.name("POOLING"), f"one of {', '.join(_POOLINGS)}", inputs.environ)
        yield f"{inputs.name('POOLING')} is ignored: a model's files define its pooling, and /info shows it"
    if "DTYPE" in inputs and inputs.text("DTYPE") == "float16":
        yield f"{inputs.name('DTYPE')}: float16 is left to the engine (`precision` auto)"
    if "CORS_ALLOW_ORIGIN" in inputs:
        yield from read_origins(inputs.name("CORS_ALLOW_ORIGIN"), inputs.environ)[1]
    for variable, why in _NO_EFFECT.items():
        if variable in inputs:
            yield f"{inputs.name(variable)} has no effect: {why}"


TEI = Preset(
    name="tei",
    product="text-embeddings-inference: one model, and its routes at the root",
    defaults={"port": 3000, "tei_metrics": True, "any_model": True},
    variables=_MEANINGS,
    flags={_flag(name): f"as {name}" for name in _MEANINGS if name not in _OWN},
    switches=frozenset(map(_flag, _SWITCHES)),
    verbatim=frozenset(("DEFAULT_PROMPT", _flag("DEFAULT_PROMPT"))),
    read_settings=_read,
)
