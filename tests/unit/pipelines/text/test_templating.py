"""Pairs as one text of a model's template: its tokens, and what is cut of a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.core.protocols import Prepared
from shoal.errors import InvalidValue, ModelFileError, ShoalError, TooLong
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.templating import Pieces, split_template
from shoal.specs import PairTemplate, ScoreSpec
from shoal.types import Classify, Item, Rerank
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.tiny_tokenizers import spec

SOURCE = (
    "{% for m in messages if m.role == 'system' %}rule {{ m.content }} {% endfor %}"
    "q {{ (messages | selectattr('role', 'eq', 'query') | first).content }} "
    "d {{ (messages | selectattr('role', 'eq', 'document') | first).content }} end of"
)
WORDS = ["[PAD]", "[UNK]", "rule", "q", "d", "end", "of", "fish", *"abcdefgh", *"0123456789"]


def template(source: str = SOURCE, **fields: Any) -> PairTemplate:
    return PairTemplate(source=source, file="chat_template.jinja", **fields)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(tokenizer(), tmp_path_factory.mktemp("templates"))


def pipeline(folder: Path, *, max_tokens: int = 12, truncate: bool = True, **fields: Any) -> PairPipeline:
    head = ScoreSpec(labels=("LABEL_0",), activation="sigmoid", template=template())
    options: dict[str, Any] = {"dimension": 0, "inputs": ("input_ids", "attention_mask"), "score": head}
    return PairPipeline(folder, spec(**options | {"max_tokens": max_tokens} | fields), truncate=truncate)


def rerank(**fields: Any) -> Rerank:
    return Rerank(model="m", queries=[], documents=[], **fields)


def prepared(folder: Path, item: Item, task: Rerank | None = None, **fields: Any) -> Prepared:
    entry = pipeline(folder, **fields).prepare([(task or rerank(), item)])[0]
    assert isinstance(entry, Prepared), entry
    return entry


def words(entry: Prepared) -> str:
    return " ".join(WORDS[i] for i in entry.tensors["input_ids"])


def fault(folder: Path, item: Item, task: Rerank | None = None, **fields: Any) -> ShoalError:
    entry = pipeline(folder, **fields).prepare([(task or rerank(), item)])[0]
    assert isinstance(entry, ShoalError)
    return entry


def test_a_pair_is_one_text(folder: Path) -> None:
    entry = prepared(folder, ("a b", "c d"))
    assert words(entry) == "q a b d c d end of"
    assert (entry.tokens, entry.truncated) == (8, False)


def test_the_default_prompt_is_the_templates_system_message(folder: Path) -> None:
    options: dict[str, Any] = {"prompts": {"query": "fish"}, "default_prompt_name": "query"}
    assert words(prepared(folder, ("a", "b"), **options)) == "rule fish q a d b end of"


@pytest.mark.parametrize("length", range(1, 20))
def test_only_the_document_is_cut(folder: Path, length: int) -> None:
    """At the right as in sentence-transformers, at the left if asked to; the template's end always stays."""
    document = list("01234567890123456789")[:length]
    right, left = (
        prepared(folder, ("a b", " ".join(document)), rerank(truncation_direction=direction))
        for direction in ("right", "left")
    )
    assert words(right) == " ".join(["q a b d", *document[:6], "end of"])
    assert words(left) == " ".join(["q a b d", *document[-6:], "end of"])
    assert right.truncated == left.truncated == (length > 6)


@pytest.mark.parametrize(
    ("limit", "direction", "kept"),
    [(2, "right", "0 1"), (2, "left", "8 9"), (9, "right", "0 1 2 3 4 5"), (9, "left", "4 5 6 7 8 9")],
)
def test_a_document_limit_cuts_it_first(folder: Path, limit: int, direction: Any, kept: str) -> None:
    task = rerank(max_document_tokens=limit, truncation_direction=direction)
    entry = prepared(folder, ("a b", "0 1 2 3 4 5 6 7 8 9"), task)
    assert words(entry) == f"q a b d {kept} end of"
    assert entry.truncated


def test_a_document_limit_that_fits_is_no_reason_to_refuse(folder: Path) -> None:
    """Without truncation too; a pair that stays too long is refused."""
    pair = ("a b", "0 1 2 3 4 5 6 7 8 9")
    assert words(prepared(folder, pair, rerank(max_document_tokens=3), truncate=False)) == "q a b d 0 1 2 end of"
    assert isinstance(fault(folder, pair, rerank(max_document_tokens=9), truncate=False), TooLong)
    short = prepared(folder, ("a b", "0 1"), rerank(max_document_tokens=3), truncate=False)
    assert (words(short), short.truncated) == ("q a b d 0 1 end of", False)


def test_without_truncation_a_long_pair_is_refused(folder: Path) -> None:
    error = fault(folder, ("a b", "0 1 2 3 4 5 6 7"), truncate=False)
    assert isinstance(error, TooLong) and "at least 13 tokens" not in error.message
    assert "14 tokens, but the model accepts at most 12" in error.message


def test_a_query_that_leaves_no_room_is_refused(folder: Path) -> None:
    """It is never cut: its document's score would say nothing."""
    error = fault(folder, ("a b c d e f g h", "0 1"))
    assert isinstance(error, TooLong)
    assert "the query has 10 tokens with the model's template" in error.message


def test_a_text_alone_is_refused(folder: Path) -> None:
    entries = pipeline(folder).prepare([(Classify(model="m", inputs=[]), item) for item in ("a", ("a", "b"))])
    assert isinstance(entries[0], InvalidValue) and "send both" in entries[0].message
    assert isinstance(entries[1], Prepared)


def test_contents_may_be_parts() -> None:
    source = "{{ messages[0].content[0].text }}|{{ messages[1].content[0].text }}"
    assert split_template(template(source, structured=True), "") == Pieces("", "|", "")


def test_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}-{{ messages[1].content }}{% if x %}{{ x }}{% endif %}"
    assert split_template(template(source, variables={"bos_token": "<s>", "x": "!"}), "") == Pieces("<s>", "-", "!")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[1].content }}{{ messages[0].content }}",
        "{{ messages[0].content }}{{ messages[0].content }}{{ messages[1].content }}",
        "{{ messages[0].content | trim }} {{ messages[1].content }}",
        "{{ messages[0].content }} {{ messages[1].content | upper }}",
    ],
)
def test_a_template_must_keep_query_and_document(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"^chat_template.jinja: the template must contain the query, then"):
        split_template(template(source), "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('no query') }}", "no query"),
        ("{{ messages[7].content.text }}", "no element 7"),
    ],
)
def test_a_template_that_fails_is_refused(source: str, words: str) -> None:
    with pytest.raises(ModelFileError, match=rf"^chat_template.jinja: the template cannot be rendered: .*{words}"):
        split_template(template(source), "")


def test_a_template_must_leave_room(folder: Path) -> None:
    with pytest.raises(ModelFileError, match="its 4 tokens leave no room for a text: the model reads 4"):
        pipeline(folder, max_tokens=4)
