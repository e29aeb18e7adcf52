"""Settings: the source of each value, and errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from shoal import config
from shoal.config.reference import render_reference
from shoal.config.schema import Setting
from shoal.config.settings import SETTINGS
from shoal.core.generation.sampling import FIELDS
from shoal.errors import ConfigError
from shoal.sampling_fields import SAMPLING_FIELDS

SECRET = "s3cret-value-0123456789"


SAMPLES: dict[type[inspect.Type], tuple[str, str, Any]] = {
    inspect.IntType: ("2048", "2048", 2048),
    inspect.FloatType: ("7.5", "7.5", 7.5),
    inspect.BoolType: ("true", "true", True),
    inspect.StrType: ("localhost", '"localhost"', "localhost"),
    inspect.VarTupleType: ("http://a.example", '["http://a.example"]', ("http://a.example",)),
    inspect.LiteralType: ("", "", ""),
}
"""By kind: as text, as TOML, as the value that both mean."""

SHAPED: dict[str, tuple[str, str, Any]] = {
    "triton_metadata": ("x-key: abc", '["x-key: abc"]', ("x-key: abc",)),
    "trusted_proxies": ("10.0.0.0/8", '["10.0.0.0/8"]', ("10.0.0.0/8",)),
    "ignore_parameters": ("min_p", '["min_p"]', ("min_p",)),
    "workers": ("8", "8", 8),
}
"""The same by name, where the text has a form of its own."""


def write(folder: Path, text: str) -> Path:
    file = folder / "shoal.toml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def refusal(text: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load({}, {}, write(folder, text))
    return caught.value.message


class TestPrecedence:
    @given(
        layers=st.sets(st.sampled_from(["flag", "env", "file", "default"])),
        name=st.sampled_from(["max_inputs", "port", "streams"]),
    )
    def test_the_first_layer_that_gives_a_value_wins(
        self, tmp_path_factory: pytest.TempPathFactory, layers: set[config.Layer], name: str
    ) -> None:
        """For every set of layers, value and source are those of the first layer in PRECEDENCE that has one."""
        values = {"flag": 101, "env": 102, "file": 103, "default": getattr(config.Settings(), name)}
        file = write(tmp_path_factory.mktemp("layers"), f"{name} = 103") if "file" in layers else None
        loaded = config.load(
            {name: str(values["flag"])} if "flag" in layers else {},
            {f"SHOAL_{name.upper()}": str(values["env"])} if "env" in layers else {},
            file,
        )
        # The two layers of a preset have their own tests below.
        winner = next(layer for layer in config.PRECEDENCE if layer in {*layers, "default"})
        assert getattr(loaded.settings, name) == values[winner]
        assert loaded.sources[name].layer == winner

    @pytest.mark.parametrize("row", [row for row in SETTINGS if not row.path], ids=lambda row: row.name)
    def test_every_setting_can_be_given_by_flag_variable_and_file(self, row: Setting, tmp_path: Path) -> None:
        """No setting lacks one of its three names, and each layer reads the same value."""
        text, toml, value = SHAPED.get(row.name) or SAMPLES[type(row.kind)]
        if isinstance(row.kind, inspect.LiteralType):
            value = row.kind.values[-1]
            text, toml = str(value), f'"{value}"'
        by_flag = config.load({row.name: [text] if row.repeatable else text}, {})
        by_variable = config.load({}, {row.env: text})
        by_file = config.load({}, {}, write(tmp_path, f"{row.name} = {toml}"))
        assert [getattr(one.settings, row.name) for one in (by_flag, by_variable, by_file)] == [value] * 3

    def test_absent_flags_have_no_effect(self) -> None:
        """The command line passes None and empty lists for absent flags."""
        assert config.load({"port": None, "api_key": []}, {}).settings == config.load({}, {}).settings

    def test_an_empty_variable_counts_as_not_set(self) -> None:
        """Compose files pass empty variables for unset values."""
        assert config.load({}, {"SHOAL_PORT": "", "SHOAL_API_KEY": ""}).settings.port == 8080


class TestRefused:
    def test_an_unknown_field_to_ignore_is_refused(self, tmp_path: Path) -> None:
        """An unknown field would have no effect; the sampling fields and their request names are all known."""
        assert "ignore_parameters: must be a list, each one of allowed_token_ids, bad_words" in refusal(
            'ignore_parameters = ["temperatur"]', tmp_path
        )
        assert {*FIELDS} == {*SAMPLING_FIELDS}

    def test_an_unknown_key_names_the_file_and_the_likely_one(self, tmp_path: Path) -> None:
        """A misspelled key is always reported."""
        message = refusal("max_batchsize = 3", tmp_path)
        assert "shoal.toml: max_batchsize is not a setting here" in message
        assert "did you mean max_batch_size?" in message

    def test_a_misspelled_table_is_refused(self, tmp_path: Path) -> None:
        """An unknown setting may be a misspelling of another top-level key."""
        assert "did you mean models?" in refusal('[model.minilm]\naliases = ["m"]', tmp_path)

    def test_choices_ignore_case(self) -> None:
        """Other programs write log levels in capitals."""
        for flags, environ in (({}, {"SHOAL_LOG_LEVEL": "INFO"}), ({"log_level": "Info"}, {})):
            assert config.load(flags, environ).settings.log_level == "info"

    def test_kebab_case_in_the_file_finds_its_name(self, tmp_path: Path) -> None:
        """If the file uses a flag's spelling, the error suggests the key."""
        assert "did you mean max_wait_time_ms?" in refusal("max-wait-time-ms = 3", tmp_path)

    @pytest.mark.parametrize(
        ("flags", "environ", "expected"),
        [
            ({"port": "99999"}, {}, "--port: must be a whole number from 0 to 65535, got '99999'"),
            ({}, {"SHOAL_MAX_BATCH_MS": "0"}, "SHOAL_MAX_BATCH_MS: must be a number above 0, got '0'"),
            ({}, {"SHOAL_TRUNCATE": "perhaps"}, "SHOAL_TRUNCATE: must be true or false, got 'perhaps'"),
            ({"precision": "fp8"}, {}, "--precision: must be one of auto, bf16, f32, fp16, int8, got 'fp8'"),
            ({}, {"SHOAL_EMBED_TIMEOUT_S": "inf"}, "SHOAL_EMBED_TIMEOUT_S: must be a number above 0, got 'inf'"),
            ({}, {"SHOAL_CORS_ORIGINS": "example.com"}, "each an exact origin such as https://app.example.org"),
            ({"cors_origins": ["*"]}, {}, "(* would let every web page use this server), got ['*']"),
            ({"cors_origins": ["https://*.example"]}, {}, "--cors-origins: must be a list, each an exact origin"),
            (
                {"cors_origins": ["https://app.example/path"]},
                {},
                "--cors-origins: must be a list, each an exact origin",
            ),
        ],
    )
    def test_a_bad_value_names_its_source_and_valid_values(
        self, flags: dict[str, Any], environ: dict[str, str], expected: str
    ) -> None:
        """The message has the flag or variable, the rule and the value."""
        with pytest.raises(ConfigError) as caught:
            config.load(flags, environ)
        assert expected in caught.value.message

    def test_a_bad_value_is_refused_even_where_another_layer_wins(self) -> None:
        """An overridden mistake is still reported."""
        with pytest.raises(ConfigError, match="SHOAL_PORT"):
            config.load({"port": "80"}, {"SHOAL_PORT": "eighty"})

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('port = "80"', "port: must be a whole number from 0 to 65535, not text in quotes"),
            ("port = true", "port: must be a whole number"),
            ('api_key = "abc"', "api_key: must be a list"),
            ("embed_timeout_s = nan", "embed_timeout_s: must be a number above 0"),
            ("models = 3", 'models must be tables: [models."name"]'),
            ("port =", "not valid TOML"),
        ],
    )
    def test_types_in_the_file_are_toml_types(self, tmp_path: Path, text: str, expected: str) -> None:
        """The file has its own types; text that looks like a number is an error."""
        assert expected in refusal(text, tmp_path)

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        """A file that is named explicitly must exist."""
        with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
            config.load({}, {}, tmp_path / "none.toml")

    def test_no_message_shows_a_secret(self, tmp_path: Path) -> None:
        """A key with a space is refused, and the message does not repeat it."""
        for attempt in ({"api_key": [SECRET + " x"]}, {"admin_key": [SECRET + "\n"]}):
            with pytest.raises(ConfigError) as caught:
                config.load(attempt, {})
            assert SECRET not in caught.value.message
        assert SECRET not in refusal(f'api_key = ["{SECRET} x"]', tmp_path)


class TestEnvironment:
    def test_a_likely_misspelling_is_warned_about(self) -> None:
        """SHOAL_ variables may belong to other programs, so a near miss is a warning."""
        assert config.load({}, {"SHOAL_MAX_BATCHSIZE": "3"}).warnings == (
            "SHOAL_MAX_BATCHSIZE is not a setting: did you mean SHOAL_MAX_BATCH_SIZE?",
        )

    def test_kubernetes_service_links_are_no_settings(self) -> None:
        """A Service called "shoal" puts SHOAL_PORT=tcp://... into every pod of its namespace."""
        links = {
            "SHOAL_PORT": "tcp://10.96.0.7:80",
            "SHOAL_PORT_80_TCP": "tcp://10.96.0.7:80",
            "SHOAL_PORT_80_TCP_ADDR": "10.96.0.7",
            "SHOAL_SERVICE_HOST": "10.96.0.7",
            "SHOAL_SERVICE_PORT": "80",
        }
        loaded = config.load({}, links)
        assert loaded.settings.port == 8080
        assert loaded.warnings == ()

    def test_models_are_separated_by_spaces(self) -> None:
        """Commas separate the replicas of one model."""
        loaded = config.load({}, {"SHOAL_MODELS": "a/b  two=c/d,e/f"})
        assert loaded.served == ("a/b", "two=c/d,e/f")

    def test_the_file_is_found_by_variable_then_folder(self, tmp_path: Path) -> None:
        """SHOAL_CONFIG names the file, else shoal.toml of the folder, else there is none."""
        assert config.find_file({}, tmp_path) is None
        file = write(tmp_path, "")
        assert config.find_file({}, tmp_path) == file
        assert config.find_file({"SHOAL_CONFIG": "/other.toml"}, tmp_path) == Path("/other.toml")


class TestKeys:
    def test_key_files_add_to_the_keys(self, tmp_path: Path) -> None:
        """One key per line; comments and blank lines are ignored; the source names both places."""
        file = tmp_path / "keys"
        file.write_text(f"# ours\n\n{SECRET}\n  other-key  \n")
        file.chmod(0o600)
        loaded = config.load({"api_key": ["first"], "api_key_file": str(file)}, {})
        assert loaded.settings.api_key == ("first", SECRET, "other-key")
        assert loaded.sources["api_key"].label == f"--api-key, {file}"
        assert loaded.warnings == ()

    def test_a_file_of_keys_that_others_can_read_is_warned_about(self, tmp_path: Path) -> None:
        """This also applies to a settings file with keys."""
        keys = tmp_path / "keys"
        keys.write_text(SECRET)
        keys.chmod(0o644)
        file = write(tmp_path, f'hf_token = "{SECRET}"')
        file.chmod(0o640)
        warnings = config.load({"admin_key_file": str(keys)}, {}, file).warnings
        assert [f"chmod 600 {path}" in warning for path, warning in zip((keys, file), warnings, strict=True)] == [
            True
        ] * 2

    def test_a_line_may_hold_the_class_of_its_key(self, tmp_path: Path) -> None:
        """After any blanks; the entry is masked like every key."""
        file = tmp_path / "keys"
        file.write_text(f"{SECRET} bulk\nother \t interactive\nplain\n")
        file.chmod(0o600)
        loaded = config.load({"admin_key_file": str(file)}, {})
        assert loaded.settings.admin_key == (f"{SECRET} bulk", "other interactive", "plain")
        assert SECRET not in repr(loaded.settings) + str(loaded.describe())

    @pytest.mark.parametrize("content", ["", "# nothing\n", "two words\n", "key bulk interactive\n", b"\xff\xfe"])
    def test_a_file_without_a_usable_key_is_refused(self, tmp_path: Path, content: str | bytes) -> None:
        """An empty or broken file must not leave the server open."""
        file = tmp_path / "keys"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match="api_key_file"):
            config.load({"api_key_file": str(file)}, {})

    def test_a_missing_file_of_keys_is_refused(self, tmp_path: Path) -> None:
        """The message names the setting and the file."""
        with pytest.raises(ConfigError, match=r"api_key_file: .*nowhere cannot be read"):
            config.load({"api_key_file": str(tmp_path / "nowhere")}, {})

    def test_neither_repr_nor_dump_shows_a_secret(self) -> None:
        """Keys and tokens are masked wherever settings are shown; their length is hidden too."""
        loaded = config.load({"api_key": [SECRET], "admin_key": [SECRET], "hf_token": SECRET}, {})
        for shown in (repr(loaded), repr(loaded.settings), str(loaded.describe())):
            assert SECRET not in shown
            assert "****" in shown


class TestModels:
    TEXT = """
    max_batch_size = 16
    [models."small"]
    backends = ["hf:org/name", "hf:org/twin"]
    aliases = ["tiny"]
    default_for = ["embed"]
    max_batch_size = 8
    truncate = false
    [models."tuned/only"]
    streams = 3
    """

    def test_tables_with_backends_are_served(self, tmp_path: Path) -> None:
        """They read like the arguments of serve; a table without backends only sets options."""
        loaded = config.load({}, {}, write(tmp_path, self.TEXT))
        assert loaded.served == ("small=hf:org/name,hf:org/twin",)
        assert loaded.models["small"].aliases == ("tiny",)
        assert loaded.models["small"].default_for == ("embed",)
        assert loaded.sources["models"].layer == "file"

    def test_arguments_replace_variable_and_tables(self, tmp_path: Path) -> None:
        """The served models follow the precedence of every setting."""
        file = write(tmp_path, self.TEXT)
        environ = {"SHOAL_MODELS": "b"}
        assert config.load({"models": ["a"]}, environ, file).served == ("a",)
        assert config.load({}, environ, file).served == ("b",)
        assert config.load({}, {}).served == ()

    def test_a_model_has_its_own_settings(self, tmp_path: Path) -> None:
        """Its table wins over the rest of the file and the defaults, and loses to flags and environment."""
        file = write(tmp_path, self.TEXT)
        loaded = config.load({}, {}, file)
        assert (loaded.for_model("small").max_batch_size, loaded.for_model("small").truncate) == (8, False)
        assert loaded.for_model("tuned/only").streams == 3
        assert loaded.for_model("other").max_batch_size == 16
        assert config.load({"max_batch_size": "4"}, {}, file).for_model("small").max_batch_size == 4
        assert config.load({}, {"SHOAL_TRUNCATE": "1"}, file).for_model("small").truncate is True

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                '[models."a"]\nbackendss = ["x"]',
                'shoal.toml: [models."a"]: backendss is not a setting here: did you mean backends?',
            ),
            ('[models."a"]\nport = 1', "port is not a setting here: it is a server setting"),
            ('[models."a"]\nmax_batch = 1', "max_batch is not a setting here: did you mean max_batch_"),
            ('[models."a"]\nnonsense = {a = 1}', "nonsense is not a setting here: see docs/settings.md"),
            (
                '[models."a"]\ndefault_for = ["sing"]',
                "default_for: must be a list, each one of classify, embed, generate, ",
            ),
            ('[models."a"]\nmax_batch_size = 0', "max_batch_size: must be a whole number of at least 1"),
            ("[models]\na = 1", "models must be tables"),
            ('[models."a"]\nbackend = ["x"]', "backend: must be one of auto, local, ray, triton, got ['x']"),
            ('[models."a"]\nprompts = "query: "', "prompts: must be a table of text, not text in quotes"),
            ('[models."a"]\nprompts = {query = 1}', "prompts: must be a table of text, got {'query': 1}"),
            ('[models."a"]\ninput_names = {ids = "x"}', "input_names: must be a table of text by adapter_ids, "),
            ('[models."a"]\nnormalize = "yes"', "normalize: must be true or false, not text in quotes"),
        ],
    )
    def test_mistakes_in_a_table_name_it(self, tmp_path: Path, text: str, expected: str) -> None:
        """The message has file, table and key."""
        assert expected in refusal(text, tmp_path)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('default = "x"', "default is not a setting here: see docs/settings.md"),
            ("timeout = 5", "timeout is not a setting here: see docs/settings.md"),
            ("[defaults]\nport = 1", "defaults is not a setting here: only tables of models"),
            ("[server]\nport = 1", "server is not a setting here: only tables of models"),
            ('[model."a"]\nbackends = ["fake:"]', "model is not a setting here: did you mean models?"),
            ('tokenizer = "x"', "tokenizer is not a setting here: it is a setting of a model"),
            ('default_for = ["embed"]', "default_for is not a setting here: it is a setting of a model"),
            ("default-for = []", "default-for is not a setting here: it is a setting of a model"),
            ("prot = 1", "prot is not a setting here: did you mean port?"),
        ],
    )
    def test_hints_for_a_wrong_key(self, tmp_path: Path, text: str, expected: str) -> None:
        """They name the right table or a similar key, never an unrelated one."""
        assert expected in refusal(text, tmp_path)

    def test_a_table_may_describe_a_remote_model(self, tmp_path: Path) -> None:
        """Tables of text, numbers and switches keep their TOML types; missing keys stay unset."""
        text = """
        [models."m"]
        tokenizer = "hf:org/name"
        pooling = "cls"
        max_tokens = 512
        normalize = false
        dimension = 384
        default_prompt_name = "query"
        prompts = {query = "query: ", document = ""}
        [models."m".input_names]
        input_ids = "ids"
        [models."n"]
        output_names = {pooled = "vector"}
        """
        loaded = config.load({}, {}, write(tmp_path, text))
        table = loaded.models["m"]
        assert (table.tokenizer, table.pooling, table.max_tokens) == ("hf:org/name", "cls", 512)
        assert (table.normalize, table.dimension, table.default_prompt_name) == (False, 384, "query")
        assert table.prompts == {"query": "query: ", "document": ""}
        assert table.input_names == {"input_ids": "ids"}
        assert loaded.models["n"] == config.ModelTable(output_names={"pooled": "vector"})
        shown = loaded.describe()["tables"]["m"]
        assert shown["dimension"] == {"value": 384, "source": str(loaded.file)}
        assert "aliases" not in shown

    def test_a_models_triton_options(self, tmp_path: Path) -> None:
        """Conversion options are in the model's table like every setting of one model."""
        loaded = config.load({}, {}, write(tmp_path, '[models."m"]\nbackend = "triton"\ntriton_instances = 2\n'))
        assert (loaded.for_model("m").backend, loaded.for_model("m").triton_instances) == ("triton", 2)
        assert loaded.for_model("other").backend == "auto"


class TestPresets:
    """The layers of a preset; test_presets covers what each preset reads."""

    @given(layers=st.sets(st.sampled_from(config.PRECEDENCE)))
    def test_the_first_layer_that_gives_a_value_wins(
        self, tmp_path_factory: pytest.TempPathFactory, layers: set[config.Layer]
    ) -> None:
        """For every set of layers, value and source are those of the first; without the preset neither its default nor
        the other server's variable is read.
        """
        flags = {"max_batch_size": "101"} if "flag" in layers else {}
        environ = {"SHOAL_MAX_BATCH_SIZE": "102"} if "env" in layers else {}
        environ |= {"MAX_BATCH_SIZE": "103"} if "foreign" in layers else {}
        file = write(tmp_path_factory.mktemp("layers"), "max_batch_size = 104") if "file" in layers else None
        values = {"flag": 101, "env": 102, "foreign": 103, "file": 104, "preset": 32, "default": 64}
        for name, ignored in (("inference-server", {"default"}), ("", {"foreign", "preset"})):
            loaded = config.load({**flags, "as": name}, environ, file)
            possible = ({*layers, "preset", "default"}) - ignored
            winner = next(layer for layer in config.PRECEDENCE if layer in possible)
            assert loaded.settings.max_batch_size == values[winner]
            assert loaded.sources["max_batch_size"].layer == winner

    def test_flag_variable_and_file_can_name_it(self, tmp_path: Path) -> None:
        """In this order; the sources name the layer."""
        file = write(tmp_path, 'as = "inference-server"')
        assert config.load({}, {}, file).preset == "inference-server"
        assert config.load({}, {"SHOAL_AS": "triton-grpc-proxy"}, file).preset == "triton-grpc-proxy"
        loaded = config.load({"as": "inference-server"}, {"SHOAL_AS": "triton-grpc-proxy", "MAX_BATCH_SIZE": "7"}, file)
        assert loaded.preset == "inference-server"
        assert loaded.sources["port"] == config.Source("preset", "preset inference-server")
        assert loaded.sources["max_batch_size"] == config.Source("foreign", "MAX_BATCH_SIZE")
        assert loaded.describe()["preset"] == "inference-server"
        assert config.load({}, {}).describe()["preset"] is None

    @pytest.mark.parametrize(
        ("flags", "environ", "text", "expected"),
        [
            (
                {"as": "inference-serve"},
                {},
                "",
                "--as: 'inference-serve' is not a preset: did you mean inference-server?",
            ),
            (
                {},
                {"SHOAL_AS": "x"},
                "",
                "SHOAL_AS: 'x' is not a preset: use one of triton-grpc-proxy, inference-server",
            ),
            ({"as": "inference-server"}, {}, "as = 3", "shoal.toml: as: '3' is not a preset"),
        ],
    )
    def test_an_unknown_one_is_refused_in_every_layer(
        self, tmp_path: Path, flags: dict[str, Any], environ: dict[str, str], text: str, expected: str
    ) -> None:
        """The message lists the presets."""
        with pytest.raises(ConfigError) as caught:
            config.load(flags, environ, write(tmp_path, text))
        assert expected in caught.value.message

    def test_served_models_follow_the_same_order(self, tmp_path: Path) -> None:
        """Arguments, SHOAL_MODELS, the other server's variables, the file, the preset."""
        file = write(tmp_path, '[models."own"]\nbackends = ["fake:"]')
        chosen = {"as": "triton-grpc-proxy"}
        assert config.load({**chosen, "models": ["a"]}, {"MODEL_NAME": "m"}, file).served == ("a",)
        assert config.load(chosen, {"SHOAL_MODELS": "b", "MODEL_NAME": "m"}, file).served == ("b",)
        named = config.load(chosen, {"MODEL_NAME": "m"}, file)
        assert named.served == ("m=triton://triton-server:8001#m@1",)
        assert named.sources["models"] == config.Source("foreign", "MODEL_NAME")
        assert config.load(chosen, {}, file).served == ("own=fake:",)
        default = config.load(chosen, {})
        assert default.served == ("model=triton://triton-server:8001#model@1",)
        assert default.sources["models"] == config.Source("preset", "preset triton-grpc-proxy")

    def test_tables_are_joined_key_by_key(self, tmp_path: Path) -> None:
        """The file's key overrides the preset's default, and the other server's variable overrides the file."""
        text = '[models."model"]\nnormalize = true\ndimension = 3\nmax_batch_size = 5\nprompts = {q = "q: "}'
        file = write(tmp_path, text)
        loaded = config.load({"as": "triton-grpc-proxy"}, {"EMBEDDING_SIZE": "8", "INPUT_NAME": "t"}, file)
        table = loaded.models["model"]
        assert (table.normalize, table.dimension, table.prompts) == (True, 8, {"q": "q: "})
        assert table.input_names == {"text": "t"}
        assert loaded.for_model("model").max_batch_size == 5
        sources = {key: source.label for key, source in loaded.table_sources["model"].items()}
        assert sources["normalize"] == str(file)
        assert sources["dimension"] == "EMBEDDING_SIZE"
        assert sources["output_names"] == "preset triton-grpc-proxy"

    def test_a_model_s_table_overrides_the_preset(self, tmp_path: Path) -> None:
        """It overrides the rest of the file, and the other server's environment overrides it."""
        file = write(tmp_path, '[models."m"]\nmax_batch_size = 5')
        assert config.load({"as": "inference-server"}, {}, file).for_model("m").max_batch_size == 5
        foreign = config.load({"as": "inference-server"}, {"MAX_BATCH_SIZE": "7"}, file)
        assert foreign.for_model("m").max_batch_size == 7

    def test_preset_paths_are_relative_to_the_working_directory(self, tmp_path: Path) -> None:
        """Only a path in the file is relative to the file's folder."""
        file = write(tmp_path, 'as = "inference-server"')
        assert config.load({}, {}, file).settings.triton_repository == "model_repository"
        file = write(tmp_path, 'triton_repository = "models"')
        assert config.load({}, {}, file).settings.triton_repository == str(tmp_path / "models")


class TestTrustedProxies:
    @pytest.mark.parametrize(
        "text", ["proxy.example", "10.0.0.0/33", "10.0.0.1/8", "300.1.1.1", "10.0.0.0/8/8", "::ffff:10.0.0.1"]
    )
    def test_a_wrong_network_is_refused(self, text: str) -> None:
        """A misspelled network would trust nobody, and all users behind the proxy would be one client."""
        with pytest.raises(ConfigError, match=r"a network such as 10\.0\.0\.0/8"):
            config.load({"trusted_proxies": [text], "client_header": "X-Real-IP"}, {})

    def test_they_need_a_header(self) -> None:
        """Without client_header no header of theirs is read, which a warning says."""
        proxies = {"trusted_proxies": ["10.0.0.0/8"]}
        assert "trusted_proxies without client_header" in "".join(config.load(proxies, {}).warnings)
        assert not config.load(proxies | {"client_header": "X-Real-IP"}, {}).warnings

    @pytest.mark.parametrize(
        ("more", "warns"), [({}, True), ({"api_key": ["k"]}, False), ({"host": "::1"}, False)], ids=str
    )
    def test_clients_that_may_name_themselves_are_a_risk(self, more: dict[str, Any], warns: bool) -> None:
        """Where others reach a server without keys, and no proxy is listed."""
        flags = {"client_header": "X-User", "host": "0.0.0.0", "insecure": True} | more
        assert ("trusted_proxies" in "".join(config.load(flags, {}).warnings)) is warns


class TestPaths:
    def test_an_empty_path_stays_empty(self, tmp_path: Path) -> None:
        """An empty path is not the current folder."""
        assert config.load({}, {}).settings.triton_repository == ""
        assert config.load({}, {}, write(tmp_path, 'triton_repository = ""')).settings.triton_repository == ""

    @pytest.mark.parametrize("one", ["triton_cert_file", "triton_key_file"])
    def test_a_certificate_needs_its_key(self, one: str) -> None:
        """Each is useless without the other."""
        with pytest.raises(ConfigError, match="triton_cert_file and triton_key_file must be set together"):
            config.load({one: "some.pem"}, {})

    def test_a_path_in_the_file_is_relative_to_its_folder(self, tmp_path: Path) -> None:
        """A path on the command line is relative to the working directory."""
        file = write(tmp_path, 'home = "models"')
        assert config.load({}, {}, file).settings.home == str(tmp_path / "models")
        assert config.load({"home": "models"}, {}, file).settings.home == "models"

    def test_the_home_folder_is_expanded(self) -> None:
        """Code that writes files never receives `~`."""
        assert config.load({}, {}).settings.home == os.path.expanduser("~/.cache/shoal")


class TestBind:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
    def test_an_open_address_without_keys_is_refused(self, host: str) -> None:
        """The message names both ways to fix it."""
        with pytest.raises(ConfigError) as caught:
            config.check_bind(config.Settings(host=host))
        assert "--api-key-file" in caught.value.message
        assert "--insecure" in caught.value.message

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
    def test_loopback_needs_no_key(self, host: str) -> None:
        """Only local clients can connect."""
        config.check_bind(config.Settings(host=host))

    @pytest.mark.parametrize(
        ("host", "flags"),
        [
            ("[::1]", "--host ::1"),
            ("[::1]:80", "--host ::1 --port 80"),
            ("localhost:8333", "--host localhost --port 8333"),
        ],
    )
    def test_hosts_as_in_urls(self, host: str, flags: str) -> None:
        """The message has the right flags; they are no addresses that others could reach."""
        with pytest.raises(ConfigError, match=f"must be a name or an address alone: use {flags}$"):
            config.check_bind(config.Settings(host=host, insecure=True))

    def test_a_key_or_insecure_opens_any_address(self) -> None:
        """Either way works; a key for administrators alone does not protect the rest."""
        config.check_bind(config.Settings(host="0.0.0.0", api_key=("k",)))
        config.check_bind(config.Settings(host="0.0.0.0", insecure=True))
        with pytest.raises(ConfigError):
            config.check_bind(config.Settings(host="0.0.0.0", admin_key=("k",)))


def test_the_reference_page_is_current() -> None:
    """docs/settings.md equals the output of `python -m shoal.config`."""
    page = Path(__file__).parents[3] / "docs" / "settings.md"
    assert page.read_text() == render_reference(), "run: python -m shoal.config > docs/settings.md"


@pytest.mark.parametrize("text", [",", " , ,", ""])
def test_an_empty_list_counts_as_not_set(tmp_path: Path, text: str) -> None:
    """Keys in the file stay: an empty list must not open the server."""
    file = tmp_path / "shoal.toml"
    file.write_text('api_key = ["k1"]\n')
    loaded = config.load({}, {"SHOAL_API_KEY": text}, file)
    assert loaded.settings.api_key == ("k1",)
