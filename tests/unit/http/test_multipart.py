"""Multipart forms: valid forms are parsed back into their parts, and all other input is refused with a message."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TooManyInputs
from shoal.http import multipart
from shoal.http.multipart import BadForm, Part, is_form, parse_parts

TYPE = b"multipart/form-data; boundary=xyz"
DISPOSITION = 'Content-Disposition: form-data; name="a"\r\n'


def read(body: bytes, content_type: bytes = TYPE, max_parts: int = 100) -> list[Part]:
    return asyncio.run(parse_parts(content_type, body, max_parts=max_parts))


def field(headers: str, data: bytes = b"1") -> bytes:
    return b"--xyz\r\n" + headers.encode() + b"\r\n" + data + b"\r\n"


def form(*fields: bytes) -> bytes:
    return b"".join(fields) + b"--xyz--\r\n"


def encode_form(parts: list[Part], boundary: bytes) -> bytes:
    """Encode parts as a client does."""
    lines: list[bytes] = []
    for part in parts:
        name = part.name.replace("\\", "\\\\").replace('"', '\\"')
        file = '; filename="x.png"\r\nContent-Type: image/png' if part.is_file else ""
        head = f'Content-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        lines.append(b"--" + boundary + b"\r\n" + head + part.data + b"\r\n")
    return b"".join(lines) + b"--" + boundary + b"--\r\n"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\\"), min_size=1, max_size=12).filter(
    lambda name: name == name.strip(" \t")
)
PIECES = st.sampled_from([b"\r\n", b"\r", b"--", b"-", b"--xy", b"\r\n--xy", b"xyz", b"\x00", b"\xff"])
DATA = st.binary(max_size=40) | st.lists(PIECES, max_size=8).map(b"".join)
PARTS = st.lists(
    st.builds(Part, NAMES, DATA.filter(lambda data: b"\r\n--xyz" not in b"\r\n" + data), st.booleans()), max_size=6
)


@given(parts=PARTS, turn=st.integers(1, 64))
def test_written_parts_are_read_back(parts: list[Part], turn: int) -> None:
    """Names, bytes and order come back, wherever the body is cut for its turns, also where data looks like the
    boundary."""
    body = encode_form(parts, b"xyz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipart, "_TURN", turn)
        patch.setattr(multipart, "_SCAN_BYTES", turn)
        assert read(body, max_parts=len(parts)) == parts


@given(parts=PARTS, data=st.data())
def test_a_truncated_form_is_refused(parts: list[Part], data: st.DataObject) -> None:
    """Every prefix without the last boundary is refused."""
    body = encode_form(parts, b"xyz")
    end = data.draw(st.integers(0, len(body) - len(b"-\r\n") - 1))
    with pytest.raises(BadForm):
        read(body[:end])


@given(body=st.binary(max_size=80) | st.lists(PIECES | st.just(b"--xyz\r\n"), max_size=12).map(b"".join))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    """They are either a form or refused."""
    try:
        assert isinstance(read(body), list)
    except BadForm as error:
        assert error.message.endswith((".", "..."))


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=" + b"x" * 71,
        b"multipart/form-data; boundary=a\x00b",
        b"multipart/form-data; charset=utf-8",
    ],
)
def test_no_boundary(content_type: bytes) -> None:
    """None, an empty one and an invalid one."""
    with pytest.raises(BadForm, match="has no boundary; let the HTTP client set"):
        read(form(field(DISPOSITION)), content_type)


def test_a_quoted_boundary() -> None:
    """Java clients quote boundaries because of special characters."""
    body = b'--a:b=c\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--a:b=c--'
    assert read(body, b'Multipart/Form-Data; charset=utf-8; boundary="a:b=c"') == [Part("a", b"1")]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ("Content-Type: image/png\r\n", "Part 0 of the form has no name"),
        ("Content-Disposition: form-data\r\n", "Part 0 of the form has no name"),
        ('Content-Disposition: attachment; name="a"\r\n', "Part 0 of the form has no name"),
        (DISPOSITION + "Content-Transfer-Encoding: base64\r\n", "send the raw bytes of a file."),
        ("bad header\r\n", "could not be read as multipart/form-data"),
        (DISPOSITION + "".join(f"X-{number}: 1\r\n" for number in range(8)), "Maximum header count exceeded"),
        (DISPOSITION + f"X: {'y' * 3000}\r\n", "Maximum header size exceeded"),
    ],
)
def test_bad_parts(headers: str, message: str) -> None:
    """Each error message names the fault, and the same part without the fault is accepted."""
    assert read(form(field(DISPOSITION + "Content-Transfer-Encoding: binary\r\n"))) == [Part("a", b"1")]
    with pytest.raises(BadForm, match=message):
        read(form(field(headers)))


def test_names_and_texts_that_are_not_utf_8() -> None:
    """An invalid name refuses the form, an invalid field only its own access."""
    with pytest.raises(BadForm, match="name of part 1 of the form is not UTF-8"):
        read(form(field(DISPOSITION), b'--xyz\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n1\r\n'))
    (part,) = read(form(field(DISPOSITION, b"\xff")))
    with pytest.raises(BadForm, match="'a' is not UTF-8; send a file with a filename"):
        part.text()


def test_file_parts() -> None:
    """A filename makes one, or a type of images or bytes; a file that nobody chose is no part."""
    named = 'Content-Disposition: form-data; name="a"; filename="{}"\r\n'
    assert read(form(field(named.format("x")))) == [Part("a", b"1", True)]
    assert read(form(field(DISPOSITION + "Content-Type: image/png\r\n"))) == [Part("a", b"1", True)]
    assert read(form(field(DISPOSITION + "content-type: application/octet-stream\r\n"))) == [Part("a", b"1", True)]
    assert read(form(field(DISPOSITION + "Content-Type: text/plain\r\n"))) == [Part("a", b"1")]
    assert read(form(field(named.format(""), b""))) == []
    assert read(form(field(named.format(""), b"1"))) == [Part("a", b"1", True)]


def test_the_number_of_parts_is_bounded() -> None:
    """Empty parts count; the maximum number is accepted."""
    assert len(read(form(*[field(DISPOSITION)] * 3), max_parts=3)) == 3
    with pytest.raises(TooManyInputs, match="more than 3 parts; split"):
        read(form(*[field(DISPOSITION)] * 4), max_parts=3)


def test_boundaries_inside_of_a_part_are_bounded() -> None:
    """Each costs as much as a part."""
    assert read(form(field(DISPOSITION, b"\r\n--xyzzy" * 2)), max_parts=3) == [Part("a", b"\r\n--xyzzy" * 2)]
    for look in (1, 7, 8, 1000):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TooManyInputs, match="more than 3 parts; split"):
            patch.setattr(multipart, "_SCAN_BYTES", look)
            read(form(field(DISPOSITION, b"\r\n--xyzzy" * 3)), max_parts=3)


async def test_the_loop_runs_during_parsing() -> None:
    """A large form is parsed over several loop turns."""
    iterations = 0

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    (part,) = await parse_parts(TYPE, form(field(DISPOSITION, b"x" * 1_000_000)), max_parts=1)
    task.cancel()
    assert len(part.data) == 1_000_000
    assert iterations > 20


def test_a_client_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The parser's warnings are discarded."""
    with caplog.at_level(logging.INFO), pytest.raises(BadForm):
        read(b"nonsense")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("content_type", "form"),
    [(TYPE, True), (b" Multipart/Form-Data ", True), (b"application/json", False), (b"multipart/mixed", False)],
)
def test_is_form(content_type: bytes, form: bool) -> None:
    """Only the name counts, in any case."""
    assert is_form(content_type) is form
