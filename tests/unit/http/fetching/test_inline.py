"""What a text is: a link, an image inside, or nothing that is read here."""

from __future__ import annotations

import base64
import tracemalloc
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EmptyInput, InvalidValue, RequestError
from shoal.http.fetching.inline import MAX_ESCAPED, MIN_BYTES, Link, parse_image

IMAGE = bytes(range(256)) + b"\xfb\xff\xbf"
"""Its base64 has "+" and "/" in it, and padding."""

ENCODED = base64.b64encode(IMAGE + b"!").decode()
URLSAFE = base64.urlsafe_b64encode(IMAGE + b"!").decode()
WRAPPED = base64.encodebytes(IMAGE + b"!").decode()


def test_the_samples_cover_both_alphabets() -> None:
    assert {"+", "/", "="} <= set(ENCODED)
    assert {"-", "_"} <= set(URLSAFE)


@pytest.mark.parametrize(
    "url", ["http://a.example/x.png", "https://a.example", "HTTP://A.example/", "http:/x", "https:"]
)
def test_links(url: str) -> None:
    """They stay unchanged: the fetcher checks them."""
    assert parse_image(url) == Link(url)
    assert parse_image(f" {url}\n") == Link(url)


@pytest.mark.parametrize(
    "text",
    [
        f"data:image/png;base64,{ENCODED}",
        f"DATA:IMAGE/PNG;BASE64,{ENCODED}",
        f"data:;base64,{ENCODED}",
        f"data:application/octet-stream;base64,{ENCODED}",
        f"data:image/vnd.microsoft.icon;base64,{ENCODED}",
        f"data:image/png;charset=utf-8;name=x;base64,{ENCODED}",
        f"data:image/png; base64 ,{ENCODED}",
        f"data:image/png;base64,{ENCODED.rstrip('=')}",
        f"data:image/png;base64,{URLSAFE}",
        f"data:image/png;base64,{URLSAFE.rstrip('=')}",
        f"data:image/png;base64,{WRAPPED}",
        f"data:image/png;base64, {ENCODED[:40]} \t\r\n{ENCODED[40:]} ",
        f"data:image/png;base64,{ENCODED.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
        f"data:image/png;base64,{ENCODED[:40]}%0D%0A{ENCODED[40:]}",
        f"\n data:image/png;base64,{ENCODED}\n",
        f"data:image/png,{quote_from_bytes(IMAGE + b'!')}",
        f"data:,{''.join(f'%{byte:02x}' for byte in IMAGE)}! \n",
        ENCODED,
        URLSAFE,
        WRAPPED,
        ENCODED.rstrip("="),
        WRAPPED.replace("\n", "\r\n"),
    ],
)
def test_images_inside(text: str) -> None:
    assert parse_image(text) == IMAGE + b"!"


@pytest.mark.parametrize(
    "text",
    [
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "ftp://a.example/x.png",
        "s3://bucket/x.png",
        "blob:http://a.example/1",
        "javascript:alert(1)",
        "C:\\pictures\\x.png",
        "about:blank",
        "urn:x",
    ],
)
def test_other_schemes_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidValue, match=f"never read from '{text.partition(':')[0].lower()}'.*data URI"):
        parse_image(text)


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "/etc/hosts",
        "/proc/self/environ",
        "etc/passwd",
        "~/x.png",
        "./x.png",
        "../../x.png",
        "x.png",
        "\\\\host\\share\\x.png",
        "//a.example/x.png",
        "a.example/x.png",
        "a photo of a cat",
        "cat",
        "Katze",
        "a photo of a cat and of a dog and of a bird and of a fish",
        "a\tphoto\tof\ta\tcat\tand\tof\ta\tdog\tand\tof\ta\tbird",
        "ein schönes Bild",
        "ä" * 100,
        "{}",
        "<svg></svg>",
        "\x00\x01",
        f"{ENCODED}==",
        f"={ENCODED}",
        f"{ENCODED[:20]}={ENCODED[20:]}",
        f"{ENCODED}*",
        f"{ENCODED[:41]}",
        "=" * 40,
        "====",
    ],
)
def test_other_texts_are_refused_with_the_next_step(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"not an image, and files are never opened.*send an http"):
        parse_image(text)


def test_a_file_that_exists_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.png").write_bytes(IMAGE)
    (tmp_path / "abcd").write_bytes(IMAGE)
    monkeypatch.chdir(tmp_path)
    for text in ("x.png", str(tmp_path / "x.png"), "abcd", f"file://{tmp_path}/x.png"):
        with pytest.raises(InvalidValue):
            parse_image(text)


@pytest.mark.parametrize("text", ["", " ", "\n\t\r"])
def test_nothing_is_an_empty_input(text: str) -> None:
    with pytest.raises(EmptyInput, match="send an http"):
        parse_image(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("data:image/png;base64", "no comma"),
        (f"data:image/png;{'x' * 300},AAAA", "no comma"),
        ("data:text/html;base64,AAAA", "not an image"),
        ("data:text/html,<script>", "not an image"),
        ("data:image/;base64,AAAA", "not an image"),
        ("data:image;base64,AAAA", "not an image"),
        ("data:video/mp4;base64,AAAA", "not an image"),
        ("data:image/svg+xml;base64,AAAA", "SVG"),
        ("data:image/SVG+xml,<svg/>", "SVG"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png,", "no data"),
        ("data:image/png;base64,A", "not base64"),
        ("data:image/png;base64,AA*A", "not base64"),
        ("data:image/png;base64,AA%41A", "not base64"),
        ("data:image/png;base64,äöü", "not base64"),
        ("data:image/png;base64,AAAA====", "not base64"),
        ("data:image/png,%", "percent-encoded"),
        ("data:image/png,%4", "percent-encoded"),
        ("data:image/png,%zz", "percent-encoded"),
        ("data:image/png,ä", "percent-encoded"),
        (f"data:image/png,{'a' * (MAX_ESCAPED + 1)}", "use base64"),
    ],
)
def test_data_uris_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why) as caught:
        parse_image(text)
    assert any(step in caught.value.message for step in ("write", "send", "use"))


class TestLimits:
    @pytest.mark.parametrize("form", ["{}", "data:image/png;base64,{}"])
    def test_base64_to_the_byte(self, form: str) -> None:
        for size in (99, 100, 101):
            text = form.format(base64.b64encode(bytes(size)).decode())
            assert parse_image(text, max_bytes=size) == bytes(size)
            with pytest.raises(InvalidValue, match=f"limit of {size - 1} bytes: send a smaller one"):
                parse_image(text, max_bytes=size - 1)

    def test_escapes_to_the_byte(self) -> None:
        text = f"data:image/png,{quote_from_bytes(bytes(100))}"
        assert parse_image(text, max_bytes=100) == bytes(100)
        with pytest.raises(InvalidValue, match="limit of 99 bytes"):
            parse_image(text, max_bytes=99)

    def test_the_smallest(self) -> None:
        """A data URI says that it is an image, and may hold any."""
        assert parse_image(base64.b64encode(bytes(MIN_BYTES)).decode()) == bytes(MIN_BYTES)
        short = base64.b64encode(bytes(MIN_BYTES - 1)).decode()
        assert parse_image(f"data:image/png;base64,{short}") == bytes(MIN_BYTES - 1)
        with pytest.raises(InvalidValue, match="not an image"):
            parse_image(short)

    @pytest.mark.parametrize(
        "text",
        [
            "A" * 100_000_000,
            "data:image/png;base64," + "A" * 42_000_000,
            "data:image/png;base64," + "%2B" * 14_000_000 + "*",
            "data:image/png;base64," + "-\n" * 20_000_000 + "*",
            "-" * 27_962_023 + "*",
            " " * 1000 + "data:image/png;base64," + "-_\n" * 9_300_000 + "*\n\n",
            "-" * 28_000_000,
            "\n" * 1024 + "A" * 27_962_028,
            " " * 42_000_000,
            "data:," + "%00" * 349_000 + "%",
            "data:," + "%00" * 14_000_000,
        ],
        ids=[
            "base64",
            "data-uri",
            "escaped",
            "wrapped",
            "wrong",
            "wrapped-wrong",
            "over",
            "around",
            "blanks",
            "escapes",
            "more-escapes",
        ],
    )
    def test_refusals_use_little_memory(self, text: str) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(RequestError):
                parse_image(text)
            assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        finally:
            tracemalloc.stop()


@given(st.binary(min_size=MIN_BYTES, max_size=200), st.booleans(), st.booleans(), st.integers(1, 90))
def test_base64_round_trip(data: bytes, urlsafe: bool, padded: bool, width: int) -> None:
    encoded = (base64.urlsafe_b64encode if urlsafe else base64.b64encode)(data).decode()
    encoded = encoded if padded else encoded.rstrip("=")
    wrapped = "\n".join(encoded[i : i + width] for i in range(0, len(encoded), width))
    for text in (encoded, wrapped, f"data:image/webp;base64,{wrapped}"):
        assert parse_image(text) == data


@given(st.binary(min_size=1, max_size=200))
def test_escapes_round_trip(data: bytes) -> None:
    assert parse_image(f"data:image/gif,{quote_from_bytes(data)}") == data


@given(st.text(max_size=80))
def test_any_text_has_an_answer(text: str) -> None:
    for each in (text, f"data:{text}", f"data:image/png;base64,{text}", f"data:image/png,{text}"):
        try:
            image = parse_image(each, max_bytes=40)
        except RequestError as error:
            assert error.message
        else:
            assert isinstance(image, Link) or 0 < len(image) <= 40
