"""A server on this machine, for every test that fetches."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.http.fetching.kit import Web, web


@pytest.fixture
async def server() -> AsyncIterator[Web]:
    async with web() as web_server:
        yield web_server
