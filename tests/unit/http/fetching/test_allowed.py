"""Which URLs may be fetched; no spelling of a URL bypasses the check."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from shoal.errors import ConfigError, InvalidValue
from shoal.http.fetching.addresses import is_public, parse_ip
from shoal.http.fetching.allowed import MAX_URL_CHARACTERS, FetchPolicy, Target

PUBLIC = FetchPolicy.parse("public")

REFUSED = [
    # Loopback and other inner addresses
    "http://127.0.0.1/",
    "http://127.0.0.1:80/",
    "http://127.8.8.8/",
    "http://0.0.0.0/",
    "http://10.0.0.1/x.png",
    "http://172.16.5.4/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "https://169.254.169.254/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://168.63.129.16/",
    "http://192.0.0.192/opc/v2/",
    # IPv6
    "http://[::1]/",
    "http://[::]/",
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[0000:0000::0001]/",
    "http://[fe80::1]/",
    "http://[fd00:ec2::254]/",
    "http://[ff02::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::FFFF:a9fe:a9fe]/",
    "http://[::127.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::169.254.169.254]/",
    "http://[64:ff9b:1::8.8.8.8]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:0:0:0:0:f5ff:fffe]/",
    "http://[fe80::1%25eth0]/",
    "http://[fe80::1%eth0]/",
    "http://[2606:4700::1111%25eth0]/",
    "http://[v1.fe]/",
    "http://[::1/",
    "http://::1/",
    "http://[127.0.0.1]/",
    "http://[]/",
    # Numbers that the C library parses as addresses
    "http://2130706433/",
    "http://017700000001/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0X7F.0.0.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://0/",
    "http://127.0.0.0x1/",
    "http://127.0.0.0x/",
    "http://127.0.0.01/",
    "http://8.8.8.8.8/",
    "http://08.8.8.8/",
    "http://134744072/",  # 8.8.8.8, which is public, but not its name
    "http://127.0.0.1./",
    "http://①②⑦.⓪.⓪.①/",
    "http://⑧.8.8.8/",
    "http://127。0。0。1/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://%31%32%37.0.0.1/",
    "http://127.0.0.%31/",
    # Users, backslashes, and what parsers disagree about
    "http://user@images.example.com/",
    "http://user:word@images.example.com/",
    "http://@images.example.com/",
    "http://:@images.example.com/",
    "http://images.example.com@127.0.0.1/",
    "http://images.example.com:80@127.0.0.1/",
    "http://127.0.0.1#@images.example.com/",
    "http://127.0.0.1?@images.example.com/",
    "http://images.example.com\\@127.0.0.1/",
    "http://127.0.0.1\\@images.example.com/",
    "http:\\\\127.0.0.1/",
    "http://images.example.com\\.evil/",
    "http:/127.0.0.1/",
    "http:127.0.0.1/",
    "http:///127.0.0.1/",
    "http:////127.0.0.1/",
    "//images.example.com/x.png",
    "images.example.com/x.png",
    "http://",
    "http:///",
    "http://?x",
    "http://#x",
    "http://.",
    "http://../",
    "http://a..b/",
    "http://.example.com/",
    "http://images.example.com./",
    "http://images.example.com../",
    "http://localhost./",
    "http://images%2eexample.com/",
    "http://images.example.com%00.evil/",
    "http://images.example.com%40evil/",
    "http://images.example.com%2fevil/",
    "http://images.example.com\uff0fevil/",
    "http://images.example.com\uff20evil/",
    "http://images.example.com\uff1a81/",
    "http://℀.example.com/",
    "http://exa\u00admple.com/",
    "http://exa\u200bmple.com/",
    "http://xn--/",
    "http://-a.example.com/",
    "http://a-.example.com/",
    "http://exa mple.com/",
    "http://exa<mple.com/",
    "http://example.com;evil/",
    "http://example.com|evil/",
    'http://example.com"/',
    f"http://{'a' * 64}.example.com/",
    f"http://{'.'.join(['a' * 50] * 6)}/",
    # Control characters and blanks
    " http://images.example.com/",
    "http://images.example.com/ ",
    "http://images.example.com/a b",
    "http://images.example.com/a\\b",
    "http://images.example.com/?a\\b",
    "http://images.example.com/a\tb",
    "http://images.example.com\n/",
    "http://images.example.com/\r\nHost: evil",
    "http://images.example.com/\x00",
    "http://images.example.com/\x7f",
    "http://images.example.com/\x85",
    "http://images.example.com/\u2028",
    "http://images.example.com/\ufeff",
    "http://images.example.com/\ud800",
    "ht\ntp://images.example.com/",
    # Ports
    "http://images.example.com:22/",
    "http://images.example.com:8080/",
    "https://images.example.com:8443/",
    "http://images.example.com:0/",
    "http://images.example.com:/",
    "http://images.example.com:080/",
    "http://images.example.com:65616/",
    "http://images.example.com:-80/",
    "http://images.example.com:+80/",
    "http://images.example.com:8 0/",
    "http://images.example.com:\uff18\uff10/",
    "http://images.example.com:80:80/",
    # Schemes
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "ftp://images.example.com/",
    "gopher://images.example.com:80/",
    "dict://images.example.com/",
    "data:image/png;base64,AAAA",
    "jar:http://images.example.com!/",
    "unix:///var/run/docker.sock",
    "http+unix://x/",
    "ws://images.example.com/",
    "javascript:alert(1)",
    "/etc/passwd",
    "../x.png",
    "",
    "http",
    f"http://images.example.com/{'a' * MAX_URL_CHARACTERS}",
]


def has_same_host(text: str, target: Target) -> bool:
    """Return whether another parser, Python's, reads the same host and port from the text."""
    other = urlsplit(text)
    host = other.hostname or ""
    name = URL.build(scheme="http", host=host).raw_host if not host.isascii() else host
    port = other.port or {"http": 80, "https": 443}[other.scheme]
    left, right = parse_ip(name or ""), target.address
    return (name == target.host or (left is not None and left == right)) and port == target.port


@pytest.mark.parametrize("url", REFUSED, ids=ascii)
@pytest.mark.parametrize("setting", ["public", "images.example.com"])
def test_invalid_urls_are_refused(url: str, setting: str) -> None:
    """The error has a next step, and no character that a terminal or a log would interpret."""
    with pytest.raises(InvalidValue) as caught:
        FetchPolicy.parse(setting).check_url(url)
    assert caught.value.message.isprintable()
    assert any(step in caught.value.message for step in ("write", "check", "remove", "send", "percent-encode"))


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://images.example.com/a.png", "images.example.com", 80),
        ("https://images.example.com/a.png?x=1&y=%2B", "images.example.com", 443),
        ("HTTPS://IMAGES.Example.COM:443/A", "images.example.com", 443),
        ("http://images.example.com:443/", "images.example.com", 443),
        ("http://images.example.com", "images.example.com", 80),
        ("http://images.example.com?x", "images.example.com", 80),
        ("http://my_bucket.s3.example.com/", "my_bucket.s3.example.com", 80),
        ("http://bücher.example/ü.png", "xn--bcher-kva.example", 80),
        ("http://\uff29\uff2d\uff21\uff27\uff25\uff33。example.com/", "images.example.com", 80),
        ("http://8.8.8.8/", "8.8.8.8", 80),
        ("http://[2606:4700:0:0::1111]/", "2606:4700::1111", 80),
        ("http://images.example.com/@user:word/", "images.example.com", 80),
        ("http://3com.example/", "3com.example", 80),
        ("http://127.0.0.1.nip.example/", "127.0.0.1.nip.example", 80),
    ],
)
def test_public_hosts(url: str, host: str, port: int) -> None:
    target = PUBLIC.check_url(url)
    assert (target.host, target.port, target.listed) == (host, port, False)
    assert (target.url.raw_host, target.url.port) == (host, port)


def test_a_trailing_dot_is_reported() -> None:
    with pytest.raises(InvalidValue, match="ends in a dot: remove it"):
        PUBLIC.check_url("http://images.example.com./")


def test_a_fragment_is_not_sent() -> None:
    assert str(PUBLIC.check_url("http://images.example.com/a.png#@b").url) == "http://images.example.com/a.png"


class TestSetting:
    def test_fetching_is_disabled(self) -> None:
        assert not FetchPolicy.parse("")
        assert not FetchPolicy.parse("  ")
        with pytest.raises(InvalidValue, match=r"data URI or base64, or ask the operator to set image_hosts"):
            FetchPolicy.parse("").check_url("http://images.example.com/")

    def test_exact_hosts(self) -> None:
        """This excludes subdomains and hosts with the same suffix."""
        allowed = FetchPolicy.parse("images.example.com, Store.Internal:9000 ,10.0.0.7:9000,[fd00::7],bücher.example")
        for url in (
            "http://images.example.com/",
            "https://images.example.com/",
            "http://store.internal:9000/",
            "http://10.0.0.7:9000/",
            "https://[fd00::7]/",
            "http://[fd00:0::7]/",
            "http://xn--bcher-kva.example/",
        ):
            assert allowed.check_url(url).listed
        for url in (
            "http://a.images.example.com/",
            "http://images.example.com.evil.example/",
            "http://evilimages.example.com/",
            "http://images.example.com:9000/",
            "http://store.internal/",
            "http://store.internal:9001/",
            "http://10.0.0.7/",
            "http://10.0.0.8:9000/",
            "http://[fd00::8]/",
            "http://93.184.215.14/",
        ):
            with pytest.raises(InvalidValue, match="image_hosts"):
                allowed.check_url(url)

    def test_public_beside_hosts(self) -> None:
        allowed = FetchPolicy.parse("Public,store.internal:9000")
        assert allowed.check_url("http://store.internal:9000/").listed
        assert not allowed.check_url("http://images.example.com/").listed
        with pytest.raises(InvalidValue, match="ports 80 and 443"):
            allowed.check_url("http://store.internal:9001/")
        with pytest.raises(InvalidValue, match="not on the public internet"):
            allowed.check_url("http://10.0.0.1/")

    @pytest.mark.parametrize(
        "setting",
        [
            "*",
            "*.example.com",
            "http://a.example",
            "a.example/x",
            "a.example?",
            "a.example#",
            "a@b.example",
            "a b",
            "a.example:",
            "a.example:0",
            "a.example:70000",
            "127.1",
            "a.example,",
            ",",
            "a..b",
            "a.example.",
            "fd00::7",
            "10.0.0.0/8",
            "[fe80::1%eth0]",
            "a\\b",
            "a\nb",
            "%61.example",
            "-a.example",
        ],
    )
    def test_invalid_hosts_are_refused_by_name(self, setting: str) -> None:
        with pytest.raises(ConfigError, match="image_hosts: ") as caught:
            FetchPolicy.parse(setting)
        assert any(step in caught.value.message for step in ("write", "check", "remove", "percent-encode"))


class TestPermits:
    @pytest.mark.parametrize(
        ("address", "public", "listed"),
        [
            ("8.8.8.8", True, True),
            ("127.0.0.1", False, True),
            ("10.0.0.1", False, True),
            ("fd00::7", False, True),
            ("169.254.169.254", False, False),
            ("::ffff:169.254.169.254", False, False),
            ("0.0.0.0", False, False),
            ("ff02::1", False, False),
        ],
    )
    def test_permitted_addresses_depend_on_the_rule(self, address: str, public: bool, listed: bool) -> None:
        """A listed name may be inside, but never a metadata address."""
        judged = parse_ip(address)
        assert judged is not None
        assert PUBLIC.check_url("http://a.example/").permits(judged) == public
        assert FetchPolicy.parse("a.example").check_url("http://a.example/").permits(judged) == listed

    def test_an_address_may_be_listed_itself(self) -> None:
        target = FetchPolicy.parse("169.254.7.7").check_url("http://169.254.7.7/")
        assert target.address is not None
        assert target.permits(target.address)


HOSTS = st.one_of(
    st.sampled_from(["images.example.com", "127.0.0.1", "8.8.8.8", "[::1]", "0x7f.1", "2130706433", "①.example", ""]),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.text(max_size=12),
)
MARKS = st.sampled_from(
    ["", "@", ":", ":80", "\\", "/", "?", "#", "%", "%40", "\t", "\r\n", ".", "。", "\uff0f", "\uff20", ";", "|"]
)


@given(
    st.sampled_from(["http", "https", "HTTP", "file", ""]),
    st.sampled_from(["://", ":/", ":///", ":\\\\", "//"]),
    st.lists(st.one_of(HOSTS, MARKS), max_size=6),
)
@example("http", "://", ["images.example.com", "\\", "@", "127.0.0.1"])
@example("http", "://", ["8.8.8.8", "#", "@", "127.0.0.1"])
def test_the_fetched_url_is_the_checked_url(scheme: str, mark: str, parts: list[str]) -> None:
    """If a URL passes, this parser and another read the checked host and port from it."""
    text = scheme + mark + "".join(parts)
    try:
        target = PUBLIC.check_url(text)
    except InvalidValue:
        return
    again = URL(str(target.url))
    assert (again.raw_host, again.port) == (target.host, target.port) == (target.url.raw_host, target.url.port)
    assert has_same_host(text, target)
    assert again.scheme in {"http", "https"}
    assert again.raw_user is None
    assert target.host.isascii()
    assert target.port in {80, 443}
    assert target.address is None or is_public(target.address)


@given(st.text(max_size=40))
def test_any_text_is_checked(text: str) -> None:
    """It is refused with a message or passes unchanged."""
    for url in (text, f"http://{text}", f"http://images.example.com/{text}"):
        try:
            target = PUBLIC.check_url(url)
        except InvalidValue as error:
            assert error.message
        else:
            assert has_same_host(url, target)
