"""Loading a chat pipeline from a model's folder: which files count, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.base.chat_pipeline import load_chat_pipeline, load_generation_sampling
from shoal.config.settings import Settings
from shoal.errors import ConfigError, ModelFileError
from shoal.pipelines.chat.pipeline import TextChatPipeline
from shoal.types import Generate, Message, Tool
from tests.fixtures import tiny_llama
from tests.fixtures.chat_templates import GEMMA, QWEN

TASK = Generate(model="m", messages=[Message(role="user", content="Hi")])


def write(folder: Path, name: str, content: Any) -> None:
    """Write JSON, or a text as it is; a dict is merged into the existing file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        content = (json.loads(path.read_text()) if path.exists() else {}) | content
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama.write_tokenizer(tmp_path, template=None)
    return tmp_path


def text(pipeline: TextChatPipeline, **fields: Any) -> str:
    task = Generate(model="m", messages=TASK.messages, **fields)
    pipeline.check(task)
    return pipeline.prompts(task)[0].text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_folder_as_models_come(tmp_path: Path, kind: tiny_llama.Kind) -> None:
    tiny_llama.write_tokenizer(tmp_path, kind=kind)
    made = load_chat_pipeline(tmp_path, Settings())
    assert made.vocabulary is not None
    assert made.vocabulary.eos_ids == {tiny_llama.EOS, tiny_llama.IM_END}
    assert made.vocabulary.bos_id == tiny_llama.BOS
    assert made.options.context_tokens == tiny_llama.CONTEXT
    assert made.tool_parser == "hermes"
    (prompt,) = made.prompts(TASK)
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids is not None
    assert prompt.ids[:2] == (tiny_llama.BOS, tiny_llama.IM_START)


def test_without_a_folder() -> None:
    made = load_chat_pipeline(None, Settings(), adapters=("a",))
    assert (made.vocabulary, made.template, made.options.context_tokens) == (None, None, None)
    assert text(load_chat_pipeline(None, Settings(), template="{{ messages[0].content }}")) == "Hi"


class TestTemplates:
    def test_a_file_of_its_own_goes_first(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": "from the config"})
        assert text(load_chat_pipeline(folder, Settings())) == "from the config"
        write(folder, "chat_template.json", {"chat_template": "from JSON"})
        assert text(load_chat_pipeline(folder, Settings())) == "from JSON"
        write(folder, "chat_template.jinja", "from a file")
        assert text(load_chat_pipeline(folder, Settings())) == "from a file"

    def test_the_settings_go_before_all(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": "{% broken"})
        write(folder, "own.jinja", "{{ bos_token }}from the settings")
        made = load_chat_pipeline(folder, Settings(chat_template=str(folder / "own.jinja")), template="given")
        assert text(made) == "from the settings"

    def test_the_given_one_goes_last(self, folder: Path) -> None:
        assert text(load_chat_pipeline(folder, Settings(), template="given")) == "given"
        write(folder, "chat_template.jinja", "from a file")
        assert text(load_chat_pipeline(folder, Settings(), template="given")) == "from a file"

    @pytest.mark.parametrize("in_files", [True, False])
    def test_templates_with_names(self, folder: Path, in_files: bool) -> None:
        if in_files:
            write(folder, "chat_template.jinja", GEMMA)
            write(folder, "additional_chat_templates/tool_use.jinja", QWEN)
        else:
            named = [{"name": "default", "template": GEMMA}, {"name": "tool_use", "template": QWEN}]
            write(folder, "tokenizer_config.json", {"chat_template": named})
        made = load_chat_pipeline(folder, Settings())
        assert "<start_of_turn>" in text(made)
        assert "<tools>" in text(made, tools=[Tool(name="now")])
        assert made.tool_parser == "hermes"

    def test_one_name_is_enough(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": QWEN}]})
        assert "<|im_start|>" in text(load_chat_pipeline(folder, Settings()))

    @pytest.mark.parametrize("value", [7, [7], [{"name": "default"}], [{"template": 7}], {"a": 1}])
    def test_what_is_no_template(self, folder: Path, value: Any) -> None:
        write(folder, "tokenizer_config.json", {"chat_template": value})
        with pytest.raises(ModelFileError, match=r"^tokenizer_config\.json: chat_template: must be a text, or a list"):
            load_chat_pipeline(folder, Settings())

    @pytest.mark.parametrize(
        ("file", "content", "where"),
        [
            ("tokenizer_config.json", {"chat_template": "\n{% if %}"}, r"tokenizer_config\.json: chat_template"),
            ("chat_template.jinja", "\n{% if %}", r"chat_template\.jinja"),
        ],
    )
    def test_a_broken_one_is_named_with_its_line(self, folder: Path, file: str, content: Any, where: str) -> None:
        write(folder, file, content)
        with pytest.raises(ModelFileError, match=rf"^{where}: .*line 2: .*; set another template"):
            load_chat_pipeline(folder, Settings())

    def test_a_file_that_is_no_text(self, folder: Path) -> None:
        (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelFileError, match=r"^chat_template\.jinja: is not UTF-8"):
            load_chat_pipeline(folder, Settings())
        with pytest.raises(ConfigError, match="cannot be read as text"):
            load_chat_pipeline(folder, Settings(chat_template=str(folder / "chat_template.jinja")))

    def test_a_broken_one_in_the_settings(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"^chat_template: .*nothing\.jinja cannot be read") as caught:
            load_chat_pipeline(folder, Settings(chat_template=str(folder / "nothing.jinja")))
        assert caught.value.param == "chat_template"
        write(folder, "own.jinja", "{% if %}")
        with pytest.raises(ConfigError, match=r"^chat_template: .*own\.jinja: .*line 1"):
            load_chat_pipeline(folder, Settings(chat_template=str(folder / "own.jinja")))


class TestSpecialTokens:
    def test_as_texts_and_as_objects(self, folder: Path) -> None:
        write(folder, "chat_template.jinja", "{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}!")
        write(folder, "tokenizer_config.json", {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None})
        write(folder, "special_tokens_map.json", {"unk_token": "other", "sep_token": {"content": "<sep>"}})
        assert text(load_chat_pipeline(folder, Settings())) == "</s><unk><sep>!"

    @pytest.mark.parametrize(("value", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
    def test_what_ends_an_answer(self, folder: Path, value: Any, expected: set[int]) -> None:
        write(folder, "generation_config.json", {"eos_token_id": value})
        write(folder, "config.json", {"eos_token_id": 2})
        made = load_chat_pipeline(folder, Settings())
        assert made.vocabulary is not None
        assert made.vocabulary.eos_ids == expected | {2, tiny_llama.IM_END}

    @pytest.mark.parametrize("value", ["</s>", [True], -1, [1.5]])
    def test_what_cannot_end_one(self, folder: Path, value: Any) -> None:
        write(folder, "generation_config.json", {"eos_token_id": value})
        with pytest.raises(ModelFileError, match=r"^generation_config\.json: eos_token_id: must be a token id"):
            load_chat_pipeline(folder, Settings())


class TestContext:
    @pytest.mark.parametrize(
        ("config", "tokenizer", "expected"),
        [
            ({"max_position_embeddings": 512}, {"model_max_length": 64}, 512),
            ({}, {"model_max_length": 64}, 64),
            ({}, {"model_max_length": 1000000000000000019884624838656}, None),
            ({}, {"model_max_length": 1e30}, None),
            ({"n_positions": 77}, {}, 77),
            ({"text_config": {"max_position_embeddings": 88}}, {}, 88),
            ({}, {}, None),
        ],
    )
    def test_what_the_files_say(
        self, folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], expected: int | None
    ) -> None:
        write(folder, "config.json", {"max_position_embeddings": None} | config)
        write(folder, "tokenizer_config.json", {"model_max_length": None} | tokenizer)
        assert load_chat_pipeline(folder, Settings()).options.context_tokens == expected
        assert load_chat_pipeline(folder, Settings(), context_tokens=9).options.context_tokens == 9


def test_the_settings_reach_the_pipeline(folder: Path) -> None:
    settings = Settings(
        tool_call_parser="mistral", reasoning_parser="think", prompt_truncation="oldest", default_max_tokens=5
    )
    made = load_chat_pipeline(folder, settings)
    assert made.tool_parser == "mistral"
    assert (made.options.reasoning, made.options.truncation, made.options.answer_tokens) == ("think", "oldest", 5)
    assert load_chat_pipeline(folder, Settings(tool_call_parser="none"), template=QWEN).tool_parser is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelFileError, match=f"^{name}: "):
        load_chat_pipeline(folder, Settings())


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^tokenizer\.json: the file is missing"):
        load_chat_pipeline(tmp_path, Settings())


class TestSampling:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (
                {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
                {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05},
            ),
            ({"do_sample": True, "temperature": 1, "eos_token_id": 2}, {"temperature": 1.0}),
            ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
            ({"top_k": 0, "temperature": None, "repetition_penalty": 1.0}, {}),
            ({}, {}),
        ],
    )
    def test_what_the_model_recommends(self, tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
        write(tmp_path, "generation_config.json", config)
        assert load_generation_sampling(tmp_path) == expected

    def test_it_may_recommend_nothing(self, tmp_path: Path) -> None:
        assert load_generation_sampling(tmp_path) == {}

    @pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_k": 2.5}, {"repetition_penalty": -1}])
    def test_what_cannot_be_meant(self, tmp_path: Path, config: dict[str, Any]) -> None:
        write(tmp_path, "generation_config.json", config)
        with pytest.raises(ModelFileError, match=rf"^generation_config\.json: {next(iter(config))}: must be"):
            load_generation_sampling(tmp_path)
