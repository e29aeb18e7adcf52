"""`--as auto-batching-proxy`: its flags, as in the original's src/config.rs."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.backends import parse_served
from shoal.config import LoadedConfig, load
from shoal.errors import ConfigError

NAME = "auto-batching-proxy"


def with_flags(*words: str, own: dict[str, Any] | None = None, **environ: str) -> LoadedConfig:
    """`words`: flags of the original only, and their values; `own`: flags that Shoal has too."""
    foreign = dict(zip(words[::2], words[1::2], strict=True))
    return load({"as": NAME, "foreign": foreign, **(own or {})}, environ)


def test_the_defaults_match_the_original() -> None:
    """Port 3000, batches of 8 after 500 ms at the latest, 32 texts a request, TEI on port 8080, 30 s."""
    config = with_flags()
    settings = config.settings
    assert (settings.port, settings.max_wait_time_ms, settings.max_batch_size) == (3000, 500.0, 8)
    assert (settings.max_inputs, settings.embed_timeout_s) == (32, 30.0)
    assert (settings.embed_dialect, settings.batch_info, settings.log_level) == (NAME, False, "info")
    assert config.served == ("tei+http://127.0.0.1:8080",)
    assert [str(parse_served(each)) for each in config.served] == ["tei+http://127.0.0.1:8080"]
    assert (config.warnings, config.sources["models"].label) == ((), f"preset {NAME}")


def test_every_flag() -> None:
    """The values of the original's own test, and their sources."""
    config = with_flags(
        *("--batch-check-interval-ms", "50"),
        *("--include-batch-info", "true"),
        *("--inference-url", "http://custom:9090/embed"),
        *("--inference-timeout-secs", "60"),
        *("--max-inference-inputs", "16"),
        own={"port": "6000", "max_wait_time_ms": "200", "max_batch_size": "16", "log_level": "debug"},
    )
    settings = config.settings
    assert (settings.port, settings.max_wait_time_ms, settings.max_batch_size) == (6000, 200.0, 16)
    assert (settings.max_inputs, settings.embed_timeout_s, settings.batch_info) == (16, 60.0, True)
    assert settings.log_level == "debug"
    assert config.served == ("tei+http://custom:9090",)
    assert config.sources["max_inputs"].label == "--max-inference-inputs"
    assert config.sources["models"].label == "--inference-url"
    (warning,) = config.warnings
    assert "--batch-check-interval-ms has no effect" in warning


@pytest.mark.parametrize("flag", ["--batch-check-interval-ms", "--inference-timeout-secs", "--max-inference-inputs"])
@pytest.mark.parametrize(("value", "rule"), [("0", "above 0"), ("-1", "a whole number"), ("x", "a whole number")])
def test_zero_is_refused(flag: str, value: str, rule: str) -> None:
    """As in the original; the error names the flag."""
    with pytest.raises(ConfigError, match=f"{flag}: must be {rule}") as caught:
        with_flags(flag, value)
    assert caught.value.param == flag


def test_zero_in_shoal_s_own_settings() -> None:
    """A batch is never empty; a wait of zero works, although the original refuses it."""
    with pytest.raises(ConfigError, match="--max-batch-size"):
        with_flags(own={"max_batch_size": "0"})
    assert with_flags(own={"max_wait_time_ms": "0"}).settings.max_wait_time_ms == 0


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8080/embed", "tei+http://127.0.0.1:8080"),
        ("http://tei/embed/", "tei+http://tei"),
        ("https://tei.example/prefix/v2/embed", "tei+https://tei.example/prefix/v2"),
        ("HTTP://tei:80", "tei+http://tei:80"),
        ("http://tei:80/", "tei+http://tei:80"),
        ("http://[::1]:8080/embed", "tei+http://[::1]:8080"),
    ],
)
def test_the_inference_url_becomes_the_address(url: str, address: str) -> None:
    """The address of its /embed becomes the server's address."""
    config = with_flags("--inference-url", url)
    assert config.served == (address,)
    assert str(parse_served(address)) == address


@pytest.mark.parametrize(
    "url",
    ["tei:8080", "http://", "ftp://tei/embed", "http://tei/v1/embeddings", "http://tei/embed?x=1", "http://a b/embed"],
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="--inference-url: must be http://HOST:PORT/embed"):
        with_flags("--inference-url", url)


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False)])
def test_batch_info(value: str, expected: bool) -> None:
    assert with_flags("--include-batch-info", value).settings.batch_info is expected


@pytest.mark.parametrize(
    ("value", "level"),
    [("normal", "info"), ("critical", "error"), ("off", "error"), ("debug", "debug"), ("info", "info")],
)
def test_levels_of_the_log(value: str, level: str) -> None:
    """The original's words and Shoal's own; without the preset only Shoal's."""
    assert with_flags(own={"log_level": value}).settings.log_level == level
    if value != level:
        with pytest.raises(ConfigError, match="--log-level"):
            load({"log_level": value}, {})


@pytest.mark.parametrize(
    ("value", "level", "warned"),
    [("INFO", "info", False), ("warn", "warning", False), ("trace", "debug", False), ("app=debug", "info", True)],
)
def test_the_variable_of_its_log(value: str, level: str, warned: bool) -> None:
    """RUST_LOG, if it is a level; flags and SHOAL_LOG_LEVEL override it."""
    config = with_flags(RUST_LOG=value)
    assert (config.settings.log_level, bool(config.warnings)) == (level, warned)
    assert with_flags(RUST_LOG=value, SHOAL_LOG_LEVEL="error").settings.log_level == "error"
    assert with_flags(RUST_LOG=value, own={"log_level": "normal"}).settings.log_level == "info"


def test_another_model_may_be_served_instead() -> None:
    """Arguments win: the dialect works with any model."""
    config = load({"as": NAME, "models": ["fake:"]}, {})
    assert (config.served, config.settings.port) == (("fake:",), 3000)
