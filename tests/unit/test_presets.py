"""Presets: what the environments of other servers come to."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Loaded, load
from shoal.errors import ConfigError
from shoal.models.address import parse_served
from shoal.presets import PRESETS
from shoal.settings import BY_NAME, convert


def loaded(preset: str, **environ: str) -> Loaded:
    return load({"as": preset}, environ)


def refusal(preset: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(preset, **environ)
    return caught.value


@pytest.mark.parametrize("name", PRESETS)
def test_every_default_is_a_legal_value_of_a_setting(name: str) -> None:
    """They are not checked when Shoal starts."""
    for key, value in PRESETS[name].defaults.items():
        assert convert(BY_NAME[key], value, key) == value


@pytest.mark.parametrize("name", PRESETS)
def test_variables_are_read_under_their_preset_alone(name: str) -> None:
    """MODEL_NAME and MAX_BATCH_SIZE may mean anything to others; a wrong value is no error there."""
    environ = dict.fromkeys(PRESETS[name].variables, "@@ not a value @@")
    assert load({}, environ) == load({}, {})


@pytest.mark.parametrize("name", PRESETS)
def test_empty_variables_count_as_not_set(name: str) -> None:
    """Compose files pass them for what nobody set."""
    assert load({"as": name}, dict.fromkeys(PRESETS[name].variables, " ")) == load({"as": name}, {})


@pytest.mark.parametrize("name", PRESETS)
def test_it_listens_on_this_machine_alone(name: str) -> None:
    """Whatever the original did: an open address is said on the command line."""
    assert loaded(name).settings.host == "127.0.0.1"
    assert not loaded(name).settings.insecure


class TestTritonGrpcProxy:
    NAME = "triton-grpc-proxy"

    def test_without_any_variable_it_is_the_original_s_set_up(self) -> None:
        """One model called `model` of http://triton-server:8001, version 1, and port 8080."""
        found = loaded(self.NAME)
        assert found.settings.port == 8080
        assert found.served == ("model=triton://triton-server:8001#model@1",)
        table = found.models["model"]
        assert (table.input_names, table.output_names) == ({"text": "text"}, {"embedding": "embedding"})
        assert (table.normalize, table.default_for) == (False, ("embed",))
        assert found.warnings == ()

    def test_the_length_is_checked_only_when_it_is_given(self) -> None:
        """The original's default of 1024 cut the answers of every other model; the output's shape says it."""
        assert loaded(self.NAME).models["model"].dimension is None
        assert loaded(self.NAME, EMBEDDING_SIZE="384").models["model"].dimension == 384

    def test_every_variable(self) -> None:
        """Each goes where the table of the docs says."""
        found = loaded(
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
        assert (found.settings.port, found.settings.log_level) == (9000, "info")
        assert found.served == ("bge-m3=triton://10.0.0.5:9001#bge-m3@3",)
        table = found.models["bge-m3"]
        assert (table.input_names, table.output_names, table.dimension) == ({"text": "in"}, {"embedding": "out"}, 8)
        assert set(found.models) == {"bge-m3"}

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
        """With TLS for https; the address is one that the grammar takes."""
        (served,) = loaded(self.NAME, TRITON_SERVER_URL=url).served
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
        """Where the original would have died later, or cut vectors wrongly."""
        error = refusal(self.NAME, **environ)
        assert error.message.startswith(expected)
        assert error.param == next(iter(environ))

    def test_the_misspelt_port_of_the_compose_file_is_warned_about(self) -> None:
        """The original ignores it in silence."""
        (warning,) = loaded(self.NAME, TRITON_SERVER_PORT_GRPC="9001").warnings
        assert "TRITON_SERVER_PORT_GRPC is not read" in warning
        assert "TRITON_SERVER_GRPC_PORT" in warning
        both = loaded(self.NAME, TRITON_SERVER_PORT_GRPC="9001", TRITON_SERVER_GRPC_PORT="9002")
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
        """Directives for modules are another program's; without a level for everything the default stays."""
        assert loaded(self.NAME, RUST_LOG=directives).settings.log_level == level


class TestInferenceServer:
    NAME = "inference-server"

    def test_without_any_variable_it_is_the_original_s_set_up(self) -> None:
        """Port 8686, a Triton on this machine with its folder beside, five models, JSON metrics, nothing at start."""
        found = loaded(self.NAME)
        settings = found.settings
        assert (settings.port, settings.metrics_default, settings.default_model) == (8686, "json", False)
        assert (settings.backend, settings.triton_url) == ("triton", "localhost:8001")
        assert settings.triton_repository == "model_repository"
        assert (settings.max_loaded_models, settings.max_batch_size) == (5, 32)
        assert (settings.triton_kind, settings.triton_instances, settings.triton_accelerator) == ("auto", 1, "none")
        assert found.served == ()
        assert found.models == {}

    def test_every_variable(self) -> None:
        """Each goes where the table of the docs says."""
        settings = loaded(
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
        """A scheme is more than the original takes; https means TLS."""
        assert loaded(self.NAME, TRITON_GRPC_URL=url).settings.triton_url == expected

    @pytest.mark.parametrize("variable", ["TENSORRT_ENABLED", "FP16_ENABLED"])
    @pytest.mark.parametrize("kind", ["", "KIND_CPU"])
    def test_what_needs_a_gpu_is_refused_without_one(self, variable: str, kind: str) -> None:
        """As the original does when it starts; switched off it may stand there."""
        error = refusal(self.NAME, INSTANCE_KIND=kind, **{variable: "true"})
        assert error.message.startswith(f"{variable}: set INSTANCE_KIND=KIND_GPU")
        assert error.param == variable
        assert loaded(self.NAME, **{variable: "false"}).sources["triton_fp16"].layer == "default"

    def test_instances_need_a_kind(self) -> None:
        """The original writes neither into the model's configuration otherwise; 0 is its word for that."""
        found = loaded(self.NAME, MODEL_INSTANCES="3")
        assert found.settings.triton_instances == 1
        assert found.warnings == ("MODEL_INSTANCES counts only together with INSTANCE_KIND: set KIND_CPU or KIND_GPU",)
        none = loaded(self.NAME, MODEL_INSTANCES="0", INSTANCE_KIND="KIND_CPU")
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
        """By the name that the operator wrote."""
        assert refusal(self.NAME, **environ).message.startswith(expected)
