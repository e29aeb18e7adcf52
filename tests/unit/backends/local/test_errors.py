"""Mapping engines' errors to Shoal's errors."""

from __future__ import annotations

import pytest

from shoal.backends.local.errors import ERROR_TABLE, MESSAGES, engine_error, shorten_message
from shoal.errors import BackendError, EngineFailed, InputRejected, OutOfMemory

OPENVINO_SHAPE = """Exception from src/inference/src/cpp/infer_request.cpp:246:
Caught exception: Exception from src/plugins/intel_cpu/src/node.cpp:794:
[CPU] Add node with name 't11' Check 'input_shape[j] == 1' failed at src/plugins/x/eltwise.cpp:52:
Eltwise shape infer input shapes dim index: 0 mismatch


"""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(OPENVINO_SHAPE), InputRejected),
        (RuntimeError("INVALID_ARGUMENT : indices element out of data bounds, idx=99999"), InputRejected),
        (ValueError("Required inputs (['attention_mask']) are missing"), InputRejected),
        (TypeError("incompatible function arguments"), InputRejected),
        (RuntimeError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("Failed to allocate memory for requested buffer of shape {1, 2}"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("primitive was not executed"), EngineFailed),
        (KeyError("x"), EngineFailed),
    ],
)
def test_each_error_has_one_meaning(error: Exception, kind: type[BackendError]) -> None:
    """Shape and type errors are input errors, memory errors take precedence, and the rest are engine errors."""
    assert type(engine_error(error)) is kind


def test_the_table_is_complete() -> None:
    """Every error in the table has a message with the next step."""
    assert set(MESSAGES) == {kind for kind, _, _ in ERROR_TABLE} | {EngineFailed}
    assert all(";" in saying for saying in MESSAGES.values())


def test_the_engine_s_own_words_survive_without_its_files() -> None:
    """The message keeps the engine's text on one line, without its source locations."""
    words = shorten_message(OPENVINO_SHAPE)
    assert "shape infer input shapes dim index: 0 mismatch" in words
    assert "infer_request.cpp" not in words
    assert "\n" not in words


def test_an_error_without_words_is_named() -> None:
    """An exception with an empty message is reported by its type."""
    assert "MemoryError" in engine_error(MemoryError()).message
