"""Which IP addresses are on the public internet, whatever the spelling: every IPv4 address that an IPv6 address carries
is judged too (RFC 4291 2.5.5, RFC 3056, RFC 4380, RFC 5214, RFC 6052).

Python's `is_global` follows IANA's registries, differently in each release, and calls multicast and the tunnels global;
what decides here does not depend on the release. A translator with a prefix of its own (RFC 6052 2.2) is known to its
operator alone, and cannot be noticed.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_REFUSED_V4 = tuple(
    IPv4Network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments: of some clouds, their metadata
        "192.88.99.0/24",  # relays of 6to4
        "168.63.129.16/32",  # the platform's own endpoint on every machine of Azure
    )
)
_UNICAST_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_REFUSED_V6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def parse_ip(text: str) -> Address | None:
    """None for what is no address in the usual spelling: four decimal numbers, or RFC 4291 2.2 without a zone."""
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether anybody on the internet could reach it: global unicast, with nothing else carried inside."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not any(address in net for net in _REFUSED_V4)
    carried = _embedded_ipv4(address)
    if carried is not None and not is_public(carried):
        return False
    if address.ipv4_mapped is not None or address in _NAT64:
        return True
    return address in _UNICAST_V6 and address.is_global and not any(address in net for net in _REFUSED_V6)


def is_local(address: Address) -> bool:
    """Addresses that name nothing beyond this link, and so no store of pictures: link-local (where clouds keep their
    metadata), unspecified, multicast."""
    carried = _embedded_ipv4(address) if isinstance(address, IPv6Address) else None
    return any(
        each.is_link_local or each.is_unspecified or each.is_multicast
        for each in (address, carried)
        if each is not None
    )


def _embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address inside an IPv6 one: mapped, translated, of 6to4, of ISATAP, or compatible."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    number = int(address)
    isatap = (number >> 32) & 0xFFFF_FFFF in _ISATAP
    if isatap or address in _NAT64 or (address in _COMPATIBLE and number > 1):
        return IPv4Address(number & 0xFFFF_FFFF)
    return None
