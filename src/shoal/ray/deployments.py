"""The application of Ray Serve: a deployment that answers HTTP, and one for each model.

Requests reach a front as ASGI. It sends each task straight to a replica of its model, which batches what all fronts
send. Fronts keep nothing: any of them answers any request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY

from shoal import config
from shoal.asgi import LifespanApp, is_protected
from shoal.backends import parse_served
from shoal.backends.ray.cluster import FRONT, deployment_name
from shoal.config import LoadedConfig
from shoal.errors import ConfigError
from shoal.models.address import check_name
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL
from shoal.ray.replica import ModelReplica
from shoal.ray.scaling import POLICY
from shoal.server import Asgi, Receive, Scope, Send

MAX_ONGOING_REQUESTS = 10_000
"""Requests that Serve lets a front have: Shoal's own limits, which answer with clear errors, come first."""
DRAIN_MARGIN_S = 5.0
"""Time that a replica has for closing after the drain."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application. Keys of `args`, all optional: `models`, a list of addresses as `shoal serve` takes them
    (NAME=ADDRESS), or a mapping of names to addresses; `settings`, as in shoal.toml; `file`, the path of one.

    Variables of the environment and the file that they name are read here, once, and apply on all machines. Raises
    ConfigError and AddressError.
    """
    unknown = sorted(set(args) - {"models", "settings", "file"})
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}: use models, settings and file")
    models = args.get("models") or ()
    if isinstance(models, Mapping):
        models = [f"{name}={address}" for name, address in models.items()]
    settings = args.get("settings") or {}
    for name in settings:
        config.check_setting_name(name)
    flags = {**settings, "models": tuple(models)}
    file = Path(args["file"]) if args.get("file") else config.find_file(os.environ, Path.cwd())
    loaded = config.load(flags, os.environ, file)
    served = loaded.served or ((DEFAULT_MODEL,) if loaded.settings.default_model else ())
    deployments = dict(_build_named(loaded, text) for text in served)
    front = _deployment(
        serve.ingress()(Front),
        name=FRONT,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        logging_config={"enable_access_log": False},  # Shoal has its own
        graceful_shutdown_timeout_s=loaded.settings.drain_timeout_s + DRAIN_MARGIN_S,
    )
    return front.bind(loaded, deployments)


def build_model(loaded: LoadedConfig, name: str, address: str) -> serve.Application:
    """Build the deployment of one model. The options in its table, `[models.NAME.ray]`, are passed on to Serve."""
    own = dict(loaded.table(name).ray)
    scaling = own.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        own["autoscaling_config"] = {"policy": {"policy_function": POLICY}, **scaling}
    options = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": loaded.settings.drain_timeout_s + DRAIN_MARGIN_S,
        **own,
    }
    try:
        deployment = _deployment(ModelReplica, name=deployment_name(name), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the options of {name} for Ray Serve are invalid: {error}", param="ray") from None
    return deployment.bind(loaded, name, address)


def _deployment(kind: type, **options: Any) -> serve.Deployment:
    return cast(Callable[[type], serve.Deployment], serve.deployment(**options))(kind)


def _build_named(loaded: LoadedConfig, text: str) -> tuple[str, serve.Application]:
    served = parse_served(loaded.resolve_argument(text))
    name = check_name(served.name or served.addresses[0].id)
    if deployment_name(name) == FRONT:
        raise ConfigError(f"{text}: {FRONT!r} is the name of Shoal's own deployment: choose another name")
    return name, build_model(loaded, name, served.name_only or ",".join(map(str, served.addresses)))


class Front:
    """Answers HTTP with the models of its application: those of `models`, in their order, and those that are loaded
    later. It needs the handles in `models` only for Serve to deploy them with it."""

    def __init__(self, loaded: LoadedConfig, models: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._models = tuple(models)

    def __serve_build_asgi_app__(self) -> Asgi:
        """Raises ConfigError for an application without keys behind HAProxy, which would serve everybody."""
        application = serve.get_replica_context().app_name
        loaded = configure_front(self._loaded, application, self._models)
        app = LifespanApp(lambda: loaded)
        if not RAY_SERVE_ENABLE_HA_PROXY:
            return app
        if not is_protected(loaded):
            raise ConfigError(
                "behind HAProxy all requests seem to come from this machine: set api_key_file, or insecure"
            )
        return hide_peer(app)


def hide_peer(asgi: Asgi) -> Asgi:
    """Wrap an application behind a proxy of this machine that names no client: nobody counts as local."""

    async def hidden(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi({**scope, "client": None} if scope["type"] == "http" else scope, receive, send)

    return hidden


def configure_front(loaded: LoadedConfig, application: str, models: tuple[str, ...]) -> LoadedConfig:
    """Return the configuration of a front: models by their deployments, and no limits that belong to replicas."""
    own = msgspec.structs.replace(
        loaded.settings,
        backend="auto",
        ray_application=application,
        default_model=False,
        workers=1,
        response_store_mb=0,  # the next request may reach another front
        keep_alive_s=0.0,
        max_loaded_models=0,
        max_loaded_bytes=0,
        triton=False,
        triton_url="",
    )
    # The addresses in the tables are those that replicas open.
    tables = {name: msgspec.structs.replace(table, backends=()) for name, table in loaded.models.items()}
    if (default := parse_served(DEFAULT_MODEL).name) in models:
        table = loaded.table(default)
        tables[default] = msgspec.structs.replace(table, backends=(), aliases=(*table.aliases, *DEFAULT_ALIASES))
    named = tuple(f"{name}=ray:{application}#{name}" for name in models)
    return replace(loaded, settings=own, models=tables, served=(*named, f"ray:{application}"))
