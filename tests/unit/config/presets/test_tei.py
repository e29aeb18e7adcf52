"""`--as tei`: settings derived from the flags and environment of text-embeddings-inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.app import open_app
from shoal.backends import parse_served
from shoal.config import LoadedConfig, check_bind, load
from shoal.config.presets.tei import TEI
from shoal.config.settings import ModelTable
from shoal.errors import ConfigError


def load_preset(*words: str, **environ: str) -> LoadedConfig:
    """`words`: flags and their values."""
    return load({"as": "tei", "foreign": dict(zip(words[::2], words[1::2], strict=True))}, environ)


def test_the_default_ports_match_the_original() -> None:
    """With the metrics port; the model is Shoal's default, and limits are Shoal's own."""
    config = load_preset()
    assert (config.settings.port, config.settings.tei_metrics, config.settings.any_model) == (3000, True, True)
    assert config.served == ()
    assert (config.settings.max_inputs, config.settings.truncate) == (2048, True)
    assert config.warnings == ()


@pytest.mark.parametrize("as_flags", [False, True])
def test_every_number_and_switch(as_flags: bool) -> None:
    """From the environment and from the command line."""
    values: dict[str, tuple[str, str, Any]] = {
        "MAX_CONCURRENT_REQUESTS": ("512", "max_queue_items", 512),
        "MAX_BATCH_REQUESTS": ("4", "max_batch_size", 4),
        "MAX_CLIENT_BATCH_SIZE": ("32", "max_inputs", 32),
        "PAYLOAD_LIMIT": ("2000000", "max_body_bytes", 2_000_000),
        "AUTO_TRUNCATE": ("false", "truncate", False),
        "JSON_OUTPUT": ("true", "log_format", "json"),
        "DTYPE": ("float32", "precision", "f32"),
        "HOSTNAME": ("0.0.0.0", "host", "0.0.0.0"),
        "HF_API_TOKEN": ("t", "hf_token", "t"),
        "CORS_ALLOW_ORIGIN": (
            "https://a.example, https://b.example",
            "cors_origins",
            ("https://a.example", "https://b.example"),
        ),
    }
    environ = {name: text for name, (text, _, _) in values.items()}
    if as_flags:
        words = [word for name, text in environ.items() for word in ("--" + name.lower().replace("_", "-"), text)]
        config = load_preset(*words)
    else:
        config = load_preset(**environ, PORT="8081", MAX_BATCH_TOKENS="999", API_KEY="k", HF_TOKEN="first")
        assert (config.settings.port, config.settings.max_batch_tokens, config.settings.api_key) == (8081, 999, ("k",))
        values["HF_API_TOKEN"] = ("t", "hf_token", "first")
    assert {setting: getattr(config.settings, setting) for _, setting, _ in values.values()} == {
        setting: value for _, setting, value in values.values()
    }
    layer = "flag" if as_flags else "foreign"
    assert {config.sources[setting].layer for _, setting, _ in values.values()} == {layer}


@pytest.mark.parametrize(
    ("environ", "served"),
    [
        ({"MODEL_ID": "BAAI/bge-small-en-v1.5"}, "hf:BAAI/bge-small-en-v1.5"),
        ({"MODEL_ID": "a/b", "REVISION": "main"}, "hf:a/b@main"),
        ({"MODEL_ID": "a/b", "SERVED_MODEL_NAME": "mine"}, "mine=hf:a/b"),
        ({"MODEL_ID": "fake:labels=1"}, "fake:labels=1"),
        ({"MODEL_ID": "tei+http://gpu:8080"}, "tei+http://gpu:8080"),
    ],
)
def test_the_model(environ: dict[str, str], served: str) -> None:
    """It becomes an address that the grammar accepts."""
    assert load_preset(**environ).served == (served,)
    parse_served(served)


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    """By its path, for any revision."""
    assert load_preset("--model-id", str(tmp_path), "--revision", "main").served == (f"file:{tmp_path}",)


def test_a_flag_overrides_the_environment() -> None:
    """As in the original; addresses on the command line override both."""
    config = load_preset("--model-id", "a/flag", MODEL_ID="a/variable")
    assert (config.served, config.sources["models"].label) == (("hf:a/flag",), "--model-id")
    assert load({"as": "tei", "models": ["hf:a/named"]}, {"MODEL_ID": "a/variable"}).served == ("hf:a/named",)


def test_an_invalid_switch_value_is_not_a_model() -> None:
    """`--auto-truncate maybe` leaves `maybe` as an address beside --model-id; it must not replace the model."""
    foreign = {"--auto-truncate": "true", "--model-id": "a/flag"}
    with pytest.raises(ConfigError, match="--model-id names the model, and so does 'maybe'") as caught:
        load({"as": "tei", "models": ["maybe"], "foreign": foreign}, {})
    assert caught.value.param == "--model-id"


def test_prompts() -> None:
    """For a single served model; a text keeps its trailing space, which the model was trained with."""
    config = load_preset("--default-prompt", "query: ").table("any", served=True)
    assert (config.prompts, config.default_prompt_name) == ({"default": "query: "}, "default")
    assert load_preset("--default-prompt", "query: ").table("loaded later") == ModelTable()
    config = load_preset(DEFAULT_PROMPT="passage: ").table("any", served=True)
    assert config.prompts == {"default": "passage: "}
    config = load_preset(DEFAULT_PROMPT_NAME="query").table("any", served=True)
    assert (config.prompts, config.default_prompt_name) == ({}, "query")


async def test_a_prompt_is_for_one_model(tmp_path: Path) -> None:
    """With two models one would use the other's prompt and return wrong vectors, so the error names it."""
    load_preset = load({"as": "tei", "home": str(tmp_path), "foreign": {"--default-prompt": "query: "}}, {})
    async with open_app(load_preset, ["fake:"]):
        pass
    with pytest.raises(ConfigError, match=r"--default-prompt applies to one model, but one and two are served"):
        async with open_app(load_preset, ["one=fake:", "two=fake:"]):
            pass


def test_a_container_s_own_name_is_no_address() -> None:
    """HOSTNAME is set in every container, and the original ignores it; a flag is deliberate."""
    assert load_preset(HOSTNAME="4f1d2c3b4a5e").settings.host == "127.0.0.1"
    with pytest.raises(ConfigError, match="--hostname: must be an IP address, got '4f1d'"):
        load_preset("--hostname", "4f1d")


def test_an_open_address_asks_for_a_key() -> None:
    """0.0.0.0 is the original's default, but no preset's."""
    with pytest.raises(ConfigError, match="no API key is set"):
        check_bind(load_preset(HOSTNAME="0.0.0.0").settings)
    check_bind(load_preset(HOSTNAME="0.0.0.0", API_KEY="k").settings)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"POOLING": "cls"}, "POOLING is ignored: a model's files define its pooling, and /info shows it"),
        ({"DTYPE": "float16"}, "DTYPE: float16 is left to the engine (`precision` auto)"),
        ({"REVISION": "main"}, "REVISION requires --model-id or MODEL_ID"),
        ({"SERVED_MODEL_NAME": "m"}, "SERVED_MODEL_NAME requires --model-id or MODEL_ID"),
        ({"CORS_ALLOW_ORIGIN": "*"}, "CORS_ALLOW_ORIGIN: * is ignored: write each origin in full"),
        ({"OTLP_ENDPOINT": "http://o:4317"}, "OTLP_ENDPOINT has no effect: no traces are sent"),
        ({"TOKENIZATION_WORKERS": "4"}, "TOKENIZATION_WORKERS has no effect"),
        ({"HUGGINGFACE_HUB_CACHE": "/data"}, "HUGGINGFACE_HUB_CACHE has no effect: models are kept in `home`"),
    ],
)
def test_unused_variables_are_logged(environ: dict[str, str], message: str) -> None:
    """One warning, which starts with the name."""
    (warning,) = load_preset(**environ).warnings
    assert warning.startswith(message)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MAX_CLIENT_BATCH_SIZE": "many"}, "MAX_CLIENT_BATCH_SIZE: must be a whole number, got 'many'"),
        ({"AUTO_TRUNCATE": "perhaps"}, "AUTO_TRUNCATE: must be true or false, got 'perhaps'"),
        ({"DTYPE": "int8"}, "DTYPE: must be one of float32, bfloat16, float16, got 'int8'"),
        ({"POOLING": "max"}, "POOLING: must be one of cls, mean, splade, last-token, got 'max'"),
        ({"PORT": "70000"}, "PORT: must be a whole number from 0 to 65535, got 70000"),
        ({"DEFAULT_PROMPT": "a", "DEFAULT_PROMPT_NAME": "b"}, "DEFAULT_PROMPT: DEFAULT_PROMPT_NAME is also set"),
    ],
)
def test_wrong_values(environ: dict[str, str], message: str) -> None:
    """The error names the variable at fault."""
    with pytest.raises(ConfigError) as caught:
        load_preset(**environ)
    assert caught.value.message.startswith(message)
    assert caught.value.param == next(iter(environ))


def test_every_flag_has_its_variable() -> None:
    """As in the original; the four flags that Shoal also has belong to Shoal."""
    flags = {"--" + name.lower().replace("_", "-") for name in TEI.variables}
    assert flags - TEI.flags.keys() == {"--port", "--api-key", "--hf-token", "--max-batch-tokens"}
    assert TEI.switches <= TEI.flags.keys()
