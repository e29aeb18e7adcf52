"""The limit of file descriptors and its shares."""

from __future__ import annotations

import resource

import pytest

from shoal.server.descriptors import (
    MAX_DESCRIPTORS,
    connection_descriptors,
    descriptor_limit,
    max_grpc_connections,
    raise_descriptor_limit,
)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, MAX_DESCRIPTORS),
        (1024, 10**6, MAX_DESCRIPTORS),
        (10**6, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_is_raised(soft: int, hard: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: done.append(limits))
    raise_descriptor_limit()
    assert done == ([] if expected is None else [(expected, hard)])


@pytest.mark.parametrize(
    ("limit", "connections", "grpc"),
    [
        (128, 112, 16),
        (1024, 960, 128),
        (MAX_DESCRIPTORS, 65_472, 8192),
        (4, 4, 1),
        (resource.RLIM_INFINITY, None, 8192),
    ],
)
def test_shares(limit: int, connections: int | None, grpc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert max_grpc_connections() == grpc
    if connections is not None:
        assert descriptor_limit() == limit
        assert connection_descriptors(descriptor_limit()) == connections
