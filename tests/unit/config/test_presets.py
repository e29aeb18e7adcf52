"""Presets: settings derived from the environments of other servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_served
from shoal.config import LoadedConfig, load
from shoal.config.presets import FLAGS, PRESETS
from shoal.config.schema import convert
from shoal.config.settings import BY_NAME
from shoal.errors import ConfigError


def load_preset(preset: str, **environ: str) -> LoadedConfig:
    return load({"as": preset}, environ)


def with_flags(preset: str, *words: str, **environ: str) -> LoadedConfig:
    """`words`: flags of the original and their values."""
    return load({"as": preset, "foreign": dict(zip(words[::2], words[1::2], strict=True))}, environ)


def refusal(preset: str, *words: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        with_flags(preset, *words, **environ)
    return caught.value


@pytest.mark.parametrize("name", PRESETS)
def test_every_default_is_a_legal_value_of_a_setting(name: str) -> None:
    """Shoal does not check them at startup."""
    for key, value in PRESETS[name].defaults.items():
        assert convert(BY_NAME[key], value, key) == value


@pytest.mark.parametrize("name", PRESETS)
def test_variables_are_read_under_their_preset_alone(name: str) -> None:
    """MODEL_NAME and MAX_BATCH_SIZE may have other meanings; a wrong value is not an error without the preset."""
    environ = dict.fromkeys(PRESETS[name].variables, "@@ not a value @@")
    assert load({}, environ) == load({}, {})


@pytest.mark.parametrize("name", PRESETS)
def test_empty_variables_count_as_not_set(name: str) -> None:
    """Compose files pass empty variables for unset values."""
    assert load({"as": name}, dict.fromkeys(PRESETS[name].variables, " ")) == load({"as": name}, {})


@pytest.mark.parametrize("name", PRESETS)
def test_flags_of_others_are_refused(name: str) -> None:
    """The error names the preset that knows them; also without a preset."""
    for flag, owner in FLAGS.items():
        for preset in {name, None} - {owner.name}:
            with pytest.raises(ConfigError) as caught:
                load({"as": preset, "foreign": {flag: "1"}}, {})
            assert caught.value.message == f"{flag} is a flag of {owner.name}: add --as {owner.name}"
            assert caught.value.param == flag


def test_flags_of_originals_differ_from_shoal_s() -> None:
    """Both can be given together."""
    assert not FLAGS.keys() & {setting.flag for setting in BY_NAME.values()}
    assert len(FLAGS) == sum(len(one.flags) for one in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_listen_on_loopback(name: str) -> None:
    """For every preset: an open address must be given explicitly."""
    assert load_preset(name).settings.host == "127.0.0.1"
    assert not load_preset(name).settings.insecure


class TestTritonGrpcProxy:
    NAME = "triton-grpc-proxy"

    def test_the_defaults_match_the_original(self) -> None:
        """One model called `model` of http://triton-server:8001, version 1, and port 8080."""
        config = load_preset(self.NAME)
        assert config.settings.port == 8080
        assert config.served == ("model=triton://triton-server:8001#model@1",)
        table = config.models["model"]
        assert (table.input_names, table.output_names) == ({"text": "text"}, {"embedding": "embedding"})
        assert (table.normalize, table.default_for) == (False, ("embed",))
        assert config.warnings == ()

    def test_the_length_is_checked_only_if_set(self) -> None:
        """The original's default of 1024 would truncate other models' vectors; the output's shape has the length."""
        assert load_preset(self.NAME).models["model"].dimension is None
        assert load_preset(self.NAME, EMBEDDING_SIZE="384").models["model"].dimension == 384

    def test_every_variable(self) -> None:
        """Each sets the setting listed in the docs."""
        config = load_preset(
            self.NAME,
            SERVER_PORT="9000",
            TRITON_SERVER_URL="http://10.0.0.5/",
            TRITON_SERVER_GRPC_PORT="9001",
            MODEL_NAME="bge-m3",
            MODEL_VERSION="3",
            INPUT_NAME="in",
            OUTPUT_NAME="out",
            EMBEDDING_SIZE="8",
            RUST_LOG="info,triton_grpc_proxy=debug",
        )
        assert (config.settings.port, config.settings.log_level) == (9000, "info")
        assert config.served == ("bge-m3=triton://10.0.0.5:9001#bge-m3@3",)
        table = config.models["bge-m3"]
        assert (table.input_names, table.output_names, table.dimension) == ({"text": "in"}, {"embedding": "out"}, 8)
        assert set(config.models) == {"bge-m3"}

    def test_a_folder_written_by_shoal(self) -> None:
        """The folder of `org/name` is `org~name`, which is the name that Triton lists."""
        config = load_preset(self.NAME, MODEL_NAME="org~name")
        assert config.served == ("org/name=triton://triton-server:8001#org~name@1",)
        assert config.models["org/name"].default_for == ("embed",)
        assert config.settings.proxy_metrics
        for wrong in ("a~b~c", "org/name", "~"):
            assert refusal(self.NAME, MODEL_NAME=wrong).param == "MODEL_NAME"

    @pytest.mark.parametrize(
        ("url", "place"),
        [
            ("http://triton-server", "triton://triton-server:8001"),
            ("triton-server", "triton://triton-server:8001"),
            ("HTTPS://t.example/", "tritons://t.example:8001"),
            ("http://[::1]", "triton://[::1]:8001"),
        ],
    )
    def test_the_url_becomes_an_address(self, url: str, place: str) -> None:
        """https means TLS; the address is one that the grammar accepts."""
        (served,) = load_preset(self.NAME, TRITON_SERVER_URL=url).served
        assert served == f"model={place}#model@1"
        assert parse_served(served).name == "model"

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"TRITON_SERVER_URL": "http://h:8001"}, "TRITON_SERVER_URL: must be http://host without a port (that is"),
            ({"TRITON_SERVER_URL": "http://h/path"}, "TRITON_SERVER_URL: must be http://host"),
            ({"TRITON_SERVER_URL": "ftp://h"}, "TRITON_SERVER_URL: must be http://host"),
            ({"TRITON_SERVER_GRPC_PORT": "grpc"}, "TRITON_SERVER_GRPC_PORT: must be a whole number from 1 to 65535"),
            ({"MODEL_NAME": "../../etc"}, "MODEL_NAME: must be a model's name"),
            ({"MODEL_VERSION": "latest"}, "MODEL_VERSION: must be a whole number of at least 1, got 'latest'"),
            ({"EMBEDDING_SIZE": "1k"}, "EMBEDDING_SIZE: must be a whole number, got '1k'"),
            ({"EMBEDDING_SIZE": "0"}, "EMBEDDING_SIZE: must be a whole number of at least 1, got 0"),
            ({"SERVER_PORT": "99999"}, "SERVER_PORT: must be a whole number from 0 to 65535, got '99999'"),
        ],
    )
    def test_a_wrong_value_names_the_variable(self, environ: dict[str, str], expected: str) -> None:
        """The original would fail later, or truncate vectors wrongly."""
        error = refusal(self.NAME, **environ)
        assert error.message.startswith(expected)
        assert error.param == next(iter(environ))

    def test_the_misspelled_port_of_the_compose_file_is_warned_about(self) -> None:
        """The original ignores it silently."""
        (warning,) = load_preset(self.NAME, TRITON_SERVER_PORT_GRPC="9001").warnings
        assert "TRITON_SERVER_PORT_GRPC is ignored" in warning
        assert "TRITON_SERVER_GRPC_PORT" in warning
        both = load_preset(self.NAME, TRITON_SERVER_PORT_GRPC="9001", TRITON_SERVER_GRPC_PORT="9002")
        assert both.warnings == ()
        assert both.served == ("model=triton://triton-server:9002#model@1",)

    @pytest.mark.parametrize(
        ("directives", "level"),
        [
            ("trace", "debug"),
            ("WARN", "warning"),
            ("off", "error"),
            ("hyper=debug,error", "error"),
            ("hyper=debug", "info"),
            ("nonsense", "info"),
        ],
    )
    def test_rust_log_is_a_level(self, directives: str, level: str) -> None:
        """Directives for modules belong to another program; without a global level the default stays."""
        assert load_preset(self.NAME, RUST_LOG=directives).settings.log_level == level


class TestInferenceServer:
    NAME = "inference-server"

    def test_the_defaults_match_the_original(self) -> None:
        """Port 8686, a local Triton with its folder, five models, JSON metrics, nothing loaded at startup."""
        config = load_preset(self.NAME)
        settings = config.settings
        assert (settings.port, settings.metrics_default, settings.default_model) == (8686, "json", False)
        assert (settings.backend, settings.triton_url) == ("triton", "localhost:8001")
        assert settings.triton_repository == "model_repository"
        assert (settings.max_loaded_models, settings.max_batch_size) == (5, 32)
        assert (settings.triton_kind, settings.triton_instances, settings.triton_accelerator) == ("auto", 1, "none")
        assert config.served == ()
        assert config.models == {}

    def test_every_variable(self) -> None:
        """Each sets the setting listed in the docs."""
        settings = load_preset(
            self.NAME,
            TRITON_GRPC_URL="triton:9001",
            MAX_LOADED_MODELS="20",
            MAX_BATCH_SIZE="16",
            DYNAMIC_BATCHING="false",
            INSTANCE_KIND="KIND_GPU",
            MODEL_INSTANCES="2",
            TENSORRT_ENABLED="true",
            FP16_ENABLED="True",
        ).settings
        assert (settings.triton_url, settings.max_loaded_models, settings.max_batch_size) == ("triton:9001", 20, 16)
        assert (settings.triton_dynamic_batching, settings.triton_kind, settings.triton_instances) == (False, "gpu", 2)
        assert (settings.triton_accelerator, settings.triton_fp16) == ("tensorrt", True)

    @pytest.mark.parametrize(
        ("url", "expected"),
        [("http://h:1/", "h:1"), ("https://h:1/", "tritons://h:1"), ("grpc://h:1", "h:1"), ("h", "h")],
    )
    def test_the_url_of_triton(self, url: str, expected: str) -> None:
        """The original takes no scheme; https means TLS."""
        assert load_preset(self.NAME, TRITON_GRPC_URL=url).settings.triton_url == expected

    @pytest.mark.parametrize("variable", ["TENSORRT_ENABLED", "FP16_ENABLED"])
    @pytest.mark.parametrize("kind", ["", "KIND_CPU"])
    def test_gpu_settings_are_refused_without_a_gpu(self, variable: str, kind: str) -> None:
        """As in the original at startup; a disabled setting is allowed."""
        error = refusal(self.NAME, INSTANCE_KIND=kind, **{variable: "true"})
        assert error.message.startswith(f"{variable}: also set INSTANCE_KIND=KIND_GPU")
        assert error.param == variable
        assert load_preset(self.NAME, **{variable: "false"}).sources["triton_fp16"].layer == "default"

    def test_instances_need_a_kind(self) -> None:
        """Otherwise the original writes neither into the model's configuration; 0 means unset there."""
        config = load_preset(self.NAME, MODEL_INSTANCES="3")
        assert config.settings.triton_instances == 1
        assert config.warnings == ("MODEL_INSTANCES requires INSTANCE_KIND: set KIND_CPU or KIND_GPU",)
        none = load_preset(self.NAME, MODEL_INSTANCES="0", INSTANCE_KIND="KIND_CPU")
        assert (none.settings.triton_instances, none.settings.triton_kind, none.warnings) == (1, "cpu", ())

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"INSTANCE_KIND": "GPU"}, "INSTANCE_KIND: must be one of KIND_CPU, KIND_GPU, got 'GPU'"),
            ({"MODEL_INSTANCES": "two"}, "MODEL_INSTANCES: must be a whole number, got 'two'"),
            ({"DYNAMIC_BATCHING": "perhaps"}, "DYNAMIC_BATCHING: must be true or false, got 'perhaps'"),
            ({"MAX_BATCH_SIZE": "0"}, "MAX_BATCH_SIZE: must be a whole number of at least 1, got '0'"),
            ({"TRITON_GRPC_URL": "h/path"}, "TRITON_GRPC_URL: must be host or host:port"),
        ],
    )
    def test_a_wrong_value_names_the_variable(self, environ: dict[str, Any], expected: str) -> None:
        """By the operator's name for it."""
        assert refusal(self.NAME, **environ).message.startswith(expected)


class TestTritonOpenAI:
    NAME = "triton-openai"

    def test_the_defaults_match_the_original(self) -> None:
        """All models of the local Triton, over gRPC, on Ollama's port."""
        config = load_preset(self.NAME)
        assert (config.settings.port, config.settings.default_max_tokens, config.settings.log_level) == (
            11434,
            0,
            "info",
        )
        assert config.served == ("triton://127.0.0.1:8001",)
        assert parse_served(config.served[0]).addresses[0].model == ""
        assert config.sources["models"].label == "preset triton-openai"
        assert set(config.settings.ignore_parameters) == {
            *("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
        }
        assert config.warnings == ()

    def test_every_flag(self, tmp_path: Path) -> None:
        """Each sets the setting listed in the docs."""
        (tmp_path / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": 4096}}))
        config = with_flags(
            self.NAME,
            *("--triton_http_proto", "https", "--triton_http_host", "10.0.0.5", "--triton_http_port", "8000"),
            *("--tokenizer_dir", str(tmp_path), "--engine_dir", str(tmp_path)),
            *("--default_max_tokens", "512", "--verbose", "True"),
        )
        assert config.served == ("tritons://10.0.0.5:8001",)
        assert (config.settings.default_max_tokens, config.settings.log_level) == (512, "debug")
        table = config.table("any")
        assert (table.tokenizer, table.context_tokens) == (None, None)  # a model that embeds
        table = table.for_language_model
        assert (table.tokenizer, table.context_tokens) == (f"file:{tmp_path}", 4096)
        assert config.warnings == ()
        assert config.sources["models"].label == "--triton_http_proto, --triton_http_host"
        assert config.sources["log_level"].layer == "flag"

    def test_language_model_settings_are_shown_and_overridable(self, tmp_path: Path) -> None:
        """`shoal config` lists it once; keys in a model's own table override it."""
        file = tmp_path / "shoal.toml"
        file.write_text('[models."own"]\ntokenizer = "hf:org/own"\n[models."other"]\nnormalize = false\n')
        flags = {"as": self.NAME, "foreign": {"--tokenizer_dir": str(tmp_path)}}
        config = load(flags, {}, file)
        assert config.table("own").for_language_model.tokenizer == "hf:org/own"
        for name in ("other", "any"):
            assert config.table(name).tokenizer is None
            assert config.table(name).for_language_model.tokenizer == f"file:{tmp_path}"
        assert list(config.models) == ["own", "other"]
        shown = {"tokenizer": {"value": f"file:{tmp_path}", "source": "--tokenizer_dir"}}
        assert config.describe()["tables"]["*language models*"] == shown
        assert config.for_model("any") == config.settings
        assert config.resolve_argument("any") == "any"

    def test_without_them_a_model_has_no_table(self) -> None:
        """The default behavior."""
        config = load_preset(self.NAME)
        assert config.models.get("any") is None
        assert "*language models*" not in config.describe()["tables"]

    def test_flags_override_shoal_s_environment(self) -> None:
        """This includes flags of the original."""
        environ = {"SHOAL_MODELS": "fake:", "SHOAL_LOG_LEVEL": "error", "SHOAL_DEFAULT_MAX_TOKENS": "7"}
        config = with_flags(
            self.NAME, "--triton_http_host", "h", "--verbose", "1", "--default_max_tokens", "9", **environ
        )
        assert config.served == ("triton://h:8001",)
        assert (config.settings.log_level, config.settings.default_max_tokens) == ("debug", 9)
        assert load_preset(self.NAME, **environ).served == ("fake:",)

    @pytest.mark.parametrize("value", ["True", "1", "yes"])
    @pytest.mark.parametrize("denied", ["False", "0", ""])
    def test_verbose_sets_the_log_level(self, value: str, denied: str) -> None:
        """The original treats `--verbose False` as true."""
        assert with_flags(self.NAME, "--verbose", value).settings.log_level == "debug"
        assert with_flags(self.NAME, "--verbose", denied).settings.log_level == "info"

    def test_another_http_port_is_warned_about(self) -> None:
        """The warning says which port is used and how to change it."""
        (warning,) = with_flags(self.NAME, "--triton_http_port", "9000", "--triton_http_host", "h").warnings
        assert "--triton_http_port is ignored" in warning
        assert "8001" in warning
        assert warning.endswith("shoal serve --as triton-openai triton://h:PORT")

    @pytest.mark.parametrize(
        ("built", "tokens"),
        [
            ({"max_seq_len": 2048, "max_input_len": 1024}, 2048),
            ({"max_seq_len": None, "max_input_len": 1024, "max_output_len": 512}, 1536),
            ({"max_input_len": 1024, "max_output_len": 512}, 1536),
        ],
    )
    def test_the_context_of_an_engine(self, tmp_path: Path, built: dict[str, Any], tokens: int) -> None:
        """Newer configurations lack max_output_len, which crashes the original."""
        (tmp_path / "config.json").write_text(json.dumps({"build_config": built}))
        assert (
            with_flags(self.NAME, "--engine_dir", str(tmp_path)).table("any").for_language_model.context_tokens
            == tokens
        )

    @pytest.mark.parametrize(
        "text", [None, "{", "[]", "{}", '{"build_config": 7}', '{"build_config": {"max_seq_len": 0}}']
    )
    def test_an_engine_without_a_context(self, tmp_path: Path, text: str | None) -> None:
        """The error states the setting to use instead."""
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        error = refusal(self.NAME, "--engine_dir", str(tmp_path))
        assert error.message.startswith(f"--engine_dir: {tmp_path / 'config.json'} ")
        assert error.message.endswith("omit the flag, and set context_tokens in the model's table in shoal.toml")
        assert error.param == "--engine_dir"

    @pytest.mark.parametrize(
        ("flag", "value", "rule"),
        [
            ("--triton_http_proto", "grpc", "http or https"),
            ("--triton_http_host", "h:8000", "a host without a port"),
            ("--tokenizer_dir", "/nowhere/at/all", "an existing folder"),
            ("--engine_dir", "/nowhere/at/all", "an existing folder"),
            ("--default_max_tokens", "many", "a whole number"),
            ("--verbose", "very", "true or false"),
        ],
    )
    def test_a_wrong_value_names_the_flag(self, flag: str, value: str, rule: str) -> None:
        """As for the variables of other presets."""
        error = refusal(self.NAME, flag, value)
        assert error.message == f"{flag}: must be {rule}, got {value!r}"
        assert error.param == flag


HOST_RULE = "host, host:port or :port, with [brackets] around IPv6 before a port"


class TestOllama:
    NAME = "ollama"

    def test_the_defaults_match_the_original(self) -> None:
        """Its port, nothing at startup, and models that sleep after five minutes."""
        config = load_preset(self.NAME)
        settings = config.settings
        assert (settings.port, settings.default_model, settings.keep_alive_s) == (11434, False, 300.0)
        assert (settings.max_queued_streams, settings.max_loaded_models) == (512, 0)
        assert (config.served, config.warnings) == ((), ())

    def test_every_variable(self) -> None:
        """Each sets the setting listed in the docs."""
        config = load_preset(
            self.NAME,
            OLLAMA_HOST="127.0.0.2:9000",
            OLLAMA_KEEP_ALIVE="1h30m",
            OLLAMA_MAX_LOADED_MODELS="3",
            OLLAMA_MAX_QUEUE="0",
            OLLAMA_NUM_PARALLEL="4",
            OLLAMA_CONTEXT_LENGTH="8192",
            OLLAMA_ORIGINS="https://app.example.org, http://localhost:3000",
            OLLAMA_DEBUG="1",
            OLLAMA_LOAD_TIMEOUT="15m",
            OLLAMA_KV_CACHE_TYPE="q8_0",
        )
        settings = config.settings
        assert (settings.host, settings.port) == ("127.0.0.2", 9000)
        assert (settings.keep_alive_s, settings.max_loaded_models) == (5400.0, 3)
        assert (settings.max_queued_streams, settings.max_streams) == (0, 4)
        assert config.table("any").context_tokens is None
        assert config.table("any").for_language_model.context_tokens == 8192
        assert settings.cors_origins == ("https://app.example.org", "http://localhost:3000")
        assert (settings.log_level, settings.load_timeout_s) == ("debug", 900.0)
        assert settings.kv_cache_precision == "u8"
        assert config.warnings == ()

    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("0.0.0.0", "0.0.0.0", 11434),
            (":9000", "127.0.0.1", 9000),
            ("[::1]:9000", "::1", 9000),
            ("[::]", "::", 11434),
            ("::1", "::1", 11434),
            ("::", "::", 11434),
            ("fe80::1:11", "fe80::1:11", 11434),
            ("http://::1/", "::1", 80),
            ("http://[::1]:9000/x", "::1", 9000),
            ("'\"127.0.0.2:9000\"'", "127.0.0.2", 9000),
            ("http://example.com", "example.com", 80),
            ("http://example.com:9000/ollama", "example.com", 9000),
            ("localhost", "localhost", 11434),
        ],
    )
    def test_the_address(self, text: str, host: str, port: int) -> None:
        """The original's rules."""
        settings = load_preset(self.NAME, OLLAMA_HOST=text).settings
        assert (settings.host, settings.port) == (host, port)

    @pytest.mark.parametrize(
        ("text", "seconds"), [("10m", 600), ("90", 90), ("-1", 0), ("-1m", 0), ("0", 1), ("500ms", 1), ("2.5s", 2.5)]
    )
    def test_how_long_models_stay(self, text: str, seconds: float) -> None:
        """Negative means forever, which is 0 in Shoal; Ollama's 0 is the shortest time."""
        assert load_preset(self.NAME, OLLAMA_KEEP_ALIVE=text).settings.keep_alive_s == seconds

    @pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90", 90), ("0", 31536000), ("-1m", 31536000)])
    def test_how_long_a_load_may_take(self, text: str, seconds: float) -> None:
        """0 and less mean forever in Ollama; Shoal's limit is a year."""
        assert load_preset(self.NAME, OLLAMA_LOAD_TIMEOUT=text).settings.load_timeout_s == seconds

    def test_a_cache_type_that_is_not_supported(self) -> None:
        """It is not dropped silently."""
        config = load_preset(self.NAME, OLLAMA_KV_CACHE_TYPE="q4_0")
        assert config.settings.kv_cache_precision == "auto"
        assert config.warnings == ("OLLAMA_KV_CACHE_TYPE: q4_0 is not supported; use f32, f16, q8_0",)

    def test_options_without_effect_are_logged(self) -> None:
        """One warning each, with the reason, and nothing else changes."""
        names = ["OLLAMA_FLASH_ATTENTION", "OLLAMA_GPU_OVERHEAD", "OLLAMA_SCHED_SPREAD"]
        config = load_preset(self.NAME, **dict.fromkeys(names, "1"))
        assert [one.partition(" has no effect: ")[0] for one in config.warnings] == names
        assert all(one.partition(": ")[2] for one in config.warnings)
        assert config.settings == load_preset(self.NAME).settings

    def test_0_keeps_the_default(self) -> None:
        """0 means that the server chooses."""
        environ = dict.fromkeys(("OLLAMA_MAX_LOADED_MODELS", "OLLAMA_NUM_PARALLEL", "OLLAMA_CONTEXT_LENGTH"), "0")
        assert load_preset(self.NAME, **environ) == load_preset(self.NAME)

    @pytest.mark.parametrize(
        ("text", "level"), [("0", "info"), ("false", "info"), ("true", "debug"), ("2", "debug"), ("?", "info")]
    )
    def test_debug(self, text: str, level: str) -> None:
        """A boolean or a number."""
        assert load_preset(self.NAME, OLLAMA_DEBUG=text).settings.log_level == level

    def test_unused_options_are_logged(self) -> None:
        """Patterns would allow every web page; the files are not Shoal's."""
        config = load_preset(self.NAME, OLLAMA_ORIGINS="*,https://a.example,app://*", OLLAMA_MODELS="/models")
        assert config.settings.cors_origins == ("https://a.example",)
        origins, models = config.warnings
        assert origins.startswith("OLLAMA_ORIGINS: *, app://* is ignored")
        assert models.startswith("OLLAMA_MODELS is ignored")

    @pytest.mark.parametrize(
        ("variable", "text", "rule"),
        [
            ("OLLAMA_HOST", "a b", HOST_RULE),
            ("OLLAMA_HOST", "::1:11434", HOST_RULE),
            ("OLLAMA_HOST", "[::1", HOST_RULE),
            ("OLLAMA_HOST", "[1]:80", HOST_RULE),
            ("OLLAMA_LOAD_TIMEOUT", "soon", "seconds, or a duration such as 5m; 0 or less means forever"),
            ("OLLAMA_HOST", "https://h", "without https: Shoal serves HTTP, with TLS in a proxy"),
            ("OLLAMA_KEEP_ALIVE", "soon", "seconds, or a duration such as 5m; below 0 means forever"),
            ("OLLAMA_MAX_QUEUE", "-1", "a whole number"),
            ("OLLAMA_CONTEXT_LENGTH", "4k", "a whole number"),
        ],
    )
    def test_a_wrong_value_names_the_variable(self, variable: str, text: str, rule: str) -> None:
        """The original silently uses its default."""
        assert refusal(self.NAME, **{variable: text}).message == f"{variable}: must be {rule}, got {text!r}"
