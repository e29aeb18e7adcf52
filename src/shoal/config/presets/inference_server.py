"""Preset for inference-server, with the environment of its successor:
https://github.com/OwenPendrighElliott/inference_server."""

from __future__ import annotations

from shoal.config.presets.base import (
    Environ,
    Preset,
    PresetSettings,
    PresetValue,
    invalid_value_error,
    read_int,
    read_switch,
)
from shoal.errors import ConfigError

_KINDS = {"KIND_CPU": "cpu", "KIND_GPU": "gpu"}


def _read(environ: Environ) -> PresetSettings:
    settings = {
        setting: PresetValue(environ[variable], (variable,))
        for variable, setting in (("MAX_LOADED_MODELS", "max_loaded_models"), ("MAX_BATCH_SIZE", "max_batch_size"))
        if variable in environ
    }
    if "TRITON_GRPC_URL" in environ:
        settings["triton_url"] = PresetValue(_triton_url(environ["TRITON_GRPC_URL"]), ("TRITON_GRPC_URL",))
    if "DYNAMIC_BATCHING" in environ:
        settings["triton_dynamic_batching"] = PresetValue(
            read_switch("DYNAMIC_BATCHING", environ), ("DYNAMIC_BATCHING",)
        )
    kind = environ.get("INSTANCE_KIND", "")
    if kind and kind not in _KINDS:
        raise invalid_value_error("INSTANCE_KIND", "one of KIND_CPU, KIND_GPU", environ)
    if kind:
        settings["triton_kind"] = PresetValue(_KINDS[kind], ("INSTANCE_KIND",))
    instances = read_int("MODEL_INSTANCES", environ) if "MODEL_INSTANCES" in environ else 0
    if instances and kind:
        settings["triton_instances"] = PresetValue(instances, ("MODEL_INSTANCES",))
    for variable, setting, on in (
        ("TENSORRT_ENABLED", "triton_accelerator", "tensorrt"),
        ("FP16_ENABLED", "triton_fp16", True),
    ):
        if variable in environ and read_switch(variable, environ):
            if kind != "KIND_GPU":
                raise ConfigError(f"{variable}: also set INSTANCE_KIND=KIND_GPU, or omit it", param=variable)
            settings[setting] = PresetValue(on, (variable,))
    warned = instances and not kind
    warnings = ("MODEL_INSTANCES requires INSTANCE_KIND: set KIND_CPU or KIND_GPU",) if warned else ()
    return PresetSettings(settings=settings, warnings=warnings)


def _triton_url(text: str) -> str:
    scheme, _, place = text.rstrip("/").rpartition("://")
    return f"tritons://{place}" if scheme.lower() in ("https", "grpcs") else place


INFERENCE_SERVER = Preset(
    name="inference-server",
    product="OwenPendrighElliott/inference_server: loads, runs and deletes models with the routes of `infer`",
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
        "MODEL_INSTANCES": "`triton_instances`; requires INSTANCE_KIND, 0 lets Triton choose",
        "TENSORRT_ENABLED": "`triton_accelerator`; requires KIND_GPU",
        "FP16_ENABLED": "`triton_fp16`; requires KIND_GPU",
    },
    read_settings=_read,
)
