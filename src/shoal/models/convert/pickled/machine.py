"""Interpret the pickles inside PyTorch's weight files; nothing that a pickle names is imported or called.

`pickletools` decodes the opcodes; those that build plain data are interpreted here. A pickle names functions and
classes only as text (`Name`): the few that `torch.save` writes for tensors have a meaning of their own in `_BUILD`, and
any other name is an error. A memo is a dictionary, keys of dictionaries are strings or integers, and no value is ever
walked through, so that neither huge memo numbers nor nested or shared containers cost more than the pickle's own size.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

MAX_OPERATIONS = 4_000_000
"""A tensor takes about 60; a dictionary, the largest value of one opcode, 64 bytes."""

MAX_AXES = 8
_ADDRESSABLE = 2**48

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
"""PyTorch's classes of typed storage, and the names of their types in safetensors."""


class PickleError(Exception):
    """The pickle is broken, or holds something other than tensors and plain values; the text says what."""


class Name(NamedTuple):
    """A function or class that a pickle refers to."""

    module: str
    name: str


class Storage(NamedTuple):
    """A block of `size` values of one type (in safetensors' name); `key` is where the file has it."""

    dtype: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A view of a storage. `offset` and `strides` count values, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    """`torch._utils._rebuild_tensor_v2`: the rest says nothing of the values (gradients, hooks, metadata)."""
    sizes = _are_sizes((offset,)) and _are_sizes(shape) and _are_sizes(strides)
    if not isinstance(storage, Storage) or not sizes or len(shape) != len(strides):
        raise PickleError("has a tensor that is not described as torch.save describes it")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _parameter(tensor: Any, *_: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise PickleError("has a parameter that is not a tensor")
    return tensor


def _ordered(*items: Any) -> dict[Any, Any]:
    if items:
        raise PickleError("has an OrderedDict that is not built as torch.save builds it")
    return {}


_BUILD: dict[Name, Callable[..., Any]] = {
    Name("collections", "OrderedDict"): _ordered,
    Name("torch._utils", "_rebuild_tensor"): _tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch._utils", "_rebuild_parameter"): _parameter,
}
_KNOWN = frozenset(_BUILD) | {Name("torch", name) for name in STORAGES}


def load(file: IO[bytes]) -> Any:
    """Return the value of the pickle that begins at the file's position, and leave the file behind its end.

    Dictionaries, lists, tuples, strings, bytes, numbers, None, `Storage` and `Tensor`. Raises PickleError. The caller
    bounds the size of the file.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if count > MAX_OPERATIONS:
                raise PickleError(f"has more than {MAX_OPERATIONS} operations")
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PickleError(f"is broken ({type(error).__name__})") from None
    raise PickleError("is incomplete")


class _Machine:
    """The stack and memo of one pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in _NOTHING:
            raise PickleError(f"uses {name}, which tensors do not need")

    def pop(self) -> Any:
        return self._stack.pop()

    def mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        """Return the values above the last mark, and remove it."""
        above, self._stack = self._stack, self._marks.pop()
        return above

    def put(self, index: Any) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def tuple_above(self, _: Any) -> None:
        values = tuple(self.pop_mark())
        self._stack.append(values)

    def tuple_of(self, size: int) -> None:
        values = [self.pop() for _ in range(size)]
        self._stack.append(tuple(reversed(values)))

    def extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError("appends to something other than a list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise PickleError("sets an item of something other than a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):
                raise PickleError("has a key that is neither a string nor an integer")
            target[key] = value

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(_known(module, name))

    def stack_name(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._stack.append(_known(module, name))

    def reduce(self, _: Any) -> None:
        """Build what a function would return, of the arguments on the stack."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or function not in _BUILD or type(arguments) is not tuple:
            raise PickleError("calls something that builds no tensor")
        self._stack.append(_BUILD[function](*arguments))

    def build(self, _: Any) -> None:
        """Drop the attributes of an OrderedDict: `torch.nn.Module` keeps the versions of its modules there."""
        self.pop()
        if type(self._stack[-1]) is not dict:
            raise PickleError("sets attributes of something other than a dictionary")

    def storage(self, _: Any) -> None:
        """Read a reference to a storage: ("storage", class, key, device, count[, view])."""
        told = self.pop()
        if type(told) is not tuple or not 5 <= len(told) <= 6 or told[0] != "storage" or told[5:] not in ((), (None,)):
            raise PickleError("refers to something other than a storage")
        _, kind, key, _, count = told[:5]
        if not isinstance(kind, Name) or kind.name not in STORAGES or type(key) is not str or not _are_sizes((count,)):
            raise PickleError("has a storage that is not described as torch.save describes it")
        self._stack.append(Storage(STORAGES[kind.name], key, count))


def _known(module: Any, name: Any) -> Name:
    named = Name(module, name) if type(module) is type(name) is str else Name("", "")
    if named not in _KNOWN:
        raise PickleError(f"names {f'{module}.{name}'[:80]!r}" if named.name else "names something without a name")
    return named


def _are_sizes(values: Any) -> bool:
    plain = type(values) in (tuple, list) and len(values) <= MAX_AXES
    return plain and all(type(value) is int and 0 <= value <= _ADDRESSABLE for value in values)


_LITERALS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    }
)
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_NOTHING = frozenset({"PROTO", "FRAME"})
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.pop(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "TUPLE": _Machine.tuple_above,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
}
