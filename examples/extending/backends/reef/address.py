"""Addresses of Reef servers: `reef://host[:port][/path][#model]`; without a model, every model of the server."""

from __future__ import annotations

from shoal.backends.base.address import parse_http
from shoal.models.address import Scheme

SCHEMES = {"reef": Scheme(parse=parse_http, needs_model=True)}
