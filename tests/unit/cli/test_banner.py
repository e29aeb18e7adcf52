"""The banner: the served models, printed once."""

from __future__ import annotations

import json
import shlex

import pytest

from shoal.cli.banner import banner_lines, browser_url
from shoal.config.settings import Settings
from shoal.core.protocols import ModelFacts
from shoal.core.registry import ModelCard


def card(name: str = "org/name", **changes: object) -> ModelCard:
    facts = ModelFacts(
        source="hf:org/name",
        backend="openvino",
        tasks=("embed",),
        dimension=384,
        max_input_tokens=256,
        precision="bf16",
        details={"threads": 2, "streams": 1},
    )
    fields = {"aliases": ("tiny",), "state": "ready", "created": 0, "facts": facts, "error": None}
    return ModelCard(name=name, default_for=("embed",), **{**fields, **changes})  # type: ignore[arg-type]


def banner(settings: Settings, *cards: ModelCard) -> dict[str, str]:
    return dict(banner_lines(settings, 8080, cards))


def test_a_model_is_described_by_its_facts() -> None:
    """Dimension, tokens, precision, backend, threads and streams, other names, tasks."""
    assert banner(Settings(), card())["model"] == (
        "org/name  384 dimensions, 256 tokens, bf16 on openvino 2 threads x 1 streams, alias tiny, default for embed"
    )


def test_the_first_of_two_defaults_is_used() -> None:
    """The default is the one that requests use."""
    model_lines = [
        text for label, text in banner_lines(Settings(), 8080, [card("a/b"), card("c/d")]) if label == "model"
    ]
    assert [text.rpartition(", alias tiny, ")[2] for text in model_lines] == [
        "default for embed",
        "not default for embed: a/b is listed first",
    ]


def test_a_failed_model_is_listed() -> None:
    """A failed model has no facts."""
    banner_text = banner(Settings(), card(state="failed", facts=None, error="no such folder"))
    assert banner_text["model"] == "org/name  failed"
    assert "try" not in banner_text


def test_a_waiting_model_is_listed_as_such() -> None:
    """Its server may come up at any time. The log has the reason, which is told once."""
    banner_text = banner(Settings(), card(state="loading", facts=None, note="waiting for triton://far:8001: refused"))
    assert banner_text["model"] == "org/name  waiting for its server"


def test_a_model_without_memory_is_shown_as_sleeping() -> None:
    """A model that was never loaded has no facts; the first request wakes it."""
    assert banner(Settings(), card(state="unloaded", facts=None, sleeping=True))["model"] == "org/name  sleeping"


def test_without_a_model_the_next_step_is_shown() -> None:
    """Clients may load models."""
    banner_text = banner(Settings())
    assert banner_text["model"] == "none yet: shoal load NAME --url http://127.0.0.1:8080"
    assert "try" not in banner_text


def test_the_example_is_a_valid_command() -> None:
    """A shell splits it into a POST of valid JSON to a model that embeds."""
    words = shlex.split(banner(Settings(), card("a/b"))["try"])
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8080/v1/embeddings"]
    assert json.loads(words[-1])["model"] == "a/b"


def test_keys_are_counted_and_never_shown() -> None:
    """The example takes the key from the environment."""
    settings = Settings(api_key=("s3cret",), host="0.0.0.0")
    banner_text = banner(settings, card())
    assert banner_text["auth"] == "on, 1 key"
    assert "Bearer $SHOAL_API_KEY" in banner_text["try"]
    assert "s3cret" not in str(banner_text)


def test_an_insecure_server_is_warned_about() -> None:
    """Only --insecure leads here."""
    assert banner(Settings(host="0.0.0.0", insecure=True))["auth"] == "OFF, and other machines can connect (--insecure)"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://localhost:80"),
        ("::", "http://localhost:80"),
        ("::1", "http://[::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_the_url_can_be_opened(host: str, expected: str) -> None:
    """A browser cannot open wildcard addresses."""
    assert browser_url(host, 80) == expected


def test_a_model_that_generates_has_a_line_of_its_own() -> None:
    """A model that does both has two lines."""
    facts = ModelFacts(source="fake", backend="fake", tasks=("embed", "generate"))
    banner_text = banner(Settings(), card("a/b", facts=facts))
    words = shlex.split(banner_text["chat"])
    assert words[2].endswith("/v1/chat/completions")
    assert json.loads(words[-1])["messages"][0]["role"] == "user"
    assert "/v1/embeddings" in banner_text["try"]
