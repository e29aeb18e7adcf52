"""Which client headers are sent, and to which hosts."""

from __future__ import annotations

import pytest

from shoal.errors import InvalidValue
from shoal.http.fetching.headers import MAX_CHARACTERS, MAX_HEADERS, check_download_headers


def test_sane_headers_go_to_listed_hosts() -> None:
    headers = {"Authorization": "Bearer sk-1", "X-Key": "a b", "cookie": "a=1; b=2", "User-Agent": "mine", "x-none": ""}
    assert check_download_headers(headers, listed=True) == headers


def test_headers_go_only_to_listed_hosts() -> None:
    """An empty set of headers is never refused."""
    assert check_download_headers({}, listed=False) == {}
    with pytest.raises(InvalidValue, match="only to hosts that image_hosts lists") as caught:
        check_download_headers({"authorization": "secret"}, listed=False)
    assert caught.value.param == "image_download_headers"
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "host",
        "Connection",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
        "Proxy-Authorization",
        "Proxy-Connection",
        "Content-Length",
        "Content-Type",
        "Content-Encoding",
        "Expect",
        "Range",
        "If-Range",
        "If-None-Match",
        "Accept-Encoding",
        "Forwarded",
        "Via",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Real-IP",
        "X-HTTP-Method-Override",
        "X-Method-Override",
        "HTTP2-Settings",
    ],
)
def test_reserved_headers_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"cannot contain {name}"):
        check_download_headers({name: "x"}, listed=True)


@pytest.mark.parametrize("name", ["", " ", "a b", "a:", "a\r\nHost", "ä", "a\x00", "(a)", "Host ", " Host", ":path"])
def test_names_must_be_tokens(name: str) -> None:
    with pytest.raises(InvalidValue, match="invalid header"):
        check_download_headers({name: "x"}, listed=True)


@pytest.mark.parametrize("value", ["a\r\nHost: evil", "a\nb", "a\rb", "a\x00", "a\x7f", "ä", "a\tb", " a", "a ", "a\n"])
def test_invalid_values_are_refused(value: str) -> None:
    with pytest.raises(InvalidValue, match="invalid header") as caught:
        check_download_headers({"x-key": value}, listed=True)
    assert repr(value) not in caught.value.message
    assert caught.value.message.isprintable()


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(InvalidValue, match="X-KEY twice"):
        check_download_headers({"x-key": "1", "X-KEY": "2"}, listed=True)


def test_number_and_size_are_limited() -> None:
    assert len(check_download_headers({f"x-{i}": "1" for i in range(MAX_HEADERS)}, listed=True)) == MAX_HEADERS
    with pytest.raises(InvalidValue, match="send fewer"):
        check_download_headers({f"x-{i}": "1" for i in range(MAX_HEADERS + 1)}, listed=True)
    assert check_download_headers({"x": "a" * (MAX_CHARACTERS - 1)}, listed=True)
    with pytest.raises(InvalidValue, match="send fewer"):
        check_download_headers({"x": "a" * MAX_CHARACTERS}, listed=True)
