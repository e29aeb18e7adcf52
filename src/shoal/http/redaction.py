"""Hide the addresses of backend servers from clients; the log and the admin API still show them."""

from __future__ import annotations

import logging
import re
from urllib.parse import urlsplit

from shoal.errors import InternalError, RequestError, ShoalError, UpstreamRefused

log = logging.getLogger("shoal.http")

HIDDEN = "[address hidden]"
_HOST = r"(?:\[[0-9A-Fa-f:.%]+\]|%5B[0-9A-Fa-f:.%]+%5D|[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)"
_ADDRESS = re.compile(
    # A socket address as Python formats it; the address of a remote model, or a URL; a host and port as aiohttp and
    # gRPC format them; a bare IPv4 address; and a name that gRPC could not resolve.
    r"\('[^']+'(?:, ?[0-9]+)+\)"
    rf"|\b(?:(?:tei|openai)\+https?|tritons?|https?|grpcs?|dns)://[^\s'\",;)]*[^\s'\",;):.]"
    rf"|(?:\bipv[46]:)?{_HOST}:[0-9]{{2,5}}(?![0-9A-Za-z])"
    r"|\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
    r"|(?<=\bname=)[^\s:]+"
)
_ADDRESS_HINT = re.compile(r"\('|:[/0-9]|\.[0-9]{1,3}\.|name=")
"""Matches a part of each form above. Searched first, because refusals must be cheap: searching a message without
addresses for the full pattern took a third of the time of a 429."""


def redact(text: str) -> str:
    return _ADDRESS.sub(HIDDEN, text) if _ADDRESS_HINT.search(text) else text


def redact_error(error: ShoalError, request_id: str) -> ShoalError:
    """Return the error with addresses hidden, and log the original message.

    Errors of bad requests are unchanged, because they quote the caller's own input. Of what an OpenAI-compatible server
    answers itself, only the address of that server is hidden: others may be the caller's.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UpstreamRefused):
        hidden: ShoalError = _hide_server(error)
    elif (message := redact(error.message)) == error.message:
        return error
    else:
        hidden = error.with_message(message)
    if hidden.message != error.message:
        log.warning("request %s: %s", request_id, error.message, extra={"request_id": request_id})
    return hidden


def to_public_error(error: Exception, request_id: str, what: str) -> ShoalError:
    """Return the error for the client. A bug is logged in full with `what` failed; the client gets only the request
    id."""
    if isinstance(error, ShoalError) and not isinstance(error, InternalError):
        return redact_error(error, request_id)
    log_bug(error, request_id, what)
    return InternalError(f"The server failed to process this request; see its log ({request_id}).")


def log_bug(error: Exception, request_id: str, what: str) -> None:
    log.error("request %s failed: %s", request_id, what, exc_info=error, extra={"request_id": request_id})


def _hide_server(error: UpstreamRefused) -> UpstreamRefused:
    url = urlsplit(error.server)
    host = url.hostname or ""
    message, body = error.message, error.body
    for name in (error.server, url.netloc, host if "." in host else ""):  # a host of one word may be any word
        if name:
            message = message.replace(name, HIDDEN)
            body = body.replace(name.encode(), HIDDEN.encode())
    hidden = error.with_message(message)
    hidden.body = body
    return hidden
