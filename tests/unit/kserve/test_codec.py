"""Arrays and tensors: round trips, equality with tritonclient's own encoder, and rejected inputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from shoal.errors import InputRejected, InternalError, Unsupported
from shoal.kserve import codec
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array
from tests.fakes import triton_codec

NUMERIC = sorted(codec.DTYPES)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
WORDS = st.one_of(st.binary(max_size=300), st.text(max_size=80))


def arrays(datatype: str) -> st.SearchStrategy[Array]:
    return hnp.arrays(codec.DTYPES[datatype], SHAPES)


def byte_arrays() -> st.SearchStrategy[Array]:
    return st.lists(WORDS, max_size=12).map(objects)


def objects(values: list[Any]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def read(answer: pb.ModelInferResponse) -> dict[str, Array]:
    return codec.read_tensors(answer.outputs, answer.raw_output_contents)


def through(datatype: str, array: Array, *, typed: bool) -> Array:
    """Send an array through a response and read it back."""
    answer = pb.ModelInferResponse()
    triton_codec.add_output(answer, "out", datatype, array, typed=typed)
    return read(pb.ModelInferResponse.FromString(answer.SerializeToString()))["out"]


@pytest.mark.parametrize("datatype", NUMERIC)
@given(data=st.data())
def test_numbers_come_back_to_the_bit(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(datatype))
    assert same(through(datatype, array, typed=False), array)


@pytest.mark.parametrize("datatype", sorted(set(codec.TYPED) - {"BYTES", "FP32", "FP64"}))
@given(data=st.data())
def test_typed_contents_come_back_too(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(datatype))
    assert same(through(datatype, array, typed=True), array)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@given(data=st.data())
def test_typed_floats_come_back_and_nan_stays_nan(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(datatype))
    back = through(datatype, array, typed=True)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("typed", [False, True])
@given(array=byte_arrays())
def test_texts_and_bytes_come_back_as_bytes(typed: bool, array: Array) -> None:
    back = through("BYTES", array, typed=typed)
    assert back.shape == array.shape
    assert back.tolist() == [each.encode() if isinstance(each, str) else each for each in array]


@given(array=byte_arrays())
def test_bytes_are_laid_out_as_tritonclient_does(array: Array) -> None:
    blob = codec.to_blob(array)
    theirs = serialize_byte_tensor(array)
    assert blob == (theirs.item() if theirs.size else b"")
    assert codec.from_blob(blob, array.shape).tolist() == deserialize_bytes_tensor(blob).tolist()


def test_bytes_need_not_be_utf8_and_keep_their_zeros() -> None:
    array = objects([b"\xff\xfe\x00", b"", b"\x00\x00"]).reshape(3, 1)
    assert through("BYTES", array, typed=False).tolist() == array.tolist()


@pytest.mark.parametrize("array", [np.array(["ab", "c"]), np.array([b"ab", b"c"]), objects(["ab", b"c"])])
def test_any_array_of_texts_will_do(array: Array) -> None:
    assert codec.to_raw("BYTES", array) == b"\x02\x00\x00\x00ab\x01\x00\x00\x00c"


@given(bits=hnp.arrays(np.dtype("<u4"), st.integers(0, 40)))
def test_bf16_rounds_as_the_reference_does(bits: Array) -> None:
    values = bits.view("<f4")
    ours = codec.to_bf16(values)
    with np.errstate(invalid="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).view("<u2")
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(codec.from_bf16(ours)[nan]).all()
    assert np.array_equal(np.signbit(codec.from_bf16(ours)), np.signbit(values))


@given(halves=hnp.arrays(np.dtype("<u2"), SHAPES))
def test_bf16_values_are_exact_in_float32(halves: Array) -> None:
    whole = codec.from_bf16(halves)
    assert whole.dtype == np.float32 and whole.shape == halves.shape
    back = codec.to_bf16(whole)
    nan = np.isnan(whole)
    assert np.array_equal(back[~nan], halves[~nan])
    assert np.isnan(codec.from_bf16(back)[nan]).all()


def test_bf16_goes_over_the_wire_as_float32_here() -> None:
    array = np.array([[1.0, -2.5], [np.inf, np.nan]], np.float32)
    back = through("BF16", array, typed=False)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (3.4028235e38, 0x7F80), (-0.0, 0x8000)],
)
def test_bf16_takes_the_even_neighbour_of_a_tie(value: float, bits: int) -> None:
    assert codec.to_bf16(np.array(value, np.float32)).item() == bits


def test_numbers_are_converted_to_the_requested_datatype() -> None:
    ids = np.array([[1, 2], [3, 4]], np.int64)
    assert codec.to_raw("INT32", ids) == ids.astype("<i4").tobytes()
    assert codec.to_raw("UINT64", ids) == ids.tobytes()
    assert codec.to_raw("FP32", ids) == ids.astype("<f4").tobytes()
    assert codec.to_raw("FP16", np.array([0.1], np.float32)) == np.array([0.1], "<f2").tobytes()
    assert codec.to_raw("INT32", ids.T) == ids.T.astype("<i4").tobytes()
    assert codec.to_raw("FP32", np.array([1.5], ">f4")) == np.array([1.5], "<f4").tobytes()


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("UINT64", np.array([-1])),  # a negative seed
        ("INT32", np.array([2**31])),
        ("INT8", np.array([5, -129])),
        ("UINT8", np.array([256], np.uint16)),
        ("INT64", np.array([2**63], np.uint64)),
        ("FP16", np.array([1e6], np.float32)),
        ("BF16", np.array([1e300])),
        ("BYTES", objects(["\ud800"])),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_never_wrapped(datatype: str, array: Array) -> None:
    with pytest.raises(InputRejected):
        codec.to_raw(datatype, array)


@pytest.mark.parametrize(
    ("datatype", "array"),
    [("INT32", np.array([1.5])), ("FP32", objects(["a"])), ("BYTES", np.array([1])), ("BOOL", np.array([1]))],
)
def test_an_array_of_another_kind_is_our_own_mistake(datatype: str, array: Array) -> None:
    with pytest.raises(InternalError, match=datatype):
        codec.to_raw(datatype, array)


def test_infinity_is_no_overflow() -> None:
    assert codec.to_raw("FP16", np.array([np.inf], np.float32)) == b"\x00\x7c"


def test_an_unknown_datatype_is_refused() -> None:
    with pytest.raises(Unsupported, match="FP8"):
        codec.to_raw("FP8", np.zeros(1))


def answer_of(datatype: str, shape: list[int], *raw: bytes, **typed: list[Any]) -> pb.ModelInferResponse:
    answer = pb.ModelInferResponse(raw_output_contents=raw)
    tensor = answer.outputs.add(name="vectors", datatype=datatype, shape=shape)
    for field, values in typed.items():
        getattr(tensor.contents, field).extend(values)
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        answer_of("FP32", [2], b"\0" * 4),
        answer_of("FP32", [2], b"\0" * 12),
        answer_of("BF16", [2], b"\0" * 3),
        answer_of("FP32", [-1, 4], b"\0" * 16),
        answer_of("FP32", [1], b"\0" * 4, b"\0" * 4),
        answer_of("FP4", [1], b"\0"),
        answer_of("FP32", [2], fp32_contents=[1.0]),
        answer_of("FP32", [2]),
        answer_of("FP16", [1], fp32_contents=[1.0]),
        answer_of("UINT8", [1], uint_contents=[256]),
        answer_of("INT8", [1], int_contents=[-129]),
        answer_of("BYTES", [1], b""),
        answer_of("BYTES", [1], b"\x02\x00\x00\x00a"),
        answer_of("BYTES", [1], b"\x01\x00\x00\x00ab"),
        answer_of("BYTES", [1], b"\x01\x00"),
        answer_of("BYTES", [2], b"\xff\xff\xff\xffab"),
        answer_of("BYTES", [1], b"\x01\x00\x00\x00a\x01\x00\x00\x00b"),
        answer_of("BYTES", [2**40], b"\x01\x00\x00\x00a"),
    ],
    ids=repr,
)
def test_contents_that_do_not_fit_are_the_models_failure(answer: pb.ModelInferResponse) -> None:
    with pytest.raises(codec.InvalidTensor):
        read(answer)


@given(data=st.binary(max_size=64), size=st.integers(0, 6))
def test_any_bytes_are_read_or_refused(data: bytes, size: int) -> None:
    try:
        found = codec.from_blob(data, (size,))
    except codec.InvalidTensor:
        return
    assert codec.to_blob(found) == data


def test_the_error_names_the_tensor_and_both_sizes() -> None:
    with pytest.raises(codec.InvalidTensor, match=r"tensor 'vectors': FP32 \[2\] takes 8 bytes, not 4"):
        read(answer_of("FP32", [2], b"\0" * 4))


def test_numbers_of_an_answer_are_not_copied_and_aligned() -> None:
    data = np.arange(1000, dtype="<f8").tobytes()
    array = codec.from_raw("FP64", (1000,), data)
    assert not array.flags.owndata and not array.flags.writeable and array.flags.aligned
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))


def test_several_tensors_of_an_answer_keep_their_names_raw_and_typed() -> None:
    raw, typed = pb.ModelInferResponse(), pb.ModelInferResponse()
    for answer, kind in ((raw, False), (typed, True)):  # Triton answers raw, Dynamo typed
        triton_codec.add_output(answer, "a", "INT32", np.array([[7]]), typed=kind)
        triton_codec.add_output(answer, "b", "BYTES", objects(["x"]), typed=kind)
    assert {n: a.tolist() for n, a in read(raw).items()} == {"a": [[7]], "b": [b"x"]}
    assert {n: a.tolist() for n, a in read(typed).items()} == {"a": [[7]], "b": [b"x"]}


def test_a_request_reads_back_as_a_server_reads_it() -> None:
    request = pb.ModelInferRequest()
    tensor = codec.add_input(request, "ids", "INT64", np.array([[1, 2]]))
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("ids", "INT64", [1, 2])
    assert not tensor.HasField("contents")
    assert len(request.raw_input_contents) == 1
    assert triton_codec.read_inputs(request)["ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (True, "bool_param"),
        (False, "bool_param"),
        (-5, "int64_param"),
        (2**63 - 1, "int64_param"),
        (2**63, "uint64_param"),
        (2**64 - 1, "uint64_param"),
        (0.5, "double_param"),
        ("query", "string_param"),
        ("", "string_param"),
    ],
)
def test_a_parameter_goes_into_the_field_of_its_type(value: codec.Parameter, field: str) -> None:
    request = pb.ModelInferRequest()
    codec.set_parameter(request.parameters, "x", value)
    assert request.parameters["x"].WhichOneof("parameter_choice") == field
    found = triton_codec.get_parameter(request.parameters, "x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [1], None, {"a": 1}])
def test_another_value_is_no_parameter(value: Any) -> None:
    with pytest.raises(Unsupported, match="seed") as caught:
        codec.set_parameter(pb.ModelInferRequest().parameters, "seed", value)
    assert caught.value.param == "seed"
