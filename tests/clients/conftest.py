"""Clients that need additional packages: `make test-clients` makes an environment with frameworks over OpenAI's client,
and one with that client's first major version. Elsewhere these files are not collected, so the default suite neither
imports nor skips anything."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.integration.llm_kit import FAKE, running
from tests.integration.server_kit import Server

EMBEDDER = "text-embedding-3-small"
"""An OpenAI model whose token table is part of LlamaIndex's package: no download needed."""

KNOWN = "gpt-4o-mini"
"""A second served name: some classes accept OpenAI's model names only."""

TRITONCLIENT = all(find_spec(name) is not None for name in ("tritonclient", "gevent"))
"""Whether both of its transports are there: without gevent it has none over HTTP."""

AVAILABLE = {
    "test_agents.py": find_spec("agents") is not None and shutil.which("npm") is not None,
    "test_anthropic.py": find_spec("anthropic") is not None,
    "test_claude_code.py": find_spec("anthropic") is not None and shutil.which("npm") is not None,
    "test_infinity.py": find_spec("infinity_client") is not None,
    "test_llm_servers.py": bool({"LLAMA_CPP", "VLLM"} & os.environ.keys()),
    "test_langchain.py": find_spec("langchain_openai") is not None,
    "test_llama_index.py": find_spec("llama_index") is not None,
    "test_nvidia.py": find_spec("langchain_nvidia_ai_endpoints") is not None,
    "test_openai_agents.py": find_spec("agents") is not None,
    "test_required_tools.py": all(find_spec(name) for name in ("agents", "pydantic_ai", "openvino_genai")),
    "test_openai_1.py": version("openai").startswith("1."),
    "test_tritonclient.py": TRITONCLIENT,
    "test_tritonclient_outputs.py": TRITONCLIENT,
    "test_tritonclient_running.py": TRITONCLIENT,
    "test_voyage.py": find_spec("voyageai") is not None,
}
collect_ignore = [name for name, there in AVAILABLE.items() if not there]


def pytest_configure(config: pytest.Config) -> None:
    """Ignore unclosed connections, which the frameworks keep for the life of the process: in the tests by the setting,
    and in pytest's last check by the filter."""
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
    warnings.simplefilter("ignore", ResourceWarning)


def pytest_report_header() -> str:
    return f"clients: openai {version('openai')}, left out: {', '.join(collect_ignore) or 'nothing'}"


@pytest.fixture(scope="session", autouse=True)
def table() -> Iterator[None]:
    """tiktoken's cache, for the clients and for the server."""
    package = find_spec("llama_index")
    with pytest.MonkeyPatch.context() as patch:
        if package is not None and package.submodule_search_locations:
            patch.setenv("TIKTOKEN_CACHE_DIR", f"{package.submodule_search_locations[0]}/core/_static/tiktoken_cache")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that repeats its input, under two names; the server parses tool calls and reasoning."""
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with running(
        tmp_path_factory.mktemp("server"), FAKE, f"{KNOWN}=fake:", f"{EMBEDDER}=fake:", flags=flags
    ) as started:
        yield started


@pytest.fixture
def base_url(server: Server) -> str:
    return f"{server.base_url}/v1"
