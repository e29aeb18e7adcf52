"""What clients must not learn of the servers behind: their addresses, which stay in the log and in admins' facts."""

from __future__ import annotations

import logging
import re

from shoal.errors import RequestError, ShoalError, UpstreamRefused

log = logging.getLogger("shoal.http")

HIDDEN = "[address hidden]"
_HOST = r"(?:\[[0-9A-Fa-f:.%]+\]|%5B[0-9A-Fa-f:.%]+%5D|[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)"
_ADDRESS = re.compile(
    # A socket's address, as Python writes it; an address of a remote model, or a URL; a host and port, as aiohttp and
    # gRPC write them; a bare IPv4 address; and a name that gRPC could not resolve.
    r"\('[^']+'(?:, ?[0-9]+)+\)"
    rf"|\b(?:(?:tei|openai)\+https?|tritons?|https?|grpcs?|dns)://[^\s'\",;)]*[^\s'\",;):.]"
    rf"|(?:\bipv[46]:)?{_HOST}:[0-9]{{2,5}}(?![0-9A-Za-z])"
    r"|\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b"
    r"|(?<=\bname=)[^\s:]+"
)
_ADDRESS_HINT = re.compile(r"\('|:[/0-9]|\.[0-9]{1,3}\.|name=")
"""What stands in each of those. Looked for first, because refusals must be cheap: looking for addresses in a sentence
that has none took a third of the time of a 429."""


def redact(text: str) -> str:
    return _ADDRESS.sub(HIDDEN, text) if _ADDRESS_HINT.search(text) else text


def redact_error(error: ShoalError, request_id: str) -> ShoalError:
    """The error as a client may read it. What the caller sent may stand in it: that of a bad request stays as it is,
    and so does what an OpenAI-compatible server itself said. The log keeps the address."""
    if isinstance(error, RequestError | UpstreamRefused):
        return error
    message = redact(error.message)
    if message == error.message:
        return error
    log.warning("request %s: %s", request_id, error.message, extra={"request_id": request_id})
    return error.with_message(message)
