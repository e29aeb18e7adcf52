"""Clients that want packages of their own: `make test-clients` makes an environment with frameworks over OpenAI's
client, and one with that client's first major version.

Elsewhere these files are not collected at all, so that the default suite neither imports nor skips anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.integration.llm_kit import FAKE, running
from tests.integration.server_kit import Server

EMBEDDER = "text-embedding-3-small"
"""A name of OpenAI's, whose table of tokens LlamaIndex's package carries: nothing is fetched for it."""

KNOWN = "gpt-4o-mini"
"""A second name to serve under: some classes take no model that OpenAI does not have."""

WANTED = {
    "test_infinity.py": find_spec("infinity_client") is not None,
    "test_langchain.py": find_spec("langchain_openai") is not None,
    "test_llama_index.py": find_spec("llama_index") is not None,
    "test_nvidia.py": find_spec("langchain_nvidia_ai_endpoints") is not None,
    "test_openai_1.py": version("openai").startswith("1."),
    "test_voyage.py": find_spec("voyageai") is not None,
}
collect_ignore = [name for name, there in WANTED.items() if not there]


def pytest_configure(config: pytest.Config) -> None:
    """The frameworks keep their connections for the life of the process, and close none of them: no matter during the
    tests, by the setting, nor when pytest looks once more at its end."""
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
    warnings.simplefilter("ignore", ResourceWarning)


def pytest_report_header() -> str:
    return f"clients: openai {version('openai')}, left out: {', '.join(collect_ignore) or 'nothing'}"


@pytest.fixture(scope="session", autouse=True)
def table() -> Iterator[None]:
    """tiktoken's cache, for the clients and for the server."""
    found = find_spec("llama_index")
    with pytest.MonkeyPatch.context() as patch:
        if found is not None and found.submodule_search_locations:
            patch.setenv("TIKTOKEN_CACHE_DIR", f"{found.submodule_search_locations[0]}/core/_static/tiktoken_cache")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that repeats what it hears, under two names; calls of tools and thoughts are told apart from text."""
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with running(
        tmp_path_factory.mktemp("server"), FAKE, f"{KNOWN}=fake:", f"{EMBEDDER}=fake:", flags=flags
    ) as started:
        yield started


@pytest.fixture
def base_url(server: Server) -> str:
    return f"{server.base_url}/v1"
