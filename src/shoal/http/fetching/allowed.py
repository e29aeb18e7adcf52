"""Which URLs may be fetched: the operator's setting `image_hosts`, read once, and every URL judged by it.

One parser (yarl, which aiohttp sends with) reads a URL for the check and for the fetch, and what was checked is the
very object that is fetched. Before it stands a grammar narrower than any parser's, so that no two of them can read
different hosts out of what is left.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Final

from yarl import URL

from shoal.errors import ConfigError, InvalidValue
from shoal.http.fetching.addresses import Address, is_local, is_public, parse_ip

PUBLIC: Final = "public"
PORTS: Final = frozenset({80, 443})
MAX_URL_CHARACTERS: Final = 8192

ALTERNATIVE: Final = "send the picture itself, as a data URI or base64"

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:\[\]%]+)(?::(?P<port>[1-9][0-9]{0,4}))?(?:[/?#].*)?",
    re.IGNORECASE | re.DOTALL,
)
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be fetched as far as its text says. `host` is ASCII in lower case: a name, or an address without
    brackets. `listed`: the operator wrote this host, so that its address may be private."""

    url: URL
    host: str
    port: int
    listed: bool

    @property
    def address(self) -> Address | None:
        """Where the URL itself names an address: nothing is left to resolve."""
        return parse_ip(self.host)

    def permits(self, address: Address) -> bool:
        """Whether this host may be at that address.

        A host that is not listed must be on the public internet. A listed one may be anywhere, stores of pictures
        being inside as a rule; only a link-local address (where clouds keep their metadata), an unspecified or a
        multicast one must be listed as such, since whoever answers for a name could name them.
        """
        if not self.listed:
            return is_public(address)
        return self.address is not None or not is_local(address)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """`hosts`: (host, port), and (host, None) for the ports 80 and 443. `public`: any host on the public internet."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()
    public: bool = False

    @classmethod
    def parse(cls, setting: str) -> FetchPolicy:
        """The value of `image_hosts`: "" for none; hosts between commas, each with a port where it is neither 80 nor
        443; "public" among them for every host on the public internet. Raises ConfigError."""
        entries = [entry.strip() for entry in setting.split(",")] if setting.strip() else []
        hosts = [entry for entry in entries if entry.lower() != PUBLIC]
        return cls(frozenset(map(_parse_entry, hosts)), len(hosts) < len(entries))

    def __bool__(self) -> bool:
        """Whether anything may be fetched at all."""
        return self.public or bool(self.hosts)

    def check_url(self, text: str) -> Target:
        """What to fetch for a client's URL. Raises InvalidValue; what its host resolves to is still to be judged."""
        if not self:
            raise InvalidValue(f"URLs are not fetched here: {ALTERNATIVE}, or ask the operator to set image_hosts")
        url, host, explicit = _parse_url(text)
        port = url.port
        if port is None:  # never of http and https
            raise InvalidValue("the URL has no port: write it as http://host/path")
        listed = (host, port) in self.hosts or (port in PORTS and (host, None) in self.hosts)
        if not listed and not self.public:
            where = f"{host}:{explicit}" if explicit else host
            raise InvalidValue(f"pictures are not fetched from {where}: {ALTERNATIVE}, or ask for it in image_hosts")
        if not listed and port not in PORTS:
            raise InvalidValue(f"pictures are fetched from ports 80 and 443, not {port}: {ALTERNATIVE}")
        target = Target(url, host, port, listed)
        if target.address is not None and not target.permits(target.address):
            raise not_public_error(host)
        return target


def not_public_error(host: str) -> InvalidValue:
    """A refusal that does not tell what the host resolved to."""
    return InvalidValue(f"{host} is not on the public internet, and not fetched from: {ALTERNATIVE}")


def _parse_entry(text: str) -> tuple[str, int | None]:
    found = _URL.fullmatch(f"http://{text}")
    if found is None or not text or set(text) & set("/?#*"):
        raise ConfigError(
            f"image_hosts: {text!r} is not a host: write hosts between commas, as in images.example.com,"
            f" 10.0.0.7:9000, or {PUBLIC!r} for every host on the public internet"
        )
    try:
        _, host, explicit = _parse_url(f"http://{text}/")
    except InvalidValue as error:
        raise ConfigError(f"image_hosts: {text!r}: {error.message}") from None
    return host, explicit


def _parse_url(text: str) -> tuple[URL, str, int | None]:
    """The URL without its fragment, its host, and its port where it is written."""
    if len(text) > MAX_URL_CHARACTERS:
        raise InvalidValue(f"the URL has over {MAX_URL_CHARACTERS} characters: {ALTERNATIVE}")
    if "\\" in text or any(each.isspace() or unicodedata.category(each)[0] == "C" for each in text):
        raise InvalidValue("the URL holds a backslash, a blank or a control character: percent-encode it")
    found = _URL.fullmatch(text)
    if found is None:
        raise InvalidValue(
            "the URL cannot be fetched: write http://host/path or https://host/path, without a user or a password, and"
            " with the host as it is, not percent-encoded"
        )
    try:
        url = URL(text).with_fragment(None)
        host = url.raw_host or ""
    except ValueError:  # also what the encoding of a host's name raises
        raise InvalidValue("the URL cannot be read: check its host and its port") from None
    _check_host(host, found["host"])
    port = int(found["port"]) if found["port"] else None
    if url.scheme != found["scheme"].lower() or url.explicit_port != port or url.raw_user or url.raw_password:
        raise InvalidValue("the URL can be read in two ways: check its host and its port")
    return url, host, port


def _check_host(host: str, written: str) -> None:
    """`host` as the parser has it, `written` as the client has."""
    if written.startswith("["):
        if not isinstance(parse_ip(host), IPv6Address):
            raise InvalidValue("the URL's host is not an IPv6 address: check it")
        return
    if host.endswith("."):
        raise InvalidValue("the URL's host ends in a dot: leave that out")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        # Everything that the C library would take for an IPv4 address, as https://url.spec.whatwg.org/#ends-in-a-number
        if parse_ip(host) is None or written != host:
            raise InvalidValue("the URL's host is a number: write an IPv4 address as four decimal numbers, or a name")
    elif not _NAME.fullmatch(host) or len(host) > 253:
        raise InvalidValue("the URL's host is not a name or an address: check it")
    if written.isascii() and written.lower() != host:
        raise InvalidValue("the URL can be read in two ways: check its host")
