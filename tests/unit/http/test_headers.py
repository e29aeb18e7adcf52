"""Which Host headers are accepted, and which repeated headers are refused."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Malformed
from shoal.http.headers import SINGLE_VALUE_HEADERS, check_headers, combine_headers, host_name, is_loopback

LOOPBACK = ["127.0.0.1", "127.9.9.9", "[::1]", "localhost", "LocalHost", "app.localhost"]
PORTS = ["", ":", ":0", ":80", ":8080", ":65535"]
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True)
ADDRESSES = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda address: f"[{address}]")
ANY = st.text(st.sampled_from("127.0.0.1localhostevil:@/\\?#[]%,; \t_-é\x00"), max_size=40)


@given(name=NAMES | ADDRESSES, port=st.sampled_from(PORTS))
def test_valid_hosts_with_ports(name: str, port: str) -> None:
    """The name is returned in lower case and without brackets."""
    assert host_name((name + port).encode()) == name.strip("[]").lower().encode()


@given(host=ANY | st.builds(lambda name, rest: name + rest, st.sampled_from(LOOPBACK), ANY))
def test_hosts_mean_the_same_in_urls(host: str) -> None:
    """An accepted host means the same to every parser of a URL that contains it."""
    name = host_name(host.encode())
    if name is not None:
        assert (urlsplit(f"http://{host}/").hostname or "") == name.decode()


@given(
    name=st.sampled_from(LOOPBACK), port=st.sampled_from(PORTS), junk=st.text(st.sampled_from("@/\\?#[]%, ;\t\x00é"))
)
def test_other_url_parts_are_refused_in_a_host(name: str, port: str, junk: str) -> None:
    for text in (f"{name}{port}{junk}", f"{junk}{name}{port}", f"{name}{port}{junk}evil.example"):
        assert is_loopback(text.encode()) is (text == name + port)


@pytest.mark.parametrize(
    "host",
    [
        *(
            b"127.0.0.1:80@evil.com",
            b"[::1]evil.com",
            b"[::1",
            b"::1",
            b"[::1]:80:80",
            b"[:::1]",
            b"[localhost]",
            b"[]",
        ),
        *(b"localhost:port", b"localhost:65536", b"localhost:-1", b"localhost:080808", b"a b", b" localhost"),
        *(b"localhost,evil.com", b"http://localhost", b"localhost/", b"\xc3\xa9", b"localhost\n", b"[::1%25lo]"),
    ],
)
def test_invalid_hosts_are_refused(host: bytes) -> None:
    assert host_name(host) is None
    with pytest.raises(Malformed, match="host name or an IP address"):
        check_headers([(b"host", host)], "1.1")


@given(address=st.ip_addresses())
def test_loopback_as_in_the_standard(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    text = f"[{address}]" if address.version == 6 else str(address)
    assert is_loopback(text.encode()) is address.is_loopback


@pytest.mark.parametrize("name", sorted(SINGLE_VALUE_HEADERS | {b"x-user"}))
def test_repeated_framing_headers_are_refused(name: bytes) -> None:
    """Equal values are refused too: a proxy in front may have used another one."""
    value = {b"host": b"a", b"transfer-encoding": b"chunked"}.get(name, b"1")
    raw = list({b"host": b"a", name: value}.items())
    check_headers(raw, "1.1", b"x-user")
    with pytest.raises(Malformed, match=name.decode()):
        check_headers([*raw, (name, value)], "1.1", b"x-user")


def test_lists_may_be_repeated() -> None:
    """Their values form one list."""
    raw = [(b"host", b"a"), (b"accept", b"text/plain"), (b"via", b"x"), (b"accept", b"application/json")]
    check_headers(raw, "1.1")
    assert combine_headers(raw)[b"accept"] == b"text/plain, application/json"


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2", ""])
def test_other_versions(version: str) -> None:
    with pytest.raises(Malformed, match="send the request as"):
        check_headers([(b"host", b"a")], version)


@pytest.mark.parametrize(("version", "fits"), [("1.0", True), ("1.1", False), ("2", True)])
def test_a_host_is_required(version: str, fits: bool) -> None:
    """Only with HTTP/1.1: HTTP/1.0 has no Host, and HTTP/2 another field for it."""
    if fits:
        check_headers([], version)
    else:
        with pytest.raises(Malformed, match="no 'host' header"):
            check_headers([], version)


@pytest.mark.parametrize(("version", "coding"), [("1.0", b"chunked"), ("1.1", b"gzip, chunked"), ("1.1", b"identity")])
def test_unsupported_transfer_codings(version: str, coding: bytes) -> None:
    with pytest.raises(Malformed, match="must be 'chunked'"):
        check_headers([(b"host", b"a"), (b"transfer-encoding", coding)], version)
