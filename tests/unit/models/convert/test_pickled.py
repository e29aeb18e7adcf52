"""Reading tensors out of torch.save's files without PyTorch: all of its forms, and files made to do harm."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from shoal.errors import ModelFileError
from shoal.models.convert.pickled import StoredTensor, machine, read_tensors, reader, write_safetensors
from shoal.types import Array
from tests.unit.models.torch_files import (
    MAGIC,
    ORDERED,
    REBUILD,
    STREAM_VERSION,
    Call,
    Global,
    Raw,
    Reference,
    archive,
    describe,
    pickled,
    save,
    save_stream,
    storage,
    tensor,
)

FLOATS = storage("FloatStorage", "0", 6)
DATA = np.arange(6, dtype=np.float32)
ONE = {"w": tensor(FLOATS, 0, (2, 3), (3, 1))}
TENSORS: dict[str, Array] = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.arange(3, dtype=np.float16),
    "double": np.arange(3, dtype=np.float64),
    "long": np.arange(3, dtype=np.int64),
    "int": np.arange(3, dtype=np.int32),
    "bytes": np.arange(3, dtype=np.uint8),
    "bool": np.array([True, False]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def converted(path: Path) -> dict[str, Array]:
    target = path.with_name("converted.safetensors")
    write_safetensors(target, read_tensors(path, path.name), lambda: None)
    return load_file(target)


def refuse(path: Path, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        read_tensors(path, "pytorch_model.bin")
    assert caught.value.file == "pytorch_model.bin"
    assert "use a revision that has safetensors" in caught.value.message


@pytest.mark.parametrize("write", [save, save_stream])
def test_tensors_of_every_type(tmp_path: Path, write: Any) -> None:
    got = converted(write(tmp_path / "a.bin", TENSORS))
    assert {name: each.dtype for name, each in got.items()} == {name: each.dtype for name, each in TENSORS.items()}
    for name, each in TENSORS.items():
        np.testing.assert_array_equal(got[name], each)


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    values = np.array([0x3F80, 0xC000], np.uint16)
    of = storage("BFloat16Storage", "0", 2)
    path = archive(tmp_path / "a.bin", {"w": tensor(of, 0, (2,), (1,))}, {"0": values.tobytes()})
    got = read_tensors(path, "a.bin")["w"]
    assert (got.dtype, got.data.tolist()) == ("BF16", values.tolist())


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "expected"),
    [
        (0, (3, 2), (1, 3), DATA.reshape(2, 3).T),
        (1, (2,), (2,), DATA[1:5:2]),
        (5, (), (), DATA[5]),
        (2, (2, 2), (0, 1), [[2, 3], [2, 3]]),
        (2, (2, 2), (1, 1), [[2, 3], [3, 4]]),
        (9, (0, 3), (3, 1), np.zeros((0, 3))),
    ],
)
def test_views(tmp_path: Path, offset: int, shape: Any, strides: Any, expected: Any) -> None:
    """Slices, transposed and overlapping tensors, and those that share a storage."""
    state = ONE | {"v": tensor(FLOATS, offset, shape, strides)}
    got = converted(archive(tmp_path / "a.bin", state, {"0": DATA.tobytes()}))
    np.testing.assert_array_equal(got["v"], expected)
    np.testing.assert_array_equal(got["w"], DATA.reshape(2, 3))


def test_a_file_is_converted_in_the_memory_of_its_largest_tensor(tmp_path: Path) -> None:
    """Tensors are views of the mapped file; only one whose values are not in order is copied."""
    tensors = {str(number): np.full((2**9, 2**9), number, np.float32) for number in range(8)}
    state = describe(tensors)
    state["0"] = tensor(storage("FloatStorage", "0", 2**18), 0, (2**9, 2**9), (1, 2**9))
    path = archive(tmp_path / "a.bin", state, {name: each.tobytes() for name, each in tensors.items()})
    tracemalloc.start()
    write_safetensors(tmp_path / "b", read_tensors(path, "a.bin"), lambda: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**20 <= peak < 1.5 * 2**20
    assert path.stat().st_size > 8 * 2**20


@pytest.mark.parametrize(
    "state",
    [
        Call(Global("collections", "OrderedDict"), ()),
        {"w": Call(Global("torch._utils", "_rebuild_parameter"), (ONE["w"], True, ORDERED))},
        {"w": Call(Global("torch._utils", "_rebuild_tensor"), (FLOATS, 0, (2, 3), (3, 1)))},
        {"state_dict": ONE, "epoch": 3, "loss": 0.5, "names": ["a", None, True, (1, 2), {"b": 2**70}]},
        {"state_dict": {"module.w": ONE["w"]}},
    ],
)
def test_states_that_libraries_save(tmp_path: Path, state: Any) -> None:
    if isinstance(state, Call):  # an OrderedDict with items and attributes, as Module.state_dict() returns
        items = pickled(ONE)[2:-1].removeprefix(b"}")
        state = Raw(pickled(state)[2:-1] + items + pickled({"_metadata": ORDERED})[2:-1] + b"b")
    got = converted(archive(tmp_path / "a.bin", state, {"0": DATA.tobytes()}, byteorder=b"little"))
    np.testing.assert_array_equal(got["w"], DATA.reshape(2, 3))


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("nested", [True, False])
def test_code_never_runs(tmp_path: Path, protocol: int, nested: bool) -> None:
    """In the archive, in the stream, and as a bare pickle; found before any tensor is read."""
    ran = tmp_path / "ran"
    for number, evil in enumerate((Evil(Path.touch, ran), Evil(eval, f"open({str(ran)!r}, 'w')"))):
        content = pickle.dumps({"state_dict": {"w": evil}} if nested else evil, protocol)
        path = tmp_path / f"{number}.bin"
        path.write_bytes(content)
        refuse(path, "it (names|uses)")
        refuse(archive(path, content, {"0": DATA.tobytes()}), "it (names|uses)")
        path.write_bytes(b"".join(map(pickled, (MAGIC, STREAM_VERSION, {"little_endian": True}))) + content)
        refuse(path, "it (names|uses)")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (Call(Global("os", "system"), ("true",)), r"names 'os\.system'"),
        (Global("builtins", "eval"), r"names 'builtins\.eval'"),
        (Raw(b"\x8c\x05posix\x8c\x06system\x93"), r"names 'posix\.system'"),
        (Raw(b"K\x01K\x02\x93"), "names something without a name"),
        (Raw(b"(ios\nsystem\n"), "uses INST"),
        (Raw(b"\x82\x01"), "uses EXT1"),
        (Global("torch", "load"), r"names 'torch\.load'"),
        (Global("torch", "ComplexFloatStorage"), r"names 'torch\.ComplexFloatStorage'"),
        (Call(Global("torch", "FloatStorage"), ("/etc/passwd",)), "calls something"),
        (Call(REBUILD, ("text", 0, (1,), (1,))), "not described as torch.save"),
        (Call(REBUILD, (FLOATS, -1, (1,), (1,))), "not described as torch.save"),
        (Call(REBUILD, (FLOATS, 0, (2, 3), (3,))), "not described as torch.save"),
        (Call(REBUILD, (FLOATS, 0, (2**63,), (1,))), "not described as torch.save"),
        (Call(REBUILD, (FLOATS, 0, (1,) * 9, (1,) * 9)), "not described as torch.save"),
        (Call(REBUILD, (FLOATS, 0, (True,), (1,))), "not described as torch.save"),
        (Call(REBUILD, ()), "is broken"),
        (Call(Global("torch._utils", "_rebuild_parameter"), (1,)), "parameter that is not a tensor"),
        (Call(Global("collections", "OrderedDict"), ([],)), "OrderedDict that is not built"),
        (Reference("module"), "something other than a storage"),
        (
            Reference(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6, ("view", 0, 1))),
            "other than a storage",
        ),
        (Reference(("storage", "torch.FloatStorage", "0", "cpu", 6)), "storage that is not described"),
        ({(1, 2): 3}, "neither a string nor an integer"),
        ({"w": 1}, "has 'w', which is no tensor"),
        ({1: ONE["w"]}, "has '1', which is no tensor"),
        ({}, "not a dictionary"),
        ([ONE["w"]], "not a dictionary"),
        (Raw(b"]K\x01K\x02s"), "other than a dictionary"),
        (Raw(b"}K\x01a"), "other than a list"),
        (Raw(b"]K\x01b"), "attributes of something other"),
        (Raw(b"h\x07"), r"broken \(KeyError\)"),
        (Raw(b"00"), r"broken \(IndexError\)"),
        (Raw(b"X\xff\xff\xff\x7fabc"), r"broken \(ValueError\)"),
        (Raw(b"\x8d" + b"\xff" * 7 + b"\x7f"), r"broken \(ValueError\)"),
        (Raw(b"I" + b"9" * 5000 + b"\n"), r"broken \(ValueError\)"),
        (b"\x80\x02}", r"broken \(ValueError\)|incomplete"),
        (b"", r"broken \(ValueError\)|incomplete"),
        ({"w": tensor(FLOATS, 0, (7,), (1,))}, "larger than its storage"),
        ({"w": tensor(FLOATS, 1, (2, 3), (3, 1))}, "larger than its storage"),
        ({"w": tensor(FLOATS, 0, (2, 3), (4, 1))}, "larger than its storage"),
        ({"w": tensor(FLOATS, 6, (1,), (1,))}, "larger than its storage"),
        ({"w": tensor(FLOATS, 0, (7,), (0,))}, "larger than its storage"),
        ({"w": tensor(FLOATS, 0, (2**40, 0), (1, 1))}, ""),
        ({"w": tensor(storage("FloatStorage", "0", 7), 0, (1,), (1,))}, "no complete storage"),
        ({"w": tensor(storage("DoubleStorage", "0", 6), 0, (1,), (1,))}, "no complete storage"),
        ({"w": tensor(storage("FloatStorage", "../../etc/passwd", 6), 0, (1,), (1,))}, "has no part 'data/../../etc"),
        ({"w": tensor(storage("FloatStorage", "../data.pkl", 6), 0, (1,), (1,))}, "has no part"),
    ],
)
def test_hostile_states(tmp_path: Path, state: Any, words: str) -> None:
    path = archive(tmp_path / "a.bin", state, {"0": DATA.tobytes()})
    if words:
        refuse(path, words)
    else:
        assert read_tensors(path, "a.bin")["w"].data.size == 0


@pytest.mark.parametrize(
    "opcodes",
    [
        b"]" * 200_000 + b"a" * 199_999,
        b")" + b"\x85" * 200_000,
        b"}" + b"r\xff\xff\xff\xff",
    ],
)
def test_containers_cost_no_more_than_their_pickle(tmp_path: Path, opcodes: bytes) -> None:
    """Nested and shared containers, and the largest memo number: little time and memory, and a clear refusal."""
    path = archive(tmp_path / "a.bin", Raw(opcodes), {})
    tracemalloc.start()
    begun = time.monotonic()
    refuse(path, "it ")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert time.monotonic() - begun < 30


def test_tensors_that_share_too_much(tmp_path: Path) -> None:
    """A file of 100 kB may not become one of many times that; tied weights may."""
    of, data = storage("FloatStorage", "0", 25_000), {"0": bytes(100_000)}
    for count in (2, 20):
        state = {str(number): tensor(of, 0, (25_000,), (1,)) for number in range(count)}
        path = archive(tmp_path / "a.bin", state, data)
        if count == 2:
            assert len(read_tensors(path, "a.bin")) == 2
    refuse(path, "share too much memory")


def test_shared_lists_are_not_expanded(tmp_path: Path) -> None:
    """Each of 100 lists holds the one before it ten times."""
    lists = b"]q\x000" + b"".join(
        b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1]) + b"0" for level in range(100)
    )
    state = Raw(lists + b"}(" + pickled("w")[2:-1] + b"h\x64u")
    refuse(archive(tmp_path / "a.bin", state, {}), "has 'w', which is no tensor")


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_OPERATIONS", 30)
    refuse(save(tmp_path / "a.bin", TENSORS), "more than 30 operations")
    monkeypatch.setattr(machine, "MAX_OPERATIONS", 3000)
    monkeypatch.setattr(reader, "MAX_TENSORS", 8)
    refuse(save(tmp_path / "a.bin", TENSORS), "more than 8 tensors")
    monkeypatch.setattr(reader, "MAX_READ", 1000)
    refuse(save(tmp_path / "a.bin", TENSORS), "more than 1000 bytes")
    refuse(save_stream(tmp_path / "a.bin", TENSORS | {"large": np.zeros(1000)}), "broken|more than 1000 bytes")


def test_hostile_archives(tmp_path: Path) -> None:
    path, data = tmp_path / "a.bin", DATA.tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", pickled(ONE))
        file.writestr("a/data/0", bytes(2**24))
    refuse(path, "compressed part 'data.pkl'")
    archive(path, ONE, {"0": data})
    refuse(archive(path, ONE, {"0": data}, byteorder=b"big"), "big-endian")
    refuse(archive(path, ONE, {"1": data}), "no part 'data/0'")
    refuse(archive(path, ONE, {"0": data[:-1]}), "no complete storage")
    refuse(archive(path, ONE, {"0": data}, root="../a"), "not one of torch.save")
    with zipfile.ZipFile(path, "w") as file:
        for root in ("a", "b"):
            file.writestr(f"{root}/data.pkl", pickled(ONE))
    refuse(path, "not one of torch.save")
    with zipfile.ZipFile(path, "w") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("a/data.pkl", pickled(ONE))
        file.writestr("a/data/0", data)
        file.writestr("a/data/0", data)
    refuse(path, "two parts of one name")


def patched(content: bytes, at: int, kind: str, value: int) -> bytes:
    return content[:at] + struct.pack(kind, value) + content[at + struct.calcsize(kind) :]


@pytest.mark.parametrize(
    ("field", "kind", "value", "words"),
    [
        (42, "<I", 2**31, "where its directory says"),
        (42, "<I", 7, "where its directory says"),
        (20, "<I", 2**20, "compressed part|no complete storage"),
        (10, "<H", 8, "compressed part"),
    ],
)
def test_a_directory_that_lies(tmp_path: Path, field: int, kind: str, value: int, words: str) -> None:
    """The entry of a storage in the archive's directory: its offset, size and compression."""
    path = archive(tmp_path / "a.bin", ONE, {"0": DATA.tobytes()})
    content = path.read_bytes()
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"archive/data/0"))
    path.write_bytes(patched(content, entry + field, kind, value))
    refuse(path, words)


def test_a_storage_beyond_the_end(tmp_path: Path) -> None:
    """Both sizes of a storage's entry agree with its tensor, and the file is shorter."""
    state = {"w": tensor(storage("FloatStorage", "0", 2**20), 0, (1,), (1,))}
    path = archive(tmp_path / "a.bin", state, {"0": DATA.tobytes()})
    content = path.read_bytes()
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"archive/data/0"))
    for field in (20, 24):
        content = patched(content, entry + field, "<I", 2**22)
    path.write_bytes(content)
    refuse(path, "no part 'data/0' where its directory says")


def test_hostile_streams(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    refuse(save_stream(path, TENSORS, little=False), "big-endian")
    refuse(save_stream(path, TENSORS, keys=["0", "99"]), "belongs to no tensor")
    refuse(save_stream(path, TENSORS, keys=["0"]), "no complete storage '1'")
    refuse(save_stream(path, TENSORS, keys=[["0"]]), "belongs to no tensor")
    refuse(save_stream(path, TENSORS, keys="0"), "or broken")
    content = save_stream(path, {"w": DATA}).read_bytes()
    path.write_bytes(content[:-1])
    refuse(path, "no complete storage")
    path.write_bytes(patched(content, len(content) - 32, "<q", -1))
    refuse(path, "no complete storage")
    path.write_bytes(pickled(MAGIC) + pickled(7))
    refuse(path, "not in a form that torch.save writes")
    path.write_bytes(b"ustar" * 100)
    refuse(path, "uses|broken")


def valid(root: Path) -> list[bytes]:
    return [save(root / "a", TENSORS).read_bytes(), save_stream(root / "b", TENSORS).read_bytes()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 1), seed=st.integers(0, 2**32), count=st.integers(1, 6), cut=st.booleans())
def test_damaged_files_are_read_or_refused(tmp_path: Path, which: int, seed: int, count: int, cut: bool) -> None:
    """Any change of any bytes gives tensors inside the file, or one kind of error."""
    draw, path = random.Random(seed), tmp_path / "c.bin"
    content = bytearray(valid(tmp_path)[which])
    for _ in range(count):
        content[draw.randrange(len(content))] = draw.choice((0, 1, 0xFF, draw.randrange(256)))
    path.write_bytes(content[: draw.randrange(len(content))] if cut else content)
    try:
        got = read_tensors(path, "c.bin")
    except ModelFileError:
        return
    for each in got.values():
        assert isinstance(each, StoredTensor)
        assert each.data.copy().nbytes <= 4 * len(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_any_pickle_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelFileError):
        read_tensors(archive(tmp_path / "d.bin", content, {}), "d.bin")


def test_describe_is_what_torch_writes() -> None:
    """The kit's own shape: the arguments of a rebuilt tensor, in order."""
    function, arguments = describe({"w": DATA.reshape(2, 3)})["w"]
    assert function == REBUILD
    assert arguments[1:] == (0, (2, 3), (3, 1), False, ORDERED)
