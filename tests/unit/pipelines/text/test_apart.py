"""Pairs whose parts are tokenized apart, and instructions of a request: the tokens, and what is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.core.protocols import Prepared
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, ShoalError, TooLong
from shoal.pipelines.text.pairs import PairPipeline
from shoal.specs import PairTemplate, ScoreSpec
from shoal.types import Rerank
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.text.test_templating import SOURCE as WHOLE
from tests.unit.pipelines.text.test_templating import tokenizer, words
from tests.unit.pipelines.tiny_tokenizers import spec

SOURCE = (
    "rule|{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}"
    "q {{ (messages | selectattr('role', 'eq', 'query') | first).content }}|of|"
    "d {{ (messages | selectattr('role', 'eq', 'document') | first).content }}|end"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(tokenizer(), tmp_path_factory.mktemp("apart"))


def pipeline(folder: Path, *, max_tokens: int = 12, truncate: bool = True, **fields: Any) -> PairPipeline:
    given: dict[str, Any] = {"source": SOURCE, "file": "card", "apart": "|", "max_query": 4} | fields
    head = ScoreSpec(labels=("LABEL_0",), activation="sigmoid", template=PairTemplate(**given))
    made = spec(dimension=0, inputs=("input_ids", "attention_mask"), score=head, max_tokens=max_tokens)
    return PairPipeline(folder, made, truncate=truncate)


def rerank(**fields: Any) -> Rerank:
    return Rerank(model="m", queries=[], documents=[], **fields)


def read(folder: Path, query: str, document: str, task: Rerank | None = None, **fields: Any) -> Prepared | ShoalError:
    return pipeline(folder, **fields).prepare([(task or rerank(), (query, document))])[0]


def text(entry: Prepared | ShoalError) -> str:
    assert isinstance(entry, Prepared), entry
    return words(entry)


def test_the_parts_are_joined(folder: Path) -> None:
    entry = read(folder, "a b", "c")
    assert text(entry) == "rule q a b of d c end"
    assert isinstance(entry, Prepared) and not entry.truncated


def test_the_query_is_cut_to_its_limit_and_the_document_to_the_room(folder: Path) -> None:
    entry = read(folder, "a b c d e", "1 2 3 4 5 6 7")
    assert text(entry) == "rule q a b c of d 1 2 3 4 end"
    assert isinstance(entry, Prepared) and entry.truncated
    assert isinstance(read(folder, "a b c d", "1", truncate=False), TooLong)
    assert isinstance(read(folder, "a", "1 2 3 4 5 6 7", truncate=False), TooLong)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"max_document_tokens": 2}, "rule q a of d 1 2 end"),
        ({"max_document_tokens": 2, "truncation_direction": "left"}, "rule q a of d 8 9 end"),
        ({"truncation_direction": "left"}, "rule q a of d 4 5 6 7 8 9 end"),
    ],
)
def test_a_limit_and_the_other_end(folder: Path, fields: dict[str, Any], found: str) -> None:
    assert text(read(folder, "a", "1 2 3 4 5 6 7 8 9", rerank(**fields))) == found


def test_an_instruction_is_in_the_part_of_the_query(folder: Path) -> None:
    """Requests with and without one share a job."""
    own = pipeline(folder)
    tasks = [rerank(instruction="fish"), rerank(), rerank(instruction="fish")]
    found = own.prepare([(task, (letter, "1")) for task, letter in zip(tasks, "abc", strict=True)])
    assert [text(entry) for entry in found] == [
        "rule fish q a of d 1 end",
        "rule q b of d 1 end",
        "rule fish q c of d 1 end",
    ]
    assert own.takes_instruction


def test_an_instruction_may_leave_a_query_one_token(folder: Path) -> None:
    assert text(read(folder, "a b", "1", rerank(instruction="fish fish"))) == "rule fish fish q a of d 1 end"


def test_a_whole_template_takes_one_too(folder: Path) -> None:
    task = rerank(instruction="fish")
    assert text(read(folder, "a", "b", task, source=WHOLE, apart="")) == "rule fish q a d b end of"


@pytest.mark.parametrize(
    ("instruction", "kind", "message"),
    [
        (" ", EmptyInput, "the instruction is empty"),
        ("a|b", InvalidValue, "control character"),
        ("fish " * 12, InvalidValue, "the model cannot take this instruction: its"),
        ("f" * 2001, InvalidValue, "has 2001 characters: shorten it to 2000"),
        ("fish " * 3, InvalidValue, "instruction: its 4 tokens before a query leave no room for one: both have 4"),
        ("a Shoal query a", InvalidValue, "the model cannot take this instruction: the template must contain"),
    ],
)
def test_an_instruction_that_cannot_be_used(
    folder: Path, instruction: str, kind: type[ShoalError], message: str
) -> None:
    entry = read(folder, "a", "b", rerank(instruction=instruction))
    assert isinstance(entry, kind) and message in entry.message
    assert entry.param == "instruction"


def test_a_template_with_and_without_a_place_for_an_instruction(folder: Path) -> None:
    assert pipeline(folder).takes_instruction
    assert not pipeline(folder, source=SOURCE.replace("{{ m.content }}", "")).takes_instruction


def test_a_query_that_leaves_no_room_is_refused(folder: Path) -> None:
    entry = read(folder, "a b c d e f g", "1", max_query=11)
    assert isinstance(entry, TooLong) and "leaves no room for a document" in entry.message


def test_one_text_is_refused_and_a_template_must_leave_room(folder: Path) -> None:
    (entry,) = pipeline(folder).prepare([(rerank(), "a")])
    assert isinstance(entry, InvalidValue) and "send both" in entry.message
    with pytest.raises(ModelFileError, match="its 5 tokens leave no room"):
        pipeline(folder, max_tokens=5)
