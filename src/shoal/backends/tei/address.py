"""Addresses of text-embeddings-inference servers.

tei+http://host[:port][/path][#model]   also tei+https
tei+grpc://host[:port][#model]          also tei+grpcs

A server has one model, so `#model` is optional; if given, it must match the model that the server reports.
"""

from __future__ import annotations

from shoal.backends.base.address import parse_http, split_url
from shoal.errors import AddressError
from shoal.models.address import Address, Scheme


def parse_grpc(scheme: str, text: str) -> Address:
    """Parse a gRPC address. Raises AddressError."""
    if "/" in split_url(scheme, text)[0]:
        raise AddressError(f"{scheme}:{text}: gRPC has no path: write {scheme}://host:port")
    return parse_http(scheme, text)


SCHEMES = {
    "tei+http": Scheme(parse=parse_http),
    "tei+https": Scheme(parse=parse_http),
    "tei+grpc": Scheme(parse=parse_grpc),
    "tei+grpcs": Scheme(parse=parse_grpc),
}
