"""Errors as messages between Shoal's own processes."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal import errors
from shoal.errors import InternalError, ShoalError


class PackedError(msgspec.Struct, frozen=True, array_like=True):
    """A ShoalError by the name of its class in `shoal.errors`. `fields`: its attributes."""

    name: str
    message: str
    fields: dict[str, Any] = {}

    @classmethod
    def of(cls, error: ShoalError) -> PackedError:
        """Name the nearest class of `shoal.errors`: the other end knows no backend's own."""
        kind = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        fields = {name: _to_unicode(value) for name, value in vars(error).items() if name != "message"}
        return cls(kind.__name__, _to_unicode(error.message), fields)

    def to_error(self) -> ShoalError:
        """Return the error; an InternalError for a class that this version does not have."""
        kind = _ERRORS.get(self.name, InternalError)
        error = kind.__new__(kind, self.message)
        vars(error).update(self.fields, message=self.message)
        return error


def _to_unicode(value: Any) -> Any:
    """Return a text that can be encoded: names of files may have bytes that are not UTF-8, as surrogates."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


_ERRORS: dict[str, type[ShoalError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ShoalError)
}
