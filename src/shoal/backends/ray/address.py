"""Addresses of models that run as deployments of a Ray Serve application.

ray:application[#model]
"""

from __future__ import annotations

import re

from shoal.errors import AddressError
from shoal.models.address import Address, Scheme, check_name

_APPLICATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse(scheme: str, text: str) -> Address:
    """Parse an address. Raises AddressError."""
    application, hash_mark, model = text.removeprefix("//").partition("#")
    if not _APPLICATION.fullmatch(application):
        raise AddressError(f"{scheme}:{text}: write ray:APPLICATION#MODEL, with the name of a Ray Serve application")
    if hash_mark and not model:
        raise AddressError(f"{scheme}:{text}: no model after '#': name a model, or remove '#' to serve all models")
    return Address(scheme=scheme, target=application, model=check_name(model) if model else "")


SCHEMES = {"ray": Scheme(parse=parse, needs_model=True)}
