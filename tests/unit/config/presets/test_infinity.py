"""`--as infinity`: its variables, as in the original's env.py."""

from __future__ import annotations

import pytest

from shoal.config import LoadedConfig, load
from shoal.errors import ConfigError

NAME = "infinity"


def load_preset(**environ: str) -> LoadedConfig:
    return load({"as": NAME}, {f"INFINITY_{name}": text for name, text in environ.items()})


def test_the_defaults_match_the_original() -> None:
    """Port 7997, batches of 32, a queue of 32,000."""
    settings = load_preset().settings
    assert (settings.port, settings.max_batch_size, settings.max_queue_items) == (7997, 32, 32_000)
    assert (settings.status_dialect, settings.max_inputs) == ("infinity", 2048)
    assert load_preset().served == ()


def test_every_variable() -> None:
    """Lists separate their entries with semicolons, also after the last one."""
    config = load_preset(
        MODEL_ID="BAAI/bge-small-en-v1.5;fake:images=1;",
        SERVED_MODEL_NAME="small;clip",
        REVISION="main",
        PORT="8000",
        HOST="127.0.0.2",
        API_KEY="secret",
        BATCH_SIZE="16;64",
        QUEUE_SIZE="100",
        MAX_CLIENT_BATCH_SIZE="10",
        LOG_LEVEL="trace",
        URL_PREFIX="/v1",
    )
    settings = config.settings
    assert config.served == ("small=hf:BAAI/bge-small-en-v1.5@main", "clip=fake:images=1")
    assert (settings.port, settings.host, settings.api_key) == (8000, "127.0.0.2", ("secret",))
    assert (settings.max_batch_size, settings.max_queue_items, settings.max_inputs) == (64, 100, 10)
    assert (settings.log_level, config.warnings) == ("debug", ())


def test_warnings() -> None:
    """For variables without effect."""
    config = load_preset(ENGINE="torch", URL_PREFIX="/embed", SERVED_MODEL_NAME="small")
    assert [warning.split(" ")[0].rstrip(":") for warning in config.warnings] == [
        "INFINITY_ENGINE",
        "INFINITY_URL_PREFIX",
        "INFINITY_SERVED_MODEL_NAME",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("BATCH_SIZE", "8;many", "a whole number"),
        ("BATCH_SIZE", ";", "a whole number"),
        ("LOG_LEVEL", "loud", "one of critical"),
        ("PORT", "http", "a whole number"),
        ("REVISION", "a;b", "more entries than INFINITY_MODEL_ID"),
    ],
)
def test_wrong_values(variable: str, value: str, rule: str) -> None:
    """The error names the variable."""
    with pytest.raises(ConfigError, match=rule) as caught:
        load_preset(**{"MODEL_ID": "org/name", variable: value})
    assert caught.value.param == f"INFINITY_{variable}"
