"""The places where models run: one folder per backend, and the table of their address schemes.

A backend is a folder and a line in the table. The folder's package has its class as `BACKEND`, and the package's module
`address` has the parsers of its schemes as `SCHEMES`. Both import little, and are imported only when needed.
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
    "ray": ("ray",),
    "fake": ("fake",),
}
"""Maps each backend's folder, which is also its name, to the schemes of its addresses."""

FILE_BACKENDS = ("local", "triton", "ray")
"""Backends that run file-based models, and the valid values of the setting `backend`. If it is unset, the last one that
can run them is used."""


def backend_for_scheme(scheme: str) -> str | None:
    """Return the name of the backend of a scheme, or None for an unknown scheme."""
    return next((name for name, schemes in BACKENDS.items() if scheme in schemes), None)


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend in the table."""
    found: type[Backend] = import_module(f"shoal.backends.{name}").BACKEND
    return found


def file_backend(settings: Settings) -> str:
    """Return the backend that runs file-based models by default."""
    return next(name for name in reversed(FILE_BACKENDS) if not backend_class(name).explain_no_files(settings))


def load_scheme(name: str) -> Scheme:
    """Return the address parser of a scheme in the table."""
    schemes: Mapping[str, Scheme] = import_module(f"shoal.backends.{backend_for_scheme(name)}.address").SCHEMES
    return schemes[name]


def parse_address(text: str) -> Address:
    """Parse one address of any backend. Raises AddressError, whose message shows the correct form."""
    return _address_grammar().parse_model_address(text)


def parse_served(text: str) -> ServedModel:
    """Parse one argument of `shoal serve`. Raises AddressError."""
    return _address_grammar().parse_served(text)


def _address_grammar() -> Grammar:
    return Grammar([scheme for schemes in BACKENDS.values() for scheme in schemes], load_scheme)


class Backends:
    """The backends in use, by name. Each is created on first access."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._instances: dict[str, Backend] = {}

    def __getitem__(self, name: str) -> Backend:
        if name not in self._instances:
            self._instances[name] = backend_class(name)(self._resources)
        return self._instances[name]

    def for_address(self, address: Address) -> Backend:
        """Return the backend of an address."""
        name = backend_for_scheme(address.scheme)
        assert name is not None, f"no backend has the scheme {address.scheme}"
        return self[name]

    def for_files(self, settings: Settings) -> list[Backend]:
        """Return the backends that can run file-based models with these settings."""
        return [self[name] for name in FILE_BACKENDS if not backend_class(name).explain_no_files(settings)]

    async def aclose(self) -> None:
        made, self._instances = self._instances, {}
        for backend in reversed(made.values()):
            await backend.aclose()
