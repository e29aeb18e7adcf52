"""Lines of batches: parsing, checking, results, and when a request is tried again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.batches.lines import (
    MAX_ERRORS,
    Answer,
    BadLine,
    choose_pause,
    encode_answer,
    encode_failure,
    parse_line,
    recover_ids,
    scan_file,
    take_lines,
    unfinished_lines,
)
from tests.unit.batches.kit import ENDPOINT, request_file, request_line

LIMIT = 1000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def scan(tmp_path: Path, content: bytes, *done: str) -> tuple[int, list[tuple[Any, str]], bytes]:
    path = tmp_path / "content"
    path.write_bytes(content)
    total, errors, finished = scan_file(path, ENDPOINT, LIMIT, set(done))
    return total, [(error.line, error.code) for error in errors], bytes(finished)


@given(st.text(min_size=1, max_size=20), st.dictionaries(st.text().filter(lambda key: key != "stream"), VALUES))
def test_a_line_keeps_its_body(custom_id: str, body: dict[str, Any]) -> None:
    """Whatever JSON the body is, it reaches the route unchanged."""
    try:
        text = json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}).encode()
        text.decode().encode()
        json.loads(text)
    except UnicodeEncodeError:
        return
    line = parse_line(text, 3, ENDPOINT)
    assert (line.number, line.custom_id, json.loads(line.body)) == (3, custom_id, body)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_parser(text: bytes) -> None:
    """Bytes that are no request are a BadLine, and nothing else."""
    with pytest.raises(BadLine):
        parse_line(text, 0, ENDPOINT)


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (b'{"custom_id": "a"}', "invalid_request", None),
        (request_line("a", method=7), "invalid_request", None),
        (request_line(""), "invalid_custom_id", "custom_id"),
        (request_line("a" * 513), "invalid_custom_id", "custom_id"),
        (request_line("a", method="GET"), "invalid_method", "method"),
        (request_line("a", url="/v1/completions"), "mismatched_endpoint", "url"),
        (request_line("a", body=[]), "invalid_body", "body"),
        (request_line("a", body={"stream": True}), "invalid_body", "body.stream"),
    ],
)
def test_bad_lines(line: bytes, code: str, param: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        parse_line(line, 0, ENDPOINT)
    assert (caught.value.error.code, caught.value.error.param) == (code, param)


def test_a_file_is_checked_whole(tmp_path: Path) -> None:
    """Every bad line is reported by its number in the file, where blank lines count; so are repeated ids."""
    content = request_line("a") + b"\n{\n" + request_line("a") + b"  \n" + request_line("b" * 2000) + request_line("c")
    assert scan(tmp_path, content) == (
        5,
        [(3, "invalid_json_line"), (4, "duplicate_custom_id"), (6, "line_too_long")],
        bytes(5),
    )


def test_limits_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request, too many of them, and more errors than are reported."""
    assert scan(tmp_path, b"\n \n")[1] == [(None, "empty_file")]
    assert len(scan(tmp_path, b"{\n" * 500)[1]) == MAX_ERRORS
    monkeypatch.setattr("shoal.batches.lines.MAX_LINES", 2)
    assert scan(tmp_path, request_file("a", "b"))[1] == []
    assert scan(tmp_path, request_file("a", "b", "c"))[1] == [(None, "too_many_requests")]


def test_finished_lines_are_left_out(tmp_path: Path) -> None:
    """Those with a result are marked; the others are read in their order, a few at a time."""
    total, errors, finished = scan(tmp_path, b"\n" + request_file("a", "b", "c", "d"), "b")
    assert (total, errors, finished) == (4, [], b"\0\1\0\0")
    lines = unfinished_lines(tmp_path / "content", ENDPOINT, LIMIT, bytearray(finished))
    taken = []
    while some := take_lines(lines, 2, 1000):
        taken.append([(line.number, line.custom_id) for line in some])
    assert taken == [[(0, "a"), (2, "c")], [(3, "d")]]
    lines = unfinished_lines(tmp_path / "content", ENDPOINT, LIMIT, bytearray(finished))
    assert len(take_lines(lines, 9, 1)) == 1


@pytest.mark.parametrize(
    ("body", "shown"),
    [(b'{"a": 1}', {"a": 1}), (b'{\n "a": 1\n}', {"a": 1}), (b"<html>\n\xff", "<html>\n\ufffd"), (b"", "")],
)
def test_an_answer_is_one_line(body: bytes, shown: Any) -> None:
    """A reply of a server behind may be JSON of several lines, or none."""
    line = encode_answer("batch_req_1", 'a"b', Answer(502, "req-1", body))
    assert line.count(b"\n") == 1
    response = {"status_code": 502, "request_id": "req-1", "body": shown}
    assert json.loads(line) == {"id": "batch_req_1", "custom_id": 'a"b', "response": response, "error": None}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=5), st.data())
def test_results_survive_a_torn_end(tmp_path_factory: pytest.TempPathFactory, written: list[str], data: Any) -> None:
    """A file of results that was cut anywhere has its whole lines, and is cut to them."""
    path = tmp_path_factory.mktemp("torn") / "output"
    lines = [encode_failure("id", custom_id, "c", "m") for custom_id in written]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    count = whole[:cut].count(b"\n")
    assert list(recover_ids(path)) == written[:count]
    assert path.read_bytes() == b"".join(lines[:count])
    assert list(recover_ids(path)) == written[:count]


@pytest.mark.parametrize(
    ("answer", "tries", "pause"),
    [
        (Answer(200, "", b""), 1, None),
        (Answer(400, "", b""), 1, None),
        (Answer(500, "", b""), 1, None),
        (Answer(429, "", b"", 7.0), 1, 7.0),
        (Answer(429, "", b"", 0.0), 1, 0.1),
        (Answer(503, "", b"", 3600.0), 1000, 60.0),
        (Answer(503, "", b""), 1, 1.0),
        (Answer(503, "", b""), 1000, 60.0),
        (Answer(503, "", b"", may_retry=False), 1, None),
        (Answer(504, "", b""), 2, 2.0),
        (Answer(504, "", b""), 3, None),
        (Answer(502, "", b"", may_retry=False), 1, None),
    ],
)
def test_when_a_request_is_tried_again(answer: Answer, tries: int, pause: float | None) -> None:
    """Overload always, with the pause of the reply; a timeout or a crash a few times; nothing else."""
    assert choose_pause(answer, tries) == pause
