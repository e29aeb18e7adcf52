"""Which addresses are public, in every form that embeds another address."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.http.fetching.addresses import is_local, is_public, parse_ip

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"]
INNER = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",  # Alibaba's metadata
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",  # Azure's
    "169.254.169.254",  # most clouds'
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",  # Oracle's
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
]
INNER_V6 = [
    "::",
    "::1",
    "::2",
    "100::1",
    "2001::1",
    "2001:20::1",
    "2001:db8::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "64:ff9b:1::1",
    "fc00::1",
    "fd00:ec2::254",  # AWS's metadata
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


def embedding_addresses(inner: str) -> list[str]:
    """Return every IPv6 address that embeds the IPv4 address."""
    number = int(IPv4Address(inner))
    high, low = number >> 16, number & 0xFFFF
    return [
        f"::ffff:{inner}",
        f"::{inner}",
        f"64:ff9b::{inner}",
        f"2002:{high:x}:{low:x}::1",
        f"2001:0:4136:e378:8000:63bf:{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}",
        f"2606:4700::5efe:{high:x}:{low:x}",
        f"2606:4700::200:5efe:{high:x}:{low:x}",
    ]


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    address = parse_ip(text)
    assert address is not None
    assert is_public(address)
    assert not is_local(address)


@pytest.mark.parametrize("text", INNER + INNER_V6)
def test_not_public(text: str) -> None:
    address = parse_ip(text)
    assert address is not None
    assert not is_public(address)


@pytest.mark.parametrize("text", [each for inner in INNER for each in embedding_addresses(inner)])
def test_an_embedded_inner_address_is_not_public(text: str) -> None:
    assert not is_public(IPv6Address(text))


@pytest.mark.parametrize("text", ["::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"])
def test_an_embedded_public_address_is_public(text: str) -> None:
    """Translators in networks without IPv4 answer with such addresses (RFC 6147)."""
    assert is_public(IPv6Address(text))


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "::",
        "fe80::1",
        "ff02::1",
        "::ffff:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "2002:a9fe:a9fe::1",
    ],
)
def test_local(text: str) -> None:
    address = parse_ip(text)
    assert address is not None
    assert is_local(address)


@pytest.mark.parametrize("text", ["10.0.0.1", "127.0.0.1", "192.168.1.1", "::1", "fd00::7", "8.8.8.8"])
def test_stores_may_be_inside(text: str) -> None:
    address = parse_ip(text)
    assert address is not None
    assert not is_local(address)


@pytest.mark.parametrize("text", ["", "127.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1", "fe80::1%eth0", "::1%", "a.b"])
def test_other_spellings_are_not_addresses(text: str) -> None:
    assert parse_ip(text) is None


@given(st.ip_addresses(v=4))
def test_an_embedded_address_is_checked_itself(address: IPv4Address) -> None:
    assert is_public(IPv6Address(f"::ffff:{address}")) == is_public(IPv6Address(f"64:ff9b::{address}"))
    assert is_public(IPv6Address(f"::ffff:{address}")) == is_public(address)


@given(st.ip_addresses())
def test_public_addresses_are_never_local(address: IPv4Address | IPv6Address) -> None:
    assert not (is_public(address) and is_local(address))
    assert not is_public(address) or address.is_global or isinstance(address, IPv6Address)
