"""Checks of `shoal doctor` that open connections: ports, the model hub, and each configured server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from shoal.cli._finding import Finding
from shoal.config import LoadedConfig
from shoal.config.settings import Settings
from shoal.errors import SetupError, ShoalError
from shoal.models.address import Address, ServedModel

PROBE_TIMEOUT_S = 5.0

_NEXT = "start that server, or correct the address"


def check_ports(loaded: LoadedConfig) -> Iterator[Finding]:
    settings = loaded.settings
    models = ""
    if settings.port:
        error = _try_to_bind(settings.host, settings.port, "--port")
        models = _describe_running(settings) if error else ""
        yield _judge_port("port", settings, settings.port, error, models and f"used by a Shoal server with {models}")
    if settings.grpc_port:
        error = _try_to_bind(settings.host, settings.grpc_port, "--grpc-port")
        yield _judge_port("grpc port", settings, settings.grpc_port, error, models and "probably used by that server")


def _try_to_bind(host: str, port: int, flag: str) -> SetupError | None:
    from shoal.server import bind

    try:
        for each in bind(host, port, flag):
            each.close()
    except SetupError as error:
        return error
    return None


def _judge_port(name: str, settings: Settings, port: int, error: SetupError | None, used: str) -> Finding:
    """`used`: how a running Shoal server uses the port; "" if there is none."""
    if error and not used:
        text, _, advice = error.message.partition(": ")
        return Finding(name, "fail", text, advice)
    return Finding(name, "ok", f"{port} on {settings.host} is {used if error else 'free'}")


def _describe_running(settings: Settings) -> str:
    """Describe the models of the Shoal server at the configured port; "" if there is none."""
    from shoal.cli._running import RunningServer

    with contextlib.suppress(ShoalError):  # another program has the port
        server = RunningServer.from_settings(settings, "", timeout_s=PROBE_TIMEOUT_S)
        loaded = [each["id"] for each in server.models() if (each.get("status") or {}).get("value") == "loaded"]
        return ", ".join(loaded) or "no model"
    return ""


def check_hub(loaded: LoadedConfig) -> Iterator[Finding]:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    if loaded.settings.offline:
        yield Finding("hub", "ok", "not asked, as `offline` is set: only stored models are served")
        return
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PROBE_TIMEOUT_S):
            yield Finding("hub", "ok", f"{constants.ENDPOINT} answers")
    except HTTPError as error:  # a mirror may have no page there
        yield Finding("hub", "ok", f"{constants.ENDPOINT} answers with {error.code}")
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "stored models still load; check the proxy (HTTPS_PROXY), or set HF_ENDPOINT to a mirror"
        yield Finding("hub", "warn", f"{constants.ENDPOINT} does not answer ({reason})", advice)


def check_backends(loaded: LoadedConfig) -> Iterator[Finding]:
    """Check every address that is served or in a table: stored models on disk, and servers by asking them."""
    from shoal.backends import parse_address, parse_served
    from shoal.models.sources.pins import DEFAULT_MODEL

    default = (DEFAULT_MODEL,) if loaded.settings.default_model else ()
    texts = [*(loaded.served or default), *(text for table in loaded.models.values() for text in table.backends)]
    addresses: dict[Address, None] = {}
    for text in texts:
        try:
            addresses |= dict.fromkeys(parse_served(loaded.resolve_argument(text)).addresses)
        except SetupError as error:
            yield Finding("backend", "fail", error.message, "correct the address (`shoal serve --help`)")
    for address in addresses:
        yield from _check_address(loaded, address)
    if url := loaded.settings.triton_url:  # Shoal loads models there, so it may have none yet
        address = parse_address(url if "://" in url else f"triton://{url}")
        yield _check_server(loaded, address, may_be_empty=True)


def _check_address(loaded: LoadedConfig, address: Address) -> Iterator[Finding]:
    if address.local:
        yield _check_stored(loaded, address)
    elif address.scheme == "fake":
        yield Finding("backend", "ok", f"{address}: a scripted model, for tests")
    else:
        yield _check_server(loaded, address)


def _check_stored(loaded: LoadedConfig, address: Address) -> Finding:
    from shoal.models.open_clip_names import resolve_pair
    from shoal.models.sources.pins import resolve_alias
    from shoal.models.store import Store

    source = resolve_alias(resolve_pair(address))
    try:
        stored = Store(loaded.settings.home).find(source)
    except SetupError as error:
        return Finding("backend", "fail", f"{address}: {error.message}", "set SHOAL_HOME to a folder that can be read")
    if stored is not None:
        return Finding("backend", "ok", f"{address} is stored on this machine")
    pull = f"`shoal pull {address}` fetches it now"
    if loaded.settings.offline:
        return Finding("backend", "fail", f"{address} is not stored, and `offline` is set", f"unset `offline`: {pull}")
    return Finding("backend", "warn", f"{address} is not stored yet: the first start downloads it", pull)


def _check_server(loaded: LoadedConfig, address: Address, *, may_be_empty: bool = False) -> Finding:
    from shoal.app.probe import list_offers

    try:
        offers = asyncio.run(list_offers(loaded, address, PROBE_TIMEOUT_S))
    except ShoalError as error:
        return Finding("backend", "fail", f"{address}: {error.message}", _NEXT)
    if may_be_empty and not offers:
        return Finding("backend", "ok", f"{address} answers")
    return _judge_offers(address, offers)


def _judge_offers(address: Address, offers: dict[str, ServedModel | str]) -> Finding:
    """Judge what a server offers: the model that the address names, or any."""
    names = {name: each for name, each in offers.items() if not address.model or address.id in (name, _model_of(each))}
    if address.model and not names:
        listed = ", ".join(offers) or "none"
        text = f"{address}: the server has no such model (it has: {listed})"
        return Finding("backend", "fail", text, "correct the name after the #, or load that model there")
    refused = [f"{name}: {reason}" for name, reason in names.items() if isinstance(reason, str)]
    if refused:
        return Finding("backend", "fail" if address.model else "warn", f"{address}: {'; '.join(refused)}", _NEXT)
    if not names:
        return Finding("backend", "warn", f"{address} answers, without a model", "load a model into that server")
    return Finding("backend", "ok", f"{address} answers, with {', '.join(names)}")


def _model_of(offer: ServedModel | str) -> str:
    return offer if isinstance(offer, str) else offer.addresses[0].id
