"""Decide which IP addresses are on the public internet, including IPv4 addresses embedded in IPv6 addresses
(RFC 4291 2.5.5, RFC 3056, RFC 4380, RFC 5214, RFC 6052).

Python's `is_global` follows IANA's registries differently in each release, and treats multicast and tunnel addresses as
global. The rules here do not depend on the release. A NAT64 translator with its own prefix (RFC 6052 2.2) cannot be
detected, because only its operator knows the prefix.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_REFUSED_V4 = tuple(
    IPv4Network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; some clouds serve their metadata here
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's platform endpoint, reachable from every machine
    )
)
_UNICAST_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_REFUSED_V6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, including Teredo
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def parse_ip(text: str) -> Address | None:
    """Parse an IPv4 address of four decimal numbers, or an IPv6 address (RFC 4291 2.2) without a zone; else None."""
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether the address is reachable from the internet: global unicast, as is any IPv4 address embedded in it."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not any(address in net for net in _REFUSED_V4)
    carried = _embedded_ipv4(address)
    if carried is not None and not is_public(carried):
        return False
    if address.ipv4_mapped is not None or address in _NAT64:
        return True
    return address in _UNICAST_V6 and address.is_global and not any(address in net for net in _REFUSED_V6)


def is_local(address: Address) -> bool:
    """Whether the address is link-local (where clouds keep their metadata), unspecified or multicast.

    Such an address names nothing beyond this link, and so no image store.
    """
    carried = _embedded_ipv4(address) if isinstance(address, IPv6Address) else None
    return any(
        each.is_link_local or each.is_unspecified or each.is_multicast
        for each in (address, carried)
        if each is not None
    )


def _embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address embedded in an IPv6 one: mapped, NAT64, 6to4, ISATAP or compatible."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    number = int(address)
    isatap = (number >> 32) & 0xFFFF_FFFF in _ISATAP
    if isatap or address in _NAT64 or (address in _COMPATIBLE and number > 1):
        return IPv4Address(number & 0xFFFF_FFFF)
    return None
