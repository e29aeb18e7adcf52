"""The places where a model runs: one folder each, and the table of their schemes.

A backend is its folder and its line in the table. The folder's package has its class as `BACKEND`, and its module
`address` the parsers of its schemes as `SCHEMES`; both import little, and only once they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from shoal.models.address import Address, Grammar, Scheme, ServedModel

if TYPE_CHECKING:
    from shoal.backends.base.backend import Backend, Resources
    from shoal.config.settings import Settings

BACKENDS: dict[str, tuple[str, ...]] = {
    "local": ("hf", "pypi", "file"),
    "triton": ("triton", "tritons"),
    "tei": ("tei+http", "tei+https", "tei+grpc", "tei+grpcs"),
    "openai": ("openai+http", "openai+https"),
    "fake": ("fake",),
}
"""The folder of each backend, which is also its name, and the schemes of its addresses."""

FILE_BACKENDS = ("local", "triton")
"""Backends that run models of files: what the setting `backend` may name. The last that can is used where it names
none."""


def backend_for_scheme(scheme: str) -> str | None:
    """The name of the backend that the addresses of a scheme belong to; None for an unknown scheme."""
    return next((name for name, schemes in BACKENDS.items() if scheme in schemes), None)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend of the table."""
    found: type[Backend] = import_module(f"shoal.backends.{name}").BACKEND
    return found


def file_backend(settings: Settings) -> str:
    """The backend that models of files run on where nothing else is said."""
    return next(name for name in reversed(FILE_BACKENDS) if not backend_class(name).explain_no_files(settings))


def load_scheme(name: str) -> Scheme:
    """How addresses of a scheme of the table read."""
    schemes: Mapping[str, Scheme] = import_module(f"shoal.backends.{backend_for_scheme(name)}.address").SCHEMES
    return schemes[name]


def parse_address(text: str) -> Address:
    """Parse one address of any backend. Raises AddressError that says what to write instead."""
    return _address_grammar().parse_model_address(text)


def parse_served(text: str) -> ServedModel:
    """Parse one argument of `shoal serve`. Raises AddressError."""
    return _address_grammar().parse_served(text)


def _address_grammar() -> Grammar:
    return Grammar([scheme for schemes in BACKENDS.values() for scheme in schemes], load_scheme)


class Backends:
    """The backends in use, by name; one is made when it is first asked for."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._made: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = backend_class(name)(self._resources)
        return self._made[name]

    def for_address(self, address: Address) -> Backend:
        """The backend that the address belongs to."""
        name = backend_for_scheme(address.scheme)
        assert name is not None, f"{address.scheme} is no scheme of the table"
        return self[name]

    def for_files(self, settings: Settings) -> list[Backend]:
        """Those that run models of files under these settings."""
        return [self[name] for name in FILE_BACKENDS if not backend_class(name).explain_no_files(settings)]

    async def aclose(self) -> None:
        made, self._made = self._made, {}
        for backend in reversed(made.values()):
            await backend.aclose()
