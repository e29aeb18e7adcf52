"""Model names of Ollama's clients."""

from __future__ import annotations

import pytest

from shoal.surfaces.ollama.names import LIBRARY, is_library_name, match_library_name, split_quantization, strip_tag

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SERVED = {
    "minilm": ["minilm", MINILM],
    "small": ["small", "bartowski/Llama-3.2-1B-Instruct-GGUF"],
    "OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov": ["OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov"],
    "google/gemma-3-1b-it": ["google/gemma-3-1b-it"],
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("all-minilm", "minilm"),
        ("all-minilm:l6-v2", "minilm"),
        ("all-minilm:33m", None),
        ("llama3.2:1b", "small"),
        ("llama3.2:1b-instruct-q4_K_M", "small"),
        ("llama3.2:3b", None),
        ("llama3.2", None),
        ("qwen2.5:0.5b", "OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov"),
        ("qwen2.5:0.5b-instruct-fp16", "OpenVINO/Qwen2.5-0.5B-Instruct-int4-ov"),
        ("gemma3:1b", "google/gemma-3-1b-it"),
        ("gemma3:12b", None),
        ("bge-m3", None),
    ],
)
def test_names_of_the_library(name: str, model: str | None) -> None:
    """Family, version and size must match one served model."""
    assert match_library_name(name, SERVED) == model


def test_ambiguous_names() -> None:
    """Two candidates match neither, because a wrong model's answer would look right."""
    served = {name: [name] for name in ("a/Llama-3.2-1B", "b/Llama-3.2-1B-Instruct-GGUF")}
    assert match_library_name("llama3.2:1b", served) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf.co/org/name:Q4_K_M", ("org/name", "Q4_K_M")),
        ("org/name:q8_0", ("org/name", "Q8_0")),
        ("org/name:IQ3_XS", ("org/name", "IQ3_XS")),
        ("org/name:f16", ("org/name", "F16")),
        ("huggingface.co/org/name:latest", ("org/name", "")),
        ("org/name:loud", ("org/name:loud", "")),
        ("mini", ("mini", "")),
    ],
)
def test_quantizations(name: str, expected: tuple[str, str]) -> None:
    """Tags that name a quantization are distinguished from adapters."""
    assert split_quantization(strip_tag(name)) == expected


@pytest.mark.parametrize(
    ("name", "whose"),
    [("llama3.2:1b", True), ("mistral:7b", True), ("org/name:7b", False), ("pypi:package", False), ("gpt2", False)],
)
def test_names_that_only_the_library_has(name: str, whose: bool) -> None:
    """They cannot be names of the Hub or of PyPI."""
    assert is_library_name(name, {"pypi"}) is whose


def test_the_table_of_embedders() -> None:
    """Every name maps to one repository."""
    assert LIBRARY["all-minilm"] == LIBRARY["all-minilm:22m"] == MINILM
    assert all("/" in repository for repository in LIBRARY.values())
