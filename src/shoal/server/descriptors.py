"""The shares of the process's file descriptors: HTTP connections, gRPC connections, and a reserve for all else."""

from __future__ import annotations

import resource
import sys

RESERVED_DESCRIPTORS = 64
"""File descriptors reserved for model files and backend connections; below a limit of 512, an eighth of it."""
MAX_DESCRIPTORS = 65_536
_GRPC_SHARE = 8


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to what the system grants, at most MAX_DESCRIPTORS.

    The default of 1,024 is meant for programs that call select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit != resource.RLIM_INFINITY else sys.maxsize


def connection_descriptors(limit: int) -> int:
    """Return how many of `limit` descriptors are for connections; the rest is the reserve."""
    return limit - min(RESERVED_DESCRIPTORS, limit // 8)


def max_grpc_connections() -> int:
    """Return the maximum gRPC connections: an eighth of the limit, since one connection carries any number of calls."""
    return max(1, min(descriptor_limit(), MAX_DESCRIPTORS) // _GRPC_SHARE)
