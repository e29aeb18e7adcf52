"""What a message may hold is checked before protobuf makes objects of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Malformed, RequestError, TooManyInputs
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve.message_limits import SMALL, check_infer_request

PADDING = b"x" * SMALL
HEAD = pb.ModelInferRequest(id=PADDING.decode()).SerializeToString()
"""Makes a message large enough to be checked."""


def tensor(data: bytes) -> bytes:
    """Return the field of one input."""
    length = len(data)
    size = bytearray()
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return b"\x2a" + bytes([*size, length]) + data


@pytest.mark.parametrize(
    "fields",
    [
        b"\x2a\x00" * 65,  # inputs
        b"\x32\x00" * 65,  # outputs
        b"\x3a\x00" * 65,  # raw contents
        b"\x22\x00" * 257,  # parameters
        b"\x78\x00" * 17,  # an unknown field
        tensor(b"\x18\x01" * 9),  # dimensions, one by one
        tensor(b"\x1a\x7f" + b"\x01" * 127),  # and packed
        tensor(b"\x22\x00" * 17),  # parameters of a tensor
        tensor(b"\x2a\x80\x80\x01" + b"\x42\x00" * 8_192),  # texts
        tensor(b"\x2a\x00" * 2),  # contents
        tensor(b"\x2a\x85\x80\x10\x1a\x81\x80\x10" + b"\x01" * 262_145),  # int64_contents
    ],
)
def test_too_much_is_rejected(fields: bytes) -> None:
    with pytest.raises(TooManyInputs):
        check_infer_request(HEAD + fields)


def test_millions_of_fields_are_rejected_at_once() -> None:
    began = time.process_time()
    with pytest.raises(TooManyInputs):
        check_infer_request(b"\x2a\x00" * 8_000_000)
    assert time.process_time() - began < 1.0  # parsing them takes minutes


@pytest.mark.parametrize("fields", [b"\x2a\xff", b"\x2a\x05ab", b"\x2b", b"\xff" * 12, b"\x09abc", b"\x2a"])
def test_invalid_bytes_are_rejected(fields: bytes) -> None:
    with pytest.raises(Malformed):
        check_infer_request(HEAD + fields)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_accepted_or_rejected(data: bytes) -> None:
    """No other error, and what protobuf can parse is never called malformed."""
    try:
        check_infer_request(HEAD + data)
    except Malformed:
        with pytest.raises(Exception, match=r"."):
            pb.ModelInferRequest.FromString(HEAD + data)
    except RequestError:
        pass


@given(
    texts=st.lists(st.binary(max_size=40), max_size=50),
    shape=st.lists(st.integers(0, 2**62), max_size=8),
    floats=st.lists(st.floats(width=32), max_size=300),
    raw=st.lists(st.binary(max_size=3000), max_size=4),
    names=st.dictionaries(st.text(max_size=20), st.integers(0, 2**40), max_size=20),
)
def test_usual_requests_pass(
    texts: list[bytes], shape: list[int], floats: list[float], raw: list[bytes], names: dict[str, int]
) -> None:
    request = pb.ModelInferRequest(id=PADDING.decode(), model_name="m", raw_input_contents=raw)
    one = request.inputs.add(name="text", datatype="BYTES", shape=shape)
    one.contents.bytes_contents.extend(texts)
    request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.extend(floats)
    for name, value in names.items():
        request.parameters[name].int64_param = value
    check_infer_request(request.SerializeToString())


def test_a_large_text_passes() -> None:
    request = pb.ModelInferRequest(raw_input_contents=[b"a" * 16_000_000])
    check_infer_request(request.SerializeToString())
    typed = pb.ModelInferRequest()
    typed.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a" * 5_000_000)
    check_infer_request(typed.SerializeToString())
