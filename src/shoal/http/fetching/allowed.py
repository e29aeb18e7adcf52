"""Decide which URLs may be fetched, by the operator's setting `image_hosts`.

One parser (yarl, which aiohttp uses) reads a URL for both the check and the fetch, and the checked object itself is
fetched. A grammar narrower than any parser's runs first, so that no two parsers can read different hosts from the URLs
that remain.
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

ALTERNATIVE: Final = "send the image itself, as a data URI or base64"

_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:\[\]%]+)(?::(?P<port>[1-9][0-9]{0,4}))?(?:[/?#].*)?",
    re.IGNORECASE | re.DOTALL,
)
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A URL whose text is allowed; the addresses of its host are still unchecked.

    `host` is lower-case ASCII: a name, or an address without brackets. `listed`: the operator listed this host, so its
    address may be private.
    """

    url: URL
    host: str
    port: int
    listed: bool

    @property
    def address(self) -> Address | None:
        """The address in the URL itself, which needs no resolution; None for a host name."""
        return parse_ip(self.host)

    def permits(self, address: Address) -> bool:
        """Whether this host may resolve to `address`.

        An unlisted host must be on the public internet. A listed one may be anywhere, as image stores usually are
        internal. Only link-local (where clouds keep their metadata), unspecified and multicast addresses must be listed
        as addresses, because whoever controls a name could make it resolve to them.
        """
        if not self.listed:
            return is_public(address)
        return self.address is not None or not is_local(address)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """The allowed hosts: (host, port) pairs, with port None for ports 80 and 443. `public`: allow any public host."""

    hosts: frozenset[tuple[str, int | None]] = frozenset()
    public: bool = False

    @classmethod
    def parse(cls, setting: str) -> FetchPolicy:
        """Parse the value of `image_hosts`: comma-separated hosts, each with a port unless that is 80 or 443.

        "" allows nothing; the entry "public" allows every host on the public internet. Raises ConfigError.
        """
        entries = [entry.strip() for entry in setting.split(",")] if setting.strip() else []
        hosts = [entry for entry in entries if entry.lower() != PUBLIC]
        return cls(frozenset(map(_parse_entry, hosts)), len(hosts) < len(entries))

    def __bool__(self) -> bool:
        """Whether any host is allowed."""
        return self.public or bool(self.hosts)

    def check_url(self, text: str) -> Target:
        """Check a client's URL and return its target. Raises InvalidValue. The caller checks the resolved addresses."""
        if not self:
            raise InvalidValue(
                f"this server does not fetch URLs: {ALTERNATIVE}, or ask the operator to set image_hosts"
            )
        url, host, explicit = _parse_url(text)
        port = url.port
        if port is None:  # cannot happen: http and https have default ports
            raise InvalidValue("the URL has no port: write it as http://host/path")
        listed = (host, port) in self.hosts or (port in PORTS and (host, None) in self.hosts)
        if not listed and not self.public:
            where = f"{host}:{explicit}" if explicit else host
            raise InvalidValue(
                f"this server does not fetch images from {where}: {ALTERNATIVE}, or ask the operator to add it to "
                "image_hosts"
            )
        if not listed and port not in PORTS:
            raise InvalidValue(f"images are fetched only from ports 80 and 443, not {port}: {ALTERNATIVE}")
        target = Target(url, host, port, listed)
        if target.address is not None and not target.permits(target.address):
            raise not_public_error(host)
        return target


def not_public_error(host: str) -> InvalidValue:
    """Build an error that does not reveal the addresses of the host."""
    return InvalidValue(f"{host} is not on the public internet, so nothing is fetched from it: {ALTERNATIVE}")


def _parse_entry(text: str) -> tuple[str, int | None]:
    found = _URL.fullmatch(f"http://{text}")
    if found is None or not text or set(text) & set("/?#*"):
        raise ConfigError(
            f"image_hosts: {text!r} is not a host: write hosts separated by commas, such as images.example.com,"
            f" 10.0.0.7:9000, or {PUBLIC!r} for every host on the public internet"
        )
    try:
        _, host, explicit = _parse_url(f"http://{text}/")
    except InvalidValue as error:
        raise ConfigError(f"image_hosts: {text!r}: {error.message}") from None
    return host, explicit


def _parse_url(text: str) -> tuple[URL, str, int | None]:
    """Return the URL without its fragment, its host, and its port if the text has one."""
    if len(text) > MAX_URL_CHARACTERS:
        raise InvalidValue(f"the URL has more than {MAX_URL_CHARACTERS} characters: {ALTERNATIVE}")
    if "\\" in text or any(each.isspace() or unicodedata.category(each)[0] == "C" for each in text):
        raise InvalidValue("the URL contains a backslash, a space or a control character: percent-encode it")
    found = _URL.fullmatch(text)
    if found is None:
        raise InvalidValue(
            "the URL cannot be fetched: write http://host/path or https://host/path, without a user or password, and "
            "without percent-encoding in the host"
        )
    try:
        url = URL(text).with_fragment(None)
        host = url.raw_host or ""
    except ValueError:  # includes errors of encoding the host name
        raise InvalidValue("the URL cannot be parsed: check its host and port") from None
    _check_host(host, found["host"])
    port = int(found["port"]) if found["port"] else None
    if url.scheme != found["scheme"].lower() or url.explicit_port != port or url.raw_user or url.raw_password:
        raise InvalidValue("the URL is ambiguous: check its host and port")
    return url, host, port


def _check_host(host: str, written: str) -> None:
    """Raise InvalidValue for an unusable or ambiguous host. `host` is as parsed, `written` as the client wrote it."""
    if written.startswith("["):
        if not isinstance(parse_ip(host), IPv6Address):
            raise InvalidValue("the URL's host is not an IPv6 address: check it")
        return
    if host.endswith("."):
        raise InvalidValue("the URL's host ends in a dot: remove it")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        # The C library would read all of these as IPv4 addresses: https://url.spec.whatwg.org/#ends-in-a-number
        if parse_ip(host) is None or written != host:
            raise InvalidValue("the URL's host is a number: write an IPv4 address as four decimal numbers, or a name")
    elif not _NAME.fullmatch(host) or len(host) > 253:
        raise InvalidValue("the URL's host is not a name or an address: check it")
    if written.isascii() and written.lower() != host:
        raise InvalidValue("the URL is ambiguous: check its host")
