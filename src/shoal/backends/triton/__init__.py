"""NVIDIA Triton: its gRPC protocol, its models, and a server of one's own."""

from __future__ import annotations

import os


def quiet() -> None:
    """Keep gRPC's C core from writing its own lines to standard error at every failed connection: what matters comes
    back as an error, and the log is Shoal's to format. To be called before `grpc` is imported; GRPC_VERBOSITY wins."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
